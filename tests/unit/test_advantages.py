import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import spec_of

from furlong.ops.policy.advantages import group_advantages
from furlong.ops.records import Disposition

TRAINED, FLAT, UNSCORED = Disposition.TRAINED, Disposition.ZERO_VARIANCE, Disposition.UNSCORED
NOT_CHOSEN = Disposition.NOT_CHOSEN
PLAIN, SCALED = (spec_of(normalise_std=std).algorithm for std in (False, True))
NAMES = ["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "ppo", "dpo", "sft", "distill"]


def algorithm(name, **more):
    needed = {"dpo": {"kl_coef": 0.1}, "distill": {"kl_coef": 0.1, "teacher": "folder"}}
    return spec_of(name=name, **needed.get(name, {}), **more).algorithm


CHOSEN = {name: algorithm(name) for name in NAMES}


def rows(rewards, name, **more):
    made = group_advantages(rewards, ["g"] * len(rewards), algorithm(name, **more))
    return [(o.advantage, o.disposition) for o in made]


scores = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-1e3, 1e3))
tables = st.lists(st.tuples(scores, st.sampled_from("abc")), max_size=20)


def test_by_hand_with_and_without_std():
    rewards, groups = [1.0, 0.0, 0.0, 0.0], ["g"] * 4
    plain = [o.advantage for o in group_advantages(rewards, groups, PLAIN)]
    assert plain == [0.75, -0.25, -0.25, -0.25]
    scaled = [o.advantage for o in group_advantages(rewards, groups, SCALED)]
    # Population deviation of one success in four is sqrt(3)/4; the floor moves it by 2.3e-6 relative.
    assert scaled == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3], rel=3e-6)


def test_groups_may_interleave_and_order_is_kept():
    outcomes = group_advantages([1.0, 5.0, 0.0, 7.0], ["a", "b", "a", "b"], PLAIN)
    assert [o.advantage for o in outcomes] == [0.5, -1.0, -0.5, 1.0]
    assert [o.reward for o in outcomes] == [1.0, 5.0, 0.0, 7.0]


def test_unscored_is_left_out_of_its_groups_mean():
    outcomes = group_advantages([1.0, None, 0.0], ["g"] * 3, PLAIN)
    assert [o.advantage for o in outcomes] == [0.5, 0.0, -0.5]
    assert [o.disposition for o in outcomes] == [TRAINED, UNSCORED, TRAINED]
    assert outcomes[1].reward is None


@pytest.mark.parametrize("rewards", [[0.0, 0.0], [1.0], [0.1, 0.1, 0.1], [0.7, None]])
@pytest.mark.parametrize("std", [SCALED, PLAIN], ids=["std", "plain"])
def test_no_comparison_no_gradient(rewards, std):
    outcomes = group_advantages(rewards, ["g"] * len(rewards), std)
    assert all(o.advantage == 0.0 for o in outcomes)
    assert [o.disposition for o in outcomes] == [UNSCORED if r is None else FLAT for r in rewards]


def test_empty_step_has_no_outcomes():
    assert group_advantages([], [], SCALED) == []


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_non_finite_reward_is_an_error(reward):
    with pytest.raises(ValueError, match="group g"):
        group_advantages([0.0, reward], ["g", "g"], SCALED)


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="one of each per trajectory"):
        group_advantages([0.0], ["g", "g"], SCALED)


@settings(deadline=None)
@given(tables, st.booleans())
def test_centred_finite_and_independent_of_order(table, std):
    chosen = SCALED if std else PLAIN
    outcomes = group_advantages([r for r, _ in table], [g for _, g in table], chosen)
    assert all(math.isfinite(o.advantage) for o in outcomes)
    for group in "abc":
        mine = [o for o, (_, g) in zip(outcomes, table, strict=True) if g == group]
        # Rounding of the mean, 2e3 wide at most, divided by a deviation of at least the floor.
        assert abs(sum(o.advantage for o in mine)) <= 1e-9 * (1e6 if std else 1.0)
        kinds = {o.disposition for o in mine} - {UNSCORED}
        assert len(kinds) <= 1, "a group is trained as a whole or not at all"
    backwards = group_advantages([r for r, _ in table[::-1]], [g for _, g in table[::-1]], chosen)[::-1]
    for one, other in zip(outcomes, backwards, strict=True):
        assert one.disposition == other.disposition
        # Sums taken in another order differ by rounding, which the floor can magnify a millionfold.
        assert one.advantage == pytest.approx(other.advantage, abs=1e-3, rel=1e-6)


def test_each_algorithm_by_hand():
    """Rewards 1, 0, 0.5, 0.5: mean 1/2, population deviation sqrt(1/8)."""
    rewards, root = [1.0, 0.0, 0.5, 0.5], math.sqrt(1 / 8) + 1e-6
    plain, scaled = [0.5, -0.5, 0.0, 0.0], [0.5 / root, -0.5 / root, 0.0, 0.0]
    want = {
        "grpo": scaled, "gspo": scaled, "distill": scaled, "dr_grpo": plain, "reinforce_pp_baseline": plain,
        "rloo": [1 - 1 / 3, 0 - 2 / 3, 0.0, 0.0], "reinforce_pp": rewards, "ppo": rewards,
    }  # fmt: skip
    for name, advantages in want.items():
        assert [a for a, _ in rows(rewards, name)] == pytest.approx(advantages), name
        assert {kind for _, kind in rows(rewards, name)} == {TRAINED}
    assert [a for a, _ in rows(rewards, "gspo", normalise_std=False)] == plain
    assert rows(rewards, "dpo") == [(1.0, TRAINED), (-1.0, TRAINED), (0.0, NOT_CHOSEN), (0.0, NOT_CHOSEN)]
    assert rows(rewards, "sft") == [(1.0, TRAINED), *[(0.0, NOT_CHOSEN)] * 3]


def test_pairs_and_favourites_among_equals():
    assert [a for a, _ in rows([0.0, 1.0, 1.0, 0.0], "dpo")] == [-1.0, 1.0, 0.0, 0.0], "the first of equals"
    assert [a for a, _ in rows([0.0, 1.0, 1.0, None], "sft")] == [0.0, 1.0, 1.0, 0.0], "all of the best"
    assert {kind for _, kind in rows([0.0, 0.0], "sft")} == {NOT_CHOSEN}, "nothing to imitate"
    assert {kind for _, kind in rows([0.0, -1.0], "sft")} == {NOT_CHOSEN}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rewards", [[0.5, 0.5, 0.5], [0.5], [0.5, None]])
def test_equal_rewards_train_only_where_rewards_are_not_all_that_is_compared(name, rewards):
    advantage = {"reinforce_pp": 0.5, "ppo": 0.5, "sft": 1.0, "distill": 0.0}
    want = (advantage[name], TRAINED) if name in advantage else (0.0, FLAT)
    assert rows(rewards, name) == [(0.0, UNSCORED) if reward is None else want for reward in rewards]


@settings(deadline=None)
@given(tables, st.sampled_from(NAMES))
def test_only_trained_trajectories_have_an_advantage(table, name):
    outcomes = group_advantages([r for r, _ in table], [g for _, g in table], CHOSEN[name])
    assert [o.reward for o in outcomes] == [r for r, _ in table]
    assert all(o.advantage == 0.0 for o in outcomes if o.disposition != TRAINED)
    assert all((o.disposition == UNSCORED) == (o.reward is None) for o in outcomes)
    if name == "dpo":
        for group in "abc":
            signs = sorted(o.advantage for o, (_, g) in zip(outcomes, table, strict=True) if g == group and o.advantage)
            assert signs in ([], [-1.0, 1.0])


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8))
def test_rloo_is_the_reward_over_the_mean_of_the_others(rewards):
    for index, (advantage, kind) in enumerate(rows(rewards, "rloo")):
        others = rewards[:index] + rewards[index + 1 :]
        want = rewards[index] - sum(others) / len(others) if kind == TRAINED else 0.0
        assert advantage == pytest.approx(want, abs=1e-9)


def test_needs_no_torch():
    modules = "advantages", "algorithms", "corrections", "schedule"
    names = ", ".join(f"furlong.ops.policy.{name}" for name in modules)
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
