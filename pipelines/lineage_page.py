"""`lineage_page`: what made a step's weights, as one HTML file, on demand."""

from dagster import AssetExecutionContext, MaterializeResult, MetadataValue, ResourceParam, asset

from furlong.pipelines.assets import PER_STEP, weight_publish
from furlong.pipelines.partitions import parse_partition_key
from furlong.resources.system import System


@asset(**PER_STEP, deps=[weight_publish], kinds={"html", "duckdb"})
def lineage_page(context: AssetExecutionContext, system: ResourceParam[System]) -> MaterializeResult:
    """The step's weights version with its steps, trajectories, prompts, seeds, reward code and ancestors; opens offline."""
    from furlong.ops.stages.chain import committed_step
    from furlong.ops.stages.context import StageError
    from furlong.resources.lake import Lake
    from furlong.resources.lineage_page import write_page

    run, step = parse_partition_key(context.partition_key)
    lake = Lake(system.placement.lake_uri())
    row = committed_step(lake, run, step)
    if row is None:
        raise StageError(
            f"{run} step {step}: there is no record of it, so it made no weights; materialise train_step first"
        )
    path, told = write_page(system.placement, lake, run, row["version_after"])
    return MaterializeResult(
        metadata={
            "page": MetadataValue.url(path.as_uri()),
            "path": MetadataValue.path(str(path)),
            "run": run,
            "version": row["version_after"],
            "learnt_from_steps": len(told["steps"]),
            "learnt_from_trajectories": told["trajectories"],
            "learnt_from_prompts": told["prompts"],
            "learnt_from_tokens": told["tokens"],
            "command": MetadataValue.md(f"`furlong lineage weights v{row['version_after']} --run {run}`"),
        }
    )
