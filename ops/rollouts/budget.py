"""How much may go wrong between two batches before the run stops and says why."""

from __future__ import annotations

from collections import Counter

from furlong.ops.records import Failure, Rejection
from furlong.ops.stages.context import StageError

_REMEDY = {
    str(Rejection.ZERO_VARIANCE): (
        "the policy always or never solves these prompts: choose tasks of another difficulty (data.tasks), or set "
        "rollout.filter to none"
    ),
    str(Failure.DEADLINE): (
        "raise FURLONG_REPLY_DEADLINE, or lower sampling.max_new_tokens or the environment's turns (data.env.options)"
    ),
    str(Failure.ENGINE_LOST): "read the engines' logs for why they die, and give them more memory or set fewer of them",
    str(Failure.ENVIRONMENT): "run the environment of data.env by hand on this prompt and mend it",
    str(Failure.VERIFIER): "mend the verifier of these prompts, or raise FURLONG_VERIFY_DEADLINE",
    str(Failure.DRIFT): (
        "the chat template does not render replies to the tokens that were sampled: compare model and data.system with "
        "a template that is known to work"
    ),
}


class BudgetSpent(StageError):
    """Too much was rejected or failed since the last batch; the message says what, an example, and what to set."""


class Budget:
    """Counts zero-variance groups and failed tries at trajectories since the last admitted batch."""

    def __init__(self, limit: float):
        """
        Args:
            limit: how many are allowed, `RolloutSpec.budget` times the groups of a batch.
        """
        if not limit > 0:
            raise ValueError(f"a budget of {limit} could not lose anything; set rollout.budget above 0")
        self.limit = limit
        self._counts: Counter[str] = Counter()
        self._example: dict[str, str] = {}

    @property
    def spent(self) -> int:
        return sum(self._counts.values())

    def reject(self, group_id: str, reason: Rejection, detail: str) -> None:
        """Count a rejected group; BudgetSpent when that is one too many. Only zero variance counts: other rejections
        follow from the run's settings, not from its data, and their prompts are drawn again."""
        if reason == Rejection.ZERO_VARIANCE:
            self._spend(str(reason), f"group {group_id}: {detail}")

    def fail(self, trajectory_id: str, kind: Failure, detail: str) -> None:
        """Count a try at a trajectory that gave none; BudgetSpent when that is one too many."""
        self._spend(str(kind), f"trajectory {trajectory_id}: {detail}")

    def admitted(self) -> None:
        """A batch was admitted: begin anew."""
        self._counts.clear()
        self._example.clear()

    def _spend(self, kind: str, example: str) -> None:
        self._counts[kind] += 1
        self._example[kind] = example
        if self.spent <= self.limit:
            return
        kinds = ", ".join(f"{count} {name}" for name, count in self._counts.most_common())
        worst = self._counts.most_common(1)[0][0]
        raise BudgetSpent(
            f"{self.spent} groups or trajectories were lost since the last batch, more than the {self.limit:g} that "
            f"rollout.budget allows: {kinds}. The commonest is {worst}, last {self._example[worst]}. What helps: "
            f"{_REMEDY[worst]}; or raise rollout.budget. Rows of the tables failures and ledger tell of each one"
        )
