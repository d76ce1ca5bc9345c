"""Plans of the trunk: what tiles show is what queries see, and what they cost is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.kernels import branches, trunk
from furlong.kernels.layout import NOBODY, ContextLayout, Rows, contiguous_layout, zigzag_layout
from furlong.kernels.reference_backend import plan_mask
from furlong.kernels.trunk import Tile, TrunkPlan, plan_trunk


def cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packed(*lengths: int) -> Rows:
    return contiguous_layout(cu(*lengths), 1).rows(0)


def causal(rows: Rows, keys: Rows | None = None) -> TrunkPlan:
    return plan_trunk(rows.document, rows.position + 1, keys or rows)


def seen(document: torch.Tensor, cutoff: torch.Tensor, keys: Rows) -> torch.Tensor:
    same = (document[:, None] == keys.document) & (document != NOBODY)[:, None]
    return same & (keys.position < cutoff[:, None])


def shown(tiles: tuple[Tile, ...], plan: TrunkPlan) -> torch.Tensor:
    """How often each pair is shown."""
    count = torch.zeros(plan.queries, plan.keys, dtype=torch.long)
    for tile in tiles:
        one = TrunkPlan(plan.queries, plan.keys, plan.order, plan.key_order, (tile,))
        count += plan_mask(one, torch.device("cpu"))
    return count


def check(document: torch.Tensor, cutoff: torch.Tensor, keys: Rows) -> TrunkPlan:
    plan, want = plan_trunk(document, cutoff, keys), seen(document, cutoff, keys)
    assert torch.equal(shown(plan.tiles, plan), want.long())
    assert torch.equal(shown(plan.pieces, plan), want.long())
    assert plan.pairs == int(want.sum())
    assert plan.computed == sum(piece.area for piece in plan.pieces) >= plan.pairs
    for piece in plan.pieces:
        assert piece.area > 0
        assert max(piece.queries.stop - piece.queries.start, piece.keys.stop - piece.keys.start) <= trunk.SPAN
        if piece.ends is not None:
            assert piece.ends.min() >= 1
            assert (piece.ends.diff() >= 0).all()
    return plan


@st.composite
def coordinates(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, Rows]:
    lengths = draw(st.lists(st.integers(0, 60), max_size=4))
    shuffle = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    rows = packed(*lengths)
    padding = draw(st.integers(0, 3))
    keys = Rows(
        torch.cat([rows.document, torch.full((padding,), NOBODY)]),
        torch.cat([rows.position, torch.zeros(padding, dtype=torch.long)]),
    )
    if draw(st.booleans()):
        mixed = torch.randperm(len(keys.position), generator=shuffle)[draw(st.integers(0, 3)) :]
        keys = Rows(keys.document[mixed], keys.position[mixed])
    queries = draw(st.integers(0, 120))
    document = torch.randint(-1, max(len(lengths), 1), (queries,), generator=shuffle)
    cutoff = torch.randint(0, draw(st.sampled_from([2, 8, 70])), (queries,), generator=shuffle)
    if draw(st.booleans()):
        document = document.sort().values
    return document, cutoff, keys


@settings(max_examples=80, deadline=None)
@given(coordinates())
def test_any_coordinates(given_: tuple[torch.Tensor, torch.Tensor, Rows]):
    check(*given_)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=4), st.sampled_from([1, 2, 4]), st.booleans())
def test_any_rank_over_any_rank(lengths: list[int], ranks: int, zigzag: bool):
    layout: ContextLayout = (zigzag_layout if zigzag else contiguous_layout)(cu(*lengths), ranks)
    total = 0
    for rank in range(ranks):
        rows = layout.rows(rank)
        for source in range(ranks):
            plan = check(rows.document, rows.position + 1, layout.rows(source))
            assert plan.order is None
            assert plan.key_order is None
            total += plan.pairs
    assert total == sum(n * (n + 1) // 2 for n in lengths)


def test_documents_under_their_diagonal_are_one_tile_each():
    plan = causal(packed(100, 1, 7))
    assert [(tile.kind, tile.queries, tile.keys) for tile in plan.tiles] == [
        ("causal", slice(0, 100), slice(0, 100)),
        ("full", slice(100, 101), slice(100, 101)),
        ("causal", slice(101, 108), slice(101, 108)),
    ]


@pytest.mark.parametrize("rank", range(4))
def test_zigzag_meets_other_ranks_in_one_full_rectangle(rank: int):
    layout, chunk = zigzag_layout(cu(160), 4), 20
    pairs = 0
    for source in range(4):
        plan = causal(layout.rows(rank), layout.rows(source))
        pairs += plan.pairs
        (tile,) = plan.tiles
        if source < rank:
            assert (tile.kind, tile.queries, tile.keys) == ("full", slice(0, 2 * chunk), slice(0, chunk))
        elif source > rank:
            assert (tile.kind, tile.queries, tile.keys) == ("full", slice(chunk, 2 * chunk), slice(0, 2 * chunk))
        else:
            assert (tile.kind, tile.area) == ("causal", 4 * chunk**2)
    # Research section 2.7: every rank computes 2 P c^2 + c pairs.
    assert pairs == 2 * 4 * chunk**2 + chunk


def test_a_suffix_of_queries_sees_what_came_before_in_full():
    rows = packed(100)
    plan = check(rows.document[60:], rows.position[60:] + 1, rows)
    assert [tile.kind for tile in plan.tiles] == ["full", "causal"]


@pytest.mark.parametrize("length", [640, 1000, 2048, 8192, 65536])
def test_what_is_computed_is_within_five_percent(length: int):
    plan = causal(packed(length))
    assert plan.pairs == length * (length + 1) // 2
    assert plan.computed <= 1.05 * plan.pairs


@pytest.mark.parametrize("size", [1, 7, 16])
@pytest.mark.parametrize("spacing", [4, 32, 100])
def test_blocks_compute_within_five_percent(size: int, spacing: int):
    rows = packed(8192)
    anchors = torch.randperm(8192, generator=torch.Generator().manual_seed(size))[: 8192 // spacing]
    plan = plan_trunk(*branches.block_draft(rows, anchors, size, True).main_view(), rows)
    assert plan.order is not None
    assert plan.pairs == size * int(anchors.sum())
    assert plan.computed <= 1.05 * plan.pairs
    assert len(plan.pieces) < 400


def test_unrolled_depths_compute_within_five_percent():
    rows = packed(2048)
    plan = plan_trunk(*branches.unrolled(rows, 4).main_view(), rows)
    assert plan.pairs == 4 * 2048 * 2049 // 2
    assert plan.computed <= 1.05 * plan.pairs


def test_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trunk, "SPAN", 64)
    monkeypatch.setattr(trunk, "GRANULE", 4)
    rows = packed(300, 50)
    check(rows.document, rows.position + 1, rows)
    anchors = torch.randperm(350, generator=torch.Generator().manual_seed(0))[:90]
    check(*branches.block_draft(rows, anchors, 3, False).main_view(), rows)


@pytest.mark.parametrize("cutoff", [0, 1, 10_000])
def test_cutoffs_at_the_edges(cutoff: int):
    rows = packed(50, 20)
    check(rows.document, torch.full_like(rows.position, cutoff), rows)


def test_orders_are_undone():
    rows = packed(20)
    mixed = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    keys = Rows(rows.document[mixed], rows.position[mixed])
    plan = plan_trunk(rows.document[mixed], rows.position[mixed] + 1, keys)
    x = torch.randn(20, 3)
    assert torch.equal(plan.unsorted_queries(plan.sorted_queries(x)), x)
    assert torch.equal(plan.unsorted_keys(plan.sorted_keys(x)), x)
    assert torch.equal(plan.sorted_keys(keys.position), torch.arange(20))


def test_errors_say_what_to_give():
    rows = packed(5)
    for document, cutoff, keys, words in [
        (rows.document, rows.position[:4], rows, "per query"),
        (rows.document, rows.position.float(), rows, "per query"),
        (rows.document[:, None], rows.position[:, None], rows, "per query"),
        (rows.document, rows.position, Rows(rows.document, rows.position[:4]), "per key"),
    ]:
        with pytest.raises(ValueError, match=words):
            plan_trunk(document, cutoff, keys)
