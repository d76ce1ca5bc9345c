"""From the lake's rows to the trainer's batch: the same rows give the same batch, live or in a replay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from furlong.ops.identity import fingerprint
from furlong.ops.policy.advantages import Outcome, group_advantages
from furlong.ops.protocols import LakeLike, TrainBatch
from furlong.ops.records import Disposition
from furlong.ops.spec import RunSpec
from furlong.ops.stages.context import StageError, StepKey


def assemble(lake: LakeLike, spec: RunSpec, key: StepKey) -> tuple[TrainBatch, list[dict[str, Any]]]:
    """The batch of a step and what became of each trajectory (rows of `steps.outcomes`).

    Only trained trajectories enter the batch. Order is by trajectory id, never by arrival.

    Raises:
        StageError: a trajectory without a reward row, a reward without a trajectory, or a group that is not whole.
    """
    columns = ["trajectory_id", "group_id", "tokens", "logprobs", "loss_mask"]
    rows = sorted(lake.read("trajectories", key.columns(), columns).to_pylist(), key=lambda r: r["trajectory_id"])
    groups = lake.read("groups", key.columns(), ["group_id", "prompt_tokens", "samples"]).to_pylist()
    scores = lake.read("rewards", key.columns(), ["trajectory_id", "score"]).to_pylist()
    _conserved(key, rows, groups, scores)
    score_of = {row["trajectory_id"]: row["score"] for row in scores}
    outcomes = group_advantages(
        [score_of[row["trajectory_id"]] for row in rows],
        [row["group_id"] for row in rows],
        normalise_std=spec.algorithm.normalise_std,
    )
    batch = _batch(spec, key, rows, groups, outcomes)
    return batch, [
        {"trajectory_id": row["trajectory_id"], "group_id": row["group_id"], "reward": out.reward,
         "advantage": out.advantage, "disposition": str(out.disposition)}
        for row, out in zip(rows, outcomes, strict=True)
    ]  # fmt: skip


def _conserved(key: StepKey, rows: list[dict], groups: list[dict], scores: list[dict]) -> None:
    """Every sample that was asked for is there once, and is scored once."""
    expected = {group["group_id"]: group["samples"] for group in groups}
    counted = dict.fromkeys(expected, 0)
    for row in rows:
        if row["group_id"] not in counted:
            raise StageError(f"{key}: trajectory {row['trajectory_id']} belongs to no group; the lake was changed")
        counted[row["group_id"]] += 1
    for name, wanted in expected.items():
        if counted[name] != wanted:
            raise StageError(f"{key}: group {name} has {counted[name]} of {wanted} trajectories; re-run its rollouts")
    scored = sorted(row["trajectory_id"] for row in scores)
    if not groups or scored != [row["trajectory_id"] for row in rows]:
        raise StageError(
            f"{key}: {len(scored)} rewards for {len(rows)} trajectories in {len(groups)} groups; run rewards"
        )


def _batch(spec: RunSpec, key: StepKey, rows: list[dict], groups: list[dict], outcomes: list[Outcome]) -> TrainBatch:
    kept = [(row, out) for row, out in zip(rows, outcomes, strict=True) if out.disposition == Disposition.TRAINED]
    used = sorted({row["group_id"] for row, _ in kept})
    prompt_of = {group["group_id"]: tuple(group["prompt_tokens"]) for group in groups}
    blank = {row["trajectory_id"]: len(prompt_of[row["group_id"]]) for row, _ in kept}
    return TrainBatch(
        step=key.step,
        temperature=spec.sampling.temperature,
        prompts=tuple(prompt_of[name] for name in used),
        group=tuple(used.index(row["group_id"]) for row, _ in kept),
        replies=tuple(tuple(row["tokens"][blank[row["trajectory_id"]] :]) for row, _ in kept),
        logprobs=tuple(tuple(row["logprobs"][blank[row["trajectory_id"]] :]) for row, _ in kept),
        masks=tuple(tuple(row["loss_mask"][blank[row["trajectory_id"]] :]) for row, _ in kept),
        advantages=tuple(out.advantage for _, out in kept),
        trajectory_ids=tuple(row["trajectory_id"] for row, _ in kept),
    )


def batch_digest(batch: TrainBatch) -> str:
    """64 hex digits over everything that the optimiser step depends on, beside the weights; names are not part of it."""
    return fingerprint({name: value for name, value in asdict(batch).items() if name != "trajectory_ids"})
