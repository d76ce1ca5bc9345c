"""From the lake's rows to the trainer's batch: the same rows give the same batch, live or in a replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from itertools import takewhile
from typing import Any

from furlong.ops.identity import fingerprint
from furlong.ops.policy.advantages import Outcome, group_advantages
from furlong.ops.policy.routing import from_row
from furlong.ops.protocols import LakeLike, TrainBatch
from furlong.ops.records import Disposition
from furlong.ops.spec import AlgorithmSpec, RunSpec
from furlong.ops.stages.chain import one_row
from furlong.ops.stages.context import StageError, StepKey
from furlong.ops.stages.rollouts import batch_rows


def assemble(lake: LakeLike, spec: RunSpec, key: StepKey) -> tuple[TrainBatch, list[dict[str, Any]]]:
    """The batch of a step and what became of each trajectory (rows of `steps.outcomes`).

    Only trained trajectories enter the batch. Order is by trajectory id, never by arrival. Leaves of one sample count
    as one reply in their group's statistics, and share its advantage.

    Raises:
        StageError: a trajectory without a reward row, a reward without a trajectory, or a group that is not whole.
    """
    columns = [
        "trajectory_id",
        "group_id",
        "sample",
        "leaf",
        "tokens",
        "logprobs",
        "loss_mask",
        "version_spans",
        "routing",
    ]
    rows = sorted(batch_rows(lake, key, "trajectories", columns), key=lambda row: row["trajectory_id"])
    groups = batch_rows(lake, key, "groups", ["group_id", "samples"])
    scores = batch_rows(lake, key, "rewards", ["trajectory_id", "score"])
    _conserved(key, rows, groups, scores)
    outcomes = _outcomes(rows, {row["trajectory_id"]: row["score"] for row in scores}, spec.algorithm)
    batch = _batch(lake, spec, key, rows, outcomes)
    trained = {name: sum(mask) for name, mask in zip(batch.trajectory_ids, batch.masks, strict=True)}
    return batch, [
        {"trajectory_id": row["trajectory_id"], "group_id": row["group_id"], "reward": out.reward,
         "advantage": out.advantage, "disposition": str(out.disposition),
         "tokens_trained": trained.get(row["trajectory_id"], 0)}
        for row, out in zip(rows, outcomes, strict=True)
    ]  # fmt: skip


def _outcomes(rows: list[dict], score_of: dict[str, float | None], algorithm: AlgorithmSpec) -> list[Outcome]:
    first = [row for row in rows if row["leaf"] == 0]
    made = group_advantages(
        [score_of[row["trajectory_id"]] for row in first], [row["group_id"] for row in first], algorithm
    )
    by_sample = {(row["group_id"], row["sample"]): out for row, out in zip(first, made, strict=True)}
    return [by_sample[row["group_id"], row["sample"]] for row in rows]


def _conserved(key: StepKey, rows: list[dict], groups: list[dict], scores: list[dict]) -> None:
    """Every sample that was asked for is there once, and every trajectory of it is scored once."""
    expected = {group["group_id"]: group["samples"] for group in groups}
    counted: dict[str, list[int]] = {name: [] for name in expected}
    for row in rows:
        if row["group_id"] not in counted:
            raise StageError(f"{key}: trajectory {row['trajectory_id']} belongs to no group; the lake was changed")
        counted[row["group_id"]] += [row["sample"]] if row["leaf"] == 0 else []
    for name, wanted in expected.items():
        if sorted(counted[name]) != list(range(wanted)):
            raise StageError(f"{key}: group {name} has {len(counted[name])} of {wanted} samples; re-run its rollouts")
    scored = sorted(row["trajectory_id"] for row in scores)
    if not groups or scored != [row["trajectory_id"] for row in rows]:
        raise StageError(
            f"{key}: {len(scored)} rewards for {len(rows)} trajectories in {len(groups)} groups; run rewards"
        )


def _batch(lake: LakeLike, spec: RunSpec, key: StepKey, rows: list[dict], outcomes: list[Outcome]) -> TrainBatch:
    kept = [(row, out) for row, out in zip(rows, outcomes, strict=True) if out.disposition == Disposition.TRAINED]
    used = sorted({row["group_id"] for row, _ in kept})
    prompt_of = {name: _shared_prompt([row for row, _ in kept if row["group_id"] == name]) for name in used}
    blank = {row["trajectory_id"]: len(prompt_of[row["group_id"]]) for row, _ in kept}
    start = one_row(lake, "batches", key.columns(), ["version"])["version"]

    def replies(values: Callable[[dict[str, Any]], list]) -> tuple[tuple, ...]:
        return tuple(tuple(values(row)[blank[row["trajectory_id"]] :]) for row, _ in kept)

    return TrainBatch(
        step=key.step,
        temperature=spec.sampling.temperature,
        prompts=tuple(prompt_of[name] for name in used),
        group=tuple(used.index(row["group_id"]) for row, _ in kept),
        replies=replies(lambda row: row["tokens"]),
        # Of a token that nobody sampled any number will do, as its mask is false.
        logprobs=replies(lambda row: [0.0 if value is None else value for value in row["logprobs"]]),
        masks=replies(lambda row: _mask(spec, row)),
        sampled_by=replies(_sampled_by),
        version=start,
        advantages=tuple(out.advantage for _, out in kept),
        rewards=tuple(out.reward for _, out in kept),
        routing=tuple(row["routing"] and from_row(row["routing"]) for row, _ in kept),
        trajectory_ids=tuple(row["trajectory_id"] for row, _ in kept),
    )


def _shared_prompt(rows: list[dict[str, Any]]) -> tuple[int, ...]:
    """What all of a group's trajectories begin with, up to the first token that any of them is trained on.

    An agent writes its own prompts, which may differ from one sample to the next.
    """
    limit = min(row["loss_mask"].index(True) if True in row["loss_mask"] else len(row["tokens"]) for row in rows)
    columns = zip(*(row["tokens"][:limit] for row in rows), strict=True)
    return tuple(tokens[0] for tokens in takewhile(lambda tokens: len(set(tokens)) == 1, columns))


def _mask(spec: RunSpec, row: dict[str, Any]) -> list[bool]:
    if spec.rollout.stale_tokens == "train" or not row["version_spans"]:
        return row["loss_mask"]
    versions = _sampled_by(row)
    return [on and version == max(versions) for on, version in zip(row["loss_mask"], versions, strict=True)]


def _sampled_by(row: dict[str, Any]) -> list[int]:
    """The weights version that sampled each token; -1 for those that nobody sampled."""
    versions = [-1] * len(row["tokens"])
    for span in row["version_spans"]:
        versions[span["start"] : span["end"]] = [span["version"]] * (span["end"] - span["start"])
    return versions


def teacher_logprobs(lake: LakeLike, key: StepKey, batch: TrainBatch) -> tuple[tuple[float, ...], ...]:
    """What the teacher said of the batch's reply tokens (`teacher_scores`), in the shape of `TrainBatch.replies`; NaN for
    tokens that nobody sampled.

    Raises:
        StageError: a trajectory that it has not scored, or not whole.
    """
    columns = ["trajectory_id", "logprobs"]
    rows = {row["trajectory_id"]: row["logprobs"] for row in batch_rows(lake, key, "teacher_scores", columns)}
    found = []
    for name, group, reply in zip(batch.trajectory_ids, batch.group, batch.replies, strict=True):
        total = len(batch.prompts[group]) + len(reply)
        if len(rows.get(name, ())) != total:
            raise StageError(
                f"{key}: the teacher has scored {len(rows.get(name, ()))} of the {total} tokens of trajectory {name}; run "
                "its rewards"
            )
        values = rows[name][total - len(reply) :]
        found.append(tuple(math.nan if value is None else value for value in values))
    return tuple(found)


def score_rows(batch: TrainBatch, scores: tuple[float | None, ...]) -> list[dict[str, Any]]:
    """{trajectory_id, logprobs} of each trajectory of the batch, one value for each of its tokens, prompt included.

    Args:
        scores: of the trained tokens, in order (`StepMetrics.scores`).
    Raises:
        ValueError: another number of scores than of trained tokens.
    """
    if len(scores) != sum(map(sum, batch.masks)):
        raise ValueError(f"{len(scores)} scores for {sum(map(sum, batch.masks))} trained tokens; give one for each")
    values = iter(scores)
    return [
        {
            "trajectory_id": name,
            "logprobs": [None] * len(batch.prompts[group]) + [next(values) if on else None for on in mask],
        }
        for name, group, mask in zip(batch.trajectory_ids, batch.group, batch.masks, strict=True)
    ]


def batch_digest(batch: TrainBatch, teacher: tuple[tuple[float, ...], ...] | None = None) -> str:
    """64 hex digits over everything that the optimiser step depends on, beside the weights; names are not part of it.

    Args:
        teacher: from `teacher_logprobs`; None for a run without a teacher.
    """
    values = {name: value for name, value in asdict(batch).items() if name != "trajectory_ids"}
    for record in values["routing"]:
        if record is not None:
            record["data"] = record["data"].hex()
    if teacher is not None:
        values["teacher"] = [[None if math.isnan(value) else value for value in row] for row in teacher]
    return fingerprint(values)
