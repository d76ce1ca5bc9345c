"""What every rank of the benchmark runs: one pass of each side, watched by a `Meter`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from branch_attention_baselines import Coordinates, Joined, block_mask, computed_by_blocks, dense_attention, dense_mask
from branch_attention_meter import Meter
from torch import Tensor

from furlong.kernels.branches import BranchLayout, test_time_training, unrolled
from furlong.kernels.context_parallel import cp_branch_attention, ring_attention
from furlong.kernels.layout import ContextLayout, Rows, contiguous_layout, zigzag_layout
from furlong.kernels.ring import Ring

HEADS, KV_HEADS, HEAD_DIM, DEPTH = 2, 1, 32, 4
BYTES = 4
DEADLINE = 300.0


@dataclass(frozen=True)
class Case:
    """One point: all ranks of it run it together."""

    side: str
    ranks: int
    tokens: int
    arithmetic: bool


@dataclass
class Found:
    """On one rank."""

    forward: dict
    """`Counts`, plain, and so below."""
    backward: dict | None
    pairs: int
    """Of the trunk, that queries see, by the kernels' own count."""
    branch_pairs: int
    multiplied: float
    """Pairs per head, forward, in the blocks that a kernel goes through, as dispatched; FlexAttention's by its mask."""
    own_sent: dict[str, int]
    """By the kernels' own count, header included."""


def measure_all(rank: int, cases: list[Case]) -> list[dict | None]:
    """What this rank found in each case, None where it had no part."""
    rings = _rings(rank, {case.ranks for case in cases})
    found: list[dict | None] = []
    for case in cases:
        ring = rings.get(case.ranks)
        found.append(None if ring is None else vars(_measure(case, ring)))
    return found


def _rings(rank: int, sizes: set[int]) -> dict[int, Ring]:
    rings = {}
    for size in sorted(sizes):
        group = dist.new_group(list(range(size))) if size > 1 else None
        if rank < size:
            rings[size] = Ring(group, DEADLINE)
    return rings


def document(tokens: int, ranks: int, contiguous: bool = False) -> ContextLayout:
    """One long document."""
    return (contiguous_layout if contiguous else zigzag_layout)(torch.tensor([0, tokens]), ranks)


def tensors(branches: BranchLayout, rows: int, seed: int, requires_grad: bool = True) -> list[Tensor]:
    """q, k_main, v_main, k_branch, v_branch."""
    draw = torch.Generator().manual_seed(seed)
    main, entries = (rows, KV_HEADS, HEAD_DIM), (branches.branches, branches.entries, KV_HEADS, HEAD_DIM)
    queries = (branches.branches, branches.queries, HEADS, HEAD_DIM)
    made = [torch.randn(shape, generator=draw) for shape in (queries, main, main, entries, entries)]
    return [x.requires_grad_(requires_grad) for x in made]


def _measure(case: Case, ring: Ring) -> Found:
    """One forward pass and, where the side has one, one backward pass."""
    tokens = case.tokens * (1 + DEPTH) if case.side == "in sequence" else case.tokens
    layout = document(tokens, ring.ranks, case.side == "contiguous")
    rows = layout.rows(ring.rank)
    if case.side == "in sequence":
        branches = test_time_training(rows, 0)
    else:
        branches = (unrolled if case.side == "all depths" else test_time_training)(rows, DEPTH)
    inputs = tensors(branches, len(rows.position), ring.rank, case.side != "flex")
    side, masks, blocks = _side(case, layout, branches, ring)
    ring.ledger.clear()
    with Meter(*inputs, *masks, arithmetic=case.arithmetic) as meter:
        out = side(*inputs)
        forward = meter.phase().plain()
        if out.requires_grad:
            out.backward(torch.ones_like(out))
        backward = meter.phase().plain() if out.requires_grad else None
    ledger = ring.ledger
    return Found(
        forward, backward, ledger.pairs["trunk"], ledger.pairs["branch"],
        blocks or forward["blocks"]["forward"] / HEADS, dict(ledger.sent),
    )  # fmt: skip


def _side(
    case: Case, layout: ContextLayout, branches: BranchLayout, ring: Ring
) -> tuple[Callable[..., Tensor], list[Tensor], int]:
    """What to call, the masks it holds, and pairs in their blocks, if they have blocks.

    Masks and plans are made beforehand: their making is neither side's point.
    """
    if case.side in ("dense", "flex"):
        return _one_softmax(case, layout, branches, ring)
    if case.side == "in sequence":
        return lambda q, k, v, kb, vb: ring_attention(q[:, 0], k, v, layout=layout, ring=ring, backend="cpu"), [], 0
    strategy = case.side if case.side in ("gather", "ulysses") else "ring"

    def attend(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        return cp_branch_attention(
            q, k, v, kb, vb, layout=layout, branches=branches, ring=ring, strategy=strategy, backend="cpu"
        )

    return attend, [], 0


def _one_softmax(
    case: Case, layout: ContextLayout, branches: BranchLayout, ring: Ring
) -> tuple[Callable[..., Tensor], list[Tensor], int]:
    at = coordinates(layout.rows(ring.rank), layout, branches)
    mask = block_mask(at) if case.side == "flex" else dense_mask(at)
    parts = mask.as_tuple() if case.side == "flex" else (mask,)

    def attend(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        keys, values = (Joined.apply(*pair, ring.group) for pair in ((k, kb), (v, vb)))
        if case.side == "dense":
            return dense_attention(q, keys, values, mask)
        # FlexAttention's kernel is not called: compiled code hides what it allocates, which is its output.
        return torch.zeros_like(q)

    blocks = computed_by_blocks(mask) if case.side == "flex" else 0
    return attend, [x for x in parts if isinstance(x, Tensor)], blocks


def coordinates(rows: Rows, layout: ContextLayout, branches: BranchLayout) -> Coordinates:
    return Coordinates(
        branches.document, branches.cutoff[:, 0], layout.document.flatten(), layout.position.flatten(), branches.entries
    )
