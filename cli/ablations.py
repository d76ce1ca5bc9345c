"""`furlong grid`, `furlong compare` and `furlong rescore`: many runs from one spec, side by side, and judged anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from furlong.cli.weights import console, opened

if TYPE_CHECKING:
    from furlong.ops.spec import Placement

FLIPS = 20
"""Flips that are shown; table `rescores` has all."""


def grid(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="A spec's name or the path of a spec file.")],
    vary: Annotated[list[str], typer.Option("--vary", help="KEY=VALUE,VALUE; may be given several times.")],
    steps: Annotated[int, typer.Option(min=0, help="Steps of each run; 0 for the spec's.")] = 0,
) -> None:
    """Write every run of a grid to the lake and add its partition to asset `run`, for a backfill to fill it."""
    from furlong.ops.compare.grid import parse_vary
    from furlong.ops.spec import Placement, SpecError
    from furlong.resources.grid import write_grid
    from furlong.resources.system import System

    try:
        placement = Placement.from_env()
        made = write_grid(System(placement), spec, parse_vary(vary), {"steps": steps} if steps else {})
    except SpecError as err:
        console.print(str(err), style="red", markup=False)
        raise typer.Exit(2) from err
    _add_partitions(placement, [name for name, _ in made])
    for name, varied in made:
        console.print(f"{name}: {', '.join(f'{key}={value}' for key, value in varied.items())}", markup=False)
    console.print("fill them: `furlong ui`, job fill_run, Launch backfill")


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="The runs' names.")],
    to: Annotated[Path, typer.Option("--to", help="The page to write.")] = Path("comparison.html"),
) -> None:
    """Write one page with what differs between runs, their curves on one scale, and how each ended."""
    from furlong.ops.compare.page import comparison_page
    from furlong.resources.weights.run_model import run_row, stored_spec

    with opened(runs[0]) as (lake, _, _):
        specs = {run: stored_spec(run_row(lake, run)).model_dump(mode="json") for run in runs}
        to.write_text(comparison_page(lake, specs), encoding="utf-8")
    console.print(str(to), markup=False)


def rescore(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")],
    verifier: Annotated[
        str, typer.Option(help="module:function to judge by; empty for the prompts' own, as its code is now.")
    ] = "",
) -> None:
    """Judge a run's finished steps anew and list the verdicts that flip; nothing that was trained changes."""
    from furlong.resources.rescoring import rescore_run

    with opened(run) as (_, name, placement):
        told = rescore_run(placement, name, verifier)
    for flip in told["flips"][:FLIPS]:
        words = f"step {flip['step']} {flip['trajectory_id']}: {flip['old']} -> {flip['new']}: {flip['text'][-80:]!r}"
        console.print(words, markup=False)
    console.print(
        f"{len(told['flips'])} of {told['trajectories']} verdicts flip; of {told['groups']} groups the advantages change "
        f"sign in {told['changed_sign']}, vanish in {told['vanished']}, appear in {told['appeared']}"
    )


def _add_partitions(placement: Placement, names: list[str]) -> None:
    from dagster import DagsterInstance

    from furlong.pipelines.partitions import RUNS
    from furlong.resources.dagster_home import ensure_dagster_home

    ensure_dagster_home(placement)
    with DagsterInstance.get() as instance:
        instance.add_dynamic_partitions(RUNS.name, names)
