"""Which rows of a run count: the latest attempt of each step, and the versions a version is built from."""

from __future__ import annotations

from typing import Any

from furlong.ops.history import newest_attempts
from furlong.ops.protocols import LakeLike
from furlong.ops.stages.context import StageError, StepKey


def one_row(lake: LakeLike, table: str, where: dict[str, Any], columns: list[str] | None = None) -> dict | None:
    """The single row that matches, or None; two rows are corruption and raise StageError."""
    found = lake.read(table, where, columns).to_pylist()
    if len(found) > 1:
        raise StageError(f"{table}: {len(found)} rows for {where}, expected one; the lake was written to from outside")
    return found[0] if found else None


STEP_COLUMNS = ["step", "attempt", "version_before", "version_after", "digest_after", "master_digest_after"]


def committed_steps(lake: LakeLike, run: str) -> dict[int, dict[str, Any]]:
    """Step -> STEP_COLUMNS of its latest committed attempt. Reads the whole run: for starting and restoring only."""
    latest = {row["step"]: row for row in newest_attempts(lake.read("steps", {"run": run}, STEP_COLUMNS).to_pylist())}
    missing = [n for n in range(1, len(latest) + 1) if n not in latest]
    if missing:
        raise StageError(f"run {run}: step {missing[0]} is missing from `steps` below later ones; restore the table")
    return latest


def committed_step(lake: LakeLike, run: str, step: int) -> dict[str, Any] | None:
    """STEP_COLUMNS of the latest committed attempt of one step."""
    rows = newest_attempts(lake.read("steps", {"run": run, "step": step}, STEP_COLUMNS).to_pylist())
    return rows[0] if rows else None


def starting_version(lake: LakeLike, key: StepKey) -> int:
    """The weights version that a step starts from: what the step before it published, or 0; or the newest on top of that in
    which the draft alone is another."""
    if key.step == 1:
        return max([0, *_live_of(lake, key.run, 0, 1)])
    before = committed_step(lake, key.run, key.step - 1)
    if before is None:
        raise StageError(f"{key}: step {key.step - 1} has no record yet; run the steps in order")
    if attempts(lake, key.run, key.step - 1) > before["attempt"]:
        raise StageError(
            f"{key}: step {key.step - 1} is being repeated; finish that first by running it with attempt 0"
        )
    row = version_row(lake, key.run, before["version_after"])
    if row is not None and row["state"] == "collected":
        raise StageError(
            f"{key}: the weights that step {key.step - 1} published, version {row['version']}, were collected; only the "
            "newest step can be taken or repeated"
        )
    if row is None or row["state"] == "staged":
        raise StageError(f"{key}: step {key.step - 1} has not published its weights; run its weight_publish first")
    return max([row["version"], *_live_of(lake, key.run, row["step"], row["attempt"])])


def _live_of(lake: LakeLike, run: str, step: int, attempt: int) -> list[int]:
    """The live versions of one attempt of a step: what it trained, and what was published on it without training."""
    where = {"run": run, "step": step, "attempt": attempt, "state": "live"}
    return lake.read("weight_versions", where, ["version"])["version"].to_pylist()


def next_step(lake: LakeLike, run: str, steps: int) -> int:
    """The first step with something left to do, be it a repetition; `steps` + 1 when a run of that length is complete."""
    done = committed_steps(lake, run)
    if not done:
        return 1
    last = len(done)
    version = version_row(lake, run, done[last]["version_after"])
    if version is None or version["state"] != "live" or attempts(lake, run, last) > done[last]["attempt"]:
        return last
    evaluated = lake.read("evals", {"run": run, "version": version["version"]}, ["mode"]).num_rows > 0
    return last if last == steps and not evaluated else last + 1


def version_row(lake: LakeLike, run: str, version: int) -> dict[str, Any] | None:
    """The row of `weight_versions`, without the per-tensor manifest."""
    columns = ["version", "step", "attempt", "state", "kind", "parent", "digest"]
    return one_row(lake, "weight_versions", {"run": run, "version": version}, columns)


def newest_live(lake: LakeLike, run: str) -> int:
    """The newest weights version that engines have proved."""
    rows = lake.read("weight_versions", {"run": run, "state": "live"}, ["version"])["version"].to_pylist()
    if not rows:
        raise StageError(f"run {run} has no live weights version; run its `prompts` first")
    return max(rows)


def next_version(lake: LakeLike, key: StepKey) -> int:
    """One more than any version of the run. Only the newest step is ever repeated, so that stands there or just before."""
    around = {"run": key.run, "step": [key.step - 1, key.step]}
    trained = lake.read("steps", around, ["version_after"])["version_after"].to_pylist()
    # Drafts that were published alone have numbers too, and no step.
    return max([0, *trained, *lake.read("weight_versions", around, ["version"])["version"].to_pylist()]) + 1


CHAIN_COLUMNS = ["version", "state", "kind", "parent", "anchor", "digest", "full_bytes", "delta_bytes"]
_WINDOW = 64
"""Versions read at once while walking back; most chains end within one read."""


def chain_rows(lake: LakeLike, run: str, version: int) -> list[dict[str, Any]]:
    """CHAIN_COLUMNS of the versions that `version` is built from: itself first, its nearest anchor last.

    Raises:
        StageError: a version of the chain is not in the lake, was collected, or has no parent and no anchor.
    """
    known: dict[int, dict[str, Any]] = {}
    path: list[dict[str, Any]] = []
    at = version
    while True:
        if at not in known:
            around = {"run": run, "version": list(range(max(0, at - _WINDOW + 1), at + 1))}
            known |= {row["version"]: row for row in lake.read("weight_versions", around, CHAIN_COLUMNS).to_pylist()}
        row = known.get(at)
        _check_link(run, version, at, row)
        path.append(row)
        if row["kind"] == "anchor":
            return path
        at = row["parent"]


def delta_path(lake: LakeLike, run: str, version: int) -> tuple[str, list[int]]:
    """How to build `version`: the `anchor` of its nearest complete copy (`base`, or a path below the lake), and the
    versions whose deltas to apply to that, in order; none when `version` is an anchor itself."""
    *path, anchor = chain_rows(lake, run, version)
    return anchor["anchor"], [row["version"] for row in reversed(path)]


def anchor_due(lake: LakeLike, run: str, parent: int, delta_bytes: int, full_bytes: int, anchor_every: int) -> bool:
    """Whether the version about to be published on `parent` should be a complete copy too.

    It should when it is the `anchor_every`-th since the last, or when the deltas since then, with its own
    `delta_bytes`, outweigh a copy of `full_bytes`: from there on a copy is also the faster way to build it.
    """
    *path, _ = chain_rows(lake, run, parent)
    return len(path) + 1 >= anchor_every or sum(row["delta_bytes"] for row in path) + delta_bytes > full_bytes


def _check_link(run: str, version: int, at: int, row: dict[str, Any] | None) -> None:
    needed = f"run {run}: weights version {at}" + (f", needed to build {version}," if at != version else "")
    if row is None:
        chain = "restore the table weight_versions, or use another version"
        advice = "`furlong weights list` shows those that are" if version == at else chain
        raise StageError(f"{needed} is not in the lake; {advice}")
    if row["state"] == "collected":
        raise StageError(
            f"{needed} was collected, so its bytes are gone; use a version that is not, and tag versions to keep them"
        )
    if row["kind"] == "anchor" and row["anchor"] is None:
        raise StageError(f"{needed} is an anchor without a place; restore the table weight_versions")
    if row["kind"] != "anchor" and (row["parent"] is None or row["parent"] >= at):
        raise StageError(f"{needed} has parent {row['parent']}, which is no earlier one; restore weight_versions")


def attempts(lake: LakeLike, run: str, step: int) -> int:
    """The newest attempt of a step that groups were drawn for; 0 when none were. Groups are committed before all else."""
    return max(lake.read("groups", {"run": run, "step": step}, ["attempt"])["attempt"].to_pylist(), default=0)


def batch_groups(lake: LakeLike, key: StepKey) -> list[dict[str, Any]]:
    """{step, attempt, group_id} of the groups that a step trains on; none when it has no batch yet."""
    row = one_row(lake, "batches", key.columns(), ["groups"])
    return row["groups"] if row else []


def check_repeatable(lake: LakeLike, key: StepKey, last: int) -> None:
    """A new attempt is allowed only on the newest step, `last` being its newest attempt with a batch: later steps were
    built on the old one."""
    if key.attempt <= 1 and last == 0:
        return
    if key.attempt != last + 1:
        raise StageError(f"{key}: the next attempt would be {last + 1}; set attempt to that, or 0 for the current one")
    if lake.read("groups", {"run": key.run, "step": key.step + 1}, ["step"]).num_rows:
        raise StageError(
            f"{key}: groups of step {key.step + 1} were already drawn, so it cannot be repeated; repeat the newest step "
            "of a run with staleness 0, or start another run"
        )
    if not lake.read("steps", {"run": key.run, "step": key.step, "attempt": last}, ["step"]).num_rows:
        raise StageError(f"{key}: attempt {last} has not finished; run it again with attempt 0, which continues it")
