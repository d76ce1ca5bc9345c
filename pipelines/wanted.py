"""Which run and which weights version the words of a launchpad mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster import AssetKey, AssetMaterialization

from furlong.pipelines.partitions import STEPS, partition_key

if TYPE_CHECKING:
    from typing import Any

    from dagster import OpExecutionContext

    from furlong.resources.lake import Lake

RUN = "The run; may stay empty where the lake has only one."
VERSION = "A weights version's number or tag; empty for the newest that is live."


def wanted(lake: Lake, run: str, version: str) -> tuple[str, int]:
    """The run and the version that are meant.

    Raises:
        SpecError: no such run, or none named and several there. TagError: no such tag. StageError: nothing is live.
    """
    from furlong.ops.stages.chain import newest_live
    from furlong.resources.weights.run_model import only_run
    from furlong.resources.weights.tags import tagged_version

    name = only_run(lake, run.strip())
    return name, tagged_version(lake, name, version.strip()) if version.strip() else newest_live(lake, name)


def tell(context: OpExecutionContext, words: str, facts: dict[str, Any]) -> None:
    """Show what a job did: in words in the log, and with the facts beside the op."""
    context.log.info(words)
    context.add_output_metadata({"done": words, **facts})


def materialised(context: OpExecutionContext, asset: str, run: str, step: int, facts: dict[str, Any]) -> None:
    """Log that an asset has rows of a step, beside what the flow's own jobs log; version 0 counts to step 1."""
    key = partition_key(run, max(1, step))
    context.instance.add_dynamic_partitions(STEPS.name, [key])
    context.log_event(AssetMaterialization(AssetKey(asset), partition=key, metadata=facts))
