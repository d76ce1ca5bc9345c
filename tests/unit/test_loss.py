import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops.policy import head
from furlong.ops.policy.head import token_logprobs
from furlong.ops.policy.loss import (
    NonFiniteError,
    clipped_loss,
    constant_denominators,
    require_finite,
    sequence_means,
    sequence_sums,
    token_denominators,
)


def loss_of(ratio, advantage, low=0.2, high=0.28):
    log_ratio = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    loss, clipped = clipped_loss(log_ratio, torch.tensor([advantage], dtype=torch.float64), low, high)
    loss.sum().backward()
    return loss.item(), log_ratio.grad.item(), clipped.item()


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


def test_denominators_by_hand():
    assert token_denominators([2, 6, 0], "token") == [8.0, 8.0, 8.0]
    assert token_denominators([2, 6, 0], "sequence") == [4.0, 12.0, 0.0]
    assert sum(n / d for n, d in zip([2, 6], [4.0, 12.0], strict=True)) == 1.0
    assert constant_denominators([2, 6, 0], 100) == [200.0, 200.0, 200.0], "the masked trajectory does not count"
    assert token_denominators([0], "sequence") == constant_denominators([0], 100) == [0.0]
    assert token_denominators([], "token") == []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=12), st.data())
def test_float64_reference_and_split(rows, data):
    log_ratio, advantage = (torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True))
    loss, _ = clipped_loss(log_ratio, advantage, 0.2, 0.28)
    for got, (x, a) in zip(loss.tolist(), rows, strict=True):
        r = math.exp(x)
        # One exponential of double precision, up to 20.
        assert got == pytest.approx(-min(r * a, min(max(r, 0.8), 1.28) * a), abs=1e-13)
    cut = data.draw(st.integers(0, len(rows)))
    parts = [clipped_loss(log_ratio[p], advantage[p], 0.2, 0.28)[0] for p in (slice(0, cut), slice(cut, None))]
    assert torch.equal(torch.cat(parts), loss)


def test_sequence_sums_and_means_by_hand():
    values = torch.tensor([1.0, 2.0, 5.0, 3.0], dtype=torch.float64)
    trajectory = torch.tensor([0, 0, 3, 0])
    assert sequence_sums(values, trajectory).tolist() == [6.0, 6.0, 5.0, 6.0]
    assert sequence_means(values, trajectory).tolist() == [2.0, 2.0, 5.0, 2.0]
    assert sequence_means(values[:0], trajectory[:0]).tolist() == []


def test_bad_numbers_name_their_trajectories():
    values = torch.tensor([0.0, math.nan, math.inf, 1.0])
    with pytest.raises(NonFiniteError, match=r"at 2 of 4 trained tokens, first nan, in trajectory b, c;"):
        require_finite("thing", values, ["a", "b", "c", "d"])
    with pytest.raises(NonFiniteError, match=r"t0, t1, t2, t3, t4 and 2 more"):
        require_finite("thing", torch.full((7,), math.nan), [f"t{i}" for i in range(7)])
    require_finite("thing", values[:1], ["a"])


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
