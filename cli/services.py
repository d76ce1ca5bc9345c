"""`furlong ui`, `furlong status`, `furlong down`: what runs beside a training run."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

console = Console(highlight=False, soft_wrap=True)


def ui(
    port: Annotated[int | None, typer.Option(help="Port; by default 3000 or, if taken, a free one.")] = None,
) -> None:
    """Open the Dagster UI on this root's runs, until Ctrl-C; runs that it launched go on."""
    from furlong.ops.spec import Placement
    from furlong.resources.services import serve
    from furlong.resources.services import ui as start

    with _plain_errors():
        placement = Placement.from_env()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            console.print("starting the Dagster UI ...")
            with start(placement, port) as running:
                console.print(f"Dagster UI: {running.url}   (Ctrl-C ends it)")
                console.print(f"MLflow:     {running.mlflow or 'not started, as port 5000 is taken'}")
                serve(placement, running, console.print)
        except KeyboardInterrupt:
            console.print("ended")


def status() -> None:
    """Show what of this root is running: Ray, actors, drivers, the UI."""
    from furlong.ops.spec import Placement
    from furlong.resources.cluster import cluster_lives, ensure_cluster
    from furlong.resources.processes import mark, marked
    from furlong.resources.ray_head import running_head
    from furlong.resources.run_lock import driven_runs
    from furlong.resources.stopping import stopped_runs

    with _plain_errors():
        placement = Placement.from_env()
        head = running_head(placement.folder)
        address = placement.ray_address or (f"{head.address}, process {head.pid}" if head else "not running")
        console.print(f"root     {placement.folder}")
        console.print(f"ray      {address}")
        if cluster_lives(placement):
            from furlong.resources.actors import code_hash, live_actors

            ensure_cluster(placement)
            for name in live_actors(placement):
                age = "today's code" if name.code == code_hash() else "OLD code"
                console.print(f"actor    {name.role} of run {name.run}, {age} ({name.code})")
        for run, pid in driven_runs(placement.folder).items():
            console.print(f"driver   process {pid} drives run {run}")
        for run, stop in stopped_runs(placement.folder).items():
            console.print(f"stopped  run {run}, {stop.reason}; `furlong resume {run}` lets it go on", markup=False)
        services = marked(mark("ui", placement.folder))
        console.print(f"ui       {f'{len(services)} processes' if services else 'not running'}")


def down() -> None:
    """End the UI, the runs that it launched and Ray of this root; runs can be continued after their last committed step."""
    from furlong.ops.spec import Placement
    from furlong.resources.cluster import stop_cluster
    from furlong.resources.run_lock import driven_runs
    from furlong.resources.services import end_ui, stop_workers

    with _plain_errors():
        placement = Placement.from_env()
        for run, pid in driven_runs(placement.folder).items():
            console.print(f"[yellow]run {run} is being driven by process {pid} and will be stopped[/yellow]")
        ended = [*end_ui(placement), *stop_workers(placement), *stop_cluster(placement)]
        for line in ended:
            console.print(f"ended {line}", markup=False)
        if not ended:
            console.print(f"nothing of {placement.folder} was running")


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Errors that a person can act on are shown as their message alone."""
    from furlong.ops.spec import SpecError
    from furlong.resources.cluster import ClusterError
    from furlong.resources.processes import LeftoverError
    from furlong.resources.run_lock import LockHeld
    from furlong.resources.services import ServiceError

    try:
        yield
    except (SpecError, ClusterError, LeftoverError, LockHeld, ServiceError) as err:
        console.print(str(err), style="red", markup=False)
        raise typer.Exit(1) from err
