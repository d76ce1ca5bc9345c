"""Stage 2: the batch of a step: groups of trajectories that are new enough, in the order of their prompts.

Who draws them, and how far ahead of the step, is the pump's business (`resources.rollouts.pump`); a synchronous run
draws exactly the step's own.
"""

from __future__ import annotations

import math
from typing import Any

import pyarrow.compute as pc

from furlong.ops import records
from furlong.ops.protocols import GenerateRequest, LakeLike, Sample
from furlong.ops.rollouts.acceptance import numbers
from furlong.ops.rollouts.spans import cover
from furlong.ops.stages.chain import batch_groups, check_repeatable, starting_version
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting


def rollouts(run: Run, key: StepKey) -> StageReport:
    """Commit one row of `batches`; its groups, trajectories and routings are in the lake by then."""
    with reporting("rollouts", key) as report:
        known = run.lake.read("batches", {"run": key.run, "step": key.step})
        rows = known.filter(pc.field("attempt") == key.attempt).to_pylist()
        if not rows:
            check_repeatable(run.lake, key, max(known["attempt"].to_pylist(), default=0))
            version = starting_version(run.lake, key)
            rows = [report.work(lambda: run.pump.gather(key, version))]
            report.note(run.lake.commit_once("batches", key.columns(), records.rows("batches", rows)))
        report.values = _summary(run.lake, key, rows[0])
    return report


def fitting_prompt(run: Run, prompt: dict[str, Any]) -> list[int]:
    """The prompt's token ids; StageError when prompt and longest reply do not fit the model's context."""
    ids = run.render(prompt)
    room, limit = run.context_length, run.spec.sampling.max_new_tokens
    if len(ids) + limit > room:
        raise StageError(
            f"prompt {prompt['prompt_id']} has {len(ids)} tokens; with max_new_tokens={limit} it exceeds the model's "
            f"context of {room}; shorten data.system or the task's questions, or lower sampling.max_new_tokens"
        )
    return ids


def check_sample(request: GenerateRequest, sample: Sample) -> None:
    """Refuse a sample that is not a finite reply to this request with a weights version for every token."""
    name = request.request_id
    if sample.request_id != name:
        raise StageError(f"engine answered {sample.request_id} for {name}; restart the engine with `make down`")
    counts = [len(sample.tokens), len(sample.logprobs), len(sample.model_logprobs)]
    if len(set(counts)) > 1:
        raise StageError(
            f"reply {name}: {counts[0]} tokens but {counts[1]} and {counts[2]} log-probabilities; restart the engine with "
            "`make down`"
        )
    if sample.drafted is not None and len(sample.drafted) != counts[0]:
        raise StageError(
            f"reply {name}: {counts[0]} tokens but {len(sample.drafted)} flags of proposals; restart the engine with "
            "`make down`"
        )
    for values in (sample.logprobs, sample.model_logprobs):
        bad = [t for t, value in enumerate(values) if not math.isfinite(value) or value > 0]
        if bad:
            raise StageError(
                f"reply {name}: log-probability {values[bad[0]]} at token {bad[0]}; it was not committed; check the "
                "weights version's digest and the engine's log"
            )
    if not cover(sample.versions, counts[0]):
        raise StageError(
            f"reply {name}: the weights versions {sample.versions} do not cover its {counts[0]} tokens; a token without "
            "a version is never trained on; restart the engine"
        )


def batch_rows(
    lake: LakeLike, key: StepKey, table: str, columns: list[str], groups: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Rows of a per-trajectory or per-group table that belong to the batch of a step, wherever they were drawn for.

    Args:
        groups: from `batch_groups`, for callers that read several tables; None to look them up.
    """
    groups = batch_groups(lake, key) if groups is None else groups
    names = [group["group_id"] for group in groups]
    where = {"run": key.run, "step": sorted({group["step"] for group in groups})}
    if table in ("rewards", "teacher_scores"):
        rows = lake.read(table, where, columns).to_pylist()
        return [row for row in rows if row["trajectory_id"].rpartition("-s")[0] in set(names)]
    return lake.read(table, where | {"group_id": names}, columns).to_pylist()


def _summary(lake: LakeLike, key: StepKey, batch: dict[str, Any]) -> dict[str, Any]:
    rows = batch_rows(lake, key, "trajectories", ["loss_mask", "finish_reason", "turns"])
    lengths = [sum(row["loss_mask"]) for row in rows]
    return {
        "trajectories": len(rows),
        "reply_tokens": sum(lengths),
        "mean_reply_tokens": sum(lengths) / len(lengths),
        "stopped_fraction": sum(row["finish_reason"] == "stop" for row in rows) / len(rows),
        "turns": sum(row["turns"] for row in rows) / len(rows),
        "weights_version": batch["version"],
        "staleness_mean": batch["staleness_mean"],
        "staleness_max": batch["staleness_max"],
        "passed_over": batch["passed_over"],
        "waiting_groups": batch["waiting_groups"],
        **numbers(batch["speculation"]),
    }
