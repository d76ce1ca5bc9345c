"""A grid of runs: `grid` writes it, and a backfill over the partitions of asset `run` fills it, one Dagster run for each."""

from typing import Any

from dagster import (
    AssetExecutionContext,
    Config,
    MaterializeResult,
    MetadataValue,
    OpExecutionContext,
    ResourceParam,
    RunConfig,
    asset,
    define_asset_job,
    job,
    op,
)
from pydantic import Field

from furlong.pipelines.partitions import RUNS
from furlong.pipelines.rl_run import take_block
from furlong.pipelines.wanted import tell
from furlong.resources.system import System


class Part(Config):
    """How far."""

    steps: int = Field(0, description="Steps to take; 0 goes on to the run's last step.")


@asset(partitions_def=RUNS, group_name="runs", pool="trainer", kinds={"ray", "deltalake"})
def run(context: AssetExecutionContext, config: Part, system: ResourceParam[System]) -> MaterializeResult:
    """A whole run: its next steps are taken, each logged as its own step's partition; then its curves in one place."""
    from furlong.ops.history import load_series
    from furlong.ops.plots import line_plot
    from furlong.resources.lake import Lake
    from furlong.resources.weights.run_model import run_row

    lake = Lake(system.placement.lake_uri())
    name = run_row(lake, context.partition_key)["run"]
    take_block(context, system, name, config.steps)
    series = load_series(lake, name)
    rewards = series["reward_mean"]
    return MaterializeResult(
        metadata={
            "run": name,
            "steps": len(rewards),
            "reward_mean": float(rewards[-1][1]) if rewards else MetadataValue.null(),
            "reward": MetadataValue.md(line_plot(rewards, "mean reward by step")),
            "length": MetadataValue.md(line_plot(series["mean_reply_tokens"], "mean tokens of a reply by step")),
            "compare": MetadataValue.md(f"`furlong compare {name} OTHER`"),
        }
    )


class Grid(Config):
    """Which runs."""

    spec: str = Field("tiny", description="A spec's name or the path of a spec file.")
    vary: dict[str, list[Any]] = Field({"seed": [0, 1]}, description="Dotted spec keys and the values of each.")
    overrides: dict[str, Any] = Field({}, description="Dotted spec keys that all runs share, e.g. {steps: 10}.")


@op
def write_runs(context: OpExecutionContext, config: Grid, system: ResourceParam[System]) -> None:
    """Write every run of the grid to the lake, and add its partition to asset `run`."""
    from furlong.resources.grid import write_grid

    names = [name for name, _ in write_grid(system, config.spec, config.vary, config.overrides)]
    context.instance.add_dynamic_partitions(RUNS.name, names)
    tell(context, f"{len(names)} runs: {', '.join(names)}; fill them by a backfill of `fill_run`", {"runs": len(names)})


@job(
    description="Write a grid of runs, one for each combination of values; a backfill of `fill_run` then fills it.",
    config=RunConfig(ops={"write_runs": Grid()}),
)
def grid() -> None:
    write_runs()


fill_run = define_asset_job(
    "fill_run", selection=[run], description="Take the steps of one run of a grid; a backfill takes those of many."
)
