"""A run's numbers over its steps, read back from the lake."""

from __future__ import annotations

import json
from typing import Any

from furlong.ops.protocols import LakeLike
from furlong.ops.rollouts.acceptance import numbers
from furlong.ops.spec import RunSpec

TWINS = 3
"""Other runs that a plot compares a run with, at most."""
STEP_VALUES = (
    "reward_mean", "loss", "grad_norm", "entropy", "mismatch_mean", "learning_rate", "tokens_trained", "draft_loss",
)  # fmt: skip


def newest_attempts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per step, that of its latest attempt, in step order."""
    latest: dict[int, dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["attempt"]):
        latest[row["step"]] = row
    return [latest[step] for step in sorted(latest)]


def load_series(lake: LakeLike, run: str) -> dict[str, list[tuple[int, float]]]:
    """Value name -> [(step, value)]: what a new process needs to draw plots that begin at step 1."""
    steps = newest_attempts(lake.read("steps", {"run": run}, ["step", "attempt", *STEP_VALUES]).to_pylist())
    series = {name: [(row["step"], row[name]) for row in steps if row[name] is not None] for name in STEP_VALUES}
    versions = lake.read("weight_versions", {"run": run}, ["step", "attempt", "delta_bytes"]).to_pylist()
    published = newest_attempts([row for row in versions if row["step"] > 0])
    series["delta_bytes"] = [(row["step"], float(row["delta_bytes"])) for row in published]
    batches = newest_attempts(
        lake.read("batches", {"run": run}, ["step", "attempt", "groups", "speculation"]).to_pylist()
    )
    series["acceptance_length"] = _acceptance(batches)
    step_of = {group["group_id"]: row["step"] for row in batches for group in row["groups"]}
    lengths: dict[int, list[int]] = {}
    for row in lake.read("trajectories", {"run": run}, ["group_id", "loss_mask"]).to_pylist():
        if row["group_id"] in step_of:
            lengths.setdefault(step_of[row["group_id"]], []).append(sum(row["loss_mask"]))
    series["mean_reply_tokens"] = [(step, sum(n) / len(n)) for step, n in sorted(lengths.items())]
    return series


def draft_twins(lake: LakeLike, run: str, spec: RunSpec) -> dict[str, list[tuple[int, float]]]:
    """Acceptance length over steps of the newest runs that differ from this one in whether the draft learns, and in nothing
    else; by the run's name and which it is."""
    rows = lake.read("runs", None, ["run", "spec", "created_at"]).to_pylist()
    told = {row["run"]: json.loads(row["spec"]) for row in sorted(rows, key=lambda row: -row["created_at"])}
    mine, found = _but_for_training(spec.model_dump(mode="json")), {}
    for other, body in told.items():
        learns = body.get("draft", {}).get("train", True)
        if other != run and learns != spec.draft.get("train", True) and _but_for_training(body) == mine:
            batches = lake.read("batches", {"run": other}, ["step", "attempt", "speculation"]).to_pylist()
            found[f"{other} ({'co-trained' if learns else 'frozen'})"] = _acceptance(newest_attempts(batches))
        if len(found) == TWINS:
            break
    return found


def _but_for_training(body: dict[str, Any]) -> dict[str, Any]:
    return body | {"draft": {name: value for name, value in body.get("draft", {}).items() if name != "train"}}


def _acceptance(batches: list[dict[str, Any]]) -> list[tuple[int, float]]:
    told = [(row["step"], numbers(row["speculation"]).get("acceptance_length")) for row in batches]
    return [(step, length) for step, length in told if length is not None]
