"""A draft published alone, between two steps: a weights version whose policy is its parent's, bit for bit.

It goes the way of every version: deltas and manifest in the lake as staged, a shadow in every engine, every digest proved,
then the flip. Replies under way go on: nothing that their distribution is made of has changed. The version belongs to the
step of its parent; the next step starts from it.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from furlong.ops import records
from furlong.ops.draft.settings import draft_of
from furlong.ops.stages.chain import committed_steps, next_version, one_row, starting_version
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey, reporting
from furlong.ops.stages.weight_publish import flip

if TYPE_CHECKING:
    from torch import Tensor

    from furlong.ops.draft.shape import DraftShape

SHOWN = (
    "version", "parent", "digest", "delta_bytes", "transport", "wire_bytes", "stage_seconds", "pause_seconds",
    "retried_because",
)  # fmt: skip


def publish_draft(run: Run, tensors: dict[str, Tensor], shape: DraftShape) -> StageReport:
    """Commit `weight_deltas` of `draft.*`, then `weight_versions` as staged, then as live once every engine attested it.

    A repeat goes on where the one before ended; a draft that is live already is left as it is.

    Args:
        tensors: of the draft, by name, without prefix.
        shape: of the run's drafts.
    Raises:
        StageError: the run has no draft, or learns its own; or it is within a step.
        DraftError: the tensors are not of that shape.
    """
    from furlong.ops.draft.tensors import check_tensors, to_version

    check_tensors(tensors, shape, "the draft to publish")
    key, parent = _between_steps(run)
    with reporting("draft_publish", key) as report:
        row = _row(run, parent, to_version(tensors), report)
        if row["state"] == "staged":
            row = flip(run, row, report)
        report.values = {name: row[name] for name in SHOWN}
    return report


def check_publishable(run: Run) -> None:
    """StageError when the run's drafts come from elsewhere: it says why."""
    settings = draft_of(run.spec)
    if settings is None:
        raise StageError(
            f"run {run.name} draws without a draft, so a published one would lie idle; start a run with draft: "
            "{kind: eagle3, train: false}"
        )
    if settings.train:
        raise StageError(
            f"run {run.name} trains its draft: what its trainer holds is the draft of every version it publishes, and the "
            "next step would undo one published in between; start a run with draft.start set to the folder, or with "
            "draft.train: false"
        )


def _between_steps(run: Run) -> tuple[StepKey, dict[str, Any]]:
    """The next step's key, and the row of the version that it would start from; StageError when it has begun."""
    check_publishable(run)
    key = StepKey(run.name, max(committed_steps(run.lake, run.name), default=0) + 1)
    # Its tokens were sampled by the version that its batch names, and it is trained from that one.
    if run.lake.read("batches", {"run": run.name, "step": key.step}, ["step"]).num_rows:
        raise StageError(
            f"{key} has its batch already and ends with the draft it began with; publish one when the step is done, or "
            "before it begins"
        )
    version = starting_version(run.lake, key)
    row = one_row(run.lake, "weight_versions", {"run": run.name, "version": version})
    if row is None:
        raise StageError(f"run {run.name} has no weights version {version} yet; run its `prompts` first")
    return key, row


def _row(run: Run, parent: dict[str, Any], draft: dict[str, Tensor], report: StageReport) -> dict[str, Any]:
    """The row of the version: the parent's own where the draft is live, one that was staged before, or a new one."""
    from furlong.ops.weights.digest import manifest, weights_digest

    before = {tensor["name"]: tensor for tensor in parent["tensors"]}
    after = before | {tensor["name"]: tensor for tensor in manifest(draft)}
    if gone := sorted(name for name in before if name.startswith("draft.") and name not in draft):
        raise StageError(
            f"the draft to publish lacks {gone[0]} of version {parent['version']} ({len(gone)} such), which changed bytes "
            "cannot take away; publish one of the same kind and vocabulary"
        )
    digest = weights_digest({name: tensor["digest"] for name, tensor in after.items()})
    if digest == parent["digest"]:
        return parent
    where = {"run": run.name, "step": parent["step"], "attempt": parent["attempt"], "state": "staged"}
    for row in run.lake.read("weight_versions", where).to_pylist():
        if (row["parent"], row["digest"]) == (parent["version"], digest):
            return row
    changed = {n: t for n, t in draft.items() if n not in before or before[n]["digest"] != after[n]["digest"]}
    return _stage_in_lake(run, parent, changed, list(after.values()), digest, report)


def _stage_in_lake(
    run: Run, parent: dict[str, Any], changed: dict[str, Tensor], tensors: list[dict[str, Any]], digest: str,
    report: StageReport,
) -> dict[str, Any]:  # fmt: skip
    from furlong.ops.weights.delta import encode
    from furlong.ops.weights.layout import specs

    version = next_version(run.lake, StepKey(run.name, parent["step"] + 1))
    where = {"run": run.name, "version": version}
    # Without the parent's bytes, which only engines hold: what differs travels whole.
    digests = {tensor["name"]: tensor["digest"] for tensor in tensors}
    deltas = encode(version, parent["version"], run.name, {}, changed, digests)
    report.note(run.lake.commit_once("weight_deltas", where, deltas))
    tensors = sorted(tensors, key=lambda tensor: tensor["name"])
    elements = sum(math.prod(tensor["shape"]) for tensor in tensors)
    row = {
        **where, "step": parent["step"], "attempt": parent["attempt"], "state": "staged", "kind": "delta",
        "parent": parent["version"], "digest": digest, "tensors": tensors, "anchor": None,
        "full_bytes": sum(spec.nbytes for spec in specs(tensors)),
        "delta_bytes": sum(len(data.as_buffer()) for data in deltas["data"]),
        "changed_fraction": sum(tensor.numel() for tensor in changed.values()) / elements, "attestations": [],
        "fence": run.fence, "transport": "none", "wire_bytes": 0, "stage_seconds": 0.0, "pause_seconds": 0.0,
        "retried_because": "", "staged_at": time.time(), "live_at": None,
    }  # fmt: skip
    rows = records.rows("weight_versions", [row])
    report.note(run.lake.commit_once("weight_versions", where, rows, fence=run.fence))
    return row
