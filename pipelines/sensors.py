"""Sensors: what happens without a person. Settings are in `<root>/watch.yaml`, see docs/unattended.md."""

from dagster import (
    DagsterRunStatus,
    DefaultSensorStatus,
    RunFailureSensorContext,
    RunRequest,
    RunsFilter,
    SensorEvaluationContext,
    SkipReason,
    run_failure_sensor,
    sensor,
)

from furlong.ops.spec import Placement, load_spec
from furlong.ops.watch.continuous import next_block
from furlong.ops.watch.settings import Retrain, read_watch, resolve_urls
from furlong.pipelines.guard import RUN_TAG
from furlong.pipelines.rl_run import rl_run
from furlong.resources.run_lock import is_driven
from furlong.resources.stopping import stopped

NOTIFIED = "furlong/notified"
"""Tag of Dagster runs whose failure people were told of."""
WAITING = [
    DagsterRunStatus.QUEUED, DagsterRunStatus.NOT_STARTED, DagsterRunStatus.STARTING, DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]  # fmt: skip
SHOWN_LINES = 8


@run_failure_sensor(
    default_status=DefaultSensorStatus.RUNNING,
    minimum_interval_seconds=5,
    description="Tells the receivers in watch.yaml of a run that failed: run, stage, error, and how to go on.",
)
def failed_runs(context: RunFailureSensorContext):
    """The tag outlives a daemon that is killed before it has saved its cursor."""
    from furlong.resources.notify import notify

    root = Placement.from_env().folder
    urls = resolve_urls(read_watch(root).notify)
    run = context.instance.get_run_by_id(context.dagster_run.run_id)
    if not urls or run is None or NOTIFIED in run.tags:
        return SkipReason("nobody is to be told, or they were told already")
    name = run.tags.get(RUN_TAG, "")
    title = f"Furlong: {run.job_name} failed" + (f", run {name}" if name else "")
    notify(urls, title, failure_words(context, name))
    context.instance.add_run_tags(run.run_id, {NOTIFIED: "yes"})
    return None


def failure_words(context: RunFailureSensorContext, name: str) -> str:
    """Stage, the error's first lines, and what to do."""
    lines = []
    for event in context.get_step_failure_events():
        error = event.step_failure_data.error
        while error and error.cause:
            error = error.cause
        lines += [f"Stage {event.step_key}:", *(error.message.strip().splitlines()[:SHOWN_LINES] if error else [])]
    lines = lines or context.failure_event.message.strip().splitlines()[:SHOWN_LINES]
    where = f"Dagster run {context.dagster_run.run_id} (page /runs/{context.dagster_run.run_id} of the UI)."
    todo = f"Re-execute it there, or launch rl_run with run: {name}; it goes on after the last committed step."
    return "\n".join([*lines, where, *([todo] if name else [])])


@sensor(
    job=rl_run,
    default_status=DefaultSensorStatus.STOPPED,
    minimum_interval_seconds=10,
    description="Requests the next block of the run in watch.yaml's `continuous`, until its last step; a stopped run "
    "is left alone.",
)
def continuous_training(context: SensorEvaluationContext):
    """The run key, made of the first step that is left, is kept by Dagster: one block is requested once."""
    from furlong.ops.stages.chain import next_step
    from furlong.resources.lake import Lake

    placement = Placement.from_env()
    wanted = read_watch(placement.folder).continuous
    if wanted is None:
        return SkipReason("watch.yaml has no `continuous`")
    last = load_spec(wanted.spec, wanted.overrides).steps
    busy = is_driven(placement.folder, wanted.run) or bool(
        context.instance.get_runs(RunsFilter(tags={RUN_TAG: wanted.run}, statuses=WAITING), limit=1)
    )
    first = next_step(Lake(placement.lake_uri()), wanted.run, last)
    key, why = next_block(wanted.run, first, last, stopped(placement.folder, wanted.run) is not None, busy)
    return RunRequest(run_key=key, **request(wanted)) if key else SkipReason(why)


def request(wanted: Retrain) -> dict:
    """What a RunRequest of `rl_run` needs."""
    config = {"spec": wanted.spec, "run": wanted.run, "steps": wanted.steps, "overrides": wanted.overrides}
    return {"run_config": {"ops": {"block": {"config": config}}}, "tags": {RUN_TAG: wanted.run}}


SENSORS = [failed_runs, continuous_training]
