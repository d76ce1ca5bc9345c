"""The backend `flex`: compiled FlexAttention with its log-sum-exp, on CUDA.

PyTorch's public interface has no backward that takes a joint output and log-sum-exp. It has one that takes gradients of
its own output and log-sum-exp, and that is enough: the joint output is a merge of this part with the rest, so that the
joint gradient of this part's keys is what comes through that merge (`through_merge`). The price is this part's forward
once more, seven products of matrices instead of five; nothing private of PyTorch is touched.

Outputs of FlexAttention are rounded to the inputs' dtype by its kernel, before this backend widens them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.nn.functional import pad

from furlong.kernels.backends import wide
from furlong.kernels.trunk import TrunkPlan

BLOCK = 128
"""Queries and keys of one block of a mask: FlexAttention's own default."""

KERNELS = 64
"""Kernels that may be compiled: one per heads, head dim, dtype, layers of a mask and direction; PyTorch stops at 8."""

_masks: WeakKeyDictionary[TrunkPlan, dict[torch.device, BlockMask]] = WeakKeyDictionary()
"""Masks of plans that are alive: forward, backward and every depth of one batch use the same plan."""

Attend = Callable[[Tensor, Tensor, Tensor, BlockMask, float], tuple[Tensor, Tensor]]


class FlexBackend:
    """Trunk and branches by FlexAttention; float32, bfloat16 and float16 on CUDA.

    Args:
        attend: from q, k, v [1 heads rows head_dim], mask and scale to (out, lse), both differentiable.
    """

    name = "flex"

    def __init__(self, attend: Attend | None = None) -> None:
        self.attend = attend or compiled_attend

    def trunk_forward(self, q, k, v, plan: TrunkPlan, scale: float) -> tuple[Tensor, Tensor]:
        """`Backend.trunk_forward`. Raises NotImplementedError where FlexAttention has no such kernel."""
        if not plan.tiles:
            return torch.zeros_like(q, dtype=wide(q.dtype)), _nothing(q)
        rows = plan.sorted_queries(q), plan.sorted_keys(k), plan.sorted_keys(v)
        out, lse = self._forward(*rows, trunk_mask(plan, q.device), scale)
        return plan.unsorted_queries(out), plan.unsorted_queries(lse)

    def trunk_backward(self, grad, q, k, v, out, lse, plan: TrunkPlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """`Backend.trunk_backward`, from the joint out and lse."""
        if not plan.tiles:
            dq, dk, dv = (torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, k, v))
            return dq, dk, dv
        forward = partial(self._forward, mask=trunk_mask(plan, q.device), scale=scale)
        rows = plan.sorted_queries(q), plan.sorted_keys(k), plan.sorted_keys(v)
        joint = [plan.sorted_queries(x) for x in (grad, out, lse)]
        dq, dk, dv = through_merge(forward, joint[0], *rows, *joint[1:])
        return plan.unsorted_queries(dq), plan.unsorted_keys(dk), plan.unsorted_keys(dv)

    def branch_forward(self, q, k, v, sees: Bool[Tensor, "queries entries"], scale: float) -> tuple[Tensor, Tensor]:
        """`Backend.branch_forward`: the branches as one block-diagonal mask."""
        if q.numel() == 0 or k.numel() == 0:
            return torch.zeros_like(q, dtype=wide(q.dtype)), _nothing(q)
        out, lse = self._forward(*(x.flatten(0, 1) for x in (q, k, v)), branch_mask(len(q), sees), scale)
        return out.view(q.shape), lse.view(q.shape[:-1])

    def branch_backward(self, grad, q, k, v, out, lse, sees, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """`Backend.branch_backward`, from the joint out and lse."""
        if q.numel() == 0 or k.numel() == 0:
            dq, dk, dv = (torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, k, v))
            return dq, dk, dv
        forward = partial(self._forward, mask=branch_mask(len(q), sees), scale=scale)
        flat = [x.flatten(0, 1) for x in (grad, q, k, v, out, lse)]
        dq, dk, dv = through_merge(forward, *flat)
        return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
        """Over rows [rows heads head_dim]; (out, lse) wide."""
        batch = (x.transpose(0, 1)[None] for x in (q, k, v))
        out, lse = self.attend(*batch, mask, scale)
        return out[0].transpose(0, 1).to(wide(q.dtype)), lse[0].transpose(0, 1).to(wide(q.dtype))


def _nothing(q: Tensor) -> Tensor:
    return torch.full(q.shape[:-1], float("-inf"), dtype=wide(q.dtype), device=q.device)


@cache
def _compiled() -> Callable[..., tuple[Tensor, object]]:
    return torch.compile(flex_attention, fullgraph=True)


def compiled_attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """FlexAttention's compiled kernel: (out in the inputs' dtype, lse in float32).

    Raises:
        NotImplementedError: not on CUDA, where PyTorch 2.13 compiles no log-sum-exp and no backward; or float64.
    """
    if not q.is_cuda:
        raise NotImplementedError(
            f"the backend flex got tensors on {q.device.type}: PyTorch's compiled FlexAttention returns its log-sum-exp "
            "and has a backward on CUDA only; move the tensors there, or choose the backend cpu or reference"
        )
    if q.dtype == torch.float64:
        raise NotImplementedError(
            "the backend flex got float64, which FlexAttention's kernels compute in float32; "
            "choose the backend reference, or give float32 or bfloat16"
        )
    with torch._dynamo.config.patch(recompile_limit=KERNELS):
        aux = AuxRequest(lse=True)
        out, extra = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=aux)
    return out, extra.lse


def through_merge(
    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    grad: Float[Tensor, "*rows heads head_dim"],
    q: Float[Tensor, "*rows heads head_dim"],
    k: Float[Tensor, "*keys kv_heads head_dim"],
    v: Float[Tensor, "*keys kv_heads head_dim"],
    out: Float[Tensor, "*rows heads head_dim"],
    lse: Float[Tensor, "*rows heads"],
) -> tuple[Tensor, Tensor, Tensor]:
    """A part's share (dq, dk, dv) of the joint gradient, by differentiating that part's forward.

    With o, l the part's output and log-sum-exp and O, L the joint ones, the merge O = sum of w o over the parts with
    w = exp(l - L) gives dO/do = w, and grad . dO/dl = w grad . (o - O): these two go into the part's own backward.

    Args:
        forward: q, k, v to (o, l), both differentiable; computed once more here.
        grad, out, lse: gradient of the joint output, the joint output, the joint log-sum-exp.
    """
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        part, mass = forward(*inputs)
    with torch.no_grad():
        # Rows that this part sees nothing of have no share, and their log-sum-exps would give NaN.
        empty = mass == float("-inf")
        share = (mass - lse.masked_fill(empty, 0.0)).exp()[..., None]
        # Rounded as the kernel will see it: the same rounded gradient meets the same rounded output in the kernel's
        # own row sums, so that both cancel.
        grad_part = (share * grad).to(q.dtype).to(part.dtype)
        grad_mass = (grad_part * part).sum(-1) - (share * grad * out).sum(-1)
        grad_mass = grad_mass.masked_fill(empty, 0.0)
    grads = torch.autograd.grad((part, mass), inputs, (grad_part, grad_mass))
    dq, dk, dv = (x.to(wide(q.dtype)) for x in grads)
    return dq, dk, dv


def intervals(
    plan: TrunkPlan, device: torch.device
) -> tuple[Int[Tensor, "layers queries"], Int[Tensor, "layers queries"]]:
    """[begin, end) of sorted keys that each sorted query sees, in as many layers as a query has tiles."""
    used = torch.zeros(plan.queries, dtype=torch.long)
    begins, ends = [], []
    for tile in plan.tiles:
        layer = int(used[tile.queries].max())
        if layer == len(begins):
            begins.append(torch.zeros(plan.queries, dtype=torch.int32))
            ends.append(torch.zeros(plan.queries, dtype=torch.int32))
        used[tile.queries] = layer + 1
        begins[layer][tile.queries] = tile.keys.start
        if tile.kind == "full":
            seen = tile.keys.stop - tile.keys.start
        elif tile.kind == "causal":
            seen = torch.arange(1, tile.queries.stop - tile.queries.start + 1, dtype=torch.int32)
        else:
            seen = tile.ends.to("cpu", torch.int32)
        ends[layer][tile.queries] = tile.keys.start + seen
    return torch.stack(begins).to(device), torch.stack(ends).to(device)


def trunk_mask(plan: TrunkPlan, device: torch.device) -> BlockMask:
    """What the plan's sorted queries see of its sorted keys; made once per plan and device."""
    of_plan = _masks.setdefault(plan, {})
    if device not in of_plan:
        of_plan[device] = _trunk_mask(plan, device)
    return of_plan[device]


def _trunk_mask(plan: TrunkPlan, device: torch.device) -> BlockMask:
    """Blocks are summed up from intervals, so that no dense mask is ever made."""
    begin, end = intervals(plan, device)
    layers = len(begin)
    # Rows past the last one see nothing: FlexAttention wants blocks that stick out to be partial ones.
    from_key, to_key = (pad(x, (0, -plan.queries % BLOCK)).view(layers, -1, BLOCK, 1) for x in (begin, end))
    edge = torch.arange(0, plan.keys, BLOCK, device=device)
    some = torch.zeros(from_key.shape[1], len(edge), dtype=torch.bool, device=device)
    full = torch.zeros_like(some)
    for row in range(len(some)):  # one row of blocks at a time: layers x BLOCK x keys / BLOCK numbers
        meets = (from_key[:, row] < edge + BLOCK) & (to_key[:, row] > edge) & (from_key[:, row] < to_key[:, row])
        covers = (from_key[:, row] <= edge) & (to_key[:, row] >= edge + BLOCK)
        some[row] = meets.any(0).any(0)
        full[row] = covers.any(0).all(0)

    def sees_key(batch, head, query, key):
        seen = (begin[0, query] <= key) & (key < end[0, query])
        for layer in range(1, layers):
            seen = seen | ((begin[layer, query] <= key) & (key < end[layer, query]))
        return seen

    return _block_mask(some & ~full, full, sees_key, plan.queries, plan.keys)


def branch_mask(branches: int, sees: Bool[Tensor, "queries entries"]) -> BlockMask:
    """Queries and entries of all branches in one row each: a query sees what `sees` allows of its own branch."""
    queries, entries = sees.shape
    first = torch.arange(0, branches * queries, BLOCK, device=sees.device)
    last = (first + BLOCK - 1).clamp_max(branches * queries - 1)
    edge = torch.arange(0, branches * entries, BLOCK, device=sees.device)
    begin, end = first // queries * entries, (last // queries + 1) * entries
    some = (begin[:, None] < edge + BLOCK) & (end[:, None] > edge)

    def sees_entry(batch, head, query, key):
        return (query // queries == key // entries) & sees[query % queries, key % entries]

    return _block_mask(some, torch.zeros_like(some), sees_entry, branches * queries, branches * entries)


def _block_mask(partial_blocks: Tensor, full_blocks: Tensor, mask_mod: Callable, queries: int, keys: int) -> BlockMask:
    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()

    return BlockMask.from_kv_blocks(
        *listed(partial_blocks), *listed(full_blocks), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(queries, keys)
    )
