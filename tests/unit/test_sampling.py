"""Random numbers and draws: uniform, exact, reproducible, and never an impossible token."""

import math

import numpy as np
import pytest
import torch

from furlong.ops.policy.sampling import Rules, draw, uniforms

ALMOST_ONE = math.nextafter(1.0, 0.0)


def rules(temperatures, top_k=0, top_p=1.0, min_p=0.0):
    n = len(temperatures)
    return Rules(
        np.asarray(temperatures, dtype=np.float32), np.full(n, top_k), np.full(n, top_p), np.full(n, min_p)
    )  # fmt: skip


def one(logits, temperature, number, **cuts):
    drawn = draw(torch.tensor([logits]), rules([temperature], **cuts), torch.tensor([number], dtype=torch.float64))
    return drawn.tokens.item(), drawn.logprobs.item()


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
    drawn = draw(logits, rules([temperature] * 64), numbers)
    tokens, logprobs = drawn.tokens, drawn.logprobs
    own = torch.log_softmax(logits.double(), dim=-1)[torch.arange(64), tokens]
    assert torch.allclose(drawn.model_logprobs, own, rtol=0, atol=4e-6)
    assert (temperature != 1) or torch.equal(logprobs, drawn.model_logprobs)
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
    tokens = draw(logits.expand(n, -1), rules([temperature] * n), numbers).tokens
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
    drawn = draw(logits, rules([0.0] * 4, top_k=5, top_p=0.5), torch.full((4,), 0.9, dtype=torch.float64))
    tokens, logprobs = drawn.tokens, drawn.logprobs
    assert tokens.tolist() == [130, 0, 0, 127]
    assert torch.equal(logprobs, drawn.model_logprobs)
    rows = torch.arange(4)
    assert torch.allclose(logprobs, torch.log_softmax(logits.double(), -1)[rows, tokens], rtol=0, atol=1e-6)


def test_greedy_sees_differences_that_probabilities_round_away():
    logits = [0.0] * 200
    logits[7], logits[150] = 100.0, math.nextafter(100.0, 200.0) + 1e-5
    assert one(logits, 0.0, 0.3)[0] == 150


def test_mixed_rules_in_one_batch():
    """Each row as if drawn alone, bit for bit."""
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0))
    mixed = Rules(
        np.array([0.0, 1.0, 0.3, 2.0, 0.0, 1.0, 1.0, 0.7], dtype=np.float32), np.array([0, 0, 3, 0, 2, 7, 0, 9]),
        np.array([1.0, 1.0, 1.0, 0.6, 0.5, 0.9, 1.0, 0.8]), np.array([0.0, 0.0, 0.0, 0.0, 0.1, 0.0, 0.2, 0.05]),
    )  # fmt: skip
    numbers = torch.linspace(0.1, 0.9, 8, dtype=torch.float64)
    together = draw(logits, mixed, numbers)
    for row in range(8):
        some = slice(row, row + 1)
        alone = draw(logits[some], mixed.of(some), numbers[some])
        assert together.tokens[row] == alone.tokens[0]
        assert together.logprobs[row] == alone.logprobs[0]
        assert together.model_logprobs[row] == alone.model_logprobs[0]


def kept(logits, temperature, top_k, top_p, min_p):
    """Ids and probabilities that stay, in float64, one token at a time."""
    chances = torch.softmax(torch.tensor(logits, dtype=torch.float64) / temperature, -1).tolist()
    order = sorted(range(len(chances)), key=lambda token: (-chances[token], token))[: top_k or None]
    total, found, running = sum(chances[token] for token in order), [], 0.0
    for token in order:
        if found and (running >= top_p * total or chances[token] < min_p * chances[order[0]]):
            break
        found.append(token)
        running += chances[token]
    return {token: chances[token] / sum(chances[t] for t in found) for token in found}


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [
    (1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.5, 0.0), (0, 1e-9, 0.0), (0, 1.0, 0.3), (0, 1.0, 1.0), (12, 0.7, 0.02),
    (999, 1.0, 0.0),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_cut_distributions_match_float64(top_k, top_p, min_p, temperature):
    """Over a grid of uniforms: the tokens that stay, all of them, with their renormalised log-probabilities; the model's
    own log-probability is that of the whole distribution."""
    logits = (2.5 * torch.randn(150, generator=torch.Generator().manual_seed(3))).tolist()
    want = kept(logits, temperature, top_k, top_p, min_p)
    n = 4_000
    numbers = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    drawn = draw(torch.tensor([logits] * n), rules([temperature] * n, top_k, top_p, min_p), numbers)
    counts = torch.bincount(drawn.tokens, minlength=150)
    assert {token for token in range(150) if counts[token]} <= set(want)
    for token, chance in want.items():
        assert abs(counts[token] / n - chance) <= 1.5 / n + 1e-6
    exact = torch.tensor([math.log(want[token]) for token in drawn.tokens.tolist()], dtype=torch.float64)
    assert (drawn.logprobs - exact).abs().max() <= 4e-6
    own = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)[drawn.tokens]
    assert (drawn.model_logprobs - own).abs().max() <= 4e-6


@pytest.mark.parametrize("rule", [
    {"top_p": 0.6}, {"top_p": 0.97}, {"top_k": 40}, {"top_k": 1500}, {"min_p": 1e-3},
    {"top_k": 2000, "top_p": 0.5, "min_p": 0.05},
])  # fmt: skip
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_cuts_of_a_large_vocabulary_match_float64(rule, spread):
    """Where a few tokens have most of the mass, where thousands share it, and where all are equally likely. One token at
    the edge may go either way, as probabilities are float32: it changes log-probabilities by under 1e-3."""
    n = 3000
    logits = (spread * torch.randn(n, generator=torch.Generator().manual_seed(5))).tolist()
    cuts = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | rule
    want = kept(logits, 1.0, **cuts)
    numbers = torch.linspace(0, 1, 400, dtype=torch.float64)
    drawn = draw(torch.tensor([logits] * 400), rules([1.0] * 400, **cuts), numbers)
    exact = torch.tensor([math.log(want[t]) for t in drawn.tokens.tolist() if t in want], dtype=torch.float64)
    mine = drawn.logprobs[[t in want for t in drawn.tokens.tolist()]]
    assert len(exact) >= 398
    assert (mine - exact).abs().max() <= 1e-3
    alone = draw(torch.tensor([logits]), rules([1.0], **cuts), numbers[200:201])
    assert (alone.tokens[0], alone.logprobs[0]) == (drawn.tokens[200], drawn.logprobs[200])


def test_cuts_keep_the_lowest_ids_among_equals():
    flat = [0.0] * 10
    assert {one(flat, 1.0, number, top_k=3)[0] for number in (0.0, 0.4, 0.7, 1.0)} == {0, 1, 2}
    assert {one(flat, 1.0, number, top_p=0.15)[0] for number in (0.0, 0.4, 0.7, 1.0)} == {0, 1}
    assert one(flat, 1.0, 0.95, min_p=1.0) == (9, pytest.approx(math.log(0.1)))


def test_certain_token_has_log_probability_zero():
    assert one([0.0, 500.0, 0.0], 1.0, 0.2) == (1, 0.0)
    assert one([5.0], 1.0, 0.9) == (0, 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_logits_that_are_not_finite_are_told_by_row(bad, temperature):
    logits = torch.zeros(3, 500).bfloat16()
    logits[1, 411] = bad
    drawn = draw(logits, rules([temperature] * 3, top_k=4), torch.rand(3, dtype=torch.float64))
    assert drawn.logprobs.isnan().tolist() == drawn.model_logprobs.isnan().tolist() == [False, True, False]


def test_a_temperature_so_small_that_logits_overflow_is_told():
    assert math.isnan(one([1.0, 2.0, 3.0], 1e-39, 0.5)[1])
    assert math.isnan(one([1.0, 2.0, 3.0], 1e-39, 0.5, top_k=2)[1])
