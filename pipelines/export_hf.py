"""The job `export_hf`: any published version as a folder that other software loads."""

from dagster import Config, Failure, OpExecutionContext, ResourceParam, RunConfig, job, op
from pydantic import Field

from furlong.pipelines.hf_checkpoint import checkpoint_facts, comparison_facts
from furlong.pipelines.wanted import RUN, VERSION, tell, wanted
from furlong.resources.system import System


class Exported(Config):
    """Which weights to export."""

    run: str = Field("", description=RUN)
    version: str = Field("", description=VERSION)
    folder: str = Field("", description="Where to; empty for checkpoints/<run>/<version> below the root.")


@op
def export_version(context: OpExecutionContext, config: Exported, system: ResourceParam[System]) -> None:
    """Write the folder unless it is there, compare every tensor, and load it afresh: the logits must be the same."""
    from furlong.resources.lake import Lake
    from furlong.resources.weights.checkpoint import compare_logits
    from furlong.resources.weights.checkpoint import export_version as export

    name, version = wanted(Lake(system.placement.lake_uri()), config.run, config.version)
    exported = export(system.placement, name, version, config.folder.strip())
    compared = compare_logits(system.placement, name, exported)
    facts = {"run": name, **checkpoint_facts(exported), **comparison_facts(compared)}
    if not compared.passed:
        raise Failure(
            f"{exported.folder} does not reload to version {version} of run {name}: {compared.reason}; do not use it",
            metadata=facts,
            allow_retries=False,
        )
    state = "exported to" if exported.wrote else "had been exported to"
    words = f"version {version} of run {name} {state} {exported.folder}; it reloads to the same logits, bit for bit"
    tell(context, words, facts)


@job(
    description="Write any published weights version as a Hugging Face folder and prove that it reloads to the same "
    "logits.",
    config=RunConfig(ops={"export_version": Exported()}),
)
def export_hf() -> None:
    export_version()
