"""The jobs `promote` and `rollback`: which weights version people call `stable` or `candidate`, and why."""

from dagster import Config, Failure, OpExecutionContext, ResourceParam, RunConfig, job, op
from pydantic import Field

from furlong.pipelines.guard import guarded
from furlong.pipelines.wanted import RUN, VERSION, tell, wanted
from furlong.resources.system import System


class Promoted(Config):
    """Which weights, and why."""

    run: str = Field("", description=RUN)
    version: str = Field("", description=VERSION)
    to: str = Field("candidate", description="`stable` or `candidate`.")
    because: str = Field("", description="Why; kept in the history. It must not stay empty.")


@op
def promote_version(context: OpExecutionContext, config: Promoted, system: ResourceParam[System]) -> None:
    """Refuse unless its checks are green, it evaluates no worse than the stable one, and its export reloads."""
    from furlong.ops.promotion import PromotionError
    from furlong.resources.lake import Lake
    from furlong.resources.weights.promote_run import promote_run

    name, version = wanted(Lake(system.placement.lake_uri()), config.run, config.version)
    try:
        row = promote_run(system.placement, name, version, config.to, config.because, f"dagster {context.run_id}")
    except PromotionError as err:
        raise Failure(str(err), allow_retries=False) from err
    tell(context, f"version {version} of run {name} is {config.to}", {"run": name, "version": row["version"]})


class Undone(Config):
    """Which run, and why."""

    run: str = Field("", description=RUN)
    tag: str = Field("stable", description="`stable` or `candidate`.")
    because: str = Field("", description="Why; kept in the history. It must not stay empty.")


@op(pool="engines")
def roll_back(context: OpExecutionContext, config: Undone, system: ResourceParam[System]) -> None:
    """Have every engine prove the version that the tag named before, then let the tag name it again."""
    from furlong.ops.promotion import PromotionError
    from furlong.resources.lake import Lake
    from furlong.resources.weights.promote_run import rollback_run
    from furlong.resources.weights.run_model import only_run

    name = only_run(Lake(system.placement.lake_uri()), config.run.strip())
    with guarded(context, system, name):
        try:
            row = rollback_run(system, name, config.tag, config.because, f"dagster {context.run_id}")
        except PromotionError as err:
            raise Failure(str(err), allow_retries=False) from err
    words = f"{config.tag} of run {name} is version {row['version']} again"
    tell(context, words, {"run": name, "version": row["version"]})


@job(
    description="Call a weights version `stable` or `candidate`, if its checks, evaluation and export allow it.",
    config=RunConfig(ops={"promote_version": Promoted()}),
)
def promote() -> None:
    promote_version()


@job(
    description="Bring the engines back to what `stable` named before, and write down why.",
    config=RunConfig(ops={"roll_back": Undone()}),
)
def rollback() -> None:
    roll_back()


PROMOTION_JOBS = [promote, rollback]
