"""The data flow of one RL step. Read top to bottom: what is made, from what.

    prompts -> rollouts -> rewards -> train_step -> weight_publish -> evals
                                                                   -> hf_checkpoint (in its own file)

Each asset's work is a stage in `ops/stages`; here it gets its partition, its place in the graph and its metadata.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dagster import AssetExecutionContext, Config, MaterializeResult, ResourceParam, asset
from pydantic import Field

from furlong.ops.stages.context import StageReport, StepKey
from furlong.pipelines.acceptance_check import CHECK, check_result
from furlong.pipelines.checks import SPECS, check_results
from furlong.pipelines.guard import training
from furlong.pipelines.metadata import metadata
from furlong.pipelines.partitions import STEPS, parse_partition_key, partition_key
from furlong.resources.system import System

if TYPE_CHECKING:
    from furlong.resources.runs import OpenRun

PER_STEP = {"partitions_def": STEPS, "group_name": "rl", "pool": "trainer"}


class NewRun(Config):
    """Which run to start when the partition names one that is not in the lake yet."""

    spec: str = Field("tiny", description="A spec's name or path; used only for a run that does not exist yet.")
    seed: int = Field(0, description="The run's seed; used only for a run that does not exist yet.")


class Repeat(Config):
    """Repeating a finished step on purpose."""

    attempt: int = Field(0, description="0 continues the step; 2, 3, ... draws the newest step once more.")


@asset(group_name="rl", kinds={"deltalake"}, pool="trainer")
def prompts(context: AssetExecutionContext, config: NewRun, system: ResourceParam[System]) -> MaterializeResult:
    """A version of the prompt table: questions with stable ids, deduplicated, split by question, each with its verifier."""
    partition = context.run.tags["dagster/partition"]
    run, _ = parse_partition_key(partition)
    # Whoever launches by name alone, as a sensor or a script does, has not added it.
    context.instance.add_dynamic_partitions(STEPS.name, [partition])
    system.ensure_run(run, config.spec, {"seed": config.seed})
    return _materialise(context, system, "prompts", StepKey(run, 1))


@asset(**PER_STEP, deps=[prompts], kinds={"ray", "deltalake"}, check_specs=[CHECK])
def rollouts(context: AssetExecutionContext, config: Repeat, system: ResourceParam[System]) -> MaterializeResult:
    """The groups of trajectories drawn for this step: tokens, log-probabilities, weights versions."""
    key = _key(context, system, config.attempt)
    with _driving(context, system, key.run) as run:
        report = run.perform("rollouts", key)
        return MaterializeResult(metadata=metadata(report, run), check_results=[check_result(run)])


@asset(**PER_STEP, deps=[rollouts], kinds={"python", "deltalake"})
def rewards(context: AssetExecutionContext, system: ResourceParam[System]) -> MaterializeResult:
    """One row per trajectory and verifier: a verdict, and a score where the verdict has one."""
    return _materialise(context, system, "rewards", _key(context, system))


@asset(**PER_STEP, deps=[rollouts, rewards], kinds={"ray", "pytorch", "deltalake"}, check_specs=SPECS)
def train_step(context: AssetExecutionContext, system: ResourceParam[System]) -> MaterializeResult:
    """The record of one optimiser step: batch, advantages, loss, mismatch, digests before and after."""
    key = _key(context, system)
    with _driving(context, system, key.run) as run:
        facts = metadata(run.perform("train_step", key), run)
        return MaterializeResult(metadata=facts, check_results=check_results(run, key))


@asset(**PER_STEP, deps=[train_step], kinds={"ray", "deltalake"})
def weight_publish(context: AssetExecutionContext, system: ResourceParam[System]) -> MaterializeResult:
    """One new weights version: staged on every engine, proved tensor by tensor, flipped on all at once, attested."""
    key = _key(context, system)
    with _driving(context, system, key.run) as run:
        result = MaterializeResult(metadata=metadata(run.perform("weight_publish", key), run))
        if key.step < run.spec.steps:
            context.instance.add_dynamic_partitions(STEPS.name, [partition_key(key.run, key.step + 1)])
    return result


@asset(**PER_STEP, deps=[weight_publish], kinds={"ray", "deltalake"}, output_required=False)
def evals(context: AssetExecutionContext, system: ResourceParam[System]) -> Iterator[MaterializeResult]:
    """Accuracy on held-out questions. Only the first and the last step are due, and what `evals.every` adds; the
    partitions of other steps stay missing."""
    key = _key(context, system)
    with _driving(context, system, key.run) as run:
        report = run.perform("evals", key)
        run.finish()
        if report.values:
            yield MaterializeResult(metadata=metadata(report, run))


def _key(context: AssetExecutionContext, system: System, attempt: int = 0) -> StepKey:
    run, step = parse_partition_key(context.partition_key)
    return system.step_key(run, step, attempt)


@contextmanager
def _driving(context: AssetExecutionContext, system: System, name: str) -> Iterator["OpenRun"]:
    with training(context, system, name), system.driving(name, dagster_run=context.run_id) as run:
        yield run


def _materialise(context: AssetExecutionContext, system: System, stage: str, key: StepKey) -> MaterializeResult:
    with _driving(context, system, key.run) as run:
        report: StageReport = run.perform(stage, key)
        return MaterializeResult(metadata=metadata(report, run))
