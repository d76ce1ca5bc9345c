"""`furlong weights`: what versions there are, and having any of them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

if TYPE_CHECKING:
    from furlong.ops.spec import Placement
    from furlong.resources.lake import Lake

app = typer.Typer(
    no_args_is_help=True, help="List, rebuild, verify, tag and collect weights versions, and publish drafts."
)
console = Console(highlight=False, soft_wrap=True)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

RunName = Annotated[str, typer.Option("--run", help="The run; may be left out where the lake has only one.")]
Wanted = Annotated[str, typer.Argument(metavar="VERSION", help="A version's number, or a tag.")]


@app.command("list")
def list_versions(run: RunName = "") -> None:
    """Show every version of a run, and its tags."""
    from furlong.cli.weights_view import versions_table

    with opened(run) as (lake, name, _):
        console.print(versions_table(lake, name))


@app.command()
def rebuild(
    version: Wanted,
    to: Annotated[str, typer.Option("--to", help="Folder to write; it must not exist yet, or be empty.")],
    run: RunName = "",
) -> None:
    """Write a version as a Hugging Face folder, bit for bit as engines served it."""
    from furlong.resources.weights.draft_folder import draft_shape
    from furlong.resources.weights.export import export_folder
    from furlong.resources.weights.rebuild import full_row
    from furlong.resources.weights.run_model import run_model
    from furlong.resources.weights.tags import tagged_version

    with opened(run) as (lake, name, placement):
        number = tagged_version(lake, name, version)
        row = full_row(lake, name, number)
        _, spec, model = run_model(lake, name, placement)
        folder = export_folder(lake, name, number, str(model.path), to, draft=draft_shape(spec, model.path))
        console.print(f"version {number} of run {name}, digest {row['digest'][:16]}: every tensor verified")
        console.print(str(folder), markup=False)


@app.command()
def verify(run: RunName = "") -> None:
    """Rebuild every version that is not collected and compare every tensor's digest."""
    from furlong.cli.weights_view import counted
    from furlong.resources.weights.run_model import run_model
    from furlong.resources.weights.verify import verify_run

    with opened(run) as (lake, name, placement):
        base = run_model(lake, name, placement)[2].path
        good = bad = 0
        for verdict in verify_run(lake, name, str(base)):
            if verdict.fault is None:
                good += 1
                continue
            bad += 1
            errors.print(verdict.fault, style="red", markup=False)
        console.print(f"run {name}: {counted(good, 'version')} verified, {bad} at fault")
    if bad:
        raise typer.Exit(1)


@app.command()
def tag(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag, such as stable.")],
    version: Wanted,
    run: RunName = "",
) -> None:
    """Give a live version a name, whatever the name meant before; a tagged version is never collected."""
    from furlong.resources.weights.tags import set_tag, tagged_version

    with opened(run) as (lake, run_name, _):
        number = tagged_version(lake, run_name, version)
        set_tag(lake, run_name, name, number)
        console.print(f"{name} is version {number} of run {run_name}", markup=False)


@app.command()
def untag(name: Annotated[str, typer.Argument(metavar="NAME", help="The tag.")], run: RunName = "") -> None:
    """Take a tag away."""
    from furlong.resources.weights.tags import remove_tag

    with opened(run) as (lake, run_name, _):
        number = remove_tag(lake, run_name, name)
        console.print(f"version {number} of run {run_name} is no longer {name}", markup=False)


@app.command()
def collect(
    keep_last: Annotated[int, typer.Option("--keep-last", min=1, help="How many of the newest versions to keep.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be done, and do nothing.")] = False,
    retention_hours: Annotated[
        int, typer.Option(min=0, help="Remove files whose rows went so long ago; 0 if nobody else uses the lake.")
    ] = 168,
    run: RunName = "",
) -> None:
    """Free the bytes of versions that are not among the newest, tagged, staged, or needed by one of those."""
    from furlong.cli.weights_view import print_plan, print_removed
    from furlong.resources.weights.retention import collect as run_collection
    from furlong.resources.weights.retention import collection_plan
    from furlong.resources.weights.run_model import run_model

    with opened(run) as (lake, name, placement):
        if dry_run:
            print_plan(console, name, collection_plan(lake, name, keep_last), done=False)
            return
        base = run_model(lake, name, placement)[2].path
        print_plan(console, name, run_collection(lake, name, keep_last, str(base)), done=True)
        print_removed(console, len(lake.vacuum("weight_deltas", retention_hours)), retention_hours)


@app.command("publish-draft")
def publish_draft(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="A draft as SGLang, SpecForge or speculators store it.")
    ],
    run: RunName = "",
) -> None:
    """Give the engines of a run another draft, between two steps; the policy stays as it is."""
    from furlong.ops.policy.architecture import read_architecture
    from furlong.ops.stages.draft_publish import check_publishable
    from furlong.ops.stages.draft_publish import publish_draft as publish
    from furlong.resources.system import System
    from furlong.resources.weights.draft_folder import draft_shape, read_fitting_draft

    with opened(run) as (_, name, placement), System(placement).holding(name) as lent:
        check_publishable(lent)
        shape = draft_shape(lent.spec, lent.model.path)
        layers = read_architecture(str(lent.model.path)).layers
        told = publish(lent, read_fitting_draft(folder, shape, layers), shape)
        state = "is" if told.wrote else "was already"
        console.print(f"version {told.values['version']} of run {name} {state} live with this draft", markup=False)


@contextmanager
def opened(run: str) -> Iterator[tuple[Lake, str, Placement]]:
    """The lake and the run meant. What a person can act on is shown as its message alone: status 2 for a wrong question,
    1 for what is wrong in the lake."""
    from furlong.ops.policy.manifest import ModelError
    from furlong.ops.protocols import StaleFence
    from furlong.ops.records import SchemaError
    from furlong.ops.spec import Placement, SpecError
    from furlong.ops.stages.context import StageError
    from furlong.ops.weights.retention import RetentionError
    from furlong.resources.lake import Lake
    from furlong.resources.lake_table import LakeError
    from furlong.resources.run_lock import LockHeld
    from furlong.resources.weights.anchors import AnchorError
    from furlong.resources.weights.export import ExportError
    from furlong.resources.weights.rebuild import RebuildError
    from furlong.resources.weights.run_model import only_run
    from furlong.resources.weights.tags import TagError

    faults = (
        AnchorError, ExportError, LakeError, LockHeld, ModelError, RebuildError, RetentionError, SchemaError, StageError,
    )  # fmt: skip
    try:
        placement = Placement.from_env()
        lake = Lake(placement.lake_uri())
        yield lake, only_run(lake, run), placement
    except (SpecError, TagError) as err:
        errors.print(str(err), style="red", markup=False)
        raise typer.Exit(2) from err
    except (*faults, StaleFence) as err:
        errors.print(str(err), style="red", markup=False)
        raise typer.Exit(1) from err
