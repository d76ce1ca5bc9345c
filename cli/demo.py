"""`furlong demo`: drive one run from the terminal, with live progress, and tell what came of it."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console(highlight=False)


def demo(
    spec: Annotated[
        str, typer.Option(help="Spec to run: smollm2, tiny, tools, moe, or the path of a spec file.")
    ] = "smollm2",
    seed: Annotated[int, typer.Option(help="The run's seed.")] = 0,
    run: Annotated[str, typer.Option(help="Name of the run; empty continues the unfinished one or starts anew.")] = "",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="A key of the spec and its value, e.g. trainer.backend=megatron; may be repeated."),
    ] = None,
) -> None:
    """Train a language model by RL and show what happened; run it again after any interruption to continue."""
    from furlong.cli.live import LiveView
    from furlong.cli.report_view import show_report
    from furlong.ops.spec import Placement, SpecError, load_spec, parse_changes
    from furlong.resources.dagster_home import close_orphaned_runs, ensure_dagster_home
    from furlong.resources.models import resolve

    try:
        placement = Placement.from_env()
        overrides = parse_changes(changes or [])
        wanted = load_spec(spec, {"seed": seed, **overrides})
        with console.status(f"making or checking the model {wanted.model.source}"):
            resolve(wanted.model, wanted.data, wanted.seed, placement.folder)
    except SpecError as err:
        console.print(str(err), style="red", markup=False)
        raise typer.Exit(2) from err
    ensure_dagster_home(placement)
    close_orphaned_runs(placement)
    with LiveView(console) as view:
        failure = _drive(placement, view, {"spec": spec, "seed": seed, "run": run, "overrides": overrides})
    if isinstance(failure, KeyboardInterrupt):
        console.print(
            "Interrupted. Nothing committed is lost: the same command continues from the last committed step."
        )
        raise typer.Exit(130)
    if failure is not None:
        console.print(f"{type(failure).__name__}: {failure}", style="red", markup=False)
        console.print("Nothing committed is lost: once that is mended, the same command continues after the last step.")
        console.print("The traceback is in Dagster: make ui shows it under Runs.")
        raise typer.Exit(1)
    show_report(console, view.report(placement), placement)


def _drive(placement, view, config: dict) -> BaseException | None:
    """Execute the Dagster job `rl_run` in this process; returns what stopped it, if anything did."""
    from dagster import DagsterInstance
    from dagster._core.errors import DagsterExecutionInterruptedError

    from furlong.pipelines.definitions import defs
    from furlong.resources.system import System

    quiet = {"console": {"config": {"log_level": "CRITICAL"}}}
    with DagsterInstance.get() as instance:
        try:
            defs.resolve_job_def("rl_run").execute_in_process(
                run_config={"ops": {"block": {"config": config}}, "loggers": quiet},
                resources={"system": System(placement, view)},
                instance=instance,
            )
        except (KeyboardInterrupt, DagsterExecutionInterruptedError):
            return KeyboardInterrupt()
        except Exception as err:  # shown by the caller; Dagster has the traceback
            return err
    return None
