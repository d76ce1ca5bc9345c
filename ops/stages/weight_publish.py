"""Stage 5: publish the step's weights like a database commit: stage, verify every digest, flip, mark live.

Until the last commit the version is `staged`; any failure before it leaves the old version live. A repeat picks up
wherever the previous try ended, because each phase first looks for what is there.
"""

from __future__ import annotations

import math
import time
from typing import Any

import pyarrow as pa

from furlong.ops import records
from furlong.ops.policy.algorithms import algorithm_of
from furlong.ops.protocols import Attestation
from furlong.ops.spec import AlgorithmSpec
from furlong.ops.stages.chain import anchor_due, committed_step, one_row, version_row
from furlong.ops.stages.checks import require_passed
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting
from furlong.ops.stages.rollouts import batch_rows

NUMBERS = ("loss", "grad_norm", "mismatch_coverage")
MISMATCH = ("mismatch_mean", "mismatch_max", "mismatch_p99", "mismatch_k3", "mismatch_ess")
"""Measured between trainer and engine under the weights version that sampled a token; a step without any such measure
is not published."""


def weight_publish(run: Run, key: StepKey) -> StageReport:
    """Commit `weight_deltas`, then `weight_versions` as staged, then as live once every engine attested it."""
    with reporting("weight_publish", key) as report:
        step = _gate(run, key)
        where = {"run": key.run, "version": step["version_after"]}
        row = one_row(run.lake, "weight_versions", where)
        if row is None:
            row = _stage_in_lake(run, key, step, report)
        if row["state"] == "staged":
            row = flip(run, row, report)
        report.values = {
            "version": row["version"],
            "parent": row["parent"],
            "digest": row["digest"],
            "full_bytes": row["full_bytes"],
            "delta_bytes": row["delta_bytes"],
            "delta_over_full": row["delta_bytes"] / row["full_bytes"],
            "changed_fraction": row["changed_fraction"],
            "kind": row["kind"],
            "transport": row["transport"],
            "wire_bytes": row["wire_bytes"],
            "stage_seconds": row["stage_seconds"],
            "pause_seconds": row["pause_seconds"],
            "retried_because": row["retried_because"],
            "engines": ", ".join(a["engine"] for a in row["attestations"]),
        }
    return report


def _gate(run: Run, key: StepKey) -> dict[str, Any]:
    """The step's record, unless it must not be published."""
    step = one_row(run.lake, "steps", key.columns())
    if step is None:
        raise StageError(f"{key}: there is no step record to publish; run its train_step first")
    newest = committed_step(run.lake, key.run, key.step)["attempt"]
    if newest > key.attempt and not _is_live(run, key.run, step["version_after"]):
        raise StageError(
            f"{key}: the step was repeated, and attempt {newest} stands in its place, so the weights of this one are not "
            f"published any more; run attempt {newest}, or 0 for the current one"
        )
    bad = [name for name in NUMBERS if not math.isfinite(step[name])]
    if step["tokens_trained"]:
        bad += [name for name in MISMATCH if step[name] is None or not math.isfinite(step[name])]
    if bad:
        raise StageError(f"{key}: {bad[0]} is {step[bad[0]]}, so its weights are not published; inspect its rollouts")
    sampled = [row["trajectory_id"] for row in batch_rows(run.lake, key, "trajectories", ["trajectory_id"])]
    if sorted(sampled) != sorted(outcome["trajectory_id"] for outcome in step["outcomes"]):
        raise StageError(
            f"{key}: {len(sampled)} trajectories were sampled but {len(step['outcomes'])} are accounted for; "
            "its weights are not published; compare `trajectories` with `steps.outcomes`"
        )
    _witnessed(key, step, run.spec.algorithm)
    require_passed(run, key)
    return step


def _witnessed(key: StepKey, step: dict[str, Any], algorithm: AlgorithmSpec) -> None:
    """The gradients of all tokens that were to be trained on, and of no others, reached the optimiser: all but as many as
    clipping and the correction took out of the loss."""
    silent = round((step["clip_fraction"] + step["rejected_fraction"]) * step["tokens_trained"])
    moving = _moving(step, algorithm)
    for row in step["outcomes"]:
        lost = max(0, row["tokens_trained"] - row["tokens_reached"]) if row["trajectory_id"] in moving else 0
        silent -= lost
        if silent < 0 or row["tokens_reached"] > row["tokens_trained"]:
            raise StageError(
                f"{key}: of trajectory {row['trajectory_id']} {row['tokens_trained']} tokens were to be trained on, but the "
                f"gradients of {row['tokens_reached']} reached the optimiser, and clipping and the correction are not why; "
                "its weights are not published: report this"
            )


def _moving(step: dict[str, Any], algorithm: AlgorithmSpec) -> set[str]:
    """The trajectories whose tokens have a gradient, unless clipped or rejected."""
    parts = algorithm_of(algorithm)
    trained = [row for row in step["outcomes"] if row["tokens_trained"]]
    if parts.valued:
        # Where values differ no token is exactly at the mean; where they are all the same, as at first, some may be.
        return {row["trajectory_id"] for row in trained} if step["value_explained"] else set()
    middle = 0.0
    if parts.whitened and trained:
        # What is exactly at the mean of the step's tokens is whitened to 0; rounding decides what is next to it.
        middle = sum(row["advantage"] * row["tokens_trained"] for row in trained)
        middle /= sum(row["tokens_trained"] for row in trained)
    moving = [row for row in trained if not math.isclose(row["advantage"], middle, rel_tol=1e-9, abs_tol=1e-12)]
    if parts.loss == "preference":
        sides = {(row["group_id"], row["advantage"] > 0) for row in moving}
        moving = [row for row in moving if (row["group_id"], row["advantage"] <= 0) in sides]
    return {row["trajectory_id"] for row in moving}


def _is_live(run: Run, name: str, version: int) -> bool:
    row = version_row(run.lake, name, version)
    return row is not None and row["state"] != "staged"


def _stage_in_lake(run: Run, key: StepKey, step: dict[str, Any], report: StageReport) -> dict[str, Any]:
    made = report.work(lambda: run.trainer.publishable(key.step, key.attempt))
    if made["digest"] != step["digest_after"]:
        raise StageError(
            f"{key}: the trainer holds weights {made['digest'][:12]}, its record says {step['digest_after'][:12]}; "
            "nothing was published; run `make down` and again, which rebuilds the trainer from the lake"
        )
    where = {"run": key.run, "version": step["version_after"]}
    _check_names(run, key, step["version_before"], made["tensors"])
    deltas = _renumber(made["deltas"], key.run, step["version_after"], step["version_before"])
    if deltas.num_rows:
        report.note(run.lake.commit_once("weight_deltas", where, deltas))
    anchor, every = None, run.spec.trainer.anchor_every
    if anchor_due(run.lake, key.run, step["version_before"], made["delta_bytes"], made["full_bytes"], every):
        anchor = report.work(lambda: run.trainer.anchor(step["version_after"], made["digest"]))
    row = {
        **key.columns(), **where, "state": "staged", "kind": "anchor" if anchor else "delta",
        "parent": step["version_before"], "digest": made["digest"], "tensors": made["tensors"], "anchor": anchor,
        "full_bytes": made["full_bytes"], "delta_bytes": made["delta_bytes"],
        "changed_fraction": made["changed_fraction"], "attestations": [], "fence": run.fence, "transport": "none",
        "wire_bytes": 0, "stage_seconds": 0.0, "pause_seconds": 0.0, "retried_because": "",
        "staged_at": time.time(), "live_at": None,
    }  # fmt: skip
    rows = records.rows("weight_versions", [row])
    report.note(run.lake.commit_once("weight_versions", where, rows, fence=run.fence))
    return row


def _check_names(run: Run, key: StepKey, parent: int, tensors: list[dict[str, Any]]) -> None:
    """Refuse a version that lacks a tensor of its parent: deltas cannot say so, and engines would go on holding it."""
    before = one_row(run.lake, "weight_versions", {"run": key.run, "version": parent}, ["tensors"])
    if gone := sorted({row["name"] for row in before["tensors"]} - {row["name"] for row in tensors}):
        raise StageError(
            f"{key}: the new weights lack tensor {gone[0]} of version {parent} ({len(gone)} in all), which changed bytes "
            "cannot take away; nothing was published: keep it as it was, or begin a new run without it"
        )


def _renumber(deltas: pa.Table, run: str, version: int, base_version: int) -> pa.Table:
    """Put the version numbers on rows that a trainer encoded; it knows steps, the lake knows versions."""
    n = deltas.num_rows
    columns = {"run": [run] * n, "version": [version] * n, "base_version": [base_version] * n}
    for name, values in columns.items():
        field = deltas.schema.field(name)
        deltas = deltas.set_column(deltas.schema.get_field_index(name), field, pa.array(values, field.type))
    return records.validate("weight_deltas", deltas)


def flip(run: Run, row: dict[str, Any], report: StageReport) -> dict[str, Any]:
    """Bring a staged version to every engine and commit it as live; the new row."""
    told = report.work(lambda: run.publish(row))
    row = {**row, **told, "state": "live", "fence": run.fence, "live_at": time.time()}
    where = {"run": row["run"], "version": row["version"]}
    report.note(run.lake.replace("weight_versions", where, records.rows("weight_versions", [row]), fence=run.fence))
    return row


def verify(row: dict[str, Any], proof: Attestation) -> None:
    """Compare an engine's proof with the manifest, tensor by tensor; StageError names the first that differs."""
    wanted = {tensor["name"]: tensor["digest"] for tensor in row["tensors"]}
    where = f"weights version {row['version']} on engine {proof.engine}"
    for name in sorted(wanted.keys() | proof.tensors.keys()):
        if wanted.get(name) != proof.tensors.get(name):
            raise StageError(
                f"{where}: tensor {name} has digest {str(proof.tensors.get(name))[:12]}, the manifest says "
                f"{str(wanted.get(name))[:12]}; version {row['parent']} stays live; run again to stage it afresh"
            )
    if proof.version != row["version"] or proof.digest != row["digest"]:
        raise StageError(f"{where}: attested {proof.version}/{proof.digest[:12]}; version {row['parent']} stays live")
