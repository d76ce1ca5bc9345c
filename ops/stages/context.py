"""What a stage is given and what it gives back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from furlong.ops.protocols import Commit, GenerateRequest, LakeLike, Sample, Verifier
from furlong.ops.rollouts.trajectory import Draw, Outcome, Task
from furlong.ops.spec import RunSpec

STAGES = ("prompts", "rollouts", "rewards", "train_step", "weight_publish")
"""The stages of a step, in order; `evals` runs beside them."""


class StageError(RuntimeError):
    """A stage that must not commit; the message names the rows at fault and the remedy."""


@dataclass(frozen=True)
class StepKey:
    """Which step of which run; a step repeated on purpose has attempt 2, 3, ..."""

    run: str
    step: int
    attempt: int = 1

    def columns(self) -> dict[str, Any]:
        """The key columns that every per-step table begins with."""
        return {"run": self.run, "step": self.step, "attempt": self.attempt}

    def __str__(self) -> str:
        return f"{self.run} step {self.step}" + (f" attempt {self.attempt}" if self.attempt > 1 else "")


class Engines(Protocol):
    """All engines of a run at one weights version."""

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Draw all replies, in the order asked."""

    def fingerprint(self) -> str:
        """What the replies were computed with."""


class Teacher(Protocol):
    """The model that a run distils, served by an engine of its own."""

    digest: str
    """64 hex digits over its folder."""

    def score(self, rows: list[tuple[tuple[int, ...], int]], temperature: float) -> list[list[float]]:
        """See `Engine.score`."""


class Pump(Protocol):
    """Draws groups, as far ahead as the staleness bound lets it (`resources.rollouts.pump`)."""

    def gather(self, key: StepKey, version: int) -> dict[str, Any]:
        """The row of `batches` of a step that starts from weights `version`; waits until there are enough groups."""


class StepTrainer(Protocol):
    """A trainer that finds its own state and batches in the lake (`resources.trainers.host`)."""

    def base(self) -> dict[str, Any]:
        """{tensors, digest, full_bytes} of the base model's weights in the published dtype."""

    def take_step(self, step: int, attempt: int) -> dict[str, Any]:
        """Take the step, or return the record of having just taken it; the record is a row of `steps`
        without `version_after`, beside `trainer_scores`, rows of that table. Raises when the lake already holds the step."""

    def publishable(self, step: int, attempt: int) -> dict[str, Any]:
        """{deltas, tensors, digest, full_bytes, delta_bytes, changed_fraction} of the weights after a step."""

    def anchor(self, version: int, digest: str) -> str:
        """Write the weights of that digest, which it must hold, as a complete copy; returns its place below the lake."""


class Run(Protocol):
    """An opened run: its identity and the long-lived parties that its stages talk to, each connected on first use."""

    name: str
    spec: RunSpec
    dataset: str
    lake: LakeLike
    verifier: Verifier
    trainer: StepTrainer
    teacher: Teacher
    """Only where the algorithm needs one."""
    pump: Pump
    context_length: int
    train_prompts: int
    """Number of training prompts in the dataset, as committed."""
    stage_deadline: float
    """Seconds that a stage may wait for others."""
    publish_deadline: float
    """Seconds that engines may take to change weights."""

    def prompts_at(self, positions: list[int]) -> dict[int, dict[str, Any]]:
        """Position -> row of `prompts`, of training prompts."""

    def prompts_of(self, prompt_ids: list[str]) -> dict[str, dict[str, Any]]:
        """Id -> row of `prompts`."""

    def render(self, prompt: dict[str, Any]) -> list[int]:
        """Token ids of a row of `prompts` as environment and chat template begin its conversation."""

    def decode(self, ids: list[int]) -> str:
        """The text of a reply's tokens."""

    def play(
        self, tasks: list[Task], prompt: dict[str, Any], draw: Draw, key: str, greedy: bool = False
    ) -> list[Outcome]:
        """Play a prompt in the run's environment, all tasks together; `key` names what should stay on one engine."""

    def engine_name(self) -> str:
        """What the run's replies are computed with, in words."""

    def prompt_rows(self) -> pa.Table:
        """The rows of `prompts` that this run's data section describes."""

    def engines_at(self, version: int) -> Engines:
        """The engines, each brought to `version` from the lake if need be and proved by digest."""

    def publish(self, row: dict[str, Any]) -> dict[str, Any]:
        """Bring the staged version `row` to every engine and flip; returns the row's columns that tell how it went.

        Raises:
            StageError: an engine could not stage or prove it; the version before serves everywhere.
        """

    @property
    def fence(self) -> int:
        """This driver's fencing token: the lake and the engines refuse it once a later driver has taken one."""


@dataclass
class StageReport:
    """What a stage did, for people: everything in it can be derived again from the lake."""

    stage: str
    key: StepKey
    commits: list[Commit] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Numbers and short strings worth showing."""
    seconds: float = 0.0
    """Wall time of the stage."""
    work_seconds: float = 0.0
    """The part of `seconds` spent in engine, trainer or verifier."""

    @property
    def wrote(self) -> bool:
        """False when everything was committed already: the stage was repeated, or the pump was there before it."""
        return any(commit.wrote for commit in self.commits)

    def note(self, commit: Commit) -> None:
        self.commits.append(commit)

    def work(self, call: Callable[[], Any]) -> Any:
        """Run `call` and count its time as the stage's own work."""
        begin = time.perf_counter()
        try:
            return call()
        finally:
            self.work_seconds += time.perf_counter() - begin


@contextmanager
def reporting(stage: str, key: StepKey) -> Iterator[StageReport]:
    """Time a stage."""
    report = StageReport(stage, key)
    begin = time.perf_counter()
    yield report
    report.seconds = time.perf_counter() - begin
