"""Each check of a step: it passes on what is right, and fails, for the right reason, on each kind of wrong."""

import copy
import math

import pytest

from furlong.ops.checks.data import conservation, routing_coverage, staleness_bound, token_round_trip
from furlong.ops.checks.learning import CEILINGS, NUMBERS, finite_loss, mismatch_ceiling, mismatch_history
from furlong.ops.checks.watch import length_drift, repetition, reward_drift

GROUPS = [{"group_id": f"g{n}", "samples": 2, "prompt_tokens": [1, 2]} for n in (1, 2)]
DRAWN = [
    {"trajectory_id": f"g{n}-s{s:02d}", "group_id": f"g{n}", "sample": s, "leaf": 0, "tokens": [1, 2, 30, 40, 0],
     "logprobs": [None, None, -1.0, -2.0, -0.5], "loss_mask": [False, False, True, True, True],
     "version_spans": [{"version": 3, "start": 2, "end": 4}, {"version": 4, "start": 4, "end": 5}], "text": "30 40",
     "routing": None}
    for n in (1, 2) for s in (0, 1)
]  # fmt: skip
REWARDS = [{"trajectory_id": row["trajectory_id"]} for row in DRAWN]
OUTCOMES = [{"trajectory_id": row["trajectory_id"], "disposition": "trained", "reward": 0.0} for row in DRAWN]


def decode(ids):
    return " ".join(str(token) for token in ids)


def changed(**values):
    """The trajectories with the second one's columns replaced."""
    rows = copy.deepcopy(DRAWN)
    rows[1] |= values
    return rows


def test_what_adds_up_is_conserved():
    told = conservation(GROUPS, DRAWN, REWARDS, OUTCOMES)
    assert told.passed
    assert told.found == {"prompts": 2, "samples": 4, "trajectories": 4, "trained": 4}


@pytest.mark.parametrize(
    ("groups", "drawn", "rewards", "outcomes", "words"),
    [
        (GROUPS, DRAWN[1:], REWARDS[1:], OUTCOMES[1:], "1 missing (g1-s00)"),
        (GROUPS[:1], DRAWN, REWARDS, OUTCOMES, "2 strangers (g2-s00"),
        (GROUPS, DRAWN, REWARDS[:-1], OUTCOMES, "1 not scored once (g2-s01)"),
        (GROUPS, DRAWN, [*REWARDS, REWARDS[0]], OUTCOMES, "1 not scored once (g1-s00)"),
        (GROUPS, DRAWN, REWARDS, OUTCOMES[:-1], "1 without one outcome (g2-s01)"),
        (GROUPS, DRAWN, REWARDS, [*OUTCOMES, OUTCOMES[0]], "1 without one outcome (g1-s00)"),
        (GROUPS, [*DRAWN, DRAWN[0]], REWARDS, OUTCOMES, "1 without one outcome (g1-s00)"),
        ([], [], [], [], "no groups"),
    ],
)
def test_what_is_lost_or_doubled_is_named(groups, drawn, rewards, outcomes, words):
    told = conservation(groups, drawn, rewards, outcomes)
    assert not told.passed
    assert told.blocking
    assert words in told.message


def test_tokens_that_are_what_was_sampled_pass():
    assert token_round_trip(GROUPS, DRAWN, decode).passed
    # Cut off, it ends without a stop token; a second leaf begins where it parts from the first.
    assert token_round_trip(GROUPS, changed(text="30 40 0"), decode).passed
    assert token_round_trip(
        GROUPS, changed(leaf=1, tokens=[9, 9, 30, 40, 0], loss_mask=[False] * 4 + [True]), decode
    ).passed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": [1, 2, 31, 40, 0]}, "its tokens read"),
        ({"text": "30 41"}, "its text is '30 41'"),
        ({"tokens": [1, 3, 30, 40, 0]}, "does not begin with its prompt's tokens"),
        ({"loss_mask": [False, True, True, True, True]}, "a token that was not sampled would be trained on"),
        ({"logprobs": [None] * 5, "loss_mask": [False] * 5}, "nothing was sampled"),
        ({"logprobs": [None, -1.0, -2.0, -0.5]}, "5 tokens, 4 log-probabilities"),
        ({"version_spans": [{"version": 3, "start": 2, "end": 4}]}, "do not cover"),
        (
            {"version_spans": [{"version": 3, "start": 2, "end": 5}, {"version": 4, "start": 4, "end": 5}]},
            "do not cover",
        ),
    ],
)
def test_a_token_that_is_not_what_was_sampled_is_found(change, words):
    told = token_round_trip(GROUPS, changed(**change), decode)
    assert not told.passed
    assert told.evidence == ["g1-s01"]
    assert words in told.message


def test_no_trajectories_are_no_pass():
    assert not token_round_trip(GROUPS, [], decode).passed
    assert not staleness_bound([], {}, 1, 0, False).passed
    assert not repetition([]).passed


def test_staleness_is_counted_in_steps_and_bounded():
    step_of = {3: 3, 4: 4}
    assert staleness_bound(DRAWN, step_of, 5, 1, masked=False).passed
    told = staleness_bound(DRAWN, step_of, 5, 0, masked=False)
    assert (told.passed, told.found["oldest"]) == (False, 1)
    assert len(told.evidence) == 4
    assert staleness_bound(DRAWN, step_of, 5, 0, masked=True).passed
    # A draft that was published alone has a version of its own and no step.
    assert staleness_bound(DRAWN, {3: 4, 4: 4}, 5, 0, masked=False).passed
    assert not staleness_bound(DRAWN, step_of, 4, 1, masked=False).passed, "sampled by weights of its own step"
    assert "version 4, which is not in the lake" in staleness_bound(DRAWN, {3: 3}, 5, 1, masked=False).message


def test_experts_of_every_token_are_wanted():
    assert routing_coverage(DRAWN) is None
    whole = [row | {"routing": {"first": 0, "rows": 4}} for row in DRAWN]
    assert routing_coverage(whole).passed
    for routing in (None, {"first": 0, "rows": 3}, {"first": 1, "rows": 4}):
        told = routing_coverage([whole[0] | {"routing": routing}, *whole[1:]])
        assert (told.passed, told.evidence) == (False, ["g1-s00"])


STEP = dict.fromkeys(NUMBERS, 0.5) | {
    "mismatch_mean": 1e-3,
    "mismatch_p99": 1e-2,
    "mismatch_k3": 1e-5,
    "tokens_trained": 9,
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_numbers_have_to_be_numbers(bad):
    assert finite_loss(STEP).passed
    for name in NUMBERS:
        told = finite_loss(STEP | {name: bad})
        assert not told.passed
        assert name in told.message
    for name in CEILINGS:
        assert not mismatch_ceiling(STEP | {name: bad}, []).passed


def test_mismatch_has_a_ceiling_and_names_the_worst_tokens():
    assert mismatch_ceiling(STEP, []).passed
    worst = [{"trajectory_id": "g1-s00", "position": 7, "difference": -3.0}]
    for name, ceiling in CEILINGS.items():
        told = mismatch_ceiling(STEP | {name: 1.01 * ceiling}, worst)
        assert (told.passed, told.blocking, told.evidence) == (False, True, ["g1-s00"])
        assert "g1-s00 token 7: -3.000" in told.message
    assert mismatch_ceiling(STEP | {"tokens_trained": 0, "mismatch_mean": None}, []).passed


def test_mismatch_that_grows_warns():
    before = [STEP | {"mismatch_mean": value} for value in (1e-3, 2e-3, 1e-3, None)]
    assert mismatch_history(STEP | {"mismatch_mean": 4e-3}, before).passed
    told = mismatch_history(STEP | {"mismatch_mean": 6e-3}, before)
    assert (told.passed, told.blocking) == (False, False)
    assert not mismatch_history(STEP | {"mismatch_mean": math.nan}, before).passed
    quiet = [STEP | {"mismatch_mean": 1e-7}] * 5
    assert mismatch_history(STEP | {"mismatch_mean": 9e-4}, quiet).passed, "rounding"


def test_reward_that_falls_warns_with_the_worst_trajectories():
    outcomes = [{"trajectory_id": name, "reward": reward} for name, reward in (("a", 1.0), ("b", 0.0), ("c", None))]
    rising = [n / 20 for n in range(20)]
    assert reward_drift(rising, outcomes).passed
    assert reward_drift([0.5] * 20, outcomes).passed
    told = reward_drift([*rising, *[0.3] * 5], outcomes)
    assert (told.passed, told.blocking, told.evidence) == (False, False, ["b", "a"])
    assert reward_drift([0.9, 0.1], outcomes).passed, "too few steps to tell"


def test_lengths_that_drift_warn_with_the_trajectories():
    drawn = [{"trajectory_id": f"t{n}", "loss_mask": [True] * n} for n in (1, 9, 5)]
    assert length_drift([10.0] * 12, drawn).passed
    assert length_drift([*[10.0] * 6, *[25.0] * 5], drawn).evidence == ["t9", "t5", "t1"]
    assert length_drift([*[10.0] * 6, *[4.0] * 5], drawn).evidence == ["t1", "t5", "t9"]
    assert length_drift([], drawn).passed


def test_replies_that_loop_warn():
    loop = {"trajectory_id": "loop", "tokens": [7] * 20, "loss_mask": [True] * 20}
    fine = {"trajectory_id": "fine", "tokens": list(range(20)), "loss_mask": [True] * 20}
    prompt = {"trajectory_id": "prompt", "tokens": [7] * 20, "loss_mask": [False] * 15 + [True] * 5}
    assert repetition([fine, fine, fine, prompt]).passed
    told = repetition([fine, loop, prompt])
    assert (told.passed, told.blocking, told.evidence) == (False, False, ["loop"])
