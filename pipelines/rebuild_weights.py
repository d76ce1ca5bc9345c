"""The job `rebuild_weights`: any version again from the lake, bit for bit."""

from dagster import Config, MetadataValue, OpExecutionContext, ResourceParam, RunConfig, job, op
from pydantic import Field

from furlong.pipelines.wanted import RUN, VERSION, tell, wanted
from furlong.resources.system import System


class Rebuilt(Config):
    """Which weights to rebuild."""

    run: str = Field("", description=RUN)
    version: str = Field("", description=VERSION)
    folder: str = Field(
        "", description="Where to write them in Hugging Face layout, a new folder; empty to compare digests only."
    )


@op
def rebuild_version(context: OpExecutionContext, config: Rebuilt, system: ResourceParam[System]) -> None:
    """From the nearest complete copy and the deltas since, each tensor compared with the version's manifest."""
    from furlong.ops.stages.chain import chain_rows
    from furlong.resources.lake import Lake
    from furlong.resources.weights.draft_folder import draft_shape
    from furlong.resources.weights.export import export_folder
    from furlong.resources.weights.rebuild import full_row, rebuild
    from furlong.resources.weights.run_model import run_model

    lake = Lake(system.placement.lake_uri())
    name, version = wanted(lake, config.run, config.version)
    row, (_, spec, model) = full_row(lake, name, version), run_model(lake, name, system.placement)
    links = [link["version"] for link in chain_rows(lake, name, version)]
    facts = {
        "run": name,
        "version": version,
        "digest": row["digest"],
        "tensors": len(row["tensors"]),
        "bytes": row["full_bytes"],
        "chain": MetadataValue.md(" <- ".join(f"v{link}" for link in links)),
    }
    if config.folder:
        shape = draft_shape(spec, model.path)
        written = export_folder(lake, name, version, str(model.path), config.folder, draft=shape)
        facts["folder"] = MetadataValue.path(str(written))
    else:
        rebuild(lake, name, version, str(model.path))
    where = f"written to {facts['folder'].value}" if config.folder else "not written anywhere"
    words = f"version {version} of run {name} rebuilt from version {links[-1]} and {len(links) - 1} deltas"
    tell(context, f"{words}, every tensor's digest as it was published; {where}", facts)


@job(
    description="Rebuild any weights version from the lake and prove it tensor by tensor; write it where you like.",
    config=RunConfig(ops={"rebuild_version": Rebuilt()}),
)
def rebuild_weights() -> None:
    rebuild_version()
