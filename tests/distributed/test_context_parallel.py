"""Attention over 1, 2 and 4 ranks, real processes, against one dense softmax in float64; what they sent and counted."""

from __future__ import annotations

import random
import weakref
from dataclasses import replace
from functools import cache

import pytest
import torch
from context_parallel_cases import NAMES, Case, at_depth, branches_of, held, joined, layout_of, run, tensors, whole
from kernel_ranks import run_ranks
from torch import Tensor

from furlong.kernels.branches import stratified_anchors
from furlong.kernels.context_parallel import cp_branch_attention, ring_attention
from furlong.kernels.dense import dense_branch_attention
from furlong.kernels.layout import NOBODY
from furlong.kernels.ring import HEADER_BYTES, ContextParallelError, Ring
from furlong.kernels.shared_trunk import SharedTrunk

RANKS = (1, 2, 4)
LONG = (24, 40, 8)
"""Whole chunks for any of these numbers of ranks."""
RAGGED = (13, 1, 6, 3)
LIMITS = {torch.float64: 1e-12, torch.float32: 2e-6}
"""Largest difference, over the largest number of the truth (or 1)."""
BF16_LIMITS = {"out": 2.0**-9, "else": 2.0**-7}
"""Norm of the difference over that of the truth. An output is rounded once, by half of 2^-8 at most. A gradient also has
the output's rounding in it, by way of grad . out, and one of its own."""


def drawn(seed: int) -> Case:
    draw = random.Random(seed)
    lengths = tuple(draw.choice([0, 1, 2, 5, 7, 8, 16, 19]) for _ in range(draw.randint(1, 4)))
    kind = draw.choice(["ttt", "unrolled", "block", "causal block"])
    anchors = tuple(draw.sample(range(sum(lengths)), min(6, sum(lengths)))) if "block" in kind else ()
    kv_heads = draw.choice([1, 2, 4])
    return Case(
        lengths, kind, draw.randint(1 if anchors else 0, 8) if "block" not in kind else draw.randint(1, 5), anchors,
        draw.choice(["zigzag", "contiguous", "line"]), 4, kv_heads, draw.choice([4, 32]),
        strategy=draw.choice(["ring", "gather"]), backend=draw.choice(["reference", "cpu"]),
    )  # fmt: skip


def stratified(lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The same for 4 ranks and for fewer, which have longer chunks: packed rows of two anchors in each chunk of 4 ranks."""
    layout = layout_of(Case(lengths), 4)
    rows = [stratified_anchors(layout, rank, 2, torch.Generator().manual_seed(1)) for rank in range(4)]
    return tuple(int(layout.source[rank, row]) for rank in range(4) for row in rows[rank])


BLOCK = {"kind": "block", "size": 4}
CASES = {
    "depth 4": Case(LONG, size=4),
    "causal": Case(RAGGED, "causal"),
    "depth 0 of branch attention": Case(RAGGED, size=0),
    "ragged": Case(RAGGED, size=3, scale=0.37),
    "one token": Case((1,), size=3),
    "no documents": Case(()),
    "empty documents": Case((0, 5, 0, 2)),
    "contiguous": Case(RAGGED, layout="contiguous"),
    "contiguous with ranks of padding": Case((1,), layout="contiguous"),
    "contiguous block": Case(RAGGED, anchors=(0, 12, 22, 13), layout="contiguous", **BLOCK),
    "line": Case(RAGGED, layout="line"),
    "line causal": Case(RAGGED, "causal", layout="line"),
    "all depths": Case(RAGGED, "unrolled", size=3),
    "stratified blocks": Case(LONG, anchors=stratified(LONG), **BLOCK),
    "blocks on edges of chunks": Case((16, 8), anchors=(0, 1, 3, 4, 7, 8, 11, 12, 15, 16, 23), **BLOCK),
    "causal blocks, all on one rank": Case((16,), "causal block", 3, anchors=(5, 0, 4, 5)),
    "no anchors": Case(RAGGED, anchors=(), **BLOCK),
    "one key head": Case(RAGGED, kv_heads=1),
    "as many key heads": Case(RAGGED, kv_heads=4, size=1),
    "gathered": Case(LONG, size=4, strategy="gather"),
    "gathered blocks": Case(LONG, anchors=stratified(LONG), strategy="gather", **BLOCK),
    "by heads": Case(RAGGED, size=3, kv_heads=4, strategy="ulysses"),
    "by heads, blocks": Case((16, 8), anchors=(0, 23, 9, 3), kv_heads=4, heads=8, strategy="ulysses", **BLOCK),
    "by heads, line": Case(RAGGED, kv_heads=4, layout="line", strategy="ulysses"),
    "by heads, nothing": Case((), kv_heads=4, strategy="ulysses"),
    "budget that fits": Case(LONG, size=4, strategy=2 * 72 * 2 * 8 * 8),
    "budget that does not": Case(LONG, size=4, strategy=2 * 72 * 2 * 8 * 8 - 1),
    "cpu": Case(RAGGED, size=3, backend="cpu"),
    "cpu blocks": Case(LONG, anchors=stratified(LONG), backend="cpu", **BLOCK),
    "float32": Case(LONG, size=4, dtype=torch.float32, backend="cpu"),
    "float32 reference": Case(RAGGED, size=4, dtype=torch.float32),
    "float32 gathered": Case(LONG, size=4, dtype=torch.float32, backend="cpu", strategy="gather"),
    "float32 by heads": Case(LONG, size=4, kv_heads=4, dtype=torch.float32, backend="cpu", strategy="ulysses"),
    "bf16": Case(LONG, size=4, dtype=torch.bfloat16, backend="cpu"),
    "bf16 blocks": Case(LONG, anchors=stratified(LONG), dtype=torch.bfloat16, backend="cpu", **BLOCK),
    "passes": Case(LONG, passes=3, size=3),
    "passes, shared": Case(LONG, passes=3, size=3, shared=True),
    "passes, gathered": Case(LONG, passes=3, size=3, strategy="gather"),
    "passes, shared and gathered": Case(LONG, passes=3, size=3, strategy="gather", shared=True),
    "passes, shared, ragged": Case(RAGGED, passes=2, size=2, shared=True, backend="cpu"),
    "passes, shared, recomputed": Case(LONG, passes=3, size=3, shared=True, recomputed=True),
    "entry by entry": Case(LONG, size=4, apart=True),
    "recomputed": Case(LONG, size=4, recomputed=True),
    **{f"drawn {seed}": drawn(seed) for seed in range(6)},
}
MUTANTS = (
    "trunk-only lse in the backward",
    "key gradient not returned",
    "halves swapped",
    "branch off by one",
    "cutoff off by one",
)
MUTATED = {
    f"{mutant} in {name}": replace(CASES[name], mutant=mutant)
    for mutant in MUTANTS
    for name in ("depth 4", "stratified blocks")
}


@pytest.fixture(scope="module")
def found() -> list[dict]:
    """By rank: for each case, then each of the cases again, then each mutant."""
    cases = [(case, RANKS) for case in CASES.values()]
    again = [(CASES["depth 4"], RANKS), (CASES["stratified blocks"], RANKS)]
    return run_ranks(4, run, cases + again + [(case, (2, 4)) for case in MUTATED.values()], deadline=300)


def results(found: list, at: int, ranks: int) -> tuple[list[dict], list[dict]]:
    return tuple(zip(*(found[rank][at][ranks] for rank in range(ranks)), strict=True))


@cache
def truth(case: Case) -> dict[str, Tensor]:
    """Output and gradients of the whole batch, from the case's inputs as they are after rounding to its dtype."""
    packed = {name: x.double() for name, x in tensors(case).items()}
    grad = packed.pop("grad")
    x = {name: value.requires_grad_() for name, value in packed.items()}
    rows = whole(case)
    if case.passes is None:
        branches = branches_of(case, rows, torch.tensor(case.anchors, dtype=torch.long))
        out = dense_branch_attention(*x.values(), rows=rows, branches=branches, scale=case.scale)
    else:
        out = x["q"]
        for depth in range(case.passes + 1):
            entries = [x[name][:, :depth] for name in ("k_branch", "v_branch")]
            out = x["q"] + dense_branch_attention(
                out, x["k_main"], x["v_main"], *entries, rows=rows, branches=at_depth(rows, depth), scale=case.scale
            )
    out.backward(grad)
    return {"out": out.detach()} | {
        name: torch.zeros_like(value) if value.grad is None else value.grad for name, value in x.items()
    }


def gaps(case: Case, ranks: int, parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Of the output and the five gradients; infinite where a number is not finite or a shape or dtype is another's."""
    got, want = joined(case, layout_of(case, ranks), parts), truth(replace(case, mutant=""))
    assert set(got) == set(want) == set(NAMES)
    return {name: gap(got[name], want[name], case.dtype) for name in NAMES}


def gap(got: Tensor, want: Tensor, dtype: torch.dtype) -> float:
    if got.shape != want.shape or got.dtype != dtype or not got.isfinite().all():
        return float("inf")
    if not want.numel():
        return 0.0
    difference = got.double() - want
    if dtype == torch.bfloat16:
        return float(difference.norm() / want.norm())
    return float(difference.abs().max() / want.abs().max().clamp(min=1))


@pytest.mark.parametrize("ranks", RANKS)
def test_equals_dense_attention(found, ranks):
    over = {}
    for at, (name, case) in enumerate(CASES.items()):
        for what, value in gaps(case, ranks, results(found, at, ranks)[0]).items():
            bf16 = BF16_LIMITS["out" if what == "out" else "else"]
            if not value <= LIMITS.get(case.dtype, bf16):
                over[name, what] = value
    assert not over


@pytest.mark.slow
def test_many_drawn_cases_equal_dense_attention():
    cases = {seed: drawn(seed) for seed in range(100, 140)}
    found = run_ranks(4, run, [(case, RANKS) for case in cases.values()], deadline=300)
    worst = {
        (seed, ranks): max(gaps(case, ranks, results(found, at, ranks)[0]).values())
        for at, (seed, case) in enumerate(cases.items())
        for ranks in RANKS
    }
    assert not {key: value for key, value in worst.items() if not value <= 1e-12}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_mutant_is_found(found, ranks):
    start = len(CASES) + 2
    missed = []
    for at, (name, case) in enumerate(MUTATED.items(), start):
        worst = max(gaps(case, ranks, results(found, at, ranks)[0]).values())
        if not worst > 1e-3:
            missed.append((name, worst))
    assert not missed


def same_bits(a: list[dict], b: list[dict]) -> bool:
    return all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in NAMES)


@pytest.mark.parametrize("ranks", RANKS)
def test_repeated_or_gathered_is_bitwise_the_same(found, ranks):
    names = list(CASES)
    here = {name: results(found, at, ranks)[0] for at, name in enumerate(names)}
    assert same_bits(here["depth 4"], results(found, len(CASES), ranks)[0])
    assert same_bits(here["stratified blocks"], results(found, len(CASES) + 1, ranks)[0])
    for ring, other in (
        ("depth 4", "gathered"),
        ("depth 4", "budget that fits"),
        ("depth 4", "budget that does not"),
        ("depth 4", "entry by entry"),
        ("depth 4", "recomputed"),
        ("passes, shared", "passes, shared, recomputed"),
        ("stratified blocks", "gathered blocks"),
        ("float32", "float32 gathered"),
        ("passes", "passes, gathered"),
        ("passes, shared", "passes, shared and gathered"),
    ):
        assert same_bits(here[ring], here[other]), (ring, other)


def test_queries_without_a_trunk_do_not_depend_on_the_number_of_ranks(found):
    """Bitwise: their branch is all they see. Others depend on it by the order in which the trunk's parts are merged."""
    for name in ("blocks on edges of chunks", "cpu blocks"):
        case, at = CASES[name], list(CASES).index(name)
        whole_batch = [joined(case, layout_of(case, ranks), results(found, at, ranks)[0]) for ranks in RANKS]
        rows = whole(case).position[torch.tensor(case.anchors)] == 0
        assert rows.sum() >= 1
        assert not rows.all()
        for other in whole_batch[1:]:
            for what in ("out", "q", "k_branch", "v_branch"):
                assert torch.equal(whole_batch[0][what][rows], other[what][rows])


def pairs_of(case: Case, ranks: int, rank: int) -> dict[str, int]:
    """Visible pairs of a rank's queries by the definition, one query at a time."""
    layout = layout_of(case, ranks)
    rows = layout.rows(rank)
    branches = branches_of(case, rows, held(case, layout, rank)[1])
    document, cutoff = branches.main_view()
    trunk = sum(min(int(end), case.lengths[int(of)]) for of, end in zip(document, cutoff, strict=True) if of != NOBODY)
    return {"trunk": trunk, "branch": int((branches.document != NOBODY).sum()) * int(branches.sees.sum())}


@pytest.mark.parametrize("ranks", RANKS)
def test_pairs_and_flops_are_those_of_the_definition(found, ranks):
    checked = 0
    for at, case in enumerate(CASES.values()):
        if case.passes is not None or case.recomputed:
            continue
        for rank, ledger in enumerate(results(found, at, ranks)[1]):
            wanted = pairs_of(case, ranks, rank)
            if case.strategy == "ulysses":
                # All queries, in a part of the heads.
                wanted["trunk"] = sum(pairs_of(case, ranks, other)["trunk"] for other in range(ranks))
            assert ledger["pairs"] == wanted
            assert all(ledger["computed"][part] >= wanted[part] for part in wanted)
            heads = {"trunk": case.heads // (ranks if case.strategy == "ulysses" else 1), "branch": case.heads}
            flops = {part: 2 * case.head_dim * heads[part] * pairs for part, pairs in wanted.items()}
            assert ledger["flops"] == {"forward": 2 * sum(flops.values()), "backward": 5 * sum(flops.values())}
            checked += sum(wanted.values()) > 0
    assert checked > 30


@pytest.mark.parametrize("ranks", RANKS)
def test_work_is_balanced(found, ranks):
    """Exactly, for whole chunks: 2 * ranks * c^2 + c pairs a rank for each document of chunks of c."""
    ledgers = results(found, list(CASES).index("depth 4"), ranks)[1]
    chunks = [length // (2 * ranks) for length in LONG]
    wanted = {"trunk": sum(2 * ranks * c * c + c for c in chunks), "branch": 4 * sum(LONG) // ranks}
    assert [ledger["pairs"] for ledger in ledgers] == [wanted] * ranks
    blocks = [x["pairs"]["trunk"] for x in results(found, list(CASES).index("stratified blocks"), ranks)[1]]
    assert ranks < 4 or max(blocks) <= 1.05 * sum(blocks) / ranks
    uneven = [x["pairs"]["trunk"] for x in results(found, list(CASES).index("contiguous"), ranks)[1]]
    assert ranks == 1 or max(uneven) > 1.2 * sum(uneven) / ranks


def sent(case: Case, ranks: int, rank: int) -> dict[str, int]:
    """Bytes by the formulas: research notes 2.10, one hop of gradients less, for a rank's own part stays at home."""
    layout = layout_of(case, ranks)
    block = 2 * layout.source.shape[1] * case.kv_heads * case.head_dim
    element, wide = case.dtype.itemsize, max(4, case.dtype.itemsize)
    passes = 1 if case.passes is None else case.passes + 1
    calls = (3 if case.recomputed else 2) * passes
    once, home = calls, passes
    if case.shared:
        calls, home = calls + 1, 1
        once = 1 if case.strategy == "gather" else once
    others = ranks - 1
    found = {"header": calls * others * HEADER_BYTES}
    if case.strategy != "ulysses":
        return found | {"kv": once * others * block * element, "gradient": home * others * block * wide}
    counts = [len(held(case, layout, r)[0]) * (case.size if "block" in case.kind else 1) for r in range(ranks)]
    heads, width = case.heads // ranks, case.head_dim
    out = (
        others * counts[rank] * heads * (width * element + 2 * width * element + wide)
        + others * block // ranks * element
    )
    back = (sum(counts) - counts[rank]) * heads * (2 * width + 1) * wide + others * block // ranks * wide
    return found | {"coordinates": others * counts[rank] * 2 * 8, "heads": out + back}


@pytest.mark.parametrize("ranks", RANKS)
def test_bytes_are_those_of_the_formula_and_branches_never_travel(found, ranks):
    for at, (name, case) in enumerate(CASES.items()):
        for rank, ledger in enumerate(results(found, at, ranks)[1]):
            got = {kind: count for kind, count in ledger["sent"].items() if count}
            assert got == {kind: count for kind, count in sent(case, ranks, rank).items() if count}, (name, rank)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_shared_trunk_sends_its_gradients_once(found, ranks):
    counted = {}
    for name in ("passes", "passes, shared", "passes, gathered", "passes, shared and gathered"):
        counted[name] = results(found, list(CASES).index(name), ranks)[1][0]["sent"]
    assert counted["passes"]["gradient"] == 4 * counted["passes, shared"]["gradient"]
    assert counted["passes"]["kv"] == counted["passes, shared"]["kv"]
    assert counted["passes, gathered"]["kv"] == 8 * counted["passes, shared and gathered"]["kv"]


def test_the_ledger_says_what_was_decided(found):
    for name, strategy in (("budget that fits", "gather"), ("budget that does not", "ring"), ("by heads", "ulysses")):
        case = CASES[name]
        for ledger in results(found, list(CASES).index(name), 4)[1]:
            ((decision, times),) = ledger["decisions"].items()
            assert (decision.asked, decision.strategy, decision.backend, times) == (
                case.strategy,
                strategy,
                "reference",
                1,
            )
            assert (
                decision.gathered_bytes
                == 2 * sum(x.numel() for x in [layout_of(case, 4).source]) * case.kv_heads * 8 * 8
            )


@pytest.mark.parametrize("strategy", ["ring", "gather"])
def test_a_shared_trunk_lives_no_longer_than_its_batch(strategy):
    ring, layout = Ring(None, 1), layout_of(Case((5,)), 1)
    k, v = (torch.ones(6, 2, 8, requires_grad=True) for _ in range(2))
    trunk = SharedTrunk(k, v, layout=layout, ring=ring, strategy=strategy, backend="cpu")
    out = trunk.attend(k[:, None], (), (), branches=at_depth(layout.rows(0), 0))
    out.sum().backward()
    watched = [weakref.ref(x) for x in (trunk.k_main, trunk._sums)]
    del trunk, out
    assert [watch() for watch in watched] == [None] * 2


def test_one_rank_alone_refuses_what_does_not_fit():
    ring, layout = Ring(None, 1), layout_of(Case((5,)), 1)
    q = torch.zeros(6, 2, 8)
    settings = {"layout": layout, "ring": ring, "backend": "cpu"}
    assert ring_attention(q, q, q, **settings).shape == q.shape
    for wrong in (
        [q[:5], q, q],
        [q, q[:5], q],
        [q, q, q.double()],
        [q, q[:, :0], q[:, :0]],
        [q[:, :, :4], q, q],
        [q[0], q, q],
    ):
        with pytest.raises(ContextParallelError):
            ring_attention(*wrong, **settings)
    branches = at_depth(layout.rows(0), 1)
    for strategy in ("fastest", None, 1.5):
        with pytest.raises(ContextParallelError, match="is not known; set"):
            cp_branch_attention(
                q[:, None], q, q, q[:, None], q[:, None], branches=branches, strategy=strategy, **settings
            )
    with pytest.raises(ContextParallelError, match="2 ranks on a ring of 1"):
        ring_attention(q, q, q, layout=layout_of(Case((5,)), 2), ring=ring, backend="cpu")
