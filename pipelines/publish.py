"""The job `publish`: finish a publication that was interrupted, or bring the engines to a version that is live."""

from typing import Any

from dagster import Config, OpExecutionContext, ResourceParam, RunConfig, job, op
from pydantic import Field

from furlong.pipelines.guard import guarded
from furlong.pipelines.metadata import metadata
from furlong.pipelines.wanted import RUN, materialised, tell, wanted
from furlong.resources.system import System


class Published(Config):
    """Which weights the engines are to serve."""

    run: str = Field("", description=RUN)
    version: str = Field(
        "", description="A weights version's number or tag; empty for the newest there is, staged or live."
    )


@op(pool="engines")
def publish_version(context: OpExecutionContext, config: Published, system: ResourceParam[System]) -> None:
    """Prove the version on every engine, tensor by tensor; a staged one becomes live, if its checks let it."""
    from furlong.ops.stages.chain import version_row
    from furlong.resources.lake import Lake

    lake = Lake(system.placement.lake_uri())
    name, version = wanted(lake, config.run, config.version or _newest(lake, config.run))
    with guarded(context, system, name), system.holding(name) as run:
        row = version_row(run.lake, name, version)
        if row is not None and row["state"] == "staged":
            report = _finish(run, row)
            facts = metadata(report, run)
            materialised(context, "weight_publish", name, row["step"], facts)
            tell(context, f"version {version} of run {name} is live now on {report.values['engines']}", facts)
        else:
            # Whatever is wrong with the version, a missing row included, is for the engines' fleet to say.
            run.engines_at(version)
            engines = run.engine_name()
            words = (
                f"every engine of run {name} has proved version {version}; the next step starts from its own version"
            )
            tell(context, words, {"run": name, "version": version, "engines": engines})
        run.tracker.flush()


def _newest(lake: Any, run: str) -> str:
    from furlong.resources.weights.run_model import only_run

    versions = lake.read("weight_versions", {"run": only_run(lake, run.strip())}, ["version"])["version"].to_pylist()
    return str(max(versions)) if versions else ""


def _finish(run: Any, row: dict[str, Any]) -> Any:
    """Go on with a staged version the way it began: with its step, or alone where only the draft is another."""
    from furlong.ops.stages.chain import committed_step, one_row
    from furlong.ops.stages.context import StepKey, reporting
    from furlong.ops.stages.weight_publish import flip

    key = StepKey(run.name, row["step"], row["attempt"])
    step = committed_step(run.lake, run.name, row["step"])
    if step is not None and step["version_after"] == row["version"]:
        return run.perform("weight_publish", key)
    with reporting("weight_publish", key) as report:
        whole = flip(run, one_row(run.lake, "weight_versions", {"run": run.name, "version": row["version"]}), report)
        shown = ("version", "parent", "digest", "transport", "wire_bytes", "stage_seconds", "pause_seconds")
        report.values = {name: whole[name] for name in shown}
        report.values["engines"] = ", ".join(proof["engine"] for proof in whole["attestations"])
    return report


@job(
    description="Finish a publication that was interrupted, or bring every engine of a run to a version that is live, "
    "each proved tensor by tensor.",
    config=RunConfig(ops={"publish_version": Published()}),
)
def publish() -> None:
    publish_version()
