"""The trunk by heads: every rank takes all rows of its share of the heads, and gives the results back to the rows' owners.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). Queries, main keys and values change from rows to heads in one
exchange, outputs and log-sum-exps back in another; a key's gradient is whole on one rank, so nothing is summed. The
branch part needs no main keys and stays with its owner, all heads of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.kernels.context_parallel import Job, branch_gradients, count_trunk, with_branches
from furlong.kernels.layout import NOBODY, Rows
from furlong.kernels.ring import Ring
from furlong.kernels.trunk import TrunkPlan, plan_trunk


class Ulysses(torch.autograd.Function):
    """Strategy "ulysses" of `cp_branch_attention`."""

    @staticmethod
    def forward(ctx: FunctionCtx, job: Job, q: Tensor, k: Tensor, v: Tensor, *entries: Tensor) -> Tensor:
        ring = job.ring
        with ring.call(f"{job.name}, forward", job.same, job.problem, own=str(q.shape[0] * q.shape[1])) as lengths:
            ctx.number = ring.number
            queries = [int(length) for length in lengths]
            plan, order = _plan(job, queries)
            mine = _to_heads(ring, q.flatten(0, 1), queries)
            keys, values = (_to_heads(ring, x, [len(k)] * ring.ranks)[order] for x in (k, v))
            part, mass = job.backend.trunk_forward(mine, keys, values, plan, job.scale)
            count_trunk(job, "forward", plan, mine)
            out = _to_rows(ring, part, queries).view(q.shape)
            lse = _to_rows(ring, mass[..., None], queries).view(q.shape[:-1])
            out, lse = with_branches(job, q, entries, out, lse)
        ctx.save_for_backward(q, out, lse, mine, keys, values, order, *entries)
        ctx.job, ctx.plan, ctx.queries, ctx.rows = job, plan, queries, len(k)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, out, lse, mine, keys, values, order, *entries = ctx.saved_tensors
        job, queries, ring = ctx.job, ctx.queries, ctx.job.ring
        with ring.call(f"{job.name}, backward of number {ctx.number}", job.same):
            dq, entry_grads = branch_gradients(job, grad, q, entries, out, lse)
            g, o = (_to_heads(ring, x.flatten(0, 1), queries) for x in (grad, out))
            mass = _to_heads(ring, lse.flatten(0, 1)[..., None], queries)[..., 0]
            part, *grads = job.backend.trunk_backward(g, mine, keys, values, o, mass, ctx.plan, job.scale)
            count_trunk(job, "backward", ctx.plan, mine)
            dq += _to_rows(ring, part, queries).view(q.shape)
            rows = [ctx.rows] * ring.ranks
            dk, dv = (_to_rows(ring, _put_back(x, order, sum(rows)), rows).to(q.dtype) for x in grads)
        return None, dq.to(q.dtype), dk, dv, *entry_grads


def _put_back(x: Tensor, order: Tensor, rows: int) -> Tensor:
    """The rows that `order` picked, where they were; 0 in the others."""
    return x.new_zeros(rows, *x.shape[1:]).index_copy(0, order, x)


def _plan(job: Job, queries: list[int]) -> tuple[TrunkPlan, Tensor]:
    """What all ranks' queries see of all main keys in packed order, and that order among the ranks' rows."""
    layout = job.layout
    mine = torch.stack(job.branches.main_view()).t().contiguous()
    document, cutoff = _spread(job.ring, mine, queries).t()
    source = layout.source.flatten()
    # The rows that the layout added sort to the front; nobody sees them.
    order = source.argsort(stable=True)[int((source == NOBODY).sum()) :]
    packed = Rows(layout.document.flatten()[order], layout.position.flatten()[order])
    return plan_trunk(document, cutoff, packed), order


def _spread(ring: Ring, mine: Tensor, lengths: list[int]) -> Tensor:
    """Every rank's rows, one rank after another, on every rank."""
    return torch.cat(_exchange(ring, "coordinates", [mine] * ring.ranks, [(n, *mine.shape[1:]) for n in lengths]))


def _to_heads(ring: Ring, x: Tensor, lengths: list[int]) -> Tensor:
    """From [this rank's rows, all heads, ...] to [all ranks' rows, this rank's heads, ...]."""
    shares = x.chunk(ring.ranks, 1)
    shape = shares[0].shape[1:]
    return torch.cat(_exchange(ring, "heads", shares, [(n, *shape) for n in lengths]))


def _to_rows(ring: Ring, x: Tensor, lengths: list[int]) -> Tensor:
    """The way back from `_to_heads`."""
    shares = x.split(lengths)
    return torch.cat(_exchange(ring, "heads", shares, [shares[ring.rank].shape] * ring.ranks), 1)


def _exchange(ring: Ring, kind: str, leaving: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """What each rank has for this one, by rank, for what this one has for each."""
    come = list(leaving)
    turns = [((ring.rank + hop) % ring.ranks, (ring.rank - hop) % ring.ranks) for hop in range(1, ring.ranks)]
    coming = [(of, ring.swap(kind, [leaving[to]], to, of, like=[torch.Size(shapes[of])])) for to, of in turns]
    for of, pending in coming:
        (come[of],) = pending.wait()
    return come
