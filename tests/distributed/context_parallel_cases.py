"""What ranks of `test_context_parallel.py` compute, and the same batches whole, for the truth to compare them with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from furlong.kernels import context_parallel, gathered
from furlong.kernels.branches import BranchLayout, block_draft, unrolled
from furlong.kernels.branches import test_time_training as at_depth
from furlong.kernels.context_parallel import cp_branch_attention, ring_attention
from furlong.kernels.layout import (
    NOBODY,
    ContextLayout,
    Rows,
    contiguous_layout,
    line_layout,
    zigzag_layout,
    zigzag_merge,
    zigzag_split,
)  # fmt: skip
from furlong.kernels.ring import Ring
from furlong.kernels.shared_trunk import SharedTrunk

NAMES = ("out", "q", "k_main", "v_main", "k_branch", "v_branch")
DEADLINE = 60


@dataclass(frozen=True)
class Case:
    """One call, of every rank. With `passes`, depths 0..passes over one trunk, whose outputs are added."""

    lengths: tuple[int, ...]
    kind: str = "ttt"
    """"causal", "ttt" and "unrolled" of `size` depths, "block" and "causal block" of `size` slots."""
    size: int = 2
    anchors: tuple[int, ...] = ()
    """Packed rows, in any order."""
    layout: str = "zigzag"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float64
    strategy: str | int = "ring"
    backend: str = "reference"
    scale: float | None = None
    passes: int | None = None
    shared: bool = False
    apart: bool = False
    """Entries are one tensor each."""
    recomputed: bool = False
    """The forward pass runs once more in the backward pass."""
    mutant: str = ""


def layout_of(case: Case, ranks: int) -> ContextLayout:
    edges = torch.tensor([0, *case.lengths]).cumsum(0)
    if case.layout != "line":
        return {"zigzag": zigzag_layout, "contiguous": contiguous_layout}[case.layout](edges, ranks)
    # Padding between documents and at the end, to a multiple that suits 1, 2 and 4 ranks.
    documents = [torch.tensor([n] * length + [NOBODY]) for n, length in enumerate(case.lengths)]
    positions = [torch.tensor([*range(length), 0]) for length in case.lengths]
    width = -(-sum(map(len, documents)) // 8) * 8
    line = torch.full((2, width), NOBODY)
    line[1] = 0
    line[0, : sum(map(len, documents))] = torch.cat(documents)
    line[1, : sum(map(len, positions))] = torch.cat(positions)
    return line_layout(*line, ranks)


def whole(case: Case) -> Rows:
    """Coordinates of the packed batch."""
    layout = layout_of(case, 1)
    return Rows(zigzag_merge(list(layout.document), layout), zigzag_merge(list(layout.position), layout))


def branches_of(case: Case, rows: Rows, anchors: Tensor) -> BranchLayout:
    if "block" in case.kind:
        return block_draft(rows, anchors, case.size, causal="causal" in case.kind)
    if case.kind == "unrolled":
        return unrolled(rows, case.size)
    return at_depth(rows, 0 if case.kind == "causal" else case.size)


def tensors(case: Case) -> dict[str, Tensor]:
    """Packed inputs and the gradient of the output, the same for any number of ranks; in the case's dtype."""
    rows = whole(case)
    branches = branches_of(case, rows, torch.tensor(case.anchors, dtype=torch.long))
    draw = torch.Generator().manual_seed(len(rows.document) * 31 + case.size)
    main = (len(rows.document), case.kv_heads, case.head_dim)
    branch = (branches.branches, branches.sees.shape[1], *main[1:])
    query = (branches.branches, branches.queries, case.heads, case.head_dim)
    shapes = {"q": query, "k_main": main, "v_main": main, "k_branch": branch, "v_branch": branch, "grad": query}
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype) for name, shape in shapes.items()
    }


def held(case: Case, layout: ContextLayout, rank: int) -> tuple[Tensor, Tensor]:
    """This rank's branches: (number of each in the whole batch, NOBODY off padding; the row it hangs off)."""
    if "block" not in case.kind:
        return layout.source[rank], torch.arange(layout.source.shape[1])
    at = {int(row): place for place, row in enumerate(layout.source[rank].tolist()) if row != NOBODY}
    mine = [(number, at[anchor]) for number, anchor in enumerate(case.anchors) if anchor in at]
    return tuple(torch.tensor([pair[i] for pair in mine], dtype=torch.long) for i in range(2))


def part(case: Case, layout: ContextLayout, rank: int, packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a rank holds. Padding holds numbers that would show if anyone looked."""
    numbers, _ = held(case, layout, rank)
    found = {}
    for name, x in packed.items():
        if name in ("k_main", "v_main"):
            found[name] = zigzag_split(x, layout, rank, fill=50.0)
        else:
            off = (numbers == NOBODY).view(-1, *[1] * (x.dim() - 1))
            rows = x[numbers.clamp(min=0)] if len(x) else x.new_zeros(len(numbers), *x.shape[1:])
            found[name] = rows.masked_fill(off, 50.0)
    return found


def joined(case: Case, layout: ContextLayout, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The packed batch of what all ranks found; checks that every branch is there once and that padding is 0."""
    numbers = [held(case, layout, rank)[0] for rank in range(layout.ranks)]
    every = torch.cat(numbers)
    count = int((every != NOBODY).sum())
    assert torch.equal(every[every != NOBODY].sort().values, torch.arange(count))
    found = {}
    for name in parts[0]:
        if name in ("k_main", "v_main"):
            found[name] = zigzag_merge([x[name] for x in parts], layout)
            assert not torch.cat([x[name] for x in parts])[layout.source.flatten() == NOBODY].any()
        else:
            rows = torch.cat([x[name] for x in parts])
            assert not rows[every == NOBODY].any()
            found[name] = rows.new_empty(count, *rows.shape[1:])
            found[name][every[every != NOBODY]] = rows[every != NOBODY]
    return found


def solve(case: Case, ring: Ring) -> dict[str, Tensor]:
    """This rank's output and gradients."""
    layout = layout_of(case, ring.ranks)
    here = part(case, layout, ring.rank, tensors(case))
    grad = here.pop("grad")
    inputs = {name: x.requires_grad_() for name, x in here.items()}
    if case.recomputed:
        out = checkpoint(attend, case, layout, ring, inputs, use_reentrant=False)
    else:
        out = attend(case, layout, ring, inputs)
    out.backward(grad)
    return {"out": out.detach()} | {
        name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()
    }


def attend(case: Case, layout: ContextLayout, ring: Ring, x: dict[str, Tensor]) -> Tensor:
    settings = {"layout": layout, "ring": ring, "scale": case.scale, "backend": case.backend}
    rows = layout.rows(ring.rank)
    if case.kind == "causal" and case.strategy == "ring" and case.passes is None:
        return ring_attention(x["q"][:, 0], x["k_main"], x["v_main"], **settings)[:, None]
    if case.passes is not None:
        return unfold(case, settings, x, rows)
    branches = branches_of(case, rows, held(case, layout, ring.rank)[1])
    entries = [x[name].unbind(1) if case.apart else x[name] for name in ("k_branch", "v_branch")]
    main = x["q"], x["k_main"], x["v_main"]
    return cp_branch_attention(*main, *entries, branches=branches, strategy=case.strategy, **settings)


def unfold(case: Case, settings: dict, x: dict[str, Tensor], rows: Rows) -> Tensor:
    """Depths 0..passes in turn, each asking with the one before's answer, over one trunk."""
    depths = range(case.passes + 1)
    trunk = SharedTrunk(x["k_main"], x["v_main"], strategy=case.strategy, **settings) if case.shared else None
    out = x["q"]
    for depth in depths:
        branches = at_depth(rows, depth)
        entries = [x[name][:, :depth] for name in ("k_branch", "v_branch")]
        if trunk is not None:
            out = x["q"] + trunk.attend(out, *entries, branches=branches)
        else:
            out = x["q"] + cp_branch_attention(
                out, x["k_main"], x["v_main"], *entries, branches=branches, strategy=case.strategy, **settings
            )
    return out.masked_fill((rows.document == NOBODY)[:, None, None, None], 0)


def mutate(name: str):
    """Break the code in one way; gives what puts it right again."""
    kept = {}

    def put(module: object, attribute: str, value: object) -> None:
        kept[module, attribute] = getattr(module, attribute)
        setattr(module, attribute, value)

    joint, gradients = context_parallel.with_branches, context_parallel._trunk_gradients
    if name == "trunk-only lse in the backward":
        alone = {}

        def remember(job, q, entries, out, lse):
            alone.update(out=out.flatten(0, 1), lse=lse.flatten(0, 1))
            return joint(job, q, entries, out, lse)

        def forget(job, plan, flat, *rest):
            return gradients(job, plan, [flat[0], flat[1], alone["out"], alone["lse"]], *rest)

        put(context_parallel, "with_branches", remember)
        put(context_parallel, "_trunk_gradients", forget)
    elif name == "key gradient not returned":

        def home(self):
            if self._coming is not None:
                self._coming.wait()
            return self._own

        put(gathered.RingHomeward, "home", home)
    elif name == "halves swapped":

        def swapped(ring, key, value):
            for source, block in ring.travel("kv", (key, value)):
                yield source, block if source == ring.rank else tuple(x.roll(len(x) // 2, 0) for x in block)

        put(context_parallel, "CARRIERS", {"ring": (swapped, gathered.RingHomeward)})
    elif name == "branch off by one":

        def other(job, q, entries, out, lse):
            return joint(job, q, [entries[0].roll(1, 0), *entries[1:]], out, lse)

        put(context_parallel, "with_branches", other)
    elif name == "cutoff off by one":
        plan = context_parallel.plan_trunk
        put(
            context_parallel,
            "plan_trunk",
            lambda document, cutoff, keys: plan(document, (cutoff - 1).clamp(min=0), keys),
        )
    else:
        assert not name, name

    def restore() -> None:
        for (module, attribute), value in kept.items():
            setattr(module, attribute, value)

    return restore


def run(rank: int, cases: list[tuple[Case, tuple[int, ...]]]) -> list[dict[int, tuple[dict, dict]]]:
    """For each case and number of ranks, what this rank found and counted; nothing where it takes no part."""
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (1, 2, 4)}
    rings = {ranks: Ring(group, DEADLINE) for ranks, group in groups.items() if rank < ranks}
    results = []
    for case, counts in cases:
        results.append({})
        for ranks in counts:
            if rank >= ranks:
                continue
            ring = rings[ranks]
            ring.ledger.clear()
            restore = mutate(case.mutant)
            try:
                found = solve(case, ring)
            finally:
                restore()
            results[-1][ranks] = found, {name: dict(x) for name, x in vars(ring.ledger).items()}
    return results
