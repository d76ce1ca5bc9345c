"""Spans of weights versions over tokens: merged, compared with a list of one version per token."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from furlong.ops.rollouts.spans import cover, merge, shifted


def test_merging_changes_no_token_and_leaves_no_seam():
    rng = random.Random(0)
    for _ in range(200):
        versions = [rng.randrange(3) for _ in range(rng.randrange(8))]
        spans = [(version, at, at + 1) for at, version in enumerate(versions)]
        spans.insert(rng.randrange(len(spans) + 1), (9, 4, 4))
        merged = merge(spans)
        assert [version for version, start, end in merged for _ in range(start, end)] == versions
        assert all(one[0] != other[0] for one, other in pairwise(merged))
        assert cover(merged, len(versions))


def test_spans_with_tokens_between_that_nobody_sampled_stay_apart():
    assert merge([(1, 0, 2), (1, 3, 4), (1, 4, 5)]) == ((1, 0, 2), (1, 3, 5))


@pytest.mark.parametrize(
    "spans", [[], [(0, 0, 2)], [(0, 0, 2), (1, 1, 3)], [(0, 1, 3)], [(0, 0, 3), (1, 3, 3)], [(0, 0, 5), (1, 5, 3)]]
)
def test_a_gap_an_overlap_or_an_empty_span_is_no_cover(spans):
    assert not cover(spans, 3)


def test_shifting():
    assert shifted([(4, 0, 2), (5, 2, 3)], 7) == [(4, 7, 9), (5, 9, 10)]
