"""Random numbers and draws: uniform, exact, reproducible, and never an impossible token."""

import math

import numpy as np
import pytest
import torch

from furlong.ops.policy.sampling import NonFiniteLogits, draw, uniforms

ALMOST_ONE = math.nextafter(1.0, 0.0)


def one(logits, temperature, number):
    tokens, logprobs = draw(
        torch.tensor([logits]), torch.tensor([temperature]), torch.tensor([number], dtype=torch.float64), ["r"]
    )
    return tokens.item(), logprobs.item()


def test_uniforms_are_splitmix64():
    """Against the published recurrence in Python integers, at both ends of the seed range."""

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    seeds = [0, 1, 2**62 + 5, 2**63 - 1]
    for position in (0, 1, 7, 100_000):
        got = uniforms(np.array(seeds, dtype=np.uint64), position)
        want = [(mix((mix((s + golden) % 2**64) + (position + 1) * golden) % 2**64) >> 11) / 2**53 for s in seeds]
        assert got.tolist() == want


def test_uniforms_are_uniform_and_streams_are_unrelated():
    grid = np.stack([uniforms(np.arange(4000, dtype=np.uint64), t) for t in range(20)])
    assert grid.min() >= 0
    assert grid.max() < 1
    counts = np.histogram(grid, bins=100, range=(0, 1))[0]
    chi = ((counts - 800) ** 2 / 800).sum()
    assert 50 < chi < 170  # 99 degrees of freedom: both ends beyond 4 sigma
    for a, b in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:]), (grid[:-1, 1:], grid[1:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("vocab", [2, 127, 128, 129, 1000, 49152])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_draw_matches_float64_inversion(vocab, temperature):
    """Where the two differ, the number lies within 1e-6 of the boundary between two tokens."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 4 * torch.randn(64, vocab, generator=generator)
    numbers = torch.rand(64, generator=generator, dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.full((64,), temperature), numbers, ["r"] * 64)
    reference = torch.log_softmax(logits.double() / temperature, dim=-1)
    running = reference.exp().cumsum(-1)
    rows = torch.arange(64)
    upper = running[rows, tokens]
    lower = upper - reference[rows, tokens].exp()
    assert bool(((lower - 1e-6 <= numbers) & (numbers <= upper + 1e-6)).all())
    # float32 division by the temperature: 2^-24 relative on scaled logits of up to 30
    assert torch.allclose(logprobs, reference[rows, tokens], rtol=0, atol=4e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_chi_square_over_a_small_vocabulary(temperature):
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -2.0, 0.5, -0.5])
    n = 20_000
    numbers = torch.from_numpy(uniforms(np.arange(n, dtype=np.uint64) * np.uint64(977), 3))
    tokens, _ = draw(logits.expand(n, -1), torch.full((n,), temperature), numbers, ["r"] * n)
    want = n * torch.softmax(logits.double() / temperature, -1)
    chi = ((torch.bincount(tokens, minlength=7).double() - want) ** 2 / want).sum().item()
    assert chi < 27.9  # 6 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("number", [0.0, 1e-300, 0.5, ALMOST_ONE, 1.0])
def test_impossible_tokens_are_never_drawn(number):
    """exp(-200) is 0 in float32; such tokens stand first, last, in between and in blocks of their own."""
    logits = [-200.0] * 1000
    for token in (300, 301, 700):
        logits[token] = 1.0
    token, logprob = one(logits, 1.0, number)
    assert token in (300, 301, 700)
    assert logprob == pytest.approx(math.log(1 / 3), abs=1e-6)
    assert token == {0.0: 300, 1e-300: 300, 0.5: 301, ALMOST_ONE: 700, 1.0: 700}[number]


def test_greedy_takes_the_lowest_id_among_equals():
    logits = torch.full((4, 1000), -1.0)
    logits[0, [999, 130, 131]] = 3.0
    logits[1, [0, 999]] = 3.0
    logits[3, 127] = logits[3, 128] = 3.0
    tokens, logprobs = draw(logits, torch.zeros(4), torch.full((4,), 0.9, dtype=torch.float64), list("abcd"))
    assert tokens.tolist() == [130, 0, 0, 127]
    rows = torch.arange(4)
    assert torch.allclose(logprobs, torch.log_softmax(logits.double(), -1)[rows, tokens], rtol=0, atol=1e-6)


def test_greedy_sees_differences_that_probabilities_round_away():
    logits = [0.0] * 200
    logits[7], logits[150] = 100.0, math.nextafter(100.0, 200.0) + 1e-5
    assert one(logits, 0.0, 0.3)[0] == 150


def test_mixed_temperatures_in_one_batch():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    temperatures = torch.tensor([0.0, 1.0, 0.3, 2.0, 0.0, 1.0])
    numbers = torch.linspace(0.1, 0.9, 6, dtype=torch.float64)
    together = draw(logits, temperatures, numbers, list("abcdef"))
    for row in range(6):
        alone = draw(logits[row : row + 1], temperatures[row : row + 1], numbers[row : row + 1], ["x"])
        assert together[0][row] == alone[0][0]
        assert together[1][row] == alone[1][0]


def test_certain_token_has_log_probability_zero():
    assert one([0.0, 500.0, 0.0], 1.0, 0.2) == (1, 0.0)
    assert one([5.0], 1.0, 0.9) == (0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_logits_that_are_not_finite_name_the_request(bad, temperature):
    logits = torch.zeros(3, 500).bfloat16()
    logits[1, 411] = bad
    with pytest.raises(NonFiniteLogits, match=r"request guilty \(1 in all\)"):
        draw(logits, torch.full((3,), temperature), torch.rand(3, dtype=torch.float64), ["a", "guilty", "b"])


def test_temperature_so_small_that_logits_overflow_is_an_error():
    with pytest.raises(NonFiniteLogits):
        one([1.0, 2.0, 3.0], 1e-39, 0.5)
