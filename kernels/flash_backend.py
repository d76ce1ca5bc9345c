"""The backend `flash`: flash-attn's varlen kernels with log-sum-exp, if that package is installed.

Its public functions give no backward for a joint output and log-sum-exp, its private ones do: dq, dk, dv from whatever
(out, lse) they are given. Their signatures changed between releases, so that only the releases read for this file
are let through (`RELEASES`). Outputs and gradients are rounded to the inputs' dtype by the kernels, before they are
widened here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from jaxtyping import Bool
from torch import Tensor

from furlong.kernels.backends import wide
from furlong.kernels.merge import merge
from furlong.kernels.trunk import Tile, TrunkPlan

RELEASES = ("2.7.", "2.8.")
"""Releases of flash-attn whose private varlen functions take window_size_left and _right, and give lse [heads rows]."""


class FlashBackend:
    """Trunk and branches by flash-attn; bfloat16 and float16 on CUDA, head dims up to 256 in steps of 8.

    The trunk may consist of full rectangles and squares under the diagonal (all depths of test-time training, in any
    layout), branches of entries that all see, or that see in order: nothing else has a kernel there, and raises.

    Raises:
        ImportError: flash-attn is not installed, or is a release with other private signatures.
    """

    name = "flash"

    def __init__(self) -> None:
        check_installed()

    def trunk_forward(self, q, k, v, plan: TrunkPlan, scale: float) -> tuple[Tensor, Tensor]:
        """`Backend.trunk_forward`. Raises NotImplementedError for what flash-attn has no kernel for."""
        check_inputs(q)
        q, k, v = plan.sorted_queries(q), plan.sorted_keys(k), plan.sorted_keys(v)
        out = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=out.dtype, device=q.device)
        for call in calls(plan.tiles):
            rows, cols = call.rows(q.device), call.cols(q.device)
            part = _forward(q[rows], k[cols], v[cols], call, scale)
            out[rows], lse[rows] = merge(out[rows], lse[rows], *part)
        return plan.unsorted_queries(out), plan.unsorted_queries(lse)

    def trunk_backward(self, grad, q, k, v, out, lse, plan: TrunkPlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """`Backend.trunk_backward`, from the joint out and lse."""
        check_inputs(q)
        grad, q, out, lse = (plan.sorted_queries(x) for x in (grad, q, out, lse))
        k, v = plan.sorted_keys(k), plan.sorted_keys(v)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide(q.dtype), device=q.device) for x in (q, k, v))
        for call in calls(plan.tiles):
            rows, cols = call.rows(q.device), call.cols(q.device)
            part = _backward(grad[rows], q[rows], k[cols], v[cols], out[rows], lse[rows], call, scale)
            for total, at, more in zip((dq, dk, dv), (rows, cols, cols), part, strict=True):
                total[at] += more
        return plan.unsorted_queries(dq), plan.unsorted_keys(dk), plan.unsorted_keys(dv)

    def branch_forward(self, q, k, v, sees: Bool[Tensor, "queries entries"], scale: float) -> tuple[Tensor, Tensor]:
        """`Backend.branch_forward`: every branch is a sequence."""
        check_inputs(q)
        if q.numel() == 0 or k.numel() == 0:
            wide_dtype = wide(q.dtype)
            nothing = torch.full(q.shape[:-1], float("-inf"), dtype=wide_dtype, device=q.device)
            return torch.zeros(q.shape, dtype=wide_dtype, device=q.device), nothing
        out, lse = _forward(*(x.flatten(0, 1) for x in (q, k, v)), branch_call(len(q), sees), scale)
        return out.view(q.shape), lse.view(q.shape[:-1])

    def branch_backward(self, grad, q, k, v, out, lse, sees, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """`Backend.branch_backward`, from the joint out and lse."""
        check_inputs(q)
        if q.numel() == 0 or k.numel() == 0:
            dq, dk, dv = (torch.zeros(x.shape, dtype=wide(q.dtype), device=q.device) for x in (q, k, v))
            return dq, dk, dv
        flat = [x.flatten(0, 1) for x in (grad, q, k, v, out, lse)]
        dq, dk, dv = _backward(*flat, branch_call(len(q), sees), scale)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


@dataclass(frozen=True)
class Call:
    """One launch of a varlen kernel: sequence i is queries[i] against keys[i]; no row or key occurs twice."""

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    causal: bool

    def rows(self, device: torch.device) -> Tensor:
        return _rows(self.queries, device)

    def cols(self, device: torch.device) -> Tensor:
        return _rows(self.keys, device)


def calls(tiles: Sequence[Tile]) -> list[Call]:
    """Tiles in as few launches as a pass over them finds.

    Raises:
        NotImplementedError: a tile whose queries see different numbers of keys otherwise than under a diagonal.
    """
    if any(tile.kind == "masked" for tile in tiles):
        raise NotImplementedError(
            "the backend flash got queries whose cutoffs are not those of causal attention (block drafts, or keys in "
            "an order of their own), for which flash-attn has no kernel; choose the backend flex or triton"
        )
    found: list[Call] = []
    for tile in sorted(tiles, key=lambda tile: (tile.kind, tile.queries.start, tile.keys.start)):
        causal, last = tile.kind == "causal", found[-1] if found else None
        apart = (
            last is not None
            and last.causal == causal
            and last.queries[-1].stop <= tile.queries.start
            and last.keys[-1].stop <= tile.keys.start
        )
        if apart:
            found[-1] = Call((*last.queries, tile.queries), (*last.keys, tile.keys), causal)
        else:
            found.append(Call((tile.queries,), (tile.keys,), causal))
    return found


def branch_call(branches: int, sees: Bool[Tensor, "queries entries"]) -> Call:
    """All branches as sequences of one launch.

    Raises:
        NotImplementedError: a mask inside the branch that is neither full nor a square's lower triangle.
    """
    queries, entries = sees.shape
    causal = not bool(sees.all())
    if causal and not (queries == entries and torch.equal(sees, torch.ones_like(sees).tril())):
        raise NotImplementedError(
            "the backend flash got a mask inside the branch that is neither full nor causal, for which flash-attn has "
            "no kernel; choose the backend flex or triton"
        )
    rows = tuple(slice(i * queries, (i + 1) * queries) for i in range(branches))
    return Call(rows, tuple(slice(i * entries, (i + 1) * entries) for i in range(branches)), causal)


def check_installed() -> None:
    """Raise ImportError unless a release of flash-attn that this file was written for is installed."""
    fix = f"install flash-attn {' or '.join(f'{r}x' for r in RELEASES)} for CUDA, or choose the backend flex or triton"
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        raise ImportError(f"the backend flash needs the package flash-attn, which is not installed: {fix}") from None
    if not found.startswith(RELEASES):
        raise ImportError(
            f"the backend flash calls private functions of flash-attn, whose signatures in release {found} it does not "
            f"know: {fix}"
        )


def check_inputs(q: Tensor) -> None:
    """Raise NotImplementedError for tensors that flash-attn has no kernel for."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        raise NotImplementedError(
            f"the backend flash got {q.dtype} with head dim {q.shape[-1]} on {q.device.type}: flash-attn computes "
            "bfloat16 and float16 with head dims up to 256 in steps of 8 on CUDA; choose the backend flex or reference"
        )


def _rows(parts: tuple[slice, ...], device: torch.device) -> Tensor:
    return torch.cat([torch.arange(part.start, part.stop) for part in parts]).to(device)


def _lengths(parts: tuple[slice, ...], device: torch.device) -> tuple[Tensor, int]:
    sizes = torch.tensor([0, *(part.stop - part.start for part in parts)], dtype=torch.int32)
    return sizes.cumsum(0, dtype=torch.int32).to(device), int(sizes.max())


def _arguments(call: Call, device: torch.device, scale: float) -> dict[str, object]:
    cu_q, max_q = _lengths(call.queries, device)
    cu_k, max_k = _lengths(call.keys, device)
    return {
        "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k, "dropout_p": 0.0,
        "softmax_scale": scale, "causal": call.causal, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "alibi_slopes": None,
    }  # fmt: skip


def _forward(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    out, lse, *_ = _flash_attn_varlen_forward(q, k, v, return_softmax=False, **_arguments(call, q.device, scale))
    return out.to(wide(q.dtype)), lse.T


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, call: Call, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    _flash_attn_varlen_backward(
        grad.to(q.dtype), q, k, v, out.to(q.dtype), lse.T.contiguous(), dq, dk, dv,
        deterministic=True, **_arguments(call, q.device, scale),
    )  # fmt: skip
    dq, dk, dv = (x.to(wide(q.dtype)) for x in (dq, dk, dv))
    return dq, dk, dv
