"""`furlong checks`: what the checks of a step said, and letting one through on purpose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from furlong.ops.stages.context import StepKey
    from furlong.resources.lake import Lake

app = typer.Typer(no_args_is_help=True, help="Show the checks of a step, or waive one that failed, with a reason.")
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run.")]
Step = Annotated[int, typer.Argument(metavar="STEP", min=1, help="The step.")]
Attempt = Annotated[int, typer.Option(help="Its attempt; 0 for the newest.")]


@app.command()
def show(run: RunName, step: Step, attempt: Attempt = 0) -> None:
    """Print every verdict on a step; the exit status is 1 if a blocking one did not pass."""
    with _opened(run, step, attempt) as (lake, key):
        rows = lake.read("checks", key.columns()).to_pylist()
        for row in rows:
            state = "passed" if row["passed"] else "FAILED" if row["blocking"] else "warns"
            style = "green" if row["passed"] else "red" if row["blocking"] else "yellow"
            console.print(f"{state:<7} {row['check']:<18} {row['message'] or row['found']}", style=style, markup=False)
        if not rows or any(row["blocking"] and not row["passed"] for row in rows):
            errors.print(
                f"{key}: {'no checks were made' if not rows else 'its weights are not published'}", markup=False
            )
            raise typer.Exit(1)


@app.command()
def waive(
    run: RunName,
    step: Step,
    check: Annotated[str, typer.Argument(help="The check's name.")],
    because: Annotated[str, typer.Option(help="Why; it stays in the lake.")],
    attempt: Attempt = 0,
) -> None:
    """Let a step's weights be published although a check failed."""
    from furlong.ops.stages.checks import waive as let_through

    with _opened(run, step, attempt) as (lake, key):
        let_through(lake, key, check, because)
        console.print(f"{key}: {check} waived; run the step again to publish its weights", markup=False)


@contextmanager
def _opened(run: str, step: int, attempt: int) -> Iterator[tuple[Lake, StepKey]]:
    from furlong.ops.spec import Placement, SpecError
    from furlong.ops.stages.chain import committed_step
    from furlong.ops.stages.context import StageError, StepKey
    from furlong.resources.lake import Lake
    from furlong.resources.lake_table import LakeError

    try:
        lake = Lake(Placement.from_env().lake_uri())
        row = committed_step(lake, run, step)
        if row is None:
            raise StageError(f"run {run} has no committed step {step}; `furlong sql` shows those there are")
        yield lake, StepKey(run, step, attempt or row["attempt"])
    except (SpecError, StageError, LakeError) as err:
        errors.print(str(err), style="red", markup=False)
        raise typer.Exit(1) from err
