"""`hf_checkpoint`: the weights of a step as a folder that other software loads, on demand.

It is no part of the jobs that train: it copies a whole model, and any version that is not collected can be exported at
any time.
"""

from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
    AssetExecutionContext,
    MaterializeResult,
    MetadataValue,
    ResourceParam,
    asset,
)

from furlong.pipelines.assets import PER_STEP, weight_publish
from furlong.pipelines.partitions import parse_partition_key
from furlong.resources.system import System

if TYPE_CHECKING:
    from furlong.resources.weights.checkpoint import Checkpoint, Comparison

CHECK = AssetCheckSpec(
    "reloads_to_the_same_logits",
    asset="hf_checkpoint",
    blocking=True,
    description="The folder, loaded afresh, gives bit for bit the logits of the tensors rebuilt from the lake.",
)


@asset(**PER_STEP, deps=[weight_publish], kinds={"huggingface", "pytorch"}, check_specs=[CHECK])
def hf_checkpoint(context: AssetExecutionContext, system: ResourceParam[System]) -> MaterializeResult:
    """The step's weights version as safetensors, configuration, tokenizer and a model card that tells its lineage."""
    from furlong.resources.weights.checkpoint import compare_logits, export_checkpoint

    run, step = parse_partition_key(context.partition_key)
    exported = export_checkpoint(system.placement, run, step)
    compared = compare_logits(system.placement, run, exported)
    return MaterializeResult(
        metadata={"run": run, "step": step, **checkpoint_facts(exported)},
        check_results=[
            AssetCheckResult(passed=compared.passed, check_name=CHECK.name, metadata=comparison_facts(compared))
        ],
    )


def checkpoint_facts(exported: "Checkpoint") -> dict[str, Any]:
    """Metadata of an exported folder."""
    card = exported.folder / "README.md"
    facts = {
        "path": MetadataValue.path(str(exported.folder)),
        "version": exported.version,
        "weights_digest": exported.weights_digest,
        "files_digest": exported.files_digest,
        "size_bytes": exported.size,
        "already_exported": not exported.wrote,
    }
    if card.is_file():
        facts["model_card"] = MetadataValue.md(card.read_text().split("---\n", 2)[-1])
    return facts


def comparison_facts(compared: "Comparison") -> dict[str, Any]:
    """Metadata of the check that a folder reloads."""
    return {"reason": compared.reason, "prompts": compared.prompts, "logits": compared.logits}
