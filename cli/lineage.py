"""`furlong lineage` and `furlong sql`: what made a version, who saw a prompt, and anything else the lake can be asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from furlong.ops.spec import Placement
    from furlong.resources.lake import Lake
    from furlong.resources.sql import Sql

app = typer.Typer(no_args_is_help=True, help="Walk from weights back to tokens, and from prompts forward to weights.")
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


@app.command()
def weights(
    version: Annotated[str, typer.Argument(metavar="VERSION", help="A number, v12, or a tag such as stable.")],
    run: Annotated[str, typer.Option("--run", help="The run; may be left out where the lake has only one.")] = "",
    every: Annotated[
        bool, typer.Option("--all", help="List the trajectories of all its steps, not of the newest.")
    ] = False,
    as_json: AsJson = False,
    page: Annotated[bool, typer.Option("--page", help="Write it as one HTML page too, and print its path.")] = False,
) -> None:
    """Show what made a weights version: its steps, trajectories, prompts, reward code and ancestors."""
    from furlong.cli.lineage_view import show_version
    from furlong.ops.lineage.walk import version_lineage
    from furlong.resources.lineage_page import write_page
    from furlong.resources.weights.run_model import only_run
    from furlong.resources.weights.tags import tagged_version

    with _opened() as (placement, lake, sql):
        name = only_run(lake, run)
        number = tagged_version(lake, name, version[1:] if version[:1] == "v" and version[1:].isdecimal() else version)
        told = version_lineage(sql.rows, name, number, -1 if every else 1)
        _print_json(told) if as_json else show_version(console, told)
        if page:
            errors.print(f"page: {write_page(placement, lake, name, number)[0]}", markup=False)


@app.command()
def prompt(
    prompt_id: Annotated[str, typer.Argument(metavar="ID", help="The prompt's id, 16 hex digits.")],
    as_json: AsJson = False,
) -> None:
    """Show every draw of a prompt, and every weights version that has its gradients."""
    from furlong.cli.lineage_view import show_prompt
    from furlong.ops.lineage.walk import prompt_lineage

    with _opened() as (_, _, sql):
        told = prompt_lineage(sql.rows, prompt_id)
        _print_json(told) if as_json else show_prompt(console, told)


@app.command()
def trajectory(
    trajectory_id: Annotated[str, typer.Argument(metavar="ID", help="Such as tiny-3f2a9c-00012.1-g003-s00.")],
    as_json: AsJson = False,
) -> None:
    """Show one trajectory: its text, rewards, the versions that sampled it and what steps did with it."""
    from furlong.cli.lineage_view import show_trajectory
    from furlong.ops.lineage.walk import trajectory_lineage

    with _opened() as (_, _, sql):
        told = trajectory_lineage(sql.rows, trajectory_id)
        _print_json(told) if as_json else show_trajectory(console, told)


def sql(
    query: Annotated[str, typer.Argument(help="A query; without one, the tables and views are listed.")] = "",
    form: Annotated[str, typer.Option("--format", help="table, csv or json (one object a line).")] = "table",
) -> None:
    """Ask the lake in SQL: every table, and the views of docs/cookbook.md."""
    from furlong.cli.lineage_view import show_rows, show_schema

    if form not in ("table", "csv", "json"):
        errors.print(f"--format {form} is unknown; use table, csv or json", style="red", markup=False)
        raise typer.Exit(2)
    with _opened() as (_, _, asked):
        if query:
            show_rows(console, asked.arrow(query), form)
        else:
            show_schema(console)


def _print_json(told: dict[str, Any]) -> None:
    json.dump(told, sys.stdout, indent=1, default=str)
    print()


@contextmanager
def _opened() -> Iterator[tuple[Placement, Lake, Sql]]:
    """The lake, and SQL over it. What a person can act on is shown as its message alone."""
    from furlong.ops.lineage.walk import LineageError
    from furlong.ops.records import SchemaError
    from furlong.ops.spec import Placement, SpecError
    from furlong.resources.lake import Lake
    from furlong.resources.lake_table import LakeError
    from furlong.resources.sql import Sql, SqlError
    from furlong.resources.weights.tags import TagError

    try:
        placement = Placement.from_env()
        lake = Lake(placement.lake_uri())
        with Sql(lake) as asked:
            yield placement, lake, asked
    except (SpecError, TagError, SqlError, LineageError) as err:
        errors.print(str(err), style="red", markup=False)
        raise typer.Exit(2) from err
    except (LakeError, SchemaError) as err:
        errors.print(str(err), style="red", markup=False)
        raise typer.Exit(1) from err
