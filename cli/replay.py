"""`furlong replay`: does a past step come out again as it was recorded?"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

console = Console(highlight=False, soft_wrap=True)


def replay(
    run: Annotated[str, typer.Argument(help="The run.")],
    step: Annotated[int, typer.Argument(min=1, help="The step.")],
    attempt: Annotated[int, typer.Option(help="Its attempt; 0 for the newest.")] = 0,
) -> None:
    """Take a past step again from what the lake has of it; says `identical`, or which tensor differs first."""
    from furlong.ops.spec import Placement, SpecError
    from furlong.ops.stages.context import StageError
    from furlong.resources.lake_table import LakeError
    from furlong.resources.replay import replay_step

    try:
        told = replay_step(Placement.from_env(), run, step, attempt)
    except (SpecError, StageError, LakeError) as err:
        console.print(str(err), style="red", markup=False)
        raise typer.Exit(1) from err
    if not told.identical:
        console.print(f"different: {told.first_difference}", style="red", markup=False)
        raise typer.Exit(1)
    console.print(
        f"identical: step {step} of run {run}, {told.tensors} tensors and the trainer's own weights, bit for bit"
    )
