"""Plans of a transfer: everything that is needed arrives, once, in bounded runs, from sources loaded alike."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops.weights import plan
from furlong.ops.weights.costs import choose
from furlong.ops.weights.layout import (
    LayoutError,
    Offer,
    Piece,
    TensorSpec,
    check_tiling,
    cut,
    intersect,
    nbytes,
    offsets,
    shared,
    slab_shape,
    whole,
)

LIMIT, PARCEL = 256, 64
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "o_proj", "norm", "embed")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BUCKET_BYTES", LIMIT)
    monkeypatch.setattr(plan, "PARCEL_BYTES", PARCEL)


def spec(name: str, *shape: int, dtype: str = "bfloat16") -> TensorSpec:
    return TensorSpec(name, dtype, shape, "0" * 64)


@st.composite
def models(draw: st.DrawFn) -> dict[str, TensorSpec]:
    found = {}
    for number in range(draw(st.integers(1, 10))):
        name = f"layers.{number // 5}.{draw(st.sampled_from(PROJECTIONS))}.weight"
        # Rows stay below the limit, so that every slab of either dimension can be cut small enough.
        shape = draw(st.lists(st.integers(0, 12), min_size=0, max_size=2))
        found[name] = spec(name, *shape, dtype=draw(st.sampled_from(["bfloat16", "float32"])))
    return found


def splits(draw: st.DrawFn, one: TensorSpec, dim: int, parts: int) -> list[Piece]:
    """The tensor in `parts` parts of any sizes, empty ones too."""
    size = one.shape[dim] if one.shape else 1
    edges = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return [Piece(one.name, dim, lo, hi) for lo, hi in itertools.pairwise([0, *edges, size])]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[dict[str, TensorSpec], list[list[Piece]], list[list[dict[str, Piece]]]]:
    """A model; sources under tensor parallelism, replicated several times; engines of one to three ranks."""
    specs = draw(models())
    tensor_parallel, replicas = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    sources: list[list[Piece]] = [[] for _ in range(tensor_parallel * replicas)]
    engines = [[{} for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 2)))]
    for name, one in specs.items():
        dim = draw(st.integers(0, max(0, len(one.shape) - 1)))
        alike = not one.shape or draw(st.booleans())
        parts = [whole(one)] * tensor_parallel if alike else splits(draw, one, dim, tensor_parallel)
        for source, held in enumerate(sources):
            held.append(parts[source % tensor_parallel])
        for ranks in engines:
            cuts = (
                [whole(one)] * len(ranks)
                if not one.shape or draw(st.booleans())
                else splits(draw, one, dim, len(ranks))
            )
            for rank, piece in zip(ranks, cuts, strict=True):
                if piece != whole(one) or draw(st.booleans()):
                    rank[name] = piece
    return specs, sources, engines


def holds(pieces: list[Piece], part: Piece, one: TensorSpec) -> bool:
    return any(
        piece.name == part.name and (nbytes(part, one) == 0 or intersect(piece, part, one) == part or piece == part)
        for piece in pieces
    )


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_broadcast_carries_every_tensor_once_in_bounded_buckets(world: tuple) -> None:
    specs, sources, _ = world
    buckets = plan.broadcast_plan(sources, specs, specs)
    assert buckets == plan.broadcast_plan(sources, dict(reversed(specs.items())), list(reversed(list(specs))))
    arriving = defaultdict(list)
    for bucket in buckets:
        assert offsets(bucket.pieces, specs)[1] <= LIMIT
        for piece in bucket.pieces:
            assert holds(sources[bucket.source], piece, specs[piece.name])
            arriving[piece.name].append(piece)
    for name, one in specs.items():
        if one.nbytes:
            check_tiling(arriving[name], whole(one), one)
        else:
            assert len(arriving[name]) == 1
    sent = sum(nbytes(piece, specs[piece.name]) for bucket in buckets for piece in bucket.pieces)
    assert sent == sum(one.nbytes for one in specs.values())


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_p2p_gives_each_rank_its_slabs_and_no_byte_more(world: tuple) -> None:
    specs, sources, engines = world
    routes = plan.p2p_plan(sources, engines, specs, specs)
    assert len({(route.source, route.engine, route.rank) for route in routes}) == len(routes)
    for engine, ranks in enumerate(engines):
        for rank, layout in enumerate(ranks):
            mine = [route for route in routes if (route.engine, route.rank) == (engine, rank)]
            arriving = defaultdict(list)
            for route in mine:
                for piece in route.pieces:
                    assert holds(sources[route.source], piece, specs[piece.name])
                    arriving[piece.name].append(piece)
            assert set(arriving) == set(specs)
            for name, one in specs.items():
                target = layout.get(name, whole(one))
                if nbytes(target, one):
                    check_tiling(arriving[name], target, one)
                assert sum(nbytes(piece, one) for piece in arriving[name]) == nbytes(target, one)
    for route in routes:
        cut_up = [piece for run in plan.parcels(route.pieces, specs) for piece in run]
        assert sum(nbytes(p, specs[p.name]) for p in cut_up) == sum(nbytes(p, specs[p.name]) for p in route.pieces)
        # At most 12 elements of 4 bytes to an index.
        assert all(offsets(run, specs)[1] <= PARCEL for run in plan.parcels(route.pieces, specs))


@settings(max_examples=100, deadline=None)
@given(models(), st.integers(1, 5), st.integers(1, 3))
def test_sources_that_hold_everything_are_loaded_alike(specs: dict, sources: int, engines: int) -> None:
    """Within one unit (at most a bucket) of the mean, which no plan can beat."""
    holdings = [[whole(one) for one in specs.values()]] * sources
    broadcast = Counter(dict.fromkeys(range(sources), 0))
    for bucket in plan.broadcast_plan(holdings, specs, specs):
        broadcast[bucket.source] += sum(nbytes(piece, specs[piece.name]) for piece in bucket.pieces)
    p2p = Counter(dict.fromkeys(range(sources), 0))
    for route in plan.p2p_plan(holdings, [[{}]] * engines, specs, specs):
        p2p[route.source] += sum(nbytes(piece, specs[piece.name]) for piece in route.pieces)
    total = sum(one.nbytes for one in specs.values())
    for load, moved in ((broadcast, total), (p2p, total * engines)):
        assert sum(load.values()) == moved
        assert max(load.values()) <= moved / sources + min(LIMIT, total)


def test_fused_parameters_share_a_bucket_where_they_fit() -> None:
    specs = {n: spec(n, 4, 4) for n in (f"layers.{i}.{p}.weight" for i in range(20) for p in PROJECTIONS)}
    holdings = [[whole(one) for one in specs.values()] for _ in range(3)]
    where = {p.name: n for n, bucket in enumerate(plan.broadcast_plan(holdings, specs, specs)) for p in bucket.pieces}
    for layer, (first, *others) in itertools.product(
        range(20), (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    ):
        for other in others:
            assert where[f"layers.{layer}.{first}.weight"] == where[f"layers.{layer}.{other}.weight"]


def test_only_the_names_asked_for_travel() -> None:
    specs = {name: spec(name, 4) for name in "abc"}
    holdings = [[whole(one) for one in specs.values()]]
    assert [p.name for b in plan.broadcast_plan(holdings, specs, ["b"]) for p in b.pieces] == ["b"]
    assert [p.name for r in plan.p2p_plan(holdings, [[{}]], specs, ["b"]) for p in r.pieces] == ["b"]
    assert plan.broadcast_plan(holdings, specs, []) == plan.p2p_plan(holdings, [[{}]], specs, []) == ()


@pytest.mark.parametrize("held", [[], [Piece("a", 0, 0, 3)], [Piece("a", 0, 0, 1), Piece("a", 0, 2, 4)]])
def test_a_tensor_that_sources_do_not_hold_completely_is_named(held: list[Piece]) -> None:
    specs = {"a": spec("a", 4, 2)}
    with pytest.raises(LayoutError, match=r"^a: .*(missing|no source)"):
        plan.broadcast_plan([held], specs, specs)


def test_what_cannot_be_handed_over_or_cut_is_refused_by_name() -> None:
    specs = {"a": spec("a", 4, 4), "wide": spec("wide", 2, 1000)}
    with pytest.raises(LayoutError, match=r"a: one side splits dimension \d and the other"):
        plan.p2p_plan([[Piece("a", 0, 0, 2)], [Piece("a", 0, 2, 4)]], [[{"a": Piece("a", 1, 0, 2)}]], specs, ["a"])
    with pytest.raises(LayoutError, match="wide: one index of dimension 0 has 2000 bytes"):
        plan.broadcast_plan([[Piece("wide", 0, 0, 1)], [Piece("wide", 0, 1, 2)]], specs, ["wide"])
    # Held whole, the same tensor is cut along its other dimension.
    assert len(plan.broadcast_plan([[whole(specs["wide"])]], specs, ["wide"])) == math.ceil(4000 / LIMIT)


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([Piece("a", 0, 0, 2), Piece("a", 0, 3, 4)], "2 to 3 is missing"),
        ([Piece("a", 0, 0, 2), Piece("a", 0, 1, 4)], "1 to 2 is there twice"),
        ([Piece("a", 0, 0, 4), Piece("a", 0, 0, 4)], "twice"),
        ([Piece("a", 0, 0, 3)], "3 to 4 is missing"),
        ([Piece("a", 0, 0, 5)], "not inside"),
        ([Piece("a", 0, 0, 2), Piece("a", 1, 2, 4)], "use one"),
        ([Piece("a", 2, 0, 2)], "names dimension 2"),
        ([], "missing"),
    ],
)
def test_tilings_that_are_not_exact_name_the_tensor_and_the_place(pieces: list[Piece], fault: str) -> None:
    with pytest.raises(LayoutError, match=f"^a: .*{fault}"):
        check_tiling(pieces, Piece("a", 0, 0, 4), spec("a", 4, 4))


def test_no_rank_waits_for_one_that_waits_for_it() -> None:
    """In the common order every party works through its routes; two sources never start with the same rank."""
    specs = {"a": spec("a", 12)}
    holdings = [[Piece("a", 0, 3 * n, 3 * n + 3)] for n in range(4)]
    offer = Offer("s", "", 1, 0, 1, (), (2, 2), 4, routes=plan.p2p_plan(holdings, [[{}, {}], [{}, {}]], specs, specs))
    order = plan.in_turn(offer.routes, offer.engine_ranks)
    assert sorted(order, key=repr) == sorted(offer.routes, key=repr)
    assert len({(r.engine, r.rank) for r in order[:4]}) == len({r.source for r in order[:4]}) == 4


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_shared_views_are_the_same_elements_of_the_tensor(data: st.DataObject) -> None:
    one = spec("a", 5, 7, dtype="int64")
    full = torch.arange(35).reshape(5, 7)
    pieces = []
    for _ in range(2):
        dim = data.draw(st.integers(0, 1))
        lo, hi = sorted(data.draw(st.tuples(*[st.integers(0, one.shape[dim])] * 2)))
        pieces.append(Piece("a", dim, lo, hi))
    slabs = [cut(full, piece).clone() for piece in pieces]
    assert all(tuple(slab.shape) == slab_shape(piece, one) for slab, piece in zip(slabs, pieces, strict=True))
    here, there = shared(pieces[0], slabs[0], pieces[1], slabs[1])
    assert torch.equal(here, there)
    assert sorted(here.flatten().tolist()) == sorted(
        set(slabs[0].flatten().tolist()) & set(slabs[1].flatten().tolist())
    )


def measured(version: int, transport: str, wire_bytes: int, stage_seconds: float) -> dict:
    return {"version": version, "transport": transport, "wire_bytes": wire_bytes, "stage_seconds": stage_seconds}


def test_auto_tries_every_transport_then_takes_the_soonest() -> None:
    sizes = {"disk_delta": 10, "broadcast": 1000, "p2p": 2000}
    history = []
    for version, first in enumerate(("broadcast", "p2p", "disk_delta")):
        assert choose(history, sizes) == first
        history.append(measured(version, first, 100, 1.0))
    assert choose(history, sizes) == "disk_delta"
    assert choose(history, sizes | {"disk_delta": 1001}) == "broadcast"
    assert choose(history, {"p2p": 5, "broadcast": 5}) == "broadcast"
    assert choose([*history, measured(9, "none", 0, 0.0), measured(8, "p2p", 0, 9.0)], sizes) == "disk_delta"


def test_auto_forgets_old_updates_and_is_not_turned_by_a_slow_one() -> None:
    sizes = {"broadcast": 100, "disk_delta": 100}
    slow_once = [measured(n, "disk_delta", 100, 60.0 if n == 6 else 1.0) for n in range(3, 8)]
    history = (
        [measured(n, "disk_delta", 100, 99.0) for n in range(3)] + slow_once + [measured(8, "broadcast", 100, 2.0)]
    )
    assert choose(history, sizes) == choose(history[::-1], sizes) == "disk_delta"


@pytest.mark.parametrize("sizes", [{}, {"pigeon": 3}])
def test_auto_refuses_transports_that_it_does_not_know(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot be compared"):
        choose([], sizes)
