"""DAGSTER_HOME: a folder below the root, with the settings of the repository's dagster.yaml."""

from __future__ import annotations

import os
from pathlib import Path

from furlong.ops.spec import Placement
from furlong.resources.run_lock import driven_runs

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
    """Record as failed the Dagster runs whose process was killed, and return their ids.

    They would count as running for ever, and with one run at a time nothing else would leave the queue. A live run
    drives a furlong run, so while any is driven nothing is closed.
    """
    if driven_runs(placement.folder):
        return []
    from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

    unfinished = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
    with DagsterInstance.from_config(str(placement.folder / "dagster")) as instance:
        runs = instance.get_runs(RunsFilter(statuses=unfinished))
        for run in runs:
            instance.report_run_failed(run, "Its process ended without a word; launch it again and it continues.")
    return [run.run_id for run in runs]
