"""Expert ids packed and unpacked: exact, and whatever is damaged or contradicts itself is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops.policy.routing import RoutingError, as_row, decode, encode, from_row, join
from furlong.ops.protocols import Routing
from furlong.ops.records import TABLES

LAYERS = (0, 2, 5)


def _ids(seed: int, rows: int, layers: int, top_k: int, experts: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(experts), (rows, layers, 1)), axis=-1)[..., :top_k]


@st.composite
def _routings(draw: st.DrawFn) -> tuple[int, np.ndarray, tuple[int, ...], int]:
    layers = tuple(sorted(draw(st.sets(st.integers(0, 90), min_size=1, max_size=5))))
    experts = draw(st.one_of(st.integers(1, 12), st.sampled_from([255, 256, 257, 700])))
    top_k = draw(st.integers(1, min(experts, 8)))
    rows = _ids(draw(st.integers(0, 99)), draw(st.integers(0, 9)), len(layers), top_k, experts)
    dtype = draw(st.sampled_from([np.int64, np.int32, np.uint16]))
    return draw(st.integers(0, 10**6)), rows.astype(dtype), layers, experts


@given(_routings())
@settings(max_examples=150, deadline=None)
def test_what_is_packed_comes_back(case: tuple[int, np.ndarray, tuple[int, ...], int]) -> None:
    first, rows, layers, experts = case
    routing = encode(first, rows, layers, experts)
    back = decode(routing)
    assert np.array_equal(back, rows)
    assert back.shape == rows.shape
    assert back.dtype == (np.uint8 if experts <= 256 else np.dtype("<u2"))
    assert (routing.first, routing.rows, routing.layers, routing.top_k) == (first, len(rows), layers, rows.shape[2])
    assert from_row(as_row(routing)) == routing


@given(_routings(), st.lists(st.integers(0, 9), max_size=4))
@settings(max_examples=100, deadline=None)
def test_parts_join_to_the_whole(case: tuple[int, np.ndarray, tuple[int, ...], int], cuts: list[int]) -> None:
    first, rows, layers, experts = case
    bounds = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    spans = list(pairwise(bounds))
    parts = [encode(first + a, rows[a:b], layers, experts) for a, b in spans]
    assert join(parts) == encode(first, rows, layers, experts)


@pytest.mark.parametrize("gap", [-1, 1])
def test_a_gap_or_an_overlap_is_refused(gap: int) -> None:
    rows = _ids(0, 4, 3, 2, 8)
    parts = [encode(3, rows, LAYERS, 8), encode(7 + gap, rows, LAYERS, 8)]
    with pytest.raises(RoutingError, match=f"begins at {7 + gap}"):
        join(parts)
    with pytest.raises(RoutingError, match="begins at 3"):
        join([encode(7, rows, LAYERS, 8), parts[0]])


def test_parts_of_different_models_are_refused() -> None:
    one = encode(0, _ids(0, 4, 3, 2, 8), LAYERS, 8)
    others = [
        encode(4, _ids(0, 4, 3, 2, 8), (0, 2, 4), 8),
        encode(4, _ids(0, 4, 3, 3, 8), LAYERS, 8),
        encode(4, _ids(0, 4, 3, 2, 9), LAYERS, 9),
    ]
    for other in others:
        with pytest.raises(RoutingError, match="cannot be joined"):
            join([one, other])
    with pytest.raises(RoutingError, match="at least one"):
        join([])


@pytest.mark.parametrize(
    ("rows", "layers", "experts", "message"),
    [
        (np.zeros((2, 3), int), LAYERS, 8, "rows x layers x top_k"),
        (np.zeros((2, 3, 1)), LAYERS, 8, "integers"),
        (np.zeros((2, 2, 1), int), LAYERS, 8, "name each one"),
        (np.full((2, 3, 1), 8), LAYERS, 8, "expert id 8 of position 5, layer 0 is outside 0 to 7"),
        (np.full((2, 3, 1), -1), LAYERS, 8, "outside"),
        (np.full((2, 3, 1), 256), LAYERS, 256, "outside"),
        (np.zeros((2, 3, 2), int), LAYERS, 8, "twice"),
        (np.zeros((2, 3, 0), int), LAYERS, 8, "top_k=0"),
        (np.zeros((2, 3, 9), int), LAYERS, 8, "top_k=9"),
        (np.zeros((2, 3, 1), int), LAYERS, 2**16 + 1, "at most 65536"),
        (np.zeros((2, 3, 1), int), (0, 2, 2), 8, "ascending"),
        (np.zeros((2, 3, 1), int), (-1, 2, 3), 8, "ascending"),
        (np.zeros((2, 0, 1), int), (), 8, "at least one"),
    ],
)
def test_ids_that_make_no_sense_are_refused(
    rows: np.ndarray, layers: tuple[int, ...], experts: int, message: str
) -> None:
    with pytest.raises(RoutingError, match=message):
        encode(5, rows, layers, experts)
    with pytest.raises(RoutingError, match="negative"):
        encode(-1, _ids(0, 1, 3, 1, 8), LAYERS, 8)


def _damaged() -> dict[str, Routing]:
    good = encode(0, _ids(1, 40, 3, 2, 8), LAYERS, 8)
    pack = zstandard.ZstdCompressor().compress
    return {
        "cut": replace(good, data=good.data[:-3]),
        "cut after the header": replace(good, data=good.data[:6]),
        "empty": replace(good, data=b""),
        "noise": replace(good, data=b"not zstd at all"),
        "tail": replace(good, data=good.data + b"x"),
        "short": replace(good, data=pack(bytes(40 * 3 * 2 - 1))),
        "long": replace(good, data=pack(bytes(2**27))),
        "fewer experts": replace(good, experts=7),
        "other rows": replace(good, rows=39),
        "an expert twice": replace(good, data=pack(bytes(40 * 3 * 2))),
    }


@pytest.mark.parametrize("damage", _damaged())
def test_damaged_data_are_refused(damage: str) -> None:
    with pytest.raises(RoutingError):
        decode(_damaged()[damage])


@pytest.mark.parametrize("table", ["trajectories", "fragments"])
def test_rows_fit_the_lake(table: str) -> None:
    routing = encode(3, _ids(2, 5, 3, 2, 300), LAYERS, 300)
    schema = pa.schema([TABLES[table].field("routing")])
    back = pa.Table.from_pylist([{"routing": as_row(routing)}], schema).to_pylist()[0]["routing"]
    assert from_row(back) == routing
    with pytest.raises(RoutingError, match="no top_k"):
        from_row(back | {"top_k": None})
