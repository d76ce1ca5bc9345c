import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops.policy import head
from furlong.ops.policy.head import token_logprobs
from furlong.ops.policy.loss import NonFiniteError, mismatch, policy_loss, token_denominators

LOG2 = math.log(2)


def loss_of(ratio, advantage, denominator=1, low=0.2, high=0.28):
    logprob = torch.tensor([math.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    engine, a = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    counts = torch.tensor([denominator], dtype=torch.float64)
    loss, clipped = policy_loss(logprob, engine, a, low, high, counts)
    loss.sum().backward()
    return loss.item(), logprob.grad.item(), clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 2.0, -2.56, 0.0, True),  # gains above 1 + clip_high are cut
        (0.5, 2.0, -1.0, -1.0, False),  # a good token that became rare keeps its gradient
        (0.5, -2.0, 1.6, 0.0, True),  # losses below 1 - clip_low are cut
        (1.5, -2.0, 3.0, 3.0, False),  # a bad token that became likely keeps its gradient
        (1.5, 0.0, 0.0, 0.0, False),
    ],
)
def test_by_hand(ratio, advantage, loss, slope, clipped):
    assert loss_of(ratio, advantage) == (pytest.approx(loss, rel=1e-14), pytest.approx(slope, rel=1e-14), clipped)


def test_denominator_is_the_whole_steps():
    assert loss_of(1.0, 2.0, denominator=4)[0] == -0.5
    with pytest.raises(ValueError, match="whole step"):
        loss_of(1.0, 2.0, denominator=0.5)


def test_denominators_by_hand():
    assert token_denominators([2, 6, 0], "token") == [8.0, 8.0, 8.0]
    assert token_denominators([2, 6, 0], "sequence") == [4.0, 12.0, 0.0]
    assert sum(n / d for n, d in zip([2, 6], [4.0, 12.0], strict=True)) == 1.0


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-3, 0), st.floats(-3, 0), st.floats(-2, 2)), min_size=1, max_size=12), st.data())
def test_float64_reference_and_split(rows, data):
    logprob, engine, advantage = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    want = 0.0
    for p, q, a in rows:
        r = math.exp(p - q)
        want -= min(r * a, min(max(r, 0.8), 1.28) * a) / len(rows)
    counts = torch.full_like(logprob, len(rows))
    loss, _ = policy_loss(logprob, engine, advantage, 0.2, 0.28, counts)
    # Sums of at most 12 terms of size at most 41 in double precision.
    assert loss.sum().item() == pytest.approx(want, abs=1e-12)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [
        policy_loss(logprob[part], engine[part], advantage[part], 0.2, 0.28, counts[part])[0]
        for part in (slice(0, cut), slice(cut, None))
    ]
    assert torch.equal(torch.cat(parts), loss)


def test_mismatch_by_hand():
    gap = mismatch(torch.tensor([-1.0, -1.0 - LOG2]).double(), torch.tensor([-1.0, -1.0]).double(), ["a", "b"])
    assert gap.mean == pytest.approx(LOG2 / 2)
    assert gap.max == gap.p99 == pytest.approx(LOG2)
    assert gap.k3 == pytest.approx((0.5 - 1 + LOG2) / 2)


def test_p99_is_the_smallest_that_covers_99_percent():
    d = torch.arange(200, dtype=torch.float64).flip(0) / 1000
    assert mismatch(d, torch.zeros(200).double(), ["t"] * 200).p99 == 0.197
    assert mismatch(d[:1], torch.zeros(1).double(), ["t"]).p99 == 0.199


def test_equal_sides_have_no_mismatch():
    x = torch.tensor([-1.5, -0.25])
    gap = mismatch(x, x.clone(), ["a", "b"])
    assert (gap.mean, gap.max, gap.p99, gap.k3) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_mismatch_names_the_trajectory(side, value):
    sides = [torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0])]
    sides[side][1] = value
    with pytest.raises(NonFiniteError, match=r"in trajectory second;") as raised:
        mismatch(*sides, ["first", "second", "third"])
    assert "first," not in str(raised.value).split("in trajectory")[1]


def test_mismatch_whose_ratio_overflows_is_an_error():
    with pytest.raises(NonFiniteError, match="ratio"):
        mismatch(torch.tensor([0.0]), torch.tensor([-800.0]), ["t"])


def test_an_empty_or_partial_comparison_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        mismatch(torch.zeros(0), torch.zeros(0), [])
    with pytest.raises((ValueError, TypeError)):  # TypeError where shapes are checked at the boundary
        mismatch(torch.zeros(2), torch.zeros(1), ["a", "b"])
    with pytest.raises(ValueError, match="same number"):
        mismatch(torch.zeros(2), torch.zeros(2), ["a"])


def head_case(dtype, rows=5, vocab=300, width=16):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    place = torch.tensor([0, 0, 1, 4, 4, 4, 2])  # row 3 is nobody's, rows 0 and 4 have several tokens
    target = torch.tensor([7, 7, 0, 299, 63, 64, 128])
    return hidden, weight, place, target, torch.randn(7, generator=generator, dtype=torch.float64)


def plain_head(hidden, weight, place, target, temperature):
    logprobs = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return logprobs[place, target], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("limit", [1, 2**20])
def test_head_in_blocks_equals_all_logits_at_once(monkeypatch, temperature, limit):
    monkeypatch.setattr(head, "LOGIT_BYTES", limit)
    hidden, weight, place, target, slope = head_case(torch.float64)
    logprobs, entropy = token_logprobs(hidden, weight, place, target, temperature)
    (logprobs * slope).sum().backward()
    got = (logprobs.detach(), entropy, hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    logprobs, entropy = plain_head(hidden, weight, place, target, temperature)
    (logprobs * slope).sum().backward()
    for one, other in zip(got, (logprobs.detach(), entropy.detach(), hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_head_in_lower_precision(monkeypatch, dtype, bound):
    """bfloat16 keeps 8 bits: a logit of size 10 is off by up to 2^-9 * 10; float32 by 2^-24 * 10 and some sums."""
    monkeypatch.setattr(head, "LOGIT_BYTES", 1)
    hidden, weight, place, target, slope = head_case(dtype)
    logprobs, entropy = token_logprobs(hidden, weight, place, target, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    (logprobs * slope).sum().backward()
    exact_hidden, exact_weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    exact, exact_entropy = plain_head(exact_hidden, exact_weight, place, target, 1.0)
    (exact * slope).sum().backward()
    pairs = [
        (logprobs, exact),
        (entropy, exact_entropy),
        (hidden.grad, exact_hidden.grad),
        (weight.grad, exact_weight.grad),
    ]
    for got, want in pairs:
        assert (got.double() - want).norm() <= bound * want.norm()


def test_head_never_hides_a_nan():
    hidden, weight, place, target, _ = head_case(torch.float32)
    with torch.no_grad():
        weight[150, 3] = math.nan
    logprobs, _ = token_logprobs(hidden, weight, place, target, 1.0)
    assert torch.isnan(logprobs).all()
