"""The budget stops a run that loses too much, and says what, how often, and what to set."""

from __future__ import annotations

import pytest

from furlong.ops.records import Failure, Rejection
from furlong.ops.rollouts.budget import Budget, BudgetSpent
from furlong.ops.stages.context import StageError


def test_what_the_limit_allows_is_allowed_and_one_more_is_not():
    budget = Budget(2.5)
    budget.fail("g-s00", Failure.DEADLINE, "10 s")
    budget.reject("g", Rejection.ZERO_VARIANCE, "every reward is 0")
    assert budget.spent == 2
    with pytest.raises(
        BudgetSpent, match=r"3 groups or trajectories were lost since the last batch, more than the 2\.5 "
    ):
        budget.fail("g-s01", Failure.DEADLINE, "10 s")


def test_a_batch_begins_anew():
    budget = Budget(1)
    for _ in range(5):
        budget.fail("g-s00", Failure.ENGINE_LOST, "gone")
        budget.admitted()
    assert budget.spent == 0


def test_the_message_names_kinds_the_commonest_with_an_example_and_a_remedy():
    budget = Budget(3)
    budget.reject("r-00001.1-g000", Rejection.ZERO_VARIANCE, "every reward is 1.0")
    budget.fail("r-00001.1-g001-s00", Failure.VERIFIER, "sympy hung")
    budget.fail("r-00001.1-g002-s00", Failure.VERIFIER, "sympy hung again")
    with pytest.raises(StageError) as caught:
        budget.reject("r-00001.1-g003", Rejection.ZERO_VARIANCE, "every reward is 0.0")
    said = str(caught.value)
    assert "2 zero_variance, 2 verifier" in said
    assert "commonest is zero_variance, last group r-00001.1-g003: every reward is 0.0" in said
    for setting in ("rollout.filter", "data.tasks", "rollout.budget"):
        assert setting in said


@pytest.mark.parametrize("kind", [*Failure, Rejection.ZERO_VARIANCE])
def test_every_kind_has_its_remedy(kind):
    budget = Budget(0.5)
    spend = budget.fail if isinstance(kind, Failure) else budget.reject
    with pytest.raises(BudgetSpent, match=f"1 {kind}"):
        spend("g-s00", kind, "why")


@pytest.mark.parametrize("reason", [r for r in Rejection if r is not Rejection.ZERO_VARIANCE])
def test_rejections_that_the_settings_cause_are_free(reason: Rejection):
    budget = Budget(0.5)
    budget.reject("g", reason, "")
    assert budget.spent == 0


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_a_senseless_limit_is_refused(limit: float):
    with pytest.raises(ValueError, match=r"rollout\.budget"):
        Budget(limit)
