"""One prompt group in memory: what is still to be drawn of it, and what is known of what was."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from furlong.ops.identity import counter_seed
from furlong.ops.policy.routing import as_row
from furlong.ops.records import Failure
from furlong.ops.rollouts.admission import Candidate, tokens_by_step
from furlong.ops.rollouts.course import Reservation
from furlong.ops.rollouts.trajectory import Draw, Failed, Task, Trajectory
from furlong.ops.stages.context import Run
from furlong.ops.stages.rewards import as_json, score_twice
from furlong.ops.stages.rollouts import fitting_prompt
from furlong.resources.rollouts.writer import Writer

Spend = Callable[[str, Failure, str], None]
"""Counts a failed try at a trajectory (its id, kind, detail); raises BudgetSpent when that was one too many."""

SAME_DRAW = (Failure.ENGINE_LOST, Failure.VERIFIER)
"""Failures that say nothing about the draw: the next try is the same one."""


@dataclass
class Group:
    """Of one thread at a time, save for `candidate`."""

    row: dict[str, Any]
    """Of table `groups`."""
    prompt: dict[str, Any]
    """Of table `prompts`."""
    trajectories: list[dict[str, Any]] = field(default_factory=list)
    """Rows drawn so far, of the columns that `score` needs, with `sample`, `leaf`, `loss_mask` and `version_spans`."""
    tries: dict[int, int] = field(default_factory=dict)
    """Sample -> tries that failed."""
    draws: dict[int, int] = field(default_factory=dict)
    """Sample -> tries that failed by the draw itself, each of which makes the next one another draw."""
    begun_at: int | None = None
    """The newest published step when it was begun."""
    sampled: dict[int, int] = field(default_factory=dict)
    """Step -> tokens that the weights it made have sampled, once it is finished."""
    finished: bool = False

    @classmethod
    def new(cls, run: Run, reservation: Reservation, prompt: dict[str, Any], version: int) -> Group:
        """A group about to be drawn; StageError when its prompt does not fit the model's context."""
        row = {
            "run": run.name, "step": reservation.step, "attempt": reservation.attempt,
            "group_id": reservation.group_id(run.name), "position": reservation.position, "dataset": run.dataset,
            "prompt_id": prompt["prompt_id"], "prompt_tokens": fitting_prompt(run, prompt),
            "samples": run.spec.algorithm.samples_per_prompt, "weights_version": version,
        }  # fmt: skip
        return cls(row, prompt)

    @property
    def group_id(self) -> str:
        return self.row["group_id"]

    def candidate(self) -> Candidate:
        """As the choice of batches sees it. Of one that is being drawn nothing is older than its beginning."""
        lengths = [sum(row["loss_mask"]) for row in self.trajectories]
        return Candidate(
            group_id=self.group_id,
            position=self.row["position"],
            finished=self.finished,
            sampled=self.sampled if self.finished or self.begun_at is None else {self.begun_at: 0},
            mean_tokens=sum(lengths) / len(lengths) if lengths else 0.0,
        )

    def missing(self, seed: int) -> list[Task]:
        """Tasks of the samples that have no trajectory yet; `seed` is the run's."""
        there = {row["sample"] for row in self.trajectories}
        return [self._task(sample, seed) for sample in range(self.row["samples"]) if sample not in there]

    def versions(self) -> set[int]:
        """Those that sampled a token of it."""
        return {span["version"] for row in self.trajectories for span in row["version_spans"]}

    def finish(self, step_of: Mapping[int, int]) -> None:
        """All trajectories are there; `step_of` knows the step that made each version."""
        # Tokens that leaves share are counted once, where they are in the loss.
        spans = [
            (s["version"], 0, sum(row["loss_mask"][s["start"] : s["end"]]))
            for row in self.trajectories for s in row["version_spans"]
        ]  # fmt: skip
        self.sampled = tokens_by_step(spans, step_of)
        self.finished = True

    def score(self, run: Run, spend: Spend) -> list[dict[str, Any]]:
        """Rows of `rewards`; a trajectory that the verifier failed on is scored once more."""
        return score_twice(
            run,
            run.name,
            self.trajectories,
            lambda row: spend(row["trajectory_id"], Failure.VERIFIER, row["detail"]),
        )

    def count_failure(self, sample: int, attempt: int, another_draw: bool) -> None:
        """A try that failed: the next one has another number and, with `another_draw`, another seed."""
        self.tries[sample] = max(self.tries.get(sample, 0), attempt + 1)
        self.draws[sample] = self.draws.get(sample, 0) + another_draw

    def add(self, row: dict[str, Any]) -> None:
        """Keep of a row of `trajectories` what is needed before the step."""
        self.trajectories.append({name: row[name] for name in KEPT})

    def _task(self, sample: int, seed: int) -> Task:
        step, attempt, index = self.row["step"], self.row["attempt"], self.group_id.rsplit("-", 1)[1]
        root = counter_seed(seed, step, attempt, index, self.row["prompt_id"], sample)
        if draws := self.draws.get(sample, 0):
            root = counter_seed(root, "try", draws)
        return Task(f"{self.group_id}-s{sample:02d}", sample, root, self.tries.get(sample, 0))


KEPT = (
    "step", "attempt", "trajectory_id", "prompt_id", "text", "messages", "finish_reason", "sample", "leaf", "loss_mask",
    "version_spans",
)  # fmt: skip
"""Columns of `trajectories` that a group keeps in memory."""


def is_flat(group: Group, rewards: list[dict[str, Any]]) -> bool:
    """Whether all scored samples got one reward, so that the group has no gradient; each sample counts once."""
    first = {row["trajectory_id"] for row in group.trajectories if row["leaf"] == 0}
    scores = {row["score"] for row in rewards if row["trajectory_id"] in first and row["score"] is not None}
    return len(scores) < 2


def play_group(run: Run, group: Group, draw: Draw, writer: Writer, spend: Spend) -> None:
    """Draw what is missing of a group until every sample has its trajectory; each try that fails is a row and is spent.

    Raises:
        BudgetSpent: from `spend`.
        Others: from `draw`, and from whatever is at fault beyond one trajectory.
    """
    named = named_draw(draw, group.prompt["task"])
    while tasks := group.missing(run.spec.seed):
        started = time.time()
        for outcome in run.play(tasks, group.prompt, named, group.group_id):
            if isinstance(outcome, Failed):
                _failed(run, group, outcome, writer)
                spend(outcome.trajectory_id, outcome.kind, outcome.detail)
                continue
            rows = [_row(run, group, trajectory, started) for trajectory in outcome]
            for row in rows:
                group.add(row)
            writer.add("trajectories", rows)


def named_draw(draw: Draw, task: str) -> Draw:
    """`draw`, with requests that tell the engine which family of questions they are of."""
    return lambda requests, key: draw([replace(request, task=task) for request in requests], key)


def _failed(run: Run, group: Group, failed: Failed, writer: Writer) -> None:
    group.count_failure(failed.sample, failed.attempt, failed.kind not in SAME_DRAW)
    row = {
        "run": run.name, "step": group.row["step"], "attempt": group.row["attempt"],
        "trajectory_id": failed.trajectory_id, "try": failed.attempt, "kind": str(failed.kind),
        "detail": failed.detail[:2000], "tokens": failed.tokens, "engine": run.engine_name(), "at": time.time(),
    }  # fmt: skip
    writer.add("failures", [row])


def _row(run: Run, group: Group, trajectory: Trajectory, started: float) -> dict[str, Any]:
    return {
        "run": run.name, "step": group.row["step"], "attempt": group.row["attempt"],
        "trajectory_id": trajectory.trajectory_id, "group_id": group.group_id, "prompt_id": group.row["prompt_id"],
        "sample": trajectory.sample, "leaf": trajectory.leaf, "turns": trajectory.turns,
        "messages": as_json(trajectory.messages), "tokens": list(trajectory.tokens),
        "logprobs": list(trajectory.logprobs), "model_logprobs": list(trajectory.model_logprobs),
        "loss_mask": list(trajectory.loss_mask),
        "routing": as_row(trajectory.routing) if trajectory.routing else None,
        "drafted": None if trajectory.drafted is None else list(trajectory.drafted),
        "version_spans": [{"version": v, "start": a, "end": b} for v, a, b in trajectory.versions],
        "finish_reason": trajectory.finish_reason, "seed": trajectory.seed, "text": trajectory.text,
        "engine": run.engine_name(), "started_at": started, "seconds": trajectory.seconds,
    }  # fmt: skip
