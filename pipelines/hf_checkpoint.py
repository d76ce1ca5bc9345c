"""`hf_checkpoint`: the weights of a step as a folder that other software loads, on demand.

It is no part of the jobs: it copies a whole model, and any version that is not collected can be exported at any time.
"""

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
    told = {"reason": compared.reason, "prompts": compared.prompts, "logits": compared.logits}
    return MaterializeResult(
        metadata={
            "path": MetadataValue.path(str(exported.folder)),
            "run": run,
            "step": step,
            "version": exported.version,
            "weights_digest": exported.weights_digest,
            "files_digest": exported.files_digest,
            "size_bytes": exported.size,
            "already_exported": not exported.wrote,
            "model_card": MetadataValue.md((exported.folder / "README.md").read_text().split("---\n", 2)[-1]),
        },
        check_results=[AssetCheckResult(passed=compared.passed, check_name=CHECK.name, metadata=told)],
    )
