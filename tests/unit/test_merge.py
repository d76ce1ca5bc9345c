"""Attentions over disjoint keys, merged by log-sum-exp."""

import math

import pytest
import torch

from furlong.kernels.merge import merge

NOTHING = (torch.zeros(3, 2, 8, dtype=torch.float64), torch.full((3, 2), -math.inf, dtype=torch.float64))


def part(seed: int, level: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    out = torch.randn(3, 2, 8, dtype=torch.float64, generator=draw)
    return out, level + torch.randn(3, 2, dtype=torch.float64, generator=draw)


def close(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


def test_is_the_softmax_over_both():
    scores, values = torch.randn(4, 7, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    parts = [(scores[:, s].softmax(-1) @ values[s], scores[:, s].logsumexp(-1)) for s in (slice(0, 3), slice(3, 7))]
    close(merge(*parts[0], *parts[1]), (scores.softmax(-1) @ values, scores.logsumexp(-1)))


def test_nothing_is_the_identity_bitwise():
    a = part(0)
    for merged in (merge(*a, *NOTHING), merge(*NOTHING, *a)):
        assert torch.equal(merged[0], a[0])
        assert torch.equal(merged[1], a[1])


def test_nothing_and_nothing_is_nothing():
    out, lse = merge(*NOTHING, *NOTHING)
    assert torch.equal(out, NOTHING[0])
    assert torch.equal(lse, NOTHING[1])


def test_commutes_bitwise():
    for x, y in zip(merge(*part(0), *part(1, 3.0)), merge(*part(1, 3.0), *part(0)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("levels", [(0, 0, 0), (1e4, -1e4, 0), (1e4, 1e4, -1e4), (-1e4, -1e4, -1e4)])
def test_associates(levels: tuple[float, ...]):
    a, b, c = (part(seed, level) for seed, level in enumerate(levels))
    left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
    assert all(x.isfinite().all() for x in left)
    for x, y in zip(left, right, strict=True):
        # Log-sum-exps of 1e4 are themselves only known to 1e4 times the rounding.
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14 * max(1.0, *map(abs, levels)))


def test_a_far_smaller_part_vanishes():
    a = part(0, 1e4)
    merged = merge(*a, *part(1, -1e4))
    assert torch.equal(merged[0], a[0])
    assert torch.equal(merged[1], a[1])


def test_rows_are_apart():
    a, b = part(0), part(1)
    gone = (b[0].clone(), b[1].clone())
    gone[0][1], gone[1][1] = 0.0, -math.inf
    merged, whole = merge(*a, *gone), merge(*a, *b)
    assert torch.equal(merged[0][1], a[0][1])
    assert torch.equal(merged[0][[0, 2]], whole[0][[0, 2]])
