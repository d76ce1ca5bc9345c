"""DAGSTER_HOME: a folder below the root, with the settings of the repository's dagster.yaml."""

from __future__ import annotations

import os
from pathlib import Path

from furlong.ops.spec import Placement

SETTINGS = Path(__file__).resolve().parent.parent / "dagster.yaml"


def ensure_dagster_home(placement: Placement) -> Path:
    """Create `<root>/dagster` and point this process and its children to it; returns the folder.

    A dagster.yaml that somebody put there stays; without one, the repository's is linked.

    Raises:
        FileNotFoundError: the package was installed without its repository.
    """
    home = placement.folder / "dagster"
    home.mkdir(parents=True, exist_ok=True)
    link = home / "dagster.yaml"
    if not link.is_file():
        if not SETTINGS.is_file():
            raise FileNotFoundError(f"{SETTINGS} is missing; install from a clone, or write {link} by hand")
        part = home / f"dagster.yaml.{os.getpid()}"
        part.symlink_to(SETTINGS)
        part.replace(link)
    os.environ["DAGSTER_HOME"] = str(home)
    return home


def close_orphaned_runs(placement: Placement) -> list[str]:
    """Record as failed the Dagster runs whose process is gone, and return their ids; those with a live one go on.

    They would count as running for ever and keep their places in the pools. The daemon launches them again, as it does
    with those that it loses itself (`run_retries` in dagster.yaml).
    """
    from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

    from furlong.resources.run_launcher import is_lost

    unfinished = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
    with DagsterInstance.from_config(str(placement.folder / "dagster")) as instance:
        lost = [run for run in instance.get_runs(RunsFilter(statuses=unfinished)) if is_lost(instance, run)]
        for run in lost:
            if run.status == DagsterRunStatus.CANCELING:
                instance.report_run_canceled(run, "Its process has ended; launch it again and it continues.")
            else:
                instance.report_run_failed(run, "Its process ended without a word; it continues when launched again.")
    return [run.run_id for run in lost]
