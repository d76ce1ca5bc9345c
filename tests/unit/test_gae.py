import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops.policy.gae import estimates, explained_variance, generalised_advantages, value_loss


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand_over_a_masked_token():
    """V = 0.5, 0.25 at the two trained tokens, gamma 1/2, lam 1/2, reward 1; a tool spoke between and after."""
    mask = torch.tensor([True, False, True, False])
    values = float64([0.5, math.nan, 0.25, math.nan])
    penalties = float64([0.125, math.nan, 0.0, math.nan])
    advantages, returns = generalised_advantages(1.0, penalties, values, mask, 0.5, 0.5)
    last = 1.0 - 0.25
    first = (-0.125 + 0.5 * 0.25 - 0.5) + 0.25 * last
    assert advantages.tolist() == [first, 0.0, last, 0.0]
    assert returns.tolist() == [first + 0.5, 0.0, 1.0, 0.0]


rows = st.lists(st.tuples(st.booleans(), st.floats(-2, 2), st.floats(-1, 1)), min_size=1, max_size=10)


@settings(deadline=None)
@given(rows, st.floats(-2, 2), st.floats(0, 1), st.floats(0, 1))
def test_against_the_sum_of_discounted_errors(rows, reward, gamma, lam):
    mask, values, penalties = (list(column) for column in zip(*rows, strict=True))
    mask[-1] = True
    trained = [t for t, on in enumerate(mask) if on]
    got, returns = generalised_advantages(reward, float64(penalties), float64(values), torch.tensor(mask), gamma, lam)
    errors = []
    for n, t in enumerate(trained):
        after = values[trained[n + 1]] if n + 1 < len(trained) else 0.0
        gain = reward if n + 1 == len(trained) else 0.0
        errors.append(-penalties[t] + gain + gamma * after - values[t])
    for n, t in enumerate(trained):
        want = sum((gamma * lam) ** k * error for k, error in enumerate(errors[n:]))
        assert got[t].item() == pytest.approx(want, abs=1e-12)
        assert returns[t].item() == pytest.approx(want + values[t], abs=1e-12)
    assert all(got[t] == returns[t] == 0 for t, on in enumerate(mask) if not on)


def test_without_discount_the_advantage_is_the_reward_over_the_value():
    values = float64([0.3, 0.1, -0.2])
    advantages, returns = generalised_advantages(2.0, torch.zeros(3).double(), values, torch.ones(3).bool(), 1.0, 1.0)
    torch.testing.assert_close(advantages, 2.0 - values)
    torch.testing.assert_close(returns, torch.full((3,), 2.0).double())


@pytest.mark.parametrize(("mask", "value"), [([False, False], 0.0), ([True, True], math.nan), ([True, True], math.inf)])
def test_no_token_or_no_number_is_an_error(mask, value):
    with pytest.raises(ValueError, match="at least one, and finite"):
        generalised_advantages(1.0, float64([0.0, 0.0]), float64([0.0, value]), torch.tensor(mask), 1.0, 1.0)


@pytest.mark.parametrize(
    ("value", "loss", "slope", "clipped"),
    [
        (0.1, 0.5 * 0.9**2, -0.9, False),  # within 0.2 of the old value
        (0.5, 0.5 * 0.8**2, 0.0, True),  # moved 0.5 towards the target: as if only 0.2, and no gradient
        (-0.5, 0.5 * 1.5**2, -1.5, False),  # moved away from it: the whole error
    ],
)
def test_value_loss_by_hand(value, loss, slope, clipped):
    """Old value 0, return 1, clip 0.2, two tokens in the step."""
    values = float64([value]).requires_grad_()
    got, cut = value_loss(values, float64([0.0]), float64([1.0]), 0.2, float64([2.0]))
    got.sum().backward()
    assert got.item() == pytest.approx(loss / 2)
    assert values.grad.item() == pytest.approx(slope / 2)
    assert cut.item() is clipped


@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=8))
def test_value_loss_against_plain_python(rows):
    values, old, target = (float64(list(column)) for column in zip(*rows, strict=True))
    got, _ = value_loss(values, old, target, 0.3, float64([5.0] * len(rows)))
    for one, (v, o, g) in zip(got.tolist(), rows, strict=True):
        near = o + min(max(v - o, -0.3), 0.3)
        assert one == pytest.approx(max((v - g) ** 2, (near - g) ** 2) / 10, abs=1e-12)


def test_each_trajectory_of_a_step_by_itself():
    trajectory, rewards = torch.tensor([0, 0, 2, 5, 5, 5]), float64([1, 1, 3, -1, -1, -1])
    penalties, values = float64([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), float64([1, 2, 3, 4, 5, 6])
    advantages, returns = estimates(rewards, penalties, values, trajectory, 0.9, 0.8)
    for mine in (slice(0, 2), slice(2, 3), slice(3, 6)):
        on = torch.ones_like(values[mine], dtype=torch.bool)
        want = generalised_advantages(float(rewards[mine][0]), penalties[mine], values[mine], on, 0.9, 0.8)
        assert torch.equal(advantages[mine], want[0])
        assert torch.equal(returns[mine], want[1])
    nothing = estimates(*(torch.zeros(0).double(),) * 3, torch.zeros(0, dtype=torch.long), 1.0, 1.0)
    assert [len(x) for x in nothing] == [0, 0]


def test_explained_variance_by_hand():
    returns = float64([0.0, 1.0, 2.0, 3.0])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(torch.ones(4).double(), returns) == 0.0
    assert explained_variance(float64([0.0, 1.0, 2.0, 5.0]), returns) == pytest.approx(1 - 0.75 / 1.25)
    assert explained_variance(returns, float64([0.7, 0.7, 0.7 + 1e-16, 0.7])) is None
