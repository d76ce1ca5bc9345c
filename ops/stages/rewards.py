"""Stage 3: one verdict per trajectory."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from furlong.ops import records
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting
from furlong.ops.stages.rollouts import batch_rows
from furlong.ops.tasks.scoring import verifier_version

NEEDED = ["step", "attempt", "trajectory_id", "prompt_id", "text", "messages", "finish_reason"]
"""Columns of `trajectories` that a reward is made from."""


def rewards(run: Run, key: StepKey) -> StageReport:
    """Commit one row of `rewards` per trajectory of the step's batch, save those that were scored while it was drawn."""
    with reporting("rewards", key) as report:
        trajectories = batch_rows(run.lake, key, "trajectories", NEEDED)
        if not trajectories:
            raise StageError(f"{key}: no trajectories to score; run its rollouts first")
        rows = batch_rows(run.lake, key, "rewards", ["trajectory_id", "verdict", "score"])
        known = {row["trajectory_id"] for row in rows}
        if missing := [row for row in trajectories if row["trajectory_id"] not in known]:
            fresh = report.work(lambda: score(run, key.run, missing))
            where = {"run": key.run, "trajectory_id": [row["trajectory_id"] for row in fresh]}
            report.note(run.lake.commit_once("rewards", where, records.rows("rewards", fresh)))
            rows += fresh
        scores = [row["score"] for row in rows if row["score"] is not None]
        report.values = {
            "reward_mean": sum(scores) / len(scores) if scores else 0.0,
            "scored": len(scores),
            **{f"verdict_{name}": n for name, n in sorted(Counter(str(row["verdict"]) for row in rows).items())},
        }
    return report


def score(run: Run, name: str, trajectories: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `rewards` for rows of `trajectories` (of NEEDED at least)."""
    items = verifier_items(run, trajectories)
    verdicts = run.verifier.score(items)
    versions = {name: verifier_version(name) for name in {item["verifier"] for item in items}}
    return [
        {
            "run": name, "step": row["step"], "attempt": row["attempt"], "trajectory_id": row["trajectory_id"],
            "verifier": item["verifier"], "verifier_version": versions[item["verifier"]],
            "verdict": verdict["verdict"], "score": verdict["score"], "extracted": verdict["extracted"],
            "detail": verdict["detail"], "seconds": verdict["seconds"],
        }
        for row, item, verdict in zip(trajectories, items, verdicts, strict=True)
    ]  # fmt: skip


def verifier_items(run: Run, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join replies ({prompt_id, text, messages, finish_reason}) with what the verifier needs of their prompts."""
    wanted = sorted({row["prompt_id"] for row in replies})
    columns = ["prompt_id", "task", "question", "answer", "entry", "verifier"]
    found = run.lake.read("prompts", {"dataset": run.dataset, "prompt_id": wanted}, columns).to_pylist()
    by_id = {row["prompt_id"]: row for row in found}
    lost = [name for name in wanted if name not in by_id]
    if lost:
        raise StageError(f"prompt {lost[0]} of dataset {run.dataset} is not in the prompts table; run `prompts` first")
    return [
        {**by_id[r["prompt_id"]], "reply": r["text"], "messages": r["messages"], "finish_reason": r["finish_reason"]}
        for r in replies
    ]


def as_json(messages: list[dict[str, Any]]) -> str:
    """A conversation as it stands in column `messages`."""
    return json.dumps(messages, ensure_ascii=False, separators=(",", ":"))
