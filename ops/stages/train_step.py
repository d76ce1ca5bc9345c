"""Stage 4: one optimiser step on the step's trajectories, and its record."""

from __future__ import annotations

from collections import Counter
from typing import Any

from furlong.ops import records
from furlong.ops.stages.chain import batch_groups, next_version, one_row, starting_version
from furlong.ops.stages.checks import check_step
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting

SHOWN = (
    "reward_mean", "loss", "grad_norm", "learning_rate", "tokens_trained", "clip_fraction", "entropy",
    "ess", "rejected_fraction", "kl", "mismatch_coverage", "mismatch_mean", "mismatch_max", "mismatch_p99", "mismatch_k3",
    "mismatch_ess", "value_loss", "value_explained", "value_grad_norm", "draft_loss",
    "draft_agreement", "draft_acceptance", "draft_tokens", "draft_grad_norm", "draft_seconds", "draft_skipped",
    "version_before", "version_after", "digest_before", "digest_after", "batch_digest",
)  # fmt: skip


def train_step(run: Run, key: StepKey) -> StageReport:
    """Commit one row of `steps`; it reserves the number of the weights version that the step makes."""
    with reporting("train_step", key) as report:
        row = one_row(run.lake, "steps", key.columns())
        if row is None:
            if not batch_groups(run.lake, key):
                raise StageError(f"{key}: there is no batch to train on; run its rollouts first")
            before = starting_version(run.lake, key)
            record = report.work(lambda: run.trainer.take_step(key.step, key.attempt))
            after = next_version(run.lake, key)
            # First, as whoever finds the step's record takes no step again, and so has no scores.
            scores = [key.columns() | scored for scored in record["trainer_scores"]]
            if scores:
                report.note(
                    run.lake.commit_once("trainer_scores", key.columns(), records.rows("trainer_scores", scores))
                )
            numbers = {name: value for name, value in record.items() if name != "trainer_scores"}
            row = {**key.columns(), **numbers, "version_before": before, "version_after": after}
            report.note(run.lake.commit_once("steps", key.columns(), records.rows("steps", [row])))
        checks = check_step(run, key, row, report)
        report.values = {name: row[name] for name in SHOWN} | _dispositions(row) | _draft_share(row)
        report.values["checks_failed"] = ", ".join(row["check"] for row in checks if not row["passed"])
    return report


def _draft_share(row: dict[str, Any]) -> dict[str, float]:
    if row["draft_seconds"] is None or not row["seconds"]:
        return {}
    return {"draft_train_share": row["draft_seconds"] / row["seconds"]}


def _dispositions(row: dict[str, Any]) -> dict[str, int]:
    counts = Counter(outcome["disposition"] for outcome in row["outcomes"])
    return {f"trajectories_{name}": count for name, count in sorted(counts.items())}
