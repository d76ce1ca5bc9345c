"""The job `replay_step`: take a past step once more from the lake, and compare bit for bit."""

from dagster import Config, Failure, OpExecutionContext, ResourceParam, RunConfig, job, op
from pydantic import Field

from furlong.pipelines.guard import guarded
from furlong.pipelines.wanted import RUN, tell
from furlong.resources.system import System


class Replayed(Config):
    """Which step to repeat."""

    run: str = Field("", description=RUN)
    step: int = Field(0, ge=0, description="The step; 0 for the newest that was committed.")
    attempt: int = Field(0, ge=0, description="Its attempt; 0 for the newest.")


@op(pool="trainer")
def replay(context: OpExecutionContext, config: Replayed, system: ResourceParam[System]) -> None:
    """Train on the step's own batch from the weights it started from; the lake is only read."""
    from furlong.ops.stages.chain import committed_steps
    from furlong.ops.stages.context import StageError
    from furlong.resources.lake import Lake
    from furlong.resources.weights.run_model import only_run

    lake = Lake(system.placement.lake_uri())
    name = only_run(lake, config.run.strip())
    done = committed_steps(lake, name)
    step = config.step or max(done, default=0)
    if step not in done:
        has = f"steps 1 to {len(done)}" if done else "none yet"
        raise StageError(f"run {name} has no committed step {step} to replay; it has {has}: name one of these")
    from furlong.resources.replay import replay_step as replay_from_lake

    with guarded(context, system, name):
        told = replay_from_lake(system.placement, name, step, config.attempt)
    facts = {"run": name, "step": step, "identical": told.identical, "tensors_compared": told.tensors}
    where = f"step {step} of run {name}"
    if not told.identical:
        raise Failure(
            f"{where} does not come out as it was recorded: {told.first_difference}",
            metadata=facts,
            allow_retries=False,
        )
    tell(context, f"{where} replayed from the lake: identical, all {told.tensors} tensors of it", facts)


@job(
    description="Take a past step once more from what the lake has of it, and say `identical`, or which tensor differs "
    "first.",
    config=RunConfig(ops={"replay": Replayed()}),
)
def replay_step() -> None:
    replay()
