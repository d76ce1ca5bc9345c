"""Dagster's run launcher: each run in a process of its own that outlives web server, daemon and code servers.

Dagster's default would start it below a code server, which is a child of the web server or the daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster import DagsterRun, DagsterRunStatus
from dagster._core.launcher.base import CheckRunHealthResult, LaunchRunContext, RunLauncher, WorkerStatus
from dagster._grpc.types import ExecuteRunArgs
from dagster._serdes import ConfigurableClass, serialize_value

from furlong.ops.spec import Placement
from furlong.resources.workers import Worker, last_words, start_worker

if TYPE_CHECKING:
    from dagster import DagsterInstance
    from dagster._serdes import ConfigurableClassData

TAG = "furlong/worker"
"""Tag of a Dagster run that names the process executing it."""
GRACE = 60.0
"""Seconds that a terminated worker has to abandon its stage; what it was at is safe in the lake at any moment."""
UNTAGGED = 120.0
"""Seconds after its creation by which a run that somebody executes has named its process."""


class DetachedRunLauncher(RunLauncher, ConfigurableClass):
    """Named in dagster.yaml; has no settings, as everything is below FURLONG_ROOT."""

    def __init__(self, inst_data: ConfigurableClassData | None = None):
        self._inst_data = inst_data
        super().__init__()

    @property
    def inst_data(self) -> ConfigurableClassData | None:
        return self._inst_data

    @classmethod
    def config_type(cls) -> Mapping[str, Any]:
        return {}

    @classmethod
    def from_config_value(
        cls, inst_data: ConfigurableClassData, config_value: Mapping[str, Any]
    ) -> DetachedRunLauncher:
        return cls(inst_data)

    def launch_run(self, context: LaunchRunContext) -> None:
        run = context.dagster_run
        # The worker finds the instance by DAGSTER_HOME: its own copy here would hold what dagster.yaml may keep secret.
        arguments = ExecuteRunArgs(context.job_code_origin, run.run_id, None)
        worker = start_worker(Placement.from_env().folder, run.run_id, serialize_value(arguments))
        self._instance.add_run_tags(run.run_id, {TAG: str(worker)})

    def terminate(self, run_id: str) -> bool:
        """Interrupt a run's worker, which abandons its stage; one that has not ended after `GRACE` seconds is killed."""
        run = self._instance.get_run_by_id(run_id)
        if run is None or run.is_finished:
            return False
        self._instance.report_run_canceling(run)
        worker = worker_of(run)
        if worker is None or worker.elsewhere:
            self._instance.report_engine_event(f"this machine has no process of it: {worker or 'none is known'}", run)
            return False
        interrupted = worker.interrupt()
        threading.Thread(target=self._see_off, args=(run_id, worker), name=f"see-off-{run_id}", daemon=True).start()
        return interrupted

    def _see_off(self, run_id: str, worker: Worker) -> None:
        if not worker.wait(GRACE):
            worker.end()
            worker.wait(GRACE)
        run = self._instance.get_run_by_id(run_id)
        if run is not None and run.status == DagsterRunStatus.CANCELING:
            self._instance.report_run_canceled(run, "Its process has ended; launch it again and it continues.")

    @property
    def supports_check_run_worker_health(self) -> bool:
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        worker = worker_of(run)
        if not is_lost(self._instance, run):
            return CheckRunHealthResult(WorkerStatus.RUNNING, run_worker_id=str(worker))
        return CheckRunHealthResult(
            WorkerStatus.FAILED, f"{worker or 'its process'} has ended", run_worker_id=str(worker)
        )

    def get_run_worker_debug_info(self, run: DagsterRun, include_container_logs: bool | None = True) -> str | None:
        return last_words(Placement.from_env().folder, run.run_id)


def worker_of(run: DagsterRun) -> Worker | None:
    """The process that executes a Dagster run; None as long as nobody has said which."""
    return Worker.parse(run.tags[TAG]) if TAG in run.tags else None


def is_lost(instance: DagsterInstance, run: DagsterRun) -> bool:
    """Whether no process executes this unfinished run any more.

    A launched run is tagged with its worker at once; one that is executed by whoever created it, such as `furlong demo`,
    tags itself when its first stage begins.
    """
    if worker := worker_of(run):
        return not worker.lives()
    record = instance.get_run_record_by_id(run.run_id)
    return record is None or time.time() - record.create_timestamp.timestamp() > UNTAGGED
