"""What a branch's queries see, by construction."""

import pytest
import torch

from furlong.kernels import branches
from furlong.kernels.layout import NOBODY, Rows, contiguous_layout, line_layout, zigzag_layout

ROWS = Rows(torch.tensor([0, 0, 0, NOBODY, 1, 1]), torch.tensor([0, 1, 2, 0, 0, 1]))


def cu(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def test_a_pass_of_test_time_training():
    made = branches.test_time_training(ROWS, 3)
    assert (made.branches, made.queries, made.entries) == (6, 1, 3)
    assert torch.equal(made.document, ROWS.document)
    assert made.cutoff[:, 0].tolist() == [1, 2, 3, 1, 1, 2]
    assert made.sees.all()
    assert branches.test_time_training(ROWS, 0).entries == 0


def test_unrolled_is_all_passes():
    made = branches.unrolled(ROWS, 3)
    assert made.sees.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    for depth in (1, 2, 3):
        one = branches.test_time_training(ROWS, depth)
        assert torch.equal(made.cutoff[:, depth - 1], one.cutoff[:, 0])
        assert int(made.sees[depth - 1].sum()) == one.entries


def test_main_view_goes_branch_after_branch():
    document, cutoff = branches.unrolled(ROWS, 2).main_view()
    assert document.tolist() == [0, 0, 0, 0, 0, 0, NOBODY, NOBODY, 1, 1, 1, 1]
    assert cutoff.tolist() == [1, 1, 2, 2, 3, 3, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_see_strictly_before_their_anchor(causal: bool):
    made = branches.block_draft(ROWS, torch.tensor([5, 0, 2]), 4, causal)
    assert made.document.tolist() == [1, 0, 0]
    assert made.cutoff.tolist() == [[1] * 4, [0] * 4, [2] * 4]
    assert torch.equal(made.sees, torch.ones(4, 4, dtype=torch.bool).tril() if causal else torch.ones(4, 4).bool())


def test_errors_say_what_to_give():
    sees = torch.ones(1, 2, dtype=torch.bool)
    for document, cutoff, inner, words in [
        (torch.zeros(2), torch.ones(2, 1).long(), sees, "not an integer"),
        (torch.zeros(2).long(), torch.ones(2, 1), sees, "not an integer"),
        (torch.zeros(2).long(), torch.ones(2, 1).long(), sees.long(), "not bool"),
        (torch.zeros(2).long(), torch.ones(2, 2).long(), sees, "one cutoff per query"),
        (torch.zeros(2).long(), torch.ones(2).long(), sees, "dimensions"),
        (torch.zeros(2).long(), -torch.ones(2, 1).long(), sees, "negative"),
    ]:
        with pytest.raises(ValueError, match=words):
            branches.BranchLayout(document, cutoff, inner)
    for call, words in [
        (lambda: branches.test_time_training(ROWS, -1), "negative"),
        (lambda: branches.unrolled(ROWS, -1), "0 or more"),
        (lambda: branches.block_draft(ROWS, torch.tensor([0]), 0, True), "1 or more"),
        (lambda: branches.block_draft(ROWS, torch.tensor([6]), 2, True), "rows of this rank"),
        (lambda: branches.block_draft(ROWS, torch.tensor([-1]), 2, True), "rows of this rank"),
        (lambda: branches.stratified_anchors(zigzag_layout(cu(4), 1), 0, -1, torch.Generator()), "0 or more"),
    ]:
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_stratified_anchors_are_balanced_exactly(ranks: int):
    layout = zigzag_layout(cu(1024, 320), ranks)
    loads = []
    for rank in range(ranks):
        rows = layout.rows(rank)
        drawn = branches.stratified_anchors(layout, rank, 4, torch.Generator().manual_seed(7))
        assert len(drawn) == 2 * 2 * 4
        loads.append([int(rows.position[drawn][rows.document[drawn] == of].sum()) for of in (0, 1)])
    assert all(load == loads[0] for load in loads)


@pytest.mark.parametrize("make", [zigzag_layout, contiguous_layout])
def test_ranks_draw_the_same_anchors_whatever_the_layout(make):
    lengths, ranks = (37, 1, 0, 5, 64), 4
    drawn = set()
    for rank in range(ranks):
        layout = make(cu(*lengths), ranks)
        rows = layout.rows(rank)
        own = branches.stratified_anchors(layout, rank, 2, torch.Generator().manual_seed(3))
        assert (rows.document[own] != NOBODY).all()
        drawn |= {(int(rows.document[i]), int(rows.position[i])) for i in own}
    once = zigzag_layout(cu(*lengths), ranks)
    for document, length in enumerate(lengths):
        size = -(-length // (2 * ranks))
        for begin in range(0, length, max(size, 1)):
            inside = [at for of, at in drawn if of == document and begin <= at < begin + size]
            full = begin + size <= length
            assert len(inside) == min(2, size) if full else len(inside) <= min(2, size)
    assert once.lengths == lengths
    assert branches.stratified_anchors(once, 0, 0, torch.Generator()).numel() == 0


def test_every_token_is_as_likely_to_be_an_anchor():
    layout, draw = zigzag_layout(cu(64), 2), torch.Generator().manual_seed(0)
    hits = torch.zeros(64)
    for _ in range(2000):
        rows = layout.rows(0)
        hits[rows.position[branches.stratified_anchors(layout, 0, 4, draw)]] += 1
    held = hits[layout.rows(0).position]
    # 500 expected of each of the rank's 32 tokens, with a standard deviation of 19.
    assert held.min() > 400
    assert held.max() < 600


def test_anchors_of_a_line():
    document = torch.tensor([0] * 10 + [1] * 5 + [NOBODY])
    layout = line_layout(document, torch.cat([torch.arange(10), torch.arange(5), torch.zeros(1).long()]), 2)
    for rank in range(2):
        own = branches.stratified_anchors(layout, rank, 1, torch.Generator().manual_seed(0))
        assert (layout.rows(rank).document[own] != NOBODY).all()
