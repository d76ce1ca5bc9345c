"""`furlong promote` and `furlong rollback`: which weights version is `stable` or `candidate`, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from furlong.cli.weights import console, errors, opened

RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]
Because = Annotated[str, typer.Option("--because", help="Why; kept in the history.")]


def promote(
    run: RunName,
    version: Annotated[str, typer.Argument(metavar="VERSION", help="A version's number, or a tag.")],
    because: Because,
    to: Annotated[str, typer.Option("--to", help="stable or candidate.")] = "candidate",
) -> None:
    """Call a version stable or candidate, if its checks, its evaluation and its export allow it."""
    from furlong.ops.promotion import PromotionError
    from furlong.resources.weights.promote_run import promote_run
    from furlong.resources.weights.tags import tagged_version

    with opened(run) as (lake, name, placement):
        number = tagged_version(lake, name, version)
        try:
            row = promote_run(placement, name, number, to, because)
        except PromotionError as err:
            errors.print(str(err), style="red", markup=False)
            raise typer.Exit(1) from err
        console.print(f"{to} of run {name} is version {row['version']}: {row['reason']}", markup=False)


def rollback(
    run: RunName,
    because: Because,
    tag: Annotated[str, typer.Option("--tag", help="stable or candidate.")] = "stable",
) -> None:
    """Bring the engines back to what a tag named before, and let it name that again."""
    from furlong.ops.promotion import PromotionError
    from furlong.resources.system import System
    from furlong.resources.weights.promote_run import rollback_run

    with opened(run) as (_, name, placement):
        try:
            row = rollback_run(System(placement), name, tag, because)
        except PromotionError as err:
            errors.print(str(err), style="red", markup=False)
            raise typer.Exit(1) from err
        console.print(f"{tag} of run {name} is version {row['version']} again, proved by every engine", markup=False)
