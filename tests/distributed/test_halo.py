"""Shifts across chunks, ranks and documents, on real ranks, against a shift of the packed batch in one process."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from kernel_ranks import run_ranks

from furlong.kernels import halo as module
from furlong.kernels.halo import HaloPlan, halo, plan_halo, shifted_mask
from furlong.kernels.layout import (
    NOBODY,
    ContextLayout,
    LayoutError,
    contiguous_layout,
    line_layout,
    zigzag_layout,
    zigzag_merge,
    zigzag_split,
)
from furlong.kernels.ring import ContextParallelError, Ring

FLOATS = ("float64", "float32", "bfloat16")
KINDS = ("ids", "mask", *FLOATS)
FILL = -7
HIDDEN = 3
BYTES = {"ids": 8, "mask": 1, "float64": 8 * HIDDEN, "float32": 4 * HIDDEN, "bfloat16": 2 * HIDDEN}


@dataclass(frozen=True)
class Case:
    """A packed batch by hand: its coordinates are not taken from the layout that is tested."""

    lengths: tuple[int, ...]
    width: int
    layout: ContextLayout
    padding: int = 0
    kinds: tuple[str, ...] = KINDS

    @property
    def places(self) -> list[tuple[int, int]]:
        """(document, position) of every packed row."""
        real = [(document, at) for document, length in enumerate(self.lengths) for at in range(length)]
        return real + [(NOBODY, 0)] * self.padding

    def shifted(self, x: torch.Tensor, offset: int, fill: float) -> torch.Tensor:
        """The plain shift of a packed tensor, row by row."""
        row = {place: at for at, place in enumerate(self.places) if place[0] != NOBODY}
        from_ = [row.get((document, at + offset), NOBODY) if document >= 0 else NOBODY for document, at in self.places]
        rows = [x[at] if at != NOBODY else torch.full_like(x[0], fill) for at in from_]
        return torch.stack(rows) if rows else x

    def crossing(self) -> list[set[tuple[int, int]]]:
        """(document, position) that each rank takes, from the definition: behind one of its own, and not its own."""
        found = []
        for rank in range(self.layout.ranks):
            own = set(zip(self.layout.document[rank].tolist(), self.layout.position[rank].tolist(), strict=True))
            ahead = {(d, p + o) for d, p in own if d != NOBODY for o in range(1, self.width + 1)}
            found.append({(d, p) for d, p in ahead - own if p < self.lengths[d]})
        return found


def case(kind: str, lengths, width: int, ranks: int, least: int = 1) -> Case:
    edges = torch.tensor([0, *lengths]).cumsum(0)
    if kind == "line":
        padding = -sum(lengths) % (2 * ranks)
        bare = Case(tuple(lengths), width, zigzag_layout(edges, 1), padding)
        table = torch.tensor(bare.places, dtype=torch.long).view(-1, 2)
        return replace(bare, layout=line_layout(table[:, 0], table[:, 1], ranks))
    layout = contiguous_layout(edges, ranks) if kind == "contiguous" else zigzag_layout(edges, ranks, least)
    return Case(tuple(lengths), width, layout)


def cases(ranks: int) -> list[Case]:
    """The corners by name, then batches drawn from a fixed seed."""
    found = [
        case("zigzag", lengths, width, ranks, least)
        for lengths, width, least in (
            ((32,), 3, 1),  # chunks longer than the halo (4 ranks: 4 rows)
            ((24,), 3, 1),  # 4 ranks: chunks of just the halo's width
            ((16, 9, 1), 5, 1),  # shorter
            ((5, 13), 4, 4),  # made as long, with padding
            ((1, 1, 1, 1), 3, 1),  # nothing follows anything
            ((0, 7, 0, 2, 0), 2, 1),
            ((0, 0), 2, 1),
            ((), 2, 1),
            ((1,), 1, 1),  # empty ranks
            ((19, 30), 0, 1),
            ((2,), 60, 1),  # far wider than the batch
            ((40,), 60, 1),
        )
    ]
    found += [case(kind, (7, 0, 12, 1), 4, ranks) for kind in ("contiguous", "line")]
    draw = Random(6)
    for at in range(24):
        lengths = [draw.choice((0, 1, 2, draw.randrange(40))) for _ in range(draw.randrange(6))]
        kind = draw.choice(("zigzag", "zigzag", "zigzag", "contiguous", "line"))
        one = case(kind, lengths, draw.randrange(10), ranks, draw.choice((1, 1, 3, 9)))
        found.append(replace(one, kinds=KINDS[at % len(KINDS) :][:1]))
    return found


def packed(case: Case, kind: str) -> torch.Tensor:
    """Whole numbers, so that sums are exact in every dtype, and all different where the dtype can."""
    rows, make = len(case.places), torch.Generator().manual_seed(1)
    if kind == "ids":
        return torch.randperm(rows, generator=make) + 1000
    if kind == "mask":
        return torch.rand(rows, generator=make) < 0.6
    dtype = getattr(torch, kind)
    return torch.randint(-4, 5, (rows, HIDDEN), generator=make).to(dtype)


def weights(case: Case, offset: int, dtype: torch.dtype) -> torch.Tensor:
    """What a loss multiplies each element of a shift with, by packed row."""
    make = torch.Generator().manual_seed(100 + offset)
    return torch.randint(-2, 3, (len(case.places), HIDDEN), generator=make).to(dtype)


def own_late_missing(layout: ContextLayout, width: int, rank: int) -> HaloPlan:
    """Mutant: what follows a chunk is always looked for on another rank, also where this rank has it itself."""
    plan = plan_halo(layout, width, rank)
    rows = len(plan.at)
    own_late = (plan.at >= rows // 2) & (plan.at < rows) & (torch.arange(rows)[:, None] < rows // 2)
    return replace(plan, at=plan.at.masked_fill(own_late, NOBODY))


def neighbours_confused(layout: ContextLayout, width: int, rank: int) -> HaloPlan:
    """Mutant: the rows for one peer leave in the other order."""
    plan = plan_halo(layout, width, rank)
    return replace(plan, gives=tuple(rows.flip(0) for rows in plan.gives))


def gradients_kept(ring, kind, leaving, takes):
    """Mutant: halo rows' gradients are not returned."""
    home = module_traded(ring, kind, leaving, takes)
    return [torch.zeros_like(part) for part in home] if kind == "halo gradient" else home


module_traded = module._traded
MUTANTS = {
    "own late": ("plan_halo", own_late_missing),
    "neighbours": ("plan_halo", neighbours_confused),
    "gradient": ("_traded", gradients_kept),
    "mask": ("shifted_mask", lambda mask, depth: mask.shift(0, fill=False)),
    "halves": None,
}
SHOWS = {
    "own late": "'ids', 1",
    "neighbours": "'ids', 1",
    "gradient": "'float64', Case",
    "mask": "^.0, Case",
    "halves": "'ids', 1",
}
"""How the comparison with each mutant begins to fail: (kind, offset), (kind of the gradient) or (depth of the mask)."""


def of_case(case: Case, rank: int, ring: Ring) -> dict[str, Any]:
    """All that a rank finds of a case."""
    found: dict[str, Any] = {}
    for kind in case.kinds:
        x = zigzag_split(packed(case, kind), case.layout, rank)
        x.requires_grad_(kind in FLOATS)
        ring.ledger.clear()
        near = halo(x, case.layout, case.width, ring)
        shifts = [near.shift(offset, 0 if kind == "mask" else FILL) for offset in range(case.width + 1)]
        found[kind] = {"shifts": [shift.detach() for shift in shifts]}
        if kind in FLOATS:
            parts = [
                (shift * zigzag_split(weights(case, offset, x.dtype), case.layout, rank)).sum()
                for offset, shift in enumerate(shifts)
            ]
            torch.stack(parts).sum().backward()
            found[kind]["gradient"] = x.grad
        if kind == "mask":
            found[kind]["losses"] = [module.shifted_mask(near, depth) for depth in range(case.width)]
        found[kind]["windows"] = near.windows(torch.arange(len(x)), case.width + 1, FILL if kind != "mask" else 0)
        found[kind]["sent"] = dict(ring.ledger.sent)
        found[kind]["messages"] = dict(ring.ledger.messages)
    return found


def every_case(rank: int, cases: list[Case], mutant: str = "") -> list[dict[str, Any]]:
    ring = Ring(dist.group.WORLD, PATIENCE)
    with pytest.MonkeyPatch.context() as patch:
        if MUTANTS.get(mutant):
            name, function = MUTANTS[mutant]
            patch.setattr(module, name, function)
        return [of_case(case, rank, ring) for case in cases]


def mutants(rank: int, cases: list[Case], wrong: list[Case]) -> dict[str, list[dict[str, Any]]]:
    return {mutant: every_case(rank, wrong if mutant == "halves" else cases, mutant) for mutant in MUTANTS}


def whole(case: Case, parts: list[torch.Tensor], fill: float) -> torch.Tensor:
    """Merged; padding rows, which merge leaves out, must be `fill` everywhere."""
    for rank, part in enumerate(parts):
        assert bool((part[case.layout.document[rank] == NOBODY] == fill).all()), "padding"
    return zigzag_merge(parts, case.layout)


def compare(case: Case, found: list[dict[str, Any]]) -> None:
    """Bitwise: what is moved is not computed with, and whole numbers add exactly."""
    assert len(found) == case.layout.ranks
    for kind in found[0]:
        x = packed(case, kind).requires_grad_(kind in FLOATS)
        fill = 0 if kind == "mask" else FILL
        plain = [case.shifted(x, offset, fill) for offset in range(case.width + 1)]
        for offset, wanted in enumerate(plain):
            shifted = whole(case, [rank[kind]["shifts"][offset] for rank in found], fill)
            assert torch.equal(shifted, wanted), (kind, offset, case)
        windows = zigzag_merge([rank[kind]["windows"] for rank in found], case.layout)
        assert torch.equal(windows, torch.stack(plain, 1)), (kind, case)
        if kind in FLOATS:
            sum((shift * weights(case, at, x.dtype)).sum() for at, shift in enumerate(plain)).backward()
            gradient = whole(case, [rank[kind]["gradient"] for rank in found], 0)
            assert torch.equal(gradient, x.grad), (kind, case)
        if kind == "mask":
            for depth in range(case.width):
                losses = whole(case, [rank[kind]["losses"][depth] for rank in found], 0)
                assert torch.equal(losses, plain[depth + 1]), (depth, case)


@pytest.fixture(scope="module")
def results():
    """Ranks -> (cases, by case what each rank found, by mutant the same); a group starts once, when first asked for."""
    known: dict[int, Any] = {}

    def of(ranks: int):
        if ranks not in known:
            known[ranks] = (cases(ranks), run_ranks(ranks, all_of, cases(ranks), wrong_cases(ranks)))
        return known[ranks]

    return of


def wrong_cases(ranks: int) -> list[Case]:
    """Mutant: each rank holds its later chunk first, but says otherwise."""
    right = mutant_cases(ranks)
    swap = [replace(c.layout, source=c.layout.source.view(ranks, 2, -1).flip(1).flatten(1)) for c in right]
    return [replace(c, layout=layout) for c, layout in zip(right, swap, strict=True)]


def mutant_cases(ranks: int) -> list[Case]:
    found = case("zigzag", (8 * ranks,), 3, ranks), case("zigzag", (6 * ranks,), 2, ranks)
    return [replace(one, kinds=("ids", "mask", "float64")) for one in found]


def all_of(rank: int, cases: list[Case], wrong: list[Case]) -> dict[str, Any]:
    ranks = dist.get_world_size()
    return {
        "right": every_case(rank, cases),
        "again": every_case(rank, cases[:4]),
        "control": every_case(rank, mutant_cases(ranks)),
        "mutants": mutants(rank, mutant_cases(ranks), wrong),
        "disagreements": disagreements(rank) if ranks > 1 else {},
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shifts_masks_windows_and_gradients_are_those_of_one_process(results, ranks):
    tried, found = results(ranks)
    for at, one in enumerate(tried):
        compare(one, [rank["right"][at] for rank in found])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_mutants_do_not_pass(results, ranks):
    _, found = results(ranks)
    alike = {1: {"neighbours", "gradient"}, 2: set(), 4: set()}[ranks]  # one rank has no neighbour to confuse
    for at, one in enumerate(mutant_cases(ranks)):
        compare(one, [rank["control"][at] for rank in found])
        for mutant in MUTANTS:
            judged = wrong_cases(ranks)[at] if mutant == "halves" else one
            of_mutant = [rank["mutants"][mutant][at] for rank in found]
            if mutant in alike:
                compare(judged, of_mutant)
                continue
            with pytest.raises(AssertionError, match=SHOWS[mutant]):
                compare(judged, of_mutant)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_and_messages_are_those_of_the_formula(results, ranks):
    """A row for each token that follows a rank's within the width and is not its own; a message for each pair of ranks
    that has any; as many bytes return, as gradients."""
    tried, found = results(ranks)
    for at, one in enumerate(tried):
        taken = one.crossing()
        holder = {
            place: rank
            for rank in range(ranks)
            for place in zip(one.layout.document[rank].tolist(), one.layout.position[rank].tolist(), strict=True)
        }
        for kind in one.kinds:
            size = BYTES[kind]
            for rank in range(ranks):
                sent, messages = (found[rank]["right"][at][kind][what] for what in ("sent", "messages"))
                gives = [sum(holder[place] == rank for place in taken[other]) for other in range(ranks)]
                assert sent.get("halo", 0) == size * sum(gives), (one, kind)
                assert messages.get("halo", 0) == sum(1 for rows in gives if rows)
                wanted = size * len(taken[rank]) if kind in FLOATS else 0
                assert sent.get("halo gradient", 0) == wanted, (one, kind)
    long = [rank["right"][0]["ids"] for rank in found]
    assert [one["sent"].get("halo", 0) // 8 for one in long] == {1: [0], 2: [3, 3], 4: [3, 6, 6, 3]}[ranks]
    assert [one["messages"].get("halo", 0) for one in long] == {1: [0], 2: [1, 1], 4: [1, 2, 2, 1]}[ranks]


def test_a_second_time_gradients_are_the_same_bits(results):
    tried, found = results(4)
    for at in range(4):
        for rank in found:
            first, second = rank["right"][at]["float64"]["gradient"], rank["again"][at]["float64"]["gradient"]
            assert first.numel() == tried[at].layout.source.shape[1] * HIDDEN
            assert torch.equal(first, second)


@given(
    st.lists(st.one_of(st.sampled_from((0, 1, 2, 15, 16, 17)), st.integers(0, 90)), max_size=5),
    st.integers(0, 9),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 1, 4, 9]),
    st.sampled_from(["zigzag", "zigzag", "contiguous", "line"]),
)
@example([1], 9, 8, 1, "zigzag")
@example([], 3, 8, 1, "zigzag")
@example([144], 9, 8, 1, "zigzag")
@settings(deadline=None, max_examples=150, derandomize=True)
def test_plans_find_every_following_token_and_move_no_other(lengths, width, ranks, least, kind):
    one = case(kind, lengths, width, ranks, least)
    x = packed(one, "ids")
    held = [zigzag_split(x, one.layout, rank) for rank in range(ranks)]
    plans = [plan_halo(one.layout, width, rank) for rank in range(ranks)]
    taken = one.crossing()
    for rank, plan in enumerate(plans):
        parts = [held[other][plans[other].gives[rank]] for other in range(ranks)]
        assert [len(part) for part in parts] == list(plan.takes)
        assert sum(plan.takes) == len(taken[rank])
        assert plan.takes[rank] == 0
        near = module.Halo(torch.cat([held[rank], *parts]), plan.at)
        for offset in range(width + 1):
            wanted = zigzag_split(one.shifted(x, offset, FILL), one.layout, rank, FILL)
            assert torch.equal(near.shift(offset, FILL), wanted)
    chunks = [max(-(-n // (2 * ranks)), least) for n in lengths]
    if kind == "zigzag" and all(c >= width for c in chunks):
        formula = sum(
            min(width, max(0, length - j * c))
            for length, c in zip(lengths, chunks, strict=True)
            for j in range(1, 2 * ranks)
            if j != ranks
        )
        assert sum(sum(plan.takes) for plan in plans) == formula


def alone(x: torch.Tensor, lengths, width: int) -> module.Halo:
    one = case("zigzag", lengths, width, 1)
    return halo(zigzag_split(x, one.layout, 0), one.layout, width, Ring(None, 1.0))


def test_gradcheck_of_a_halo_alone():
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: [alone(x, (5, 1), 3).shift(o) for o in range(4)], x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: alone(torch.arange(6), (6,), 2).shift(3), "offset 3 is outside"),
        (lambda: alone(torch.arange(6), (6,), 2).shift(-1), "offset -1 is outside"),
        (lambda: alone(torch.arange(6), (6,), 2).windows(torch.tensor([0]), 4), "offset 3 is outside"),
        (lambda: shifted_mask(alone(torch.arange(6), (6,), 2), 1), "a boolean per row"),
        (lambda: shifted_mask(alone(torch.ones(6).bool(), (6,), 2), 2), "offset 3 is outside"),
        (lambda: plan_halo(case("zigzag", (6,), 0, 2).layout, -1, 0), "a halo of -1 rows"),
        (lambda: plan_halo(case("zigzag", (6,), 0, 2).layout, 1, 2), "rank 2 is none"),
    ],
)
def test_what_a_halo_does_not_hold_is_refused(call, words):
    with pytest.raises(LayoutError, match=words):
        call()


DEADLINE = 2.0
PATIENCE = 20.0
"""Of calls that succeed, however busy the machine is."""


def disagreements(rank: int) -> dict[str, str]:
    """What each rank is told when rank 1 does something else; then that the ring still works."""
    ranks = dist.get_world_size()
    ring = Ring(dist.group.WORLD, PATIENCE)
    one = case("zigzag", (9, 4), 2, ranks)
    x = zigzag_split(packed(one, "float64"), one.layout, rank)
    odd = rank == 1
    other = case("zigzag", (9, 3), 2, ranks).layout  # as many rows
    said = {}
    for name, changed in {
        "rows": {"x": x[1:]},
        "row": {"x": x[:, :2]},
        "dtype": {"x": x.float()},
        "gradient": {"x": x.clone().requires_grad_()},
        "width": {"width": 3},
        "layout": {"layout": other},
        "ranks": {"layout": case("zigzag", (9, 4), 2, ranks + 1).layout},
        "negative": {"width": -1},
    }.items():
        given = {"x": x, "layout": one.layout, "width": 2} | (changed if odd else {})
        try:
            halo(**given, ring=ring)
            said[name] = ""
        except ContextParallelError as error:
            said[name] = str(error)
    near = halo(x, one.layout, 2, ring)
    said["after"] = "right" if len(near.shift(2)) == len(x) else "wrong"
    return said


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_disagrees_is_named_on_all(results, ranks):
    _, found = results(ranks)
    words = {
        "rows": "rank 1: a tensor of shape", "row": "row=", "dtype": "rank 1 has dtype=torch.float32",
        "gradient": "rank 1 has gradient=True", "width": "rank 1 has width=3", "layout": "layout=",
        "ranks": "rank 1: the layout is of", "negative": "rank 1: a halo of -1 rows",
    }  # fmt: skip
    for rank in found:
        said = rank["disagreements"]
        assert said["after"] == "right"
        assert said.keys() == {*words, "after"}
        for name, wanted in words.items():
            assert wanted in said[name], (name, said[name])


def dying(rank: int, when: str) -> tuple[str, float]:
    """What a rank is told, and after how long, when rank 1 dies or sleeps."""
    ring = Ring(dist.group.WORLD, PATIENCE)
    one = case("zigzag", (40, 9), 2, dist.get_world_size())
    x = zigzag_split(packed(one, "float64"), one.layout, rank).requires_grad_()
    near = halo(x, one.layout, 2, ring)
    ring.deadline = DEADLINE
    if when == "asleep" and rank == 1:
        time.sleep(3 * DEADLINE)
    if when == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if when == "killed in the exchange" and rank == 1:
        ring.swap = lambda *args, **named: os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        if when == "killed in the backward pass":
            if rank == 1:
                near.held.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
            near.shift(1).sum().backward()
        else:
            halo(x, one.layout, 2, ring)
    except ContextParallelError as error:
        return str(error), time.monotonic() - begun
    return "", time.monotonic() - begun


@pytest.mark.parametrize(
    ("ranks", "when"),
    [
        pytest.param(2, "killed", marks=pytest.mark.slow),
        pytest.param(4, "killed in the exchange", marks=pytest.mark.slow),
        (4, "killed in the backward pass"),
        (4, "asleep"),
    ],
)
def test_a_rank_that_is_gone_is_an_error_on_all_within_the_deadline(ranks, when):
    lost = [] if when == "asleep" else [1]
    found = run_ranks(ranks, dying, when, lost=lost)
    for rank, result in enumerate(found):
        if rank in lost:
            continue
        words, seconds = result
        assert "in halo" in words, (rank, words)
        assert f"deadline of {DEADLINE} s" in words
        assert seconds < 2 * DEADLINE, (rank, seconds)
