"""Attention with branches on one rank: the trunk and the branch are computed apart and merged by log-sum-exp.

Of the joint softmax nothing is kept but its output and log-sum-exp, and the backward of each part is given those of the
whole: p = exp(score - joint lse) and delta = grad . joint out make a part's gradients exactly its share, so that no
merge has to be differentiated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.kernels.backends import Backend, MergingBackend, backend_of
from furlong.kernels.branches import BranchLayout
from furlong.kernels.layout import NOBODY, Rows
from furlong.kernels.merge import merge
from furlong.kernels.trunk import TrunkPlan, plan_trunk

Entries = Float[Tensor, "branches entries kv_heads head_dim"] | Sequence[Float[Tensor, "branches kv_heads head_dim"]]
"""Stacked, or one tensor per entry: K passes over a growing branch then keep K tensors, not K * (K + 1) / 2."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def branch_attention(
    q: Float[Tensor, "branches queries heads head_dim"],
    k_main: Float[Tensor, "rows kv_heads head_dim"],
    v_main: Float[Tensor, "rows kv_heads head_dim"],
    k_branch: Entries,
    v_branch: Entries,
    *,
    rows: Rows,
    branches: BranchLayout,
    scale: float | None = None,
    backend: str,
) -> Float[Tensor, "branches queries heads head_dim"]:
    """One softmax over the main keys before a query's cutoff and the entries of its branch that it sees.

    Differentiable once in all five tensors. Computed in float64 for float64 inputs and else in float32, and rounded
    once. The same inputs give the same bits. A query that sees nothing, of a padding row for one, has output 0, and
    gives and gets no gradient, whatever its values.

    Args:
        k_branch, v_branch: stacked, or a sequence of one tensor per entry, which is kept as it is and stacked only for
            the time of a pass.
        rows: of the main keys.
        branches: which row, cutoff and entries each query has; see its constructors.
        scale: of the scores; 1 / sqrt(head_dim) if None.
        backend: see `backends.backend_of`; never another one.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, heads that are no multiple of kv_heads, or a scale that
            is not finite and above 0.
        ImportError: the backend is not installed.
    """
    entries = listed_entries("k_branch", k_branch, v_branch), listed_entries("v_branch", v_branch, k_branch)
    check_main(k_main, v_main, rows)
    check_branches(q, k_main, *entries, branches)
    plan = plan_trunk(*branches.main_view(), rows)
    call = _Call(backend_of(backend), plan, branches, scale_of(scale, q), not isinstance(k_branch, Tensor))
    return _BranchAttention.apply(call, q, k_main, v_main, *entries[0], *entries[1])


def causal_attention(
    q: Float[Tensor, "rows heads head_dim"],
    k: Float[Tensor, "rows kv_heads head_dim"],
    v: Float[Tensor, "rows kv_heads head_dim"],
    *,
    rows: Rows,
    scale: float | None = None,
    backend: str,
) -> Float[Tensor, "rows heads head_dim"]:
    """The main sequence's own attention: each row over the keys of its document up to itself. See `branch_attention`."""
    if q.ndim != 3:
        raise ValueError(f"causal_attention: q has {q.ndim} dimensions, not 3; give [rows heads head_dim]")
    none = k.new_empty(len(q), 0, *k.shape[1:])
    sees = torch.ones(1, 0, dtype=torch.bool, device=rows.position.device)
    trunk = BranchLayout(rows.document, rows.position[:, None] + 1, sees)
    return branch_attention(q[:, None], k, v, none, none, rows=rows, branches=trunk, scale=scale, backend=backend)[:, 0]


def branch_forward(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, branches: BranchLayout, scale: float
) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]:
    """A backend's `branch_forward`, with the branches of padding rows seeing nothing."""
    q, k, v = _met(branches, (q,), (k, v))
    return _without_padding(*backend.branch_forward(q, k, v, branches.sees, scale), branches)


def joined(
    backend: Backend,
    trunk: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    branches: BranchLayout,
    scale: float,
) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]:
    """The trunk's (out, lse) with the branches' merged in, in one pass where the backend has one."""
    if not branches.entries:
        return trunk
    if isinstance(backend, MergingBackend):
        q, k, v = _met(branches, (q,), (k, v))
        return _without_padding(*backend.merged_branch_forward(*trunk, q, k, v, branches.sees, scale), branches)
    return merge(*trunk, *branch_forward(backend, q, k, v, branches, scale))


def branch_backward(
    backend: Backend,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    branches: BranchLayout,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """A backend's `branch_backward`, with no gradient to or from the branches of padding rows."""
    grad, q, out, k, v = _met(branches, (grad, q, out), (k, v))
    grads = backend.branch_backward(grad, q, k, v, out, lse, branches.sees, scale)
    padding = (branches.document == NOBODY)[:, None, None, None]
    return tuple(x.masked_fill(padding, 0.0) for x in grads) if padding.any() else grads


def _met(
    branches: BranchLayout, of_queries: Sequence[Tensor], of_entries: Sequence[Tensor]
) -> tuple[Float[Tensor, "branches queries_or_entries heads_or_kv_heads head_dim"], ...]:
    """0 in queries that see no entry and in entries that no query sees: NaN there would be 0 times NaN in a product."""
    cleared = []
    for seen, tensors in ((branches.sees.any(1), of_queries), (branches.sees.any(0), of_entries)):
        blind = None if seen.all() else ~seen[None, :, None, None]
        cleared += [x if blind is None else x.masked_fill(blind, 0.0) for x in tensors]
    return tuple(cleared)


def _without_padding(out: Tensor, lse: Tensor, branches: BranchLayout) -> tuple[Tensor, Tensor]:
    padding = branches.document == NOBODY
    if not padding.any():
        return out, lse
    return out.masked_fill(padding[:, None, None, None], 0.0), lse.masked_fill(padding[:, None, None], float("-inf"))


def scale_of(scale: float | None, q: Tensor) -> float:
    """The scale of the scores, 1 / sqrt(head_dim) by default.

    Flash kernels mask scores before they scale them: times 0 or less, what is hidden would be NaN or come first.

    Raises:
        ValueError: it is not finite and above 0.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(
            f"attention: the scale of the scores is {scale}; give a finite one above 0, or None for 1/sqrt(head_dim)"
        )
    return scale


def check_main(k: Tensor, v: Tensor, rows: Rows) -> None:
    """Check main keys and values against each other and their rows.

    Raises:
        ValueError: they do not fit; the message says what to give.
    """
    if (
        k.ndim != 3
        or k.shape != v.shape
        or k.shape[0] != len(rows.position)
        or rows.document.shape != rows.position.shape
    ):
        raise ValueError(
            f"attention: main keys {list(k.shape)}, values {list(v.shape)} and coordinates of {len(rows.position)} rows "
            "do not fit; give both as [rows kv_heads head_dim], with the coordinates of the same rows"
        )
    _check_alike(k, {"v_main": v})
    if 0 in k.shape[1:]:
        raise ValueError(
            f"attention: main keys {list(k.shape)} have no heads or no head_dim; give [rows kv_heads head_dim]"
        )


def check_branches(q: Tensor, k_main: Tensor, k: Sequence[Tensor], v: Sequence[Tensor], branches: BranchLayout) -> None:
    """Check queries and entries against their branches and the main keys.

    Raises:
        ValueError: they do not fit; the message says what to give.
    """
    head_dim = k_main.shape[-1]
    wanted = (branches.branches, branches.queries)
    if (
        q.ndim != 4
        or q.shape[:2] != wanted
        or q.shape[3] != head_dim
        or q.shape[2] == 0
        or q.shape[2] % k_main.shape[1]
    ):
        raise ValueError(
            f"branch_attention: q is {list(q.shape)}; give [branches queries heads head_dim] with {wanted[0]} branches, "
            f"{wanted[1]} queries, heads a multiple of the {k_main.shape[1]} key heads, and head_dim {head_dim}"
        )
    _check_alike(k_main, {"q": q} | {f"k_branch[{i}]": x for i, x in enumerate(k)})
    _check_alike(k_main, {f"v_branch[{i}]": x for i, x in enumerate(v)})
    for name, parts in (("k_branch", k), ("v_branch", v)):
        stacked = len(parts) == 1 and parts[0].ndim == 4
        want = (branches.branches, *([branches.entries] if stacked else []), *k_main.shape[1:])
        if any(x.shape != want for x in parts) or (not stacked and len(parts) != branches.entries):
            raise ValueError(
                f"branch_attention: {name} has shapes {[list(x.shape) for x in parts]}; give [branches entries kv_heads "
                f"head_dim] = {[branches.branches, branches.entries, *k_main.shape[1:]]}, or one tensor per entry"
            )


def _check_alike(main: Tensor, others: dict[str, Tensor]) -> None:
    if main.dtype not in DTYPES:
        raise ValueError(f"attention: k_main is {main.dtype}; cast it to one of {', '.join(str(x) for x in DTYPES)}")
    for name, x in others.items():
        if (x.dtype, x.device) != (main.dtype, main.device):
            raise ValueError(
                f"attention: {name} is {x.dtype} on {x.device}, k_main {main.dtype} on {main.device}; make them alike"
            )


def listed_entries(name: str, entries: Entries, like: Entries) -> tuple[Tensor, ...]:
    """The tensors that entries are given in: one, or one per entry.

    Raises:
        ValueError: other dimensions, or `like`, the other of k_branch and v_branch, is given in the other way.
    """
    stacked = isinstance(entries, Tensor)
    parts = (entries,) if stacked else tuple(entries)
    wrong = [x.ndim for x in parts if x.ndim != 3 + stacked]
    if wrong or stacked != isinstance(like, Tensor):
        raise ValueError(
            f"branch_attention: {name} is neither one tensor of 4 dimensions nor a sequence of tensors of 3, or the other "
            f"of k_branch and v_branch is not alike (dimensions: {[x.ndim for x in parts]}); give both as [branches "
            "entries kv_heads head_dim], or both with one [branches kv_heads head_dim] per entry"
        )
    return parts


@dataclass(frozen=True, eq=False)
class _Call:
    backend: Backend
    plan: TrunkPlan
    branches: BranchLayout
    scale: float
    listed: bool
    """Whether entries are one tensor each, without a dimension of their own."""

    def stacked(self, parts: Sequence[Tensor], main: Tensor) -> Tensor:
        if not self.listed:
            return parts[0]
        return torch.stack(parts, 1) if parts else main.new_empty(self.branches.branches, 0, *main.shape[1:])


class _BranchAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, call: _Call, q: Tensor, k: Tensor, v: Tensor, *entries: Tensor) -> Tensor:
        half = len(entries) // 2
        keys, values = (call.stacked(part, k) for part in (entries[:half], entries[half:]))
        out, lse = call.backend.trunk_forward(q.flatten(0, 1), k, v, call.plan, call.scale)
        trunk = out.reshape(q.shape), lse.reshape(q.shape[:3])
        out, lse = joined(call.backend, trunk, q, keys, values, call.branches, call.scale)
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, *entries)
        return out.to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        q, k, v, out, lse, *entries = ctx.saved_tensors
        half = len(entries) // 2
        flat = (x.flatten(0, 1) for x in (out, lse))
        grad_q, grad_k, grad_v = call.backend.trunk_backward(
            grad.flatten(0, 1), q.flatten(0, 1), k, v, *flat, call.plan, call.scale
        )
        grad_q = grad_q.reshape(q.shape)
        grad_entries: tuple[Tensor, ...] = tuple(torch.zeros_like(x) for x in entries)
        if call.branches.entries:
            keys, values = (call.stacked(part, k) for part in (entries[:half], entries[half:]))
            more, *slopes = branch_backward(call.backend, grad, q, keys, values, out, lse, call.branches, call.scale)
            grad_q = grad_q + more
            slopes = [x.to(q.dtype) for x in slopes]
            grad_entries = (*slopes[0].unbind(1), *slopes[1].unbind(1)) if call.listed else tuple(slopes)
        return None, grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), *grad_entries
