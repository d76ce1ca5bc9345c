"""Stage 1: the prompt table of a run's data section, and the base weights that it starts from."""

from __future__ import annotations

import time

from furlong.ops import records
from furlong.ops.stages.context import Run, StageReport, StepKey, reporting


def prompts(run: Run, key: StepKey) -> StageReport:
    """Commit the questions, once per dataset, and weights version 0, once per run."""
    with reporting("prompts", key) as report:
        known = run.lake.read("prompts", {"dataset": run.dataset}, ["split"])
        if not known.num_rows:
            rows = report.work(run.prompt_rows)
            report.note(run.lake.commit_once("prompts", {"dataset": run.dataset}, rows))
            known = rows.select(["split"])
        split = known["split"].to_pylist()
        _publish_base(run, key, report)
        report.values = {
            "dataset": run.dataset,
            "train_prompts": split.count("train"),
            "eval_prompts": split.count("eval"),
        }
    return report


def _publish_base(run: Run, key: StepKey, report: StageReport) -> None:
    where = {"run": key.run, "version": 0}
    if run.lake.read("weight_versions", where, ["version"]).num_rows:
        return
    base = report.work(run.trainer.base)
    now = time.time()
    row = {
        "run": key.run, "version": 0, "step": 0, "attempt": 1, "state": "live", "kind": "anchor", "parent": None,
        "digest": base["digest"], "tensors": base["tensors"], "anchor": "base", "full_bytes": base["full_bytes"],
        "delta_bytes": 0, "changed_fraction": 0.0, "attestations": [], "fence": run.fence, "transport": "none",
        "wire_bytes": 0, "stage_seconds": 0.0, "pause_seconds": 0.0, "retried_because": "", "staged_at": now, "live_at": now,
    }  # fmt: skip
    rows = records.rows("weight_versions", [row])
    report.note(run.lake.commit_once("weight_versions", where, rows, fence=run.fence))
