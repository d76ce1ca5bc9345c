"""Stage 3: one verdict per trajectory, and what the teacher says of its tokens where the algorithm has one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from furlong.ops import records
from furlong.ops.policy.algorithms import needs
from furlong.ops.records import Verdict
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting
from furlong.ops.stages.rollouts import batch_rows
from furlong.ops.tasks.scoring import verifier_version

NEEDED = ["step", "attempt", "trajectory_id", "prompt_id", "text", "messages", "finish_reason"]
"""Columns of `trajectories` that a reward is made from."""


def rewards(run: Run, key: StepKey) -> StageReport:
    """Commit one row of `rewards` per trajectory of the step's batch, save those that were scored while it was drawn; and,
    for a run that distils, one of `teacher_scores`."""
    with reporting("rewards", key) as report:
        trajectories = batch_rows(run.lake, key, "trajectories", NEEDED)
        if not trajectories:
            raise StageError(f"{key}: no trajectories to score; run its rollouts first")
        rows = batch_rows(run.lake, key, "rewards", ["trajectory_id", "verdict", "score"])
        known = {row["trajectory_id"] for row in rows}
        if missing := [row for row in trajectories if row["trajectory_id"] not in known]:
            fresh = report.work(lambda: score_twice(run, key.run, missing))
            where = {"run": key.run, "trajectory_id": [row["trajectory_id"] for row in fresh]}
            report.note(run.lake.commit_once("rewards", where, records.rows("rewards", fresh)))
            rows += fresh
        if "teacher" in needs(run.spec.algorithm):
            _ask_teacher(run, key, report)
        scores = [row["score"] for row in rows if row["score"] is not None]
        report.values = {
            "reward_mean": sum(scores) / len(scores) if scores else 0.0,
            "scored": len(scores),
            **{f"verdict_{name}": n for name, n in sorted(Counter(str(row["verdict"]) for row in rows).items())},
        }
    return report


def _ask_teacher(run: Run, key: StepKey, report: StageReport) -> None:
    known = {row["trajectory_id"] for row in batch_rows(run.lake, key, "teacher_scores", ["trajectory_id"])}
    columns = ["step", "attempt", "trajectory_id", "tokens", "logprobs"]
    found = batch_rows(run.lake, key, "trajectories", columns)
    missing = sorted((row for row in found if row["trajectory_id"] not in known), key=lambda row: row["trajectory_id"])
    if missing:
        fresh = report.work(lambda: teacher_scores(run, key.run, missing))
        where = {"run": key.run, "trajectory_id": [row["trajectory_id"] for row in fresh]}
        report.note(run.lake.commit_once("teacher_scores", where, records.rows("teacher_scores", fresh)))


def teacher_scores(run: Run, name: str, trajectories: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `teacher_scores` for rows of `trajectories`: at the temperature of the rollouts, of what was sampled."""
    sampled = [[t for t, value in enumerate(row["logprobs"]) if value is not None] for row in trajectories]
    # Without a sampled token there is nothing to score; the engine is then asked for none of the row's tokens.
    asked = [
        (tuple(row["tokens"]), at[0] if at else len(row["tokens"]))
        for row, at in zip(trajectories, sampled, strict=True)
    ]
    answers = run.teacher.score(asked, run.spec.sampling.temperature)
    made = []
    for row, at, (tokens, first), values in zip(trajectories, sampled, asked, answers, strict=True):
        if len(values) != len(tokens) - first:
            raise StageError(
                f"the teacher scored {len(values)} of the {len(tokens) - first} tokens of trajectory "
                f"{row['trajectory_id']}; nothing was committed: end its engine with `make down` and run again"
            )
        logprobs: list[float | None] = [None] * len(tokens)
        for t in at:
            logprobs[t] = values[t - first]
        made.append(
            {"run": name, "step": row["step"], "attempt": row["attempt"], "trajectory_id": row["trajectory_id"],
             "teacher": run.teacher.digest, "logprobs": logprobs}
        )  # fmt: skip
    return made


def score_twice(
    run: Run, name: str, trajectories: list[dict[str, Any]], failed: Callable[[dict[str, Any]], None] = lambda row: None
) -> list[dict[str, Any]]:
    """As `score`, with a second try where the verifier failed: once is no verdict on a trajectory, as a verifier may hang
    or die for reasons of its own.

    Args:
        failed: told each row of the first try that is not kept.
    """
    rows = score(run, name, trajectories)
    lost = {row["trajectory_id"] for row in rows if row["verdict"] in (Verdict.TIMEOUT, Verdict.ERROR)}
    for row in rows:
        if row["trajectory_id"] in lost:
            failed(row)
    again = [row for row in trajectories if row["trajectory_id"] in lost]
    second = {row["trajectory_id"]: row for row in score(run, name, again)} if again else {}
    return [second.get(row["trajectory_id"], row) for row in rows]


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
