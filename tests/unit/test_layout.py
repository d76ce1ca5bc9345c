"""Where each token of a packed batch lies, against the definition written out with lists."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

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

RANKS = (1, 2, 4, 8)
lengths_of = st.lists(st.one_of(st.sampled_from((0, 1, 2, 15, 16, 17)), st.integers(0, 70)), max_size=6)
ranks_of = st.sampled_from(RANKS)


def edges(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def defined(lengths, ranks: int, least: int = 1) -> list[list[tuple[int, int, int]]]:
    """(source, document, position) of every row of every rank, by the words of `zigzag_layout`'s padding rule."""
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    begin = 0
    for document, length in enumerate(lengths):
        if length == 0:
            continue
        chunk = max(-(-length // (2 * ranks)), least)
        rows = [(begin + at, document, at) for at in range(length)]
        rows += [(NOBODY, NOBODY, 0)] * (2 * ranks * chunk - length)
        chunks = [rows[at * chunk : (at + 1) * chunk] for at in range(2 * ranks)]
        for rank in range(ranks):
            held[rank] += chunks[rank] + chunks[2 * ranks - 1 - rank]
        begin += length
    return held


def agrees(layout: ContextLayout, lengths, held: list[list[tuple[int, int, int]]]) -> bool:
    tables = torch.stack([layout.source, layout.document, layout.position], dim=-1)
    wanted = torch.tensor(held, dtype=torch.long).view(*tables.shape[:1], -1, 3)
    return layout.lengths == tuple(lengths) and torch.equal(tables, wanted)


@given(lengths_of, ranks_of, st.integers(1, 9))
@example([], 4, 1)
@example([0, 0], 2, 3)
@example([1], 8, 1)
@example([0, 1, 0], 4, 5)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_zigzag_is_what_its_padding_rule_says(lengths, ranks, least):
    layout = zigzag_layout(edges(lengths), ranks, least)
    assert layout.ranks == ranks
    assert layout.packed == sum(lengths)
    assert agrees(layout, lengths, defined(lengths, ranks, least))


@given(lengths_of, ranks_of, st.sampled_from(["zigzag", "contiguous", "line"]), st.integers(0, 3))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_parts_merge_to_the_packed_batch_exactly_and_carry_its_coordinates(lengths, ranks, kind, extra):
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths, dtype=torch.long))
    position = torch.cat([torch.arange(n) for n in (*lengths, 0)])
    if kind == "line":
        padding = -len(document) % (2 * ranks) + extra * 2 * ranks
        document = torch.cat([document, torch.full((padding,), NOBODY)])
        position = torch.cat([position, torch.zeros(padding, dtype=torch.long)])
        layout = line_layout(document, position, ranks)
    else:
        layout = {"zigzag": zigzag_layout, "contiguous": contiguous_layout}[kind](edges(lengths), ranks)
    x = torch.randn(len(document), 3)
    parts = [zigzag_split(x, layout, rank, fill=7) for rank in range(ranks)]
    assert torch.equal(zigzag_merge(parts, layout), x)
    for rank, part in enumerate(parts):
        rows = layout.rows(rank)
        assert bool((part[layout.source[rank] == NOBODY] == 7).all())
        assert torch.equal(rows.document, zigzag_split(document, layout, rank, fill=NOBODY))
        assert torch.equal(rows.position, zigzag_split(position, layout, rank))
        # The number of a token, and whether one is so far on, by counting.
        tokens = [
            NOBODY if d == NOBODY else sum(lengths[:d]) + p
            for d, p in zip(rows.document.tolist(), rows.position.tolist(), strict=True)
        ]
        assert layout.tokens(rank).tolist() == tokens
        for offset in (-1, 0, 1, 3):
            there = [
                d != NOBODY and 0 <= p + offset < lengths[d]
                for d, p in zip(rows.document.tolist(), rows.position.tolist(), strict=True)
            ]
            assert layout.gate(rank, offset).tolist() == there


@pytest.mark.parametrize("ranks", RANKS)
def test_swapped_halves_do_not_pass_for_the_layout(ranks):
    """The mutant: a rank holds its later chunk first, while its coordinates say otherwise."""
    lengths = [4 * ranks, 16 * ranks]
    layout = zigzag_layout(edges(lengths), ranks)
    held = defined(lengths, ranks)
    assert agrees(layout, lengths, held)
    pieces = [block.view(ranks, 2, -1).flip(1).flatten(1) for block in layout.source.split([4, 16], dim=1)]
    swapped = replace(layout, source=torch.cat(pieces, dim=1))
    assert not agrees(swapped, lengths, held)
    position = torch.cat([torch.arange(n) for n in lengths])
    assert not torch.equal(zigzag_split(position, swapped, 0), swapped.rows(0).position)


@pytest.mark.parametrize("ranks", RANKS)
def test_causal_work_is_the_same_on_every_rank(ranks):
    """2 * C * c^2 + c pairs a document on each rank, for C ranks and chunks of c rows without padding."""
    chunks = (3, 5, 1)
    layout = zigzag_layout(edges([2 * ranks * c for c in chunks]), ranks)
    for rank in range(ranks):
        assert int((layout.position[rank] + 1).sum()) == sum(2 * ranks * c * c + c for c in chunks)
    last = contiguous_layout(edges([2 * ranks * 8]), ranks).position[-1]
    assert (last + 1).sum() / (16 * ranks * (16 * ranks + 1) / 2 / ranks) > (2 * ranks - 1) / ranks - 0.06


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.float64])
def test_every_dtype_and_any_features(dtype):
    layout = zigzag_layout(edges([3, 9, 0, 1]), 2)
    for features in ((), (5,), (2, 3), (0,)):
        x = torch.randint(0, 2, (13, *features)).to(dtype)
        assert torch.equal(zigzag_merge([zigzag_split(x, layout, rank) for rank in range(2)], layout), x)


def test_gradients_go_back_through_split_and_merge():
    layout = zigzag_layout(edges([3, 9, 0, 1]), 2)
    x = torch.randn(13, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: [zigzag_split(x, layout, rank) for rank in range(2)], x)
    parts = [torch.randn(layout.source.shape[1], 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(lambda *parts: zigzag_merge(parts, layout), parts)


def test_a_contiguous_layout_is_padded_once_at_the_end():
    layout = contiguous_layout(edges([5, 0, 1, 4]), 4)
    assert layout.source.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, NOBODY, NOBODY]]
    assert layout.document.tolist() == [[0, 0, 0], [0, 0, 2], [3, 3, 3], [3, NOBODY, NOBODY]]
    assert layout.position.tolist() == [[0, 1, 2], [3, 4, 0], [0, 1, 2], [3, 0, 0]]


def test_a_line_keeps_its_padding_wherever_it_lies():
    document = torch.tensor([0, 0, NOBODY, 2, 2, 2, NOBODY, NOBODY])
    layout = line_layout(document, torch.tensor([0, 1, 9, 2, 0, 1, 0, 0]), 2)
    assert layout.lengths == (2, 0, 3)
    assert layout.source.tolist() == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert layout.document.tolist() == [[0, 0, NOBODY, NOBODY], [NOBODY, 2, 2, 2]]
    assert layout.position.tolist() == [[0, 1, 0, 0], [0, 2, 0, 1]]


def test_digests_tell_layouts_apart():
    of = [
        zigzag_layout(edges(lengths), ranks, least)
        for lengths, ranks, least in (([8], 2, 1), ([8], 2, 3), ([4, 4], 2, 1), ([8], 1, 1), ([8, 0], 2, 1), ([], 2, 1))
    ]
    of.append(contiguous_layout(edges([8]), 2))
    assert len({layout.digest for layout in of}) == len(of)
    assert zigzag_layout(edges([8]), 2).digest == of[0].digest


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: zigzag_layout(torch.tensor([1, 4]), 2), "begins with 0"),
        (lambda: zigzag_layout(torch.tensor([0, 4, 3]), 2), "never decreases"),
        (lambda: zigzag_layout(torch.tensor([]), 2), "begins with 0"),
        (lambda: zigzag_layout(torch.tensor([0.0, 4.0]), 2), "integers"),
        (lambda: zigzag_layout(torch.tensor([[0, 4]]), 2), "one row"),
        (lambda: zigzag_layout(torch.tensor([0, 4]), 0), "0 ranks"),
        (lambda: contiguous_layout(torch.tensor([0, 4]), -1), "-1 ranks"),
        (lambda: zigzag_layout(torch.tensor([0, 4]), 2, 0), "least_chunk is 0"),
        (lambda: line_layout(torch.zeros(6).long(), torch.arange(6), 2), "pad the line"),
        (lambda: line_layout(torch.zeros(4).long(), torch.arange(3), 1), "3 positions"),
        (lambda: line_layout(torch.zeros(4).long(), torch.tensor([0, 1, 1, 2]), 1), "has one twice"),
        (lambda: line_layout(torch.zeros(4).long(), torch.arange(1, 5), 1), "lacks a position"),
        (lambda: zigzag_layout(torch.tensor([0, 4]), 2).rows(2), "rank 2 is none"),
        (lambda: zigzag_split(torch.zeros(5), zigzag_layout(torch.tensor([0, 4]), 2), 0), "no packed batch of 4"),
        (lambda: zigzag_split(torch.zeros(4), zigzag_layout(torch.tensor([0, 4]), 2), -1), "rank -1 is none"),
        (lambda: zigzag_split(torch.tensor(1.0), zigzag_layout(torch.tensor([0, 1]), 1), 0), "no packed batch"),
        (lambda: zigzag_merge([torch.zeros(2)], zigzag_layout(torch.tensor([0, 4]), 2)), "1 parts"),
        (lambda: zigzag_merge([], zigzag_layout(torch.tensor([0, 4]), 2)), "0 parts"),
        (lambda: zigzag_merge([torch.zeros(3)] * 2, zigzag_layout(torch.tensor([0, 4]), 2)), "2 rows each"),
        (
            lambda: zigzag_merge([torch.zeros(2), torch.zeros(2).long()], zigzag_layout(torch.tensor([0, 4]), 2)),
            "alike in dtype",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(call, words):
    with pytest.raises(LayoutError, match=words):
        call()
