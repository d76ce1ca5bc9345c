"""Attention over a packed batch that lies on several ranks: the trunk goes round, branches stay where they are.

A query's softmax goes over main keys of all ranks and over the entries of its own branch. Each rank's main keys give a
partial output with its log-sum-exp, the branch another, and `merge` joins them (ring attention, Liu et al. 2023;
FlashAttention-2, Dao 2023, section 3.1). In the backward pass every part gets the joint output and log-sum-exp, so that
its gradient is exactly its share of the joint one; gradients of main keys and values go home, those of branch entries
are home already. Branch entries never travel.

All ranks call these functions together, with the same layout, and again in the backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.kernels.backends import Backend, backend_of, wide
from furlong.kernels.branch_attention import (
    Entries,
    branch_backward,
    check_branches,
    check_main,
    joined,
    listed_entries,
    scale_of,
)
from furlong.kernels.branches import BranchLayout, test_time_training
from furlong.kernels.counters import Decision
from furlong.kernels.gathered import CARRIERS, Block
from furlong.kernels.layout import NOBODY, ContextLayout
from furlong.kernels.merge import merge
from furlong.kernels.ring import Ring
from furlong.kernels.trunk import TrunkPlan, plan_trunk

if TYPE_CHECKING:
    from furlong.kernels.shared_trunk import Sums

Strategy = Literal["ring", "gather", "ulysses"] | int
Made = TypeVar("Made")


@dataclass(frozen=True)
class Job:
    """One call, apart from its tensors."""

    name: str
    layout: ContextLayout
    branches: BranchLayout
    ring: Ring
    strategy: str
    scale: float
    backend: Backend | None
    """None where there is a problem."""
    same: dict[str, object]
    """What all ranks have to agree on."""
    problem: str
    listed: bool
    """Whether branch entries are one tensor each."""
    shared: Sums | None = None


def ring_attention(
    q: Float[Tensor, "rows heads head_dim"],
    k: Float[Tensor, "rows kv_heads head_dim"],
    v: Float[Tensor, "rows kv_heads head_dim"],
    *,
    layout: ContextLayout,
    ring: Ring,
    scale: float | None = None,
    backend: str,
) -> Float[Tensor, "rows heads head_dim"]:
    """softmax(scale * Q K^T) V over each document's keys up to the query's position; 0 at padding.

    Keys and values travel in their dtype, gradients in the wide one ("wide" is float64 for float64 inputs, else float32);
    everything is accumulated in the wide dtype, in an order that depends on the layout alone, and rounded once.

    Args:
        q, k, v: at this rank's rows, `layout.rows(ring.rank)`.
        scale: head_dim ** -0.5 by default.
        backend: a name that `backend_of` knows.
    Raises:
        ContextParallelError: on every rank, if the ranks' arguments do not fit together or one of them is gone.
    """
    branches = _remembered.once((layout,), f"causal {ring.rank}", lambda: _causal(layout, ring))
    out = cp_branch_attention(
        q[:, None], k, v, (), (), layout=layout, branches=branches, ring=ring, scale=scale, backend=backend
    )
    return out[:, 0]


def cp_branch_attention(
    q: Float[Tensor, "branches queries heads head_dim"],
    k_main: Float[Tensor, "rows kv_heads head_dim"],
    v_main: Float[Tensor, "rows kv_heads head_dim"],
    k_branch: Entries,
    v_branch: Entries,
    *,
    layout: ContextLayout,
    branches: BranchLayout,
    ring: Ring,
    strategy: Strategy = "ring",
    scale: float | None = None,
    backend: str,
) -> Float[Tensor, "branches queries heads head_dim"]:
    """Joint softmax over the main keys before each query's cutoff, on whichever rank, and its branch's visible entries.

    Equal to `branch_attention` of the whole batch, up to the order of addition. 0 where a query sees nothing.

    Args:
        q, k_branch, v_branch: of this rank's branches; ranks may have different numbers of them. Entries as for
            `branch_attention`: stacked, or a sequence of one tensor per entry.
        k_main, v_main: at this rank's rows, `layout.rows(ring.rank)`.
        branches: which main keys and entries the queries see.
        strategy: "ring" (two blocks of keys and values on a rank at a time), "gather" (all of them; bitwise the same
            results), "ulysses" (every rank takes all rows of its share of the heads; ranks must divide the kv heads), or
            bytes: "gather" if all keys and values take no more on a rank, else "ring". The ledger says which it was.
        scale: head_dim ** -0.5 by default.
        backend: a name that `backend_of` knows.
    Raises:
        ContextParallelError: on every rank, if the ranks' arguments do not fit together or one of them is gone.
    """
    job = plan_call(q, k_main, v_main, k_branch, v_branch, layout, branches, ring, strategy, scale, backend)
    if job.strategy == "ulysses":
        from furlong.kernels.ulysses import Ulysses

        return Ulysses.apply(job, q, k_main, v_main, *each(k_branch), *each(v_branch))
    return Travelling.apply(job, q, k_main, v_main, *each(k_branch), *each(v_branch))


def plan_call(
    q: Tensor, k: Tensor, v: Tensor, k_branch: Entries, v_branch: Entries, layout: ContextLayout,
    branches: BranchLayout, ring: Ring, strategy: Strategy, scale: float | None, backend: str,
    shared: Sums | None = None,
) -> Job:  # fmt: skip
    """The call that these arguments make; whatever is wrong with them is kept for all ranks to hear."""
    name = f"attention by {strategy}"
    gathered = 2 * k.numel() * k.element_size() * ring.ranks
    chosen = strategy
    if isinstance(strategy, int):
        chosen = "gather" if gathered <= strategy else "ring"
    found, problem = None, _problem(k, layout, ring, chosen)
    entries = each(k_branch), each(v_branch)
    try:
        listed_entries("k_branch", k_branch, v_branch)
        listed_entries("v_branch", v_branch, k_branch)
        check_main(k, v, layout.rows(min(ring.rank, layout.ranks - 1)))
        check_branches(q, k, *entries, branches)
        scale, found = scale_of(scale, q), backend_of(backend)
    except (ValueError, ImportError) as error:
        problem = problem or str(error)
    if not problem:
        ring.ledger.decisions[Decision(name, strategy, chosen, backend, gathered)] += 1
    same = {
        "layout": layout.digest,
        "key": tuple(k.shape),
        "heads": list(q.shape[-2:-1]),
        "dtype": k.dtype,
        "scale": scale,
        "backend": backend,
        "shared": shared is not None,
        "gradient": torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *entries[0], *entries[1])),
    }
    listed = not isinstance(k_branch, Tensor)
    return Job(name, layout, branches, ring, str(chosen), scale, found, same, problem, listed, shared)


class Travelling(torch.autograd.Function):
    """The trunk's blocks come to the queries: strategies "ring" and "gather"."""

    @staticmethod
    def forward(ctx: FunctionCtx, job: Job, q: Tensor, k: Tensor, v: Tensor, *entries: Tensor) -> Tensor:
        with job.ring.call(f"{job.name}, forward", job.same, job.problem):
            ctx.number = job.ring.number
            flat = q.flatten(0, 1)
            out = flat.new_zeros(flat.shape, dtype=wide(q.dtype))
            lse = out.new_full(out.shape[:-1], float("-inf"))
            for source, (key, value) in _blocks(job, k, v):
                plan = trunk_plans(job)[source]
                if plan.pairs:
                    out, lse = merge(out, lse, *job.backend.trunk_forward(flat, key, value, plan, job.scale))
                count_trunk(job, "forward", plan, q)
                del key, value  # the next block is on its way; two are held, not three
            out, lse = with_branches(job, q, entries, out.view(q.shape), lse.view(q.shape[:-1]))
        ctx.save_for_backward(q, k, v, out, lse, *entries)
        ctx.job = job
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *entries = ctx.saved_tensors
        job: Job = ctx.job
        with job.ring.call(f"{job.name}, backward of number {ctx.number}", job.same):
            dq, entry_grads = branch_gradients(job, grad, q, entries, out, lse)
            flat = [x.flatten(0, 1) for x in (grad, q, out, lse)]
            home = CARRIERS[job.strategy][1](job.ring) if job.shared is None else job.shared
            for source, (key, value) in _blocks(job, k, v):
                plan = trunk_plans(job)[source]
                count_trunk(job, "backward", plan, q)
                home.add(source, _trunk_gradients(job, plan, flat, key, value, dq.flatten(0, 1)))
                del key, value
            if job.shared is None:
                dk, dv = (x.to(k.dtype) for x in home.home())
            else:
                # They are kept there; a gradient of 0 that takes no memory tells autograd that this pass is done.
                dk, dv = (x.new_zeros(()).expand_as(x) for x in (k, v))
        return None, dq.to(q.dtype), dk, dv, *entry_grads


def trunk_plans(job: Job) -> tuple[TrunkPlan, ...]:
    """By rank, what this rank's queries see of its keys; made once for the same layout and branches."""

    def make() -> tuple[TrunkPlan, ...]:
        return tuple(plan_trunk(*job.branches.main_view(), job.layout.rows(r)) for r in range(job.ring.ranks))

    return _remembered.once((job.layout, job.branches), "plans", make)


def with_branches(
    job: Job, q: Tensor, entries: Sequence[Tensor], out: Tensor, lse: Tensor
) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]:
    """The trunk's wide output and log-sum-exp joined with those of this rank's branches."""
    count_branches(job, "forward", q)
    if not job.branches.entries:
        return out, lse
    keys, values = _stacked(job, entries)
    return joined(job.backend, (out, lse), q, keys, values, job.branches, job.scale)


def branch_gradients(
    job: Job, grad: Tensor, q: Tensor, entries: Sequence[Tensor], out: Tensor, lse: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The queries' wide gradient as far as it comes from the branches, and the entries' whole one in their dtype."""
    count_branches(job, "backward", q)
    if not job.branches.entries:
        return torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device), tuple(torch.zeros_like(x) for x in entries)
    keys, values = _stacked(job, entries)
    dq, *grads = branch_backward(job.backend, grad, q, keys, values, out, lse, job.branches, job.scale)
    grads = [x.to(q.dtype) for x in grads]
    return dq.contiguous(), tuple(grads) if not job.listed else tuple(part for x in grads for part in x.unbind(1))


def count_trunk(job: Job, step: str, plan: TrunkPlan, q: Tensor) -> None:
    job.ring.ledger.work(step, "trunk", plan.pairs, plan.computed, q.shape[-2], q.shape[-1])


def count_branches(job: Job, step: str, q: Tensor) -> None:
    real = _remembered.once((job.branches,), "real", lambda: int((job.branches.document != NOBODY).sum()))
    sees = job.branches.sees
    pairs = _remembered.once((job.branches,), "seen", lambda: real * int(sees.sum()))
    job.ring.ledger.work(step, "branch", pairs, real * sees.numel(), q.shape[-2], q.shape[-1])


def _blocks(job: Job, k: Tensor, v: Tensor) -> Iterator[tuple[int, Block]]:
    if job.shared is not None:
        return job.shared.blocks(job.strategy, k, v)
    return CARRIERS[job.strategy][0](job.ring, k, v)


def _trunk_gradients(
    job: Job, plan: TrunkPlan, flat: list[Tensor], key: Tensor, value: Tensor, flat_dq: Tensor
) -> Block:
    """This rank's part of a block's gradients, wide; the queries' part is added where they are kept."""
    if not plan.pairs:
        return tuple(torch.zeros(x.shape, dtype=flat_dq.dtype, device=x.device) for x in (key, value))
    grad, q, out, lse = flat
    dq, dk, dv = job.backend.trunk_backward(grad, q, key, value, out, lse, plan, job.scale)
    flat_dq.add_(dq)
    return dk, dv


def _stacked(job: Job, entries: Sequence[Tensor]) -> Block:
    half = len(entries) // 2
    parts = entries[:half], entries[half:]
    return tuple(torch.stack(list(part), 1) if job.listed else part[0] for part in parts)


def each(entries: Entries) -> tuple[Tensor, ...]:
    return (entries,) if isinstance(entries, Tensor) else tuple(entries)


def _causal(layout: ContextLayout, ring: Ring) -> BranchLayout:
    return test_time_training(layout.rows(ring.rank), 0)


def _problem(k: Tensor, layout: ContextLayout, ring: Ring, strategy: object) -> str:
    """What is wrong with the way to share the work, and what to set; empty if nothing is."""
    if layout.ranks != ring.ranks:
        return f"a layout for {layout.ranks} ranks on a ring of {ring.ranks}; make the layout with the ring's ranks"
    if strategy not in ("ring", "gather", "ulysses"):
        return f'strategy {strategy!r} is not known; set "ring", "gather", "ulysses", or bytes'
    if strategy == "ulysses" and k.ndim == 3 and k.shape[1] % ring.ranks:
        return (
            f'{k.shape[1]} kv heads cannot be dealt to {ring.ranks} ranks by ulysses; set strategy "ring" or "gather"'
        )
    return ""


class _Remembered:
    """What was made of some objects, for as long as they live."""

    def __init__(self) -> None:
        self._made: dict[tuple, object] = {}

    def once(self, owners: tuple[object, ...], what: str, make: Callable[[], Made]) -> Made:
        key = (what, *map(id, owners))
        if key not in self._made:
            self._made[key] = make()
            for owner in owners:
                weakref.finalize(owner, self._made.pop, key, None)
        return self._made[key]


_remembered = _Remembered()
