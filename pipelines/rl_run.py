"""`rl_run`: one Dagster run over a block of steps, logging the same materialisations as `rl_step`, step by step.

A Dagster run costs seconds, an event milliseconds; so a block of steps is one run. It begins after the last committed
step, whoever committed it, and a stage that is committed already only reports what stands in the lake.
"""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckEvaluation,
    AssetKey,
    AssetMaterialization,
    Config,
    OpExecutionContext,
    ResourceParam,
    job,
    op,
)
from pydantic import Field

from furlong.ops.stages.context import STAGES, StageReport, StepKey
from furlong.ops.stages.evals import evals_before
from furlong.pipelines.acceptance_check import check_event
from furlong.pipelines.checks import check_events
from furlong.pipelines.guard import training
from furlong.pipelines.metadata import metadata
from furlong.pipelines.partitions import STEPS, partition_key
from furlong.resources.stopping import stopped
from furlong.resources.system import System

if TYPE_CHECKING:
    from furlong.resources.runs import OpenRun


LAST_STEP = "furlong/last_step"
"""Tag of a Dagster run that names the step at which its block ends; re-executions inherit it."""


class Block(Config):
    """Which run, and how far."""

    spec: str = Field("tiny", description="A spec's name (tiny, smollm2) or the path of a spec file.")
    seed: int = Field(0, description="The run's seed.")
    run: str = Field(
        "", description="Run to continue or to start; empty: this spec's unfinished run, else another one."
    )
    steps: int = Field(0, description="Steps in this block; 0 goes on to the run's last step.")
    overrides: dict[str, Any] = Field({}, description="Dotted spec keys, e.g. {algorithm.learning_rate: 2.0e-5}.")


@op(pool="trainer")
def block(context: OpExecutionContext, config: Block, system: ResourceParam[System]) -> None:
    """Take the run's next steps."""
    name = system.start_run(config.spec, {"seed": config.seed, **config.overrides}, config.run)
    take_block(context, system, name, config.steps)


def take_block(context: OpExecutionContext, system: System, name: str, steps: int) -> None:
    """Take the next `steps` steps of a run that is in the lake (0: all that are left), for a job or for an asset."""
    context.log.info(f"run {name}: connecting to Ray, engine and trainer, which takes some seconds")
    driving = system.driving(name, dagster_run=context.run_id)
    with training(context, system, name), driving as run, Events(context, run) as events:
        events.log(run.perform("prompts", StepKey(name, 1)))
        first = run.next_step()
        last = last_step(context, first, steps, run.spec.steps)
        todo = f"steps {first} to {last} of {run.spec.steps}" if first <= last else "nothing is left to do"
        context.log.info(f"run {name}: {todo}")
        for step in range(first, last + 1):
            if mark := stopped(system.placement.folder, name):
                context.log.info(f"run {name} ends before step {step}, as it was stopped: {mark.reason}")
                break
            with run.step_timer(step):
                # Only the first of these steps can have been begun, and so repeated, before.
                _take(run, events, system.step_key(name, step) if step == first else StepKey(name, step))
            context.log.info(f"step {step} of {run.spec.steps}: reward {run.series('reward_mean')[-1][1]:.3f}")
        run.finish()


def last_step(context: OpExecutionContext, first: int, steps: int, most: int) -> int:
    """The step at which a block ends; tried again or re-executed, it ends where it was to end at first."""
    tags = context.instance.get_run_by_id(context.run_id).tags
    if LAST_STEP in tags:
        return int(tags[LAST_STEP])
    last = min(most, first + steps - 1) if steps else most
    context.instance.add_run_tags(context.run_id, {LAST_STEP: str(last)})
    return last


def _take(run: "OpenRun", events: "Events", key: StepKey) -> None:
    if evals_before(run.spec, key.step):
        # The engine still serves the version that the step starts from.
        events.log(run.perform("evals", key))
    for stage in STAGES[1:]:
        events.log(run.perform(stage, key))
    if key.step == run.spec.steps:
        events.log(run.perform("evals", key))


class Events:
    """Writes materialisations in the background and in order: Dagster's event log syncs to disk several times for each.

    The lake has the rows before an event is even queued, so an event lost in a crash costs a line in the UI, no data.
    Leaving the block waits for all of them and raises what any of them raised, unless something else ended the block.
    """

    DEADLINE = 120.0

    def __init__(self, context: OpExecutionContext, run: "OpenRun"):
        self._context, self._run = context, run
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="events")
        self._waiting: deque[Future] = deque()
        self._passed: dict[str, bool] = {}

    def log(self, report: StageReport) -> None:
        """Queue the materialisation of a stage; raises if an earlier one could not be written."""
        while self._waiting and self._waiting[0].done():
            self._waiting.popleft().result()
        checked = self._checked(report)
        self._waiting.append(self._pool.submit(self._write, report, metadata(report, self._run), checked))

    def _write(self, report: StageReport, facts: dict[str, Any], checked: list[AssetCheckEvaluation]) -> None:
        partition = None
        if report.stage != "prompts":
            partition = partition_key(report.key.run, report.key.step)
            self._context.instance.add_dynamic_partitions(STEPS.name, [partition, *self._next(report)])
        event = AssetMaterialization(AssetKey(report.stage), partition=partition, metadata=facts)
        self._context.log_event(event)
        for verdict in checked:
            self._context.log_event(verdict)

    def _checked(self, report: StageReport) -> list[AssetCheckEvaluation]:
        """Verdicts worth an event: all of the block's first step, later those that failed or are other than before."""
        if report.stage == "rollouts":
            return [check_event(self._run)] if self._run.spec.draft else []
        if report.stage != "train_step":
            return []
        told = {event.check_name: event for event in check_events(self._run, report.key)}
        news = [event for name, event in told.items() if not event.passed or self._passed.get(name) != event.passed]
        self._passed = {name: event.passed for name, event in told.items()}
        return news

    def _next(self, report: StageReport) -> list[str]:
        """The partition that a published step opens, for a person to materialise it with `rl_step`."""
        if report.stage != "weight_publish" or report.key.step >= self._run.spec.steps:
            return []
        return [partition_key(report.key.run, report.key.step + 1)]

    def __enter__(self) -> "Events":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._pool.shutdown(wait=False)
        late = wait(self._waiting, timeout=self.DEADLINE).not_done
        if kind is not None:
            return
        if late:
            raise TimeoutError(
                f"Dagster's event log took none of the last {len(late)} events within {self.DEADLINE:g} s; the run's rows "
                "are in the lake; find out what locks the database in DAGSTER_HOME and run again"
            )
        for future in self._waiting:
            future.result()


@job(description="Take a run's next steps: start it, or go on after its last committed step.")
def rl_run() -> None:
    block()
