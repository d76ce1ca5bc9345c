"""The job `evaluate`: accuracy of any version of a run on the questions kept away from training."""

from dagster import Config, OpExecutionContext, ResourceParam, RunConfig, job, op
from pydantic import Field

from furlong.pipelines.guard import guarded
from furlong.pipelines.metadata import metadata
from furlong.pipelines.wanted import RUN, VERSION, materialised, tell, wanted
from furlong.resources.system import System


class Evaluated(Config):
    """Which weights to evaluate."""

    run: str = Field("", description=RUN)
    version: str = Field("", description=VERSION)


@op(pool="engines")
def evaluate_version(context: OpExecutionContext, config: Evaluated, system: ResourceParam[System]) -> None:
    """Bring the run's engines to the version, play the held-out questions, and commit a row for each."""
    from furlong.ops.stages.chain import version_row
    from furlong.ops.stages.context import StepKey, reporting
    from furlong.ops.stages.evals import evaluate as measure
    from furlong.resources.lake import Lake

    name, version = wanted(Lake(system.placement.lake_uri()), config.run, config.version)
    with guarded(context, system, name), system.holding(name) as run:
        row = version_row(run.lake, name, version)
        key = StepKey(name, row["step"] if row else 0, max(1, row["attempt"]) if row else 1)
        with reporting("evals", key) as report:
            measure(run, version, report)
        facts = metadata(report, run)
        materialised(context, "evals", name, key.step, facts)
        shown = ", ".join(f"{mode} {value:.3f}" for mode, value in report.values.items())
        state = "evaluated" if report.wrote else "had been evaluated before"
        tell(context, f"version {version} of run {name} {state}: {shown}", facts)
        run.tracker.flush()


@job(
    description="Evaluate any weights version of a run on the questions kept away from training; a version that was "
    "evaluated before is only shown.",
    config=RunConfig(ops={"evaluate_version": Evaluated()}),
)
def evaluate() -> None:
    evaluate_version()
