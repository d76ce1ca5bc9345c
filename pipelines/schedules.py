"""Schedules, all switched off until a person switches them on in the UI."""

from dagster import (
    DefaultScheduleStatus,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    schedule,
)

from furlong.ops.spec import Placement
from furlong.ops.watch.settings import read_watch
from furlong.pipelines.compact_lake import compact_lake
from furlong.pipelines.rl_run import rl_run
from furlong.pipelines.sensors import request
from furlong.resources.stopping import stopped


@schedule(
    job=rl_run,
    cron_schedule="0 2 * * *",
    default_status=DefaultScheduleStatus.STOPPED,
    description="At 02:00 UTC, a block of steps of the run in watch.yaml's `nightly`.",
)
def nightly_retrain(context: ScheduleEvaluationContext):
    """A stopped run stays stopped."""
    root = Placement.from_env().folder
    wanted = read_watch(root).nightly
    if wanted is None:
        return SkipReason("watch.yaml has no `nightly`")
    if stopped(root, wanted.run):
        return SkipReason(f"run {wanted.run} was stopped; `furlong resume {wanted.run}` lets it go on")
    return RunRequest(**request(wanted))


weekly_compaction = ScheduleDefinition(
    job=compact_lake,
    name="weekly_compaction",
    cron_schedule="0 4 * * 0",
    default_status=DefaultScheduleStatus.STOPPED,
    description="On Sundays at 04:00 UTC: fewer, larger files in the lake.",
)

SCHEDULES = [nightly_retrain, weekly_compaction]
