"""Stage 3: one verdict per trajectory."""

from __future__ import annotations

from collections import Counter
from typing import Any

from furlong.ops import records
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting
from furlong.ops.tasks.scoring import verifier_version


def rewards(run: Run, key: StepKey) -> StageReport:
    """Commit one row of `rewards` per trajectory of the step."""
    with reporting("rewards", key) as report:
        rows = run.lake.read("rewards", key.columns()).to_pylist()
        if not rows:
            rows = _score(run, key, report)
            report.note(run.lake.commit_once("rewards", key.columns(), records.rows("rewards", rows)))
        scores = [row["score"] for row in rows if row["score"] is not None]
        report.values = {
            "reward_mean": sum(scores) / len(scores) if scores else 0.0,
            "scored": len(scores),
            **{f"verdict_{name}": n for name, n in sorted(Counter(str(row["verdict"]) for row in rows).items())},
        }
    return report


def _score(run: Run, key: StepKey, report: StageReport) -> list[dict[str, Any]]:
    columns = ["trajectory_id", "prompt_id", "text", "finish_reason"]
    trajectories = run.lake.read("trajectories", key.columns(), columns).to_pylist()
    if not trajectories:
        raise StageError(f"{key}: no trajectories to score; run its rollouts first")
    items = verifier_items(run, trajectories)
    verdicts = report.work(lambda: run.verifier.score(items))
    versions = {name: verifier_version(name) for name in {item["verifier"] for item in items}}
    return [
        {
            **key.columns(), "trajectory_id": row["trajectory_id"], "verifier": item["verifier"],
            "verifier_version": versions[item["verifier"]], "verdict": verdict["verdict"], "score": verdict["score"],
            "extracted": verdict["extracted"], "detail": verdict["detail"], "seconds": verdict["seconds"],
        }
        for row, item, verdict in zip(trajectories, items, verdicts, strict=True)
    ]  # fmt: skip


def verifier_items(run: Run, replies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join replies ({prompt_id, text, finish_reason}) with what the verifier needs of their prompts."""
    wanted = sorted({row["prompt_id"] for row in replies})
    columns = ["prompt_id", "task", "question", "answer", "entry", "verifier"]
    found = run.lake.read("prompts", {"dataset": run.dataset, "prompt_id": wanted}, columns).to_pylist()
    by_id = {row["prompt_id"]: row for row in found}
    lost = [name for name in wanted if name not in by_id]
    if lost:
        raise StageError(f"prompt {lost[0]} of dataset {run.dataset} is not in the prompts table; run `prompts` first")
    return [{**by_id[r["prompt_id"]], "reply": r["text"], "finish_reason": r["finish_reason"]} for r in replies]
