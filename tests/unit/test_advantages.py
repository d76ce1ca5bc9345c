import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from furlong.ops.policy.advantages import group_advantages
from furlong.ops.records import Disposition

TRAINED, FLAT, UNSCORED = Disposition.TRAINED, Disposition.ZERO_VARIANCE, Disposition.UNSCORED
scores = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-1e3, 1e3))
tables = st.lists(st.tuples(scores, st.sampled_from("abc")), max_size=20)


def test_by_hand_with_and_without_std():
    rewards, groups = [1.0, 0.0, 0.0, 0.0], ["g"] * 4
    plain = [o.advantage for o in group_advantages(rewards, groups, False)]
    assert plain == [0.75, -0.25, -0.25, -0.25]
    scaled = [o.advantage for o in group_advantages(rewards, groups, True)]
    # Population deviation of one success in four is sqrt(3)/4; the floor moves it by 2.3e-6 relative.
    assert scaled == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=3e-6)


def test_groups_may_interleave_and_order_is_kept():
    outcomes = group_advantages([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"], False)
    assert [o.advantage for o in outcomes] == [0.5, -1.0, -0.5, 1.0]
    assert [o.reward for o in outcomes] == [1.0, 5.0, 0.0, 7.0]


def test_unscored_is_left_out_of_its_groups_mean():
    outcomes = group_advantages([1.0, None, 0.0], ["g"] * 3, False)
    assert [o.advantage for o in outcomes] == [0.5, 0.0, -0.5]
    assert [o.disposition for o in outcomes] == [TRAINED, UNSCORED, TRAINED]
    assert outcomes[1].reward is None


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1.0], [0.1, 0.1, 0.1], [0.7, None]])
@pytest.mark.parametrize("std", [True, False])
def test_no_comparison_no_gradient(rewards, std):
    outcomes = group_advantages(rewards, ["g"] * len(rewards), std)
    assert all(o.advantage == 0.0 for o in outcomes)
    assert [o.disposition for o in outcomes] == [UNSCORED if r is None else FLAT for r in rewards]


def test_empty_step_has_no_outcomes():
    assert group_advantages([], [], True) == []


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_non_finite_reward_is_an_error(reward):
    with pytest.raises(ValueError, match="group g"):
        group_advantages([0.0, reward], ["g", "g"], True)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="one of each per trajectory"):
        group_advantages([0.0], ["g", "g"], True)


@given(tables, st.booleans())
def test_centred_finite_and_independent_of_order(table, std):
    outcomes = group_advantages([r for r, _ in table], [g for _, g in table], std)
    assert all(math.isfinite(o.advantage) for o in outcomes)
    for group in "abc":
        mine = [o for o, (_, g) in zip(outcomes, table, strict=True) if g == group]
        # Rounding of the mean, 2e3 wide at most, divided by a deviation of at least the floor.
        assert abs(sum(o.advantage for o in mine)) <= 1e-9 * (1e6 if std else 1.0)
        kinds = {o.disposition for o in mine} - {UNSCORED}
        assert len(kinds) <= 1, "a group is trained as a whole or not at all"
    backwards = group_advantages([r for r, _ in table[::-1]], [g for _, g in table[::-1]], std)[::-1]
    for one, other in zip(outcomes, backwards, strict=True):
        assert one.disposition == other.disposition
        # Sums taken in another order differ by rounding, which the floor can magnify a millionfold.
        assert one.advantage == pytest.approx(other.advantage, abs=1e-3, rel=1e-6)


def test_needs_no_torch():
    code = "import sys, furlong.ops.policy.advantages, furlong.ops.policy.schedule; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
