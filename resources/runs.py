"""A run opened for driving: its identity from the lake, and its engine, trainer and verifier, each met on first use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from furlong.ops import records
from furlong.ops.history import draft_twins, load_series
from furlong.ops.protocols import StaleFence
from furlong.ops.report import build_report
from furlong.ops.rollouts.trajectory import Draw, Outcome, Task
from furlong.ops.sessions.template import ChatTemplate
from furlong.ops.spec import Placement, RunSpec
from furlong.ops.stages.chain import batch_groups, next_step
from furlong.ops.stages.context import STAGES, Run, StageError, StageReport, StepKey
from furlong.ops.stages.evals import evals
from furlong.ops.stages.prompts import prompts
from furlong.ops.stages.rewards import rewards
from furlong.ops.stages.rollouts import rollouts
from furlong.ops.stages.train_step import train_step
from furlong.ops.stages.weight_publish import weight_publish
from furlong.ops.tasks.prompts import prompt_rows
from furlong.ops.tasks.render import ChatTokenizer, load_tokenizer
from furlong.ops.weights.costs import choose
from furlong.ops.weights.layout import specs
from furlong.resources.cluster import own_address
from furlong.resources.drives import Drive
from furlong.resources.lake import Lake
from furlong.resources.models import ModelFolder
from furlong.resources.remote_engine import RemoteEngine, end_superfluous, engine_count, start_engine
from furlong.resources.remote_trainer import RemoteTrainer, start_trainer
from furlong.resources.rollouts.players import Player, make_player
from furlong.resources.rollouts.pump import Pump
from furlong.resources.router import Router, Shared
from furlong.resources.teacher import Teacher
from furlong.resources.tracking import Tracker
from furlong.resources.verifier_pool import VerifierPool
from furlong.resources.weights.fleet import Fleet
from furlong.resources.weights.publisher import Publication, PublishError, publish

RECENT = 20
"""How many versions back `auto` looks to compare transports."""

PERFORM: dict[str, Callable[[Run, StepKey], StageReport]] = {
    "prompts": prompts,
    "rollouts": rollouts,
    "rewards": rewards,
    "train_step": train_step,
    "weight_publish": weight_publish,
    "evals": evals,
}


class Observer(Protocol):
    """Told what happens while it happens; the live view of the terminal is one."""

    def run_opened(self, run: OpenRun) -> None: ...
    def stage_started(self, stage: str, key: StepKey) -> None: ...
    def stage_finished(self, report: StageReport) -> None: ...
    def step_finished(self, step: int, drive: Drive) -> None: ...


class OpenRun:
    """Implements `ops.stages.context.Run`."""

    def __init__(
        self, row: dict[str, Any], spec: RunSpec, model: ModelFolder, placement: Placement, teacher_digest: str = ""
    ):
        """
        Args:
            teacher_digest: from `check_teacher`; empty for a run without a teacher.
        """
        self.name: str = row["run"]
        self.dataset: str = row["dataset"]
        self.spec, self.model, self.placement = spec, model, placement
        self.lake = Lake(placement.lake_uri())
        self.observer: Observer | None = None
        self.drive: Drive | None = None
        self.dagster_run = ""
        """Id of the Dagster run that drives it; empty where none does."""
        self._times: list[dict[str, Any]] = []
        self._teacher_digest = teacher_digest
        self._series: dict[str, dict[int, float]] | None = None

    @property
    def folder(self) -> Path:
        """Files beside the run that decide nothing: saved trainer states, drives, the report."""
        return self.placement.folder / "runs" / self.name

    @cached_property
    def tokenizer(self) -> ChatTokenizer:
        return load_tokenizer(self.model.path)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @cached_property
    def verifier(self) -> VerifierPool:
        worker = VerifierPool(self.placement.verify_deadline)
        worker.start()
        return worker

    @cached_property
    def trainer(self) -> RemoteTrainer:
        return start_trainer(self.name, self.spec, self.model, self.placement)

    @cached_property
    def teacher(self) -> Teacher:
        teacher = Teacher(self.name, self.spec, self.placement, self._teacher_digest)
        teacher.start()
        return teacher

    @cached_property
    def engines(self) -> Fleet:
        count = engine_count(self.placement)
        end_superfluous(self.name, self.placement)
        with ThreadPoolExecutor(count) as pool:
            members = list(pool.map(self._start_engine, range(count)))
        return Fleet(self.name, self.lake, str(self.model.path), members, self._restart_engine)

    @cached_property
    def router(self) -> Router:
        return Router(self.engines)

    @cached_property
    def pump(self) -> Pump:
        return Pump(self, self.router)

    @cached_property
    def player(self) -> Player:
        deadline, context = self.placement.reply_deadline, self.model.context_length
        return make_player(self.spec, self.template, deadline, context, self.folder)

    @cached_property
    def fence(self) -> int:
        return self.lake.take_fence(self.name)

    @cached_property
    def tracker(self) -> Tracker:
        return Tracker(self.placement, self.name, self.spec)

    def connect(self) -> None:
        """Meet all parties at once, since each takes seconds to start."""
        parties = ["verifier", "tracker", "tokenizer", "engines", "trainer"]
        parties += ["teacher"] if self._teacher_digest else []
        with ThreadPoolExecutor(len(parties)) as pool:
            for future in [pool.submit(getattr, self, name) for name in parties]:
                future.result()

    def renew(self) -> None:
        """Forget the fencing token and what engines proved: another process may have driven this run since then."""
        vars(self).pop("fence", None)
        if "engines" in vars(self):
            self.engines.forget()

    def pause(self) -> None:
        """Stop drawing; whoever drives this run next goes on from what was drawn."""
        with ExitStack() as closing:  # the last first, and each of them whatever another one raises
            for name in ("player", "router", "pump"):
                if party := vars(self).pop(name, None):
                    closing.callback(party.close)

    def disconnect(self) -> None:
        """Forget everybody who was met, so that each is found or started anew: whoever calls has lost one of them."""
        self.pause()
        if verifier := vars(self).pop("verifier", None):
            verifier.close()
        for name in ("engines", "trainer", "teacher", "fence"):
            vars(self).pop(name, None)

    @property
    def context_length(self) -> int:
        return self.model.context_length

    @cached_property
    def train_prompts(self) -> int:
        count = self.lake.count("prompts", {"dataset": self.dataset, "split": "train"})
        if not count:
            raise StageError(f"run {self.name}: dataset {self.dataset} has no training prompts; run `prompts` first")
        return count

    @property
    def stage_deadline(self) -> float:
        return self.placement.stage_deadline

    @property
    def publish_deadline(self) -> float:
        return self.placement.publish_deadline

    def prompts_at(self, positions: list[int]) -> dict[int, dict[str, Any]]:
        where = {"dataset": self.dataset, "split": "train", "position": positions}
        return {row["position"]: row for row in self.lake.read("prompts", where).to_pylist()}

    def prompts_of(self, prompt_ids: list[str]) -> dict[str, dict[str, Any]]:
        where = {"dataset": self.dataset, "prompt_id": prompt_ids}
        return {row["prompt_id"]: row for row in self.lake.read("prompts", where).to_pylist()}

    def render(self, prompt: dict[str, Any]) -> list[int]:
        return self.player.render(prompt)

    def decode(self, ids: list[int]) -> str:
        return self.template.reply_text(ids)

    def play(
        self, tasks: list[Task], prompt: dict[str, Any], draw: Draw, key: str, greedy: bool = False
    ) -> list[Outcome]:
        return self.player.play(tasks, prompt, draw, key, greedy)

    def engine_name(self) -> str:
        return self.engines.fingerprint()

    def prompt_rows(self) -> pa.Table:
        return records.rows("prompts", prompt_rows(self.spec.data, self.spec.seed))

    def engines_at(self, version: int) -> Shared:
        return self.router.at(version, self.fence)

    def publish(self, row: dict[str, Any]) -> dict[str, Any]:
        """See `ops.stages.context.Run`; what fails by another transport is tried once more from the lake's own rows."""
        deltas = self.lake.read("weight_deltas", {"run": self.name, "version": row["version"]})
        chosen = self._transport(row, deltas)
        retried_because = ""
        updating = self.pump.updating() if "pump" in vars(self) else nullcontext()
        with updating, self.engines.publication():
            try:
                told = self._publish(row, deltas, chosen)
            except PublishError as err:
                if isinstance(err.__cause__, StaleFence):
                    raise
                retried_because = str(err)
                # A call of the first try may still be under way; with the new token whatever it brings is too late.
                self.fence = self.lake.take_fence(self.name, held=self.fence)
                told = self._publish(row, deltas, "disk_delta")
            self.engines.proved(row["version"])
        if "pump" in vars(self):
            self.pump.published(row["step"], row["version"])
        proofs = [{"engine": p.engine, "version": p.version, "digest": p.digest} for p in told.attestations]
        numbers = {name: getattr(told, name) for name in ("transport", "wire_bytes", "stage_seconds", "pause_seconds")}
        return {"attestations": proofs, **numbers, "retried_because": retried_because}

    def _publish(self, row: dict[str, Any], deltas: pa.Table, transport: str) -> Publication:
        engines = self.engines.before(row, self.fence)
        deadline, host = self.placement.publish_deadline, own_address(self.placement)
        inflight = "retract" if self.spec.rollout.on_update == "retract" else "in_place"
        return publish(
            engines, self.trainer, row, deltas, transport, self.fence, deadline, host=host, inflight=inflight
        )

    def _transport(self, row: dict[str, Any], deltas: pa.Table) -> str:
        """The placement's, or for `auto` the one that is expected to be fastest by what earlier publications took."""
        asked = self.placement.transport
        if not self.trainer.holds(row["digest"]):
            return "disk_delta"  # a trainer that was lost meanwhile has nothing to send
        if asked != "auto":
            return asked
        recent = {
            "run": self.name,
            "state": "live",
            "version": list(range(max(1, row["version"] - RECENT), row["version"])),
        }
        columns = ["version", "transport", "wire_bytes", "stage_seconds"]
        changed = set(deltas["name"].to_pylist())
        full = sum(spec.nbytes for spec in specs(row["tensors"]) if spec.name in changed)
        engines = engine_count(self.placement)
        sizes = {"broadcast": full, "p2p": full * engines, "disk_delta": row["delta_bytes"] * engines}
        return choose(self.lake.read("weight_versions", recent, columns).to_pylist(), sizes)

    def _start_engine(self, number: int) -> RemoteEngine:
        return start_engine(self.name, self.spec, self.model, self.placement, number)

    def _restart_engine(self, number: int) -> RemoteEngine:
        self.engines.members[number].end()
        return self._start_engine(number)

    def perform(self, stage: str, key: StepKey) -> StageReport:
        """Run one stage of a step, telling the observer and MLflow."""
        if self.observer:
            self.observer.stage_started(stage, key)
        begin = time.time()
        report = PERFORM[stage](self, key)
        self._tell_pump(report)
        self._remember(report)
        self._time(report, begin)
        if self.drive:
            self.drive.add(report)
        if self.observer:
            self.observer.stage_finished(report)
        return report

    def _time(self, report: StageReport, begin: float) -> None:
        """Put a step's stages into `stage_times` when its last one is done: one commit for all of them."""
        key = report.key
        if report.wrote and report.stage in STAGES[1:]:
            self._times.append(
                {
                    **key.columns(), "stage": report.stage, "started_at": begin, "seconds": report.seconds,
                    "work_seconds": report.work_seconds, "dagster_run": self.dagster_run,
                }
            )  # fmt: skip
        if report.stage != STAGES[-1]:
            return
        mine = [row for row in self._times if (row["step"], row["attempt"]) == (key.step, key.attempt)]
        self._times.clear()
        if mine:
            where = {**key.columns(), "stage": [row["stage"] for row in mine]}
            self.lake.replace("stage_times", where, records.rows("stage_times", mine))

    def _tell_pump(self, report: StageReport) -> None:
        """What a pump that was restored from the lake knows already, one that is under way is told."""
        if "pump" not in vars(self) or not report.wrote:
            return
        if report.stage == "rollouts":
            self.pump.admitted(report.key, [group["group_id"] for group in batch_groups(self.lake, report.key)])
        elif report.stage == "train_step":
            self.pump.trained(report.key)

    def series(self, value: str) -> list[tuple[int, float]]:
        """(step, value) of every step so far, for plots."""
        return sorted(self._known().get(value, {}).items())

    @cached_property
    def twins(self) -> dict[str, list[tuple[int, float]]]:
        """See `draft_twins`, as of the first look."""
        return draft_twins(self.lake, self.name, self.spec)

    def _known(self) -> dict[str, dict[int, float]]:
        if self._series is None:
            self._series = {name: dict(points) for name, points in load_series(self.lake, self.name).items()}
        return self._series

    def _remember(self, report: StageReport) -> None:
        numbers = {k: float(v) for k, v in report.values.items() if isinstance(v, (int, float))}
        for name, value in numbers.items():
            self._known().setdefault(name, {})[report.key.step] = value
        if report.stage != "prompts":
            self.tracker.gather(report.key.step, report.stage, {**numbers, "seconds": report.seconds})

    def links(self) -> dict[str, str]:
        """Where else to look at this run."""
        return {"mlflow": self.tracker.url()}

    def next_step(self) -> int:
        """The first step with something left to do; one past the last when the run is complete."""
        return next_step(self.lake, self.name, self.spec.steps)

    @contextmanager
    def step_timer(self, step: int) -> Iterator[None]:
        """Measure a step's wall time beside the time its stages report."""
        with self.drive.step(step):
            yield
        self.tracker.log()
        if self.observer:
            self.observer.step_finished(step, self.drive)

    def finish(self) -> dict[str, Any] | None:
        """When all steps are done: put ledger and trainer's state on disk, write report.json, and return the report."""
        if self.next_step() <= self.spec.steps:
            return None
        self.pump.settle()
        self.trainer.settle()
        self.drive.save(self.folder)
        report = build_report(self.lake, self.name, self.spec, Drive.saved(self.folder))
        Drive.write_report(self.folder, report)
        self.tracker.finish(report)
        return report
