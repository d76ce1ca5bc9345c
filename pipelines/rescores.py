"""`rescores`: a run's rewards made again by the verifier as it is now, and what that would have changed."""

from dagster import (
    AssetExecutionContext,
    Config,
    MaterializeResult,
    MetadataValue,
    ResourceParam,
    asset,
    define_asset_job,
)
from pydantic import Field

from furlong.pipelines.partitions import RUNS
from furlong.pipelines.run_grid import run
from furlong.resources.system import System

SHOWN = 20
"""Flips in the metadata; the table has all."""


class Judge(Config):
    """Who judges."""

    verifier: str = Field("", description="module:function; empty for each prompt's own, as its code is now.")


@asset(partitions_def=RUNS, group_name="runs", deps=[run], kinds={"python", "deltalake"})
def rescores(context: AssetExecutionContext, config: Judge, system: ResourceParam[System]) -> MaterializeResult:
    """The run's trajectories judged anew, into a table of their own; nothing that was trained changes."""
    from furlong.resources.rescoring import rescore_run

    told = rescore_run(system.placement, context.partition_key, config.verifier.strip())
    lines = [
        f"- step {flip['step']} `{flip['trajectory_id']}`: {flip['old']} to {flip['new']}" for flip in told["flips"]
    ]
    counts = {key: told[key] for key in ("wrote", "trajectories", "groups", "changed_sign", "vanished", "appeared")}
    shown = "\n".join(lines[:SHOWN]) or "none"
    return MaterializeResult(metadata={**counts, "flips": len(lines), "flipped": MetadataValue.md(shown)})


rescore = define_asset_job(
    "rescore", selection=[rescores], description="Judge a run's finished steps anew and list the verdicts that flip."
)
