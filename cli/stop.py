"""`furlong stop` and `furlong resume`: ending a run's training on purpose, and letting it go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from furlong.ops.spec import Placement

console = Console(highlight=False, soft_wrap=True)
RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
END_SECONDS = 150.0
"""How long `--now` waits: a driver that does not end by itself is killed before that."""


def stop(
    run: RunName,
    now: Annotated[
        bool, typer.Option("--now", help="Abandon the stage under way instead of finishing the step.")
    ] = False,
    reason: Annotated[
        str, typer.Option(help="Kept with the stop, for whoever wonders.")
    ] = "stopped with `furlong stop`",
) -> None:
    """End a run's training after the step under way; nothing begins another until it is resumed."""
    from furlong.resources.run_lock import driven_runs
    from furlong.resources.stopping import request_stop

    placement = _placement_of(run)
    request_stop(placement.folder, run, reason)
    driver = driven_runs(placement.folder).get(run)
    if driver is None:
        console.print(f"run {run} is stopped; nothing was driving it")
    elif not now:
        console.print(f"run {run} ends after the step that process {driver} is at")
    else:
        _terminate(placement, run)
        console.print(f"run {run} is stopped; what its stage had not committed is done again when it goes on")
    console.print(f"`furlong resume {run}`, or launching it by hand, lets it go on after its last committed step")


def resume(run: RunName) -> None:
    """Let a stopped run go on: continuous training takes it up, and so can you."""
    from furlong.resources.stopping import clear_stop

    placement = _placement_of(run)
    mark = clear_stop(placement.folder, run)
    if mark is None:
        console.print(f"run {run} was not stopped")
    else:
        console.print(f"run {run} may go on; it had been stopped: {mark.reason}", markup=False)
    console.print("continuous training takes it up where that is switched on; else launch rl_run in Dagster's UI")


def _placement_of(run: str) -> Placement:
    """Where the run is; status 2 when there is no such run."""
    from furlong.ops.spec import Placement, SpecError
    from furlong.resources.lake import Lake
    from furlong.resources.weights.run_model import run_row

    try:
        placement = Placement.from_env()
        run_row(Lake(placement.lake_uri()), run)
        return placement
    except SpecError as err:
        console.print(str(err), style="red", markup=False)
        raise typer.Exit(2) from err


def _terminate(placement: Placement, run: str) -> None:
    """Terminate the Dagster runs that drive a run, as the button in the UI does, and wait until they have ended."""
    from dagster import DagsterInstance, RunsFilter
    from dagster._core.storage.dagster_run import IN_PROGRESS_RUN_STATUSES

    from furlong.pipelines.guard import RUN_TAG
    from furlong.resources.dagster_home import ensure_dagster_home

    ensure_dagster_home(placement)
    with DagsterInstance.get() as instance:
        driving = instance.get_runs(RunsFilter(statuses=IN_PROGRESS_RUN_STATUSES, tags={RUN_TAG: run}))
        for each in driving:
            instance.run_launcher.terminate(each.run_id)
        until = time.monotonic() + END_SECONDS
        while not all(instance.get_run_by_id(each.run_id).is_finished for each in driving):
            if time.monotonic() > until:
                console.print(
                    f"a driver of run {run} has not ended within {END_SECONDS:g} s; `furlong status` names it"
                )
                raise typer.Exit(1)
            time.sleep(0.2)
