"""A run's numbers over its steps, read back from the lake."""

from __future__ import annotations

from typing import Any

from furlong.ops.protocols import LakeLike

STEP_VALUES = ("reward_mean", "loss", "grad_norm", "entropy", "mismatch_mean", "learning_rate", "tokens_trained")


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
    batches = newest_attempts(lake.read("batches", {"run": run}, ["step", "attempt", "groups"]).to_pylist())
    step_of = {group["group_id"]: row["step"] for row in batches for group in row["groups"]}
    lengths: dict[int, list[int]] = {}
    for row in lake.read("trajectories", {"run": run}, ["group_id", "loss_mask"]).to_pylist():
        if row["group_id"] in step_of:
            lengths.setdefault(step_of[row["group_id"]], []).append(sum(row["loss_mask"]))
    series["mean_reply_tokens"] = [(step, sum(n) / len(n)) for step, n in sorted(lengths.items())]
    return series
