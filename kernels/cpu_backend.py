"""Attention on the CPU with ATen's flash attention, forward and backward, which work on output and log-sum-exp.

What ATen computes: a forward takes 256, 64 or 32 queries at a time (for 768, 192 or fewer queries) against 512 keys at
a time, and a causal one computes the whole of the last 512 keys that it begins. So squares under the diagonal are only
handed over up to 512 rows, and counted as squares (`TrunkPlan.computed`).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from furlong.kernels.backends import wide
from furlong.kernels.trunk import Tile, TrunkPlan

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuBackend:
    """Every product in float32 (float64 for float64 inputs), bfloat16 inputs included: ATen would round every piece.

    Query heads of one key head are a batch whose keys have stride 0, so that keys and values are never repeated; their
    gradients are, for one piece at a time.
    """

    name = "cpu"

    def trunk_forward(
        self,
        q: Float[Tensor, "queries heads head_dim"],
        k: Float[Tensor, "keys kv_heads head_dim"],
        v: Float[Tensor, "keys kv_heads head_dim"],
        plan: TrunkPlan,
        scale: float,
    ) -> tuple[Float[Tensor, "queries heads head_dim"], Float[Tensor, "queries heads"]]:
        dtype, group = wide(q.dtype), q.shape[1] // k.shape[1]
        out = q.new_zeros(q.shape, dtype=dtype)
        lse = q.new_full(q.shape[:2], float("-inf"), dtype=dtype)
        queries = _grouped(_ready(plan.sorted_queries(q)), group)
        keys, values = (_repeated(_ready(plan.sorted_keys(x)), group) for x in (k, v))
        out_g, lse_g = _grouped(out, group), _grouped(lse[..., None], group)[..., 0]
        begun = torch.zeros(len(q), dtype=torch.bool)
        for piece in plan.pieces:
            rows, cols = piece.queries, piece.keys
            found = _forward(
                queries[:, :, rows],
                keys[:, :, cols],
                values[:, :, cols],
                is_causal=piece.kind == "causal",
                attn_mask=_mask(piece, dtype),
                scale=scale,
            )
            _merge_into(out_g[:, :, rows], lse_g[:, :, rows], *found, fresh=not begun[rows].any())
            begun[rows] = True
        return plan.unsorted_queries(out), plan.unsorted_queries(lse)

    def trunk_backward(
        self,
        grad: Float[Tensor, "queries heads head_dim"],
        q: Float[Tensor, "queries heads head_dim"],
        k: Float[Tensor, "keys kv_heads head_dim"],
        v: Float[Tensor, "keys kv_heads head_dim"],
        out: Float[Tensor, "queries heads head_dim"],
        lse: Float[Tensor, "queries heads"],
        plan: TrunkPlan,
        scale: float,
    ) -> tuple[
        Float[Tensor, "queries heads head_dim"],
        Float[Tensor, "keys kv_heads head_dim"],
        Float[Tensor, "keys kv_heads head_dim"],
    ]:
        dtype, group = wide(q.dtype), q.shape[1] // k.shape[1]
        grad_q = q.new_zeros(q.shape, dtype=dtype)
        grad_k, grad_v = (x.new_zeros(x.shape, dtype=dtype) for x in (k, v))
        grads, queries, outs = (_grouped(_ready(plan.sorted_queries(x)), group) for x in (grad, q, out))
        keys, values = (_repeated(_ready(plan.sorted_keys(x)), group) for x in (k, v))
        lses = _grouped(plan.sorted_queries(lse)[..., None], group)[..., 0]
        grad_q_g = _grouped(grad_q, group)
        for piece in plan.pieces:
            rows, cols = piece.queries, piece.keys
            slope_q, slope_k, slope_v = _backward(
                grads[:, :, rows],
                queries[:, :, rows],
                keys[:, :, cols],
                values[:, :, cols],
                outs[:, :, rows],
                lses[:, :, rows],
                0.0,
                piece.kind == "causal",
                attn_mask=_mask(piece, dtype),
                scale=scale,
            )
            grad_q_g[:, :, rows] += slope_q
            for total, slope in ((grad_k, slope_k), (grad_v, slope_v)):
                total[cols] += slope.sum(0).transpose(0, 1)
        return plan.unsorted_queries(grad_q), plan.unsorted_keys(grad_k), plan.unsorted_keys(grad_v)

    def branch_forward(
        self,
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]:
        dtype = wide(q.dtype)
        if q.numel() == 0 or k.shape[1] == 0:
            return q.new_zeros(q.shape, dtype=dtype), q.new_full(q.shape[:3], float("-inf"), dtype=dtype)
        keys, values = (_ready(x).transpose(1, 2) for x in (k, v))
        found = _forward(_by_key_head(_ready(q), k), keys, values, attn_mask=_inner_mask(sees, q, k), scale=scale)
        out, lse = _by_query(found[0], q), _by_query(found[1][..., None], q)[..., 0]
        return out, lse.masked_fill(~sees.any(1)[None, :, None], float("-inf"))

    def branch_backward(
        self,
        grad: Float[Tensor, "branches queries heads head_dim"],
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        out: Float[Tensor, "branches queries heads head_dim"],
        lse: Float[Tensor, "branches queries heads"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[
        Float[Tensor, "branches queries heads head_dim"],
        Float[Tensor, "branches entries kv_heads head_dim"],
        Float[Tensor, "branches entries kv_heads head_dim"],
    ]:
        dtype = wide(q.dtype)
        if q.numel() == 0 or k.shape[1] == 0:
            return tuple(x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
        keys, values = (_ready(x).transpose(1, 2) for x in (k, v))
        grads, queries, outs = (_by_key_head(_ready(x), k) for x in (grad, q, out))
        # A query that saw nothing has no mass to be a share of; with any finite one its masked entries get 0.
        mass = _by_key_head(lse.masked_fill(lse == float("-inf"), 0.0)[..., None], k)[..., 0]
        mask = _inner_mask(sees, q, k)
        found = _backward(grads, queries, keys, values, outs, mass, 0.0, False, attn_mask=mask, scale=scale)
        return _by_query(found[0], q), found[1].transpose(1, 2), found[2].transpose(1, 2)


def _ready(x: Float[Tensor, "*rows head_dim"]) -> Float[Tensor, "*rows head_dim"]:
    """In the wide dtype, and with neighbouring elements side by side, which the operators take for granted.

    Raises:
        ValueError: the tensor is not on the CPU.
    """
    if x.device.type != "cpu":
        raise ValueError(f"the backend cpu got a tensor on {x.device}; choose flex, flash or triton there")
    x = x.to(wide(x.dtype))
    return x if x.stride(-1) == 1 else x.contiguous()


def _grouped(x: Float[Tensor, "rows heads head_dim"], group: int) -> Float[Tensor, "group kv_heads rows head_dim"]:
    return x.unflatten(1, (-1, group)).permute(2, 1, 0, 3)


def _repeated(x: Float[Tensor, "rows kv_heads head_dim"], group: int) -> Float[Tensor, "group kv_heads rows head_dim"]:
    return x.transpose(0, 1).expand(group, -1, -1, -1)


def _mask(piece: Tile, dtype: torch.dtype) -> Float[Tensor, "queries keys"] | None:
    if piece.ends is None:
        return None
    beyond = torch.arange(piece.keys.stop - piece.keys.start) >= piece.ends[:, None]
    return torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, float("-inf"))


def _merge_into(
    out: Float[Tensor, "group kv_heads rows head_dim"],
    lse: Float[Tensor, "group kv_heads rows"],
    more: Float[Tensor, "group kv_heads rows head_dim"],
    more_lse: Float[Tensor, "group kv_heads rows"],
    fresh: bool,
) -> None:
    """`merge.merge` in place, where the second part saw something for every row."""
    if fresh:
        out.copy_(more)
        lse.copy_(more_lse)
        return
    joint = torch.logaddexp(lse, more_lse)
    out.mul_(torch.exp(lse - joint)[..., None]).add_(more * torch.exp(more_lse - joint)[..., None])
    lse.copy_(joint)


def _by_key_head(
    x: Float[Tensor, "branches queries heads last"], k: Float[Tensor, "branches entries kv_heads head_dim"]
) -> Float[Tensor, "branches kv_heads queries*group last"]:
    """The queries of all heads that share a key head, in one: inside a branch they see the same entries."""
    return x.unflatten(2, (k.shape[2], -1)).transpose(1, 2).flatten(2, 3)


def _by_query(
    x: Float[Tensor, "branches kv_heads queries*group last"], q: Float[Tensor, "branches queries heads head_dim"]
) -> Float[Tensor, "branches queries heads last"]:
    """The inverse of `_by_key_head`."""
    return x.unflatten(2, (q.shape[1], -1)).transpose(1, 2).flatten(2, 3)


def _inner_mask(sees: Tensor, q: Tensor, k: Tensor) -> Float[Tensor, "queries*group entries"] | None:
    if sees.all():
        return None
    rows = sees.repeat_interleave(q.shape[2] // k.shape[2], dim=0)
    return torch.zeros(rows.shape, dtype=wide(q.dtype)).masked_fill_(~rows, float("-inf"))
