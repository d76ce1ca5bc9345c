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
    """The weights version that a step starts from: what the step before it published, or 0."""
    if key.step == 1:
        return 0
    before = committed_step(lake, key.run, key.step - 1)
    if before is None:
        raise StageError(f"{key}: step {key.step - 1} has no record yet; run the steps in order")
    if attempts(lake, key.run, key.step - 1) > before["attempt"]:
        raise StageError(
            f"{key}: step {key.step - 1} is being repeated; finish that first by running it with attempt 0"
        )
    row = version_row(lake, key.run, before["version_after"])
    if row is None or row["state"] != "live":
        raise StageError(f"{key}: step {key.step - 1} has not published its weights; run its weight_publish first")
    return row["version"]


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


def next_version(lake: LakeLike, key: StepKey) -> int:
    """One more than any version of the run. Only the newest step is ever repeated, so that stands there or just before."""
    around = {"run": key.run, "step": [key.step - 1, key.step]}
    return max([0, *lake.read("steps", around, ["version_after"])["version_after"].to_pylist()]) + 1


def delta_path(lake: LakeLike, run: str, version: int) -> list[int]:
    """Versions to apply in order on top of the anchor to get `version`; empty for the anchor itself."""
    columns = ["version", "kind", "parent"]
    rows = {r["version"]: r for r in lake.read("weight_versions", {"run": run}, columns).to_pylist()}
    path: list[int] = []
    at = version
    while True:
        if at not in rows:
            raise StageError(f"run {run}: weights version {at}, needed to rebuild {version}, is not in the lake")
        if rows[at]["kind"] == "anchor":
            return path[::-1]
        path.append(at)
        at = rows[at]["parent"]


def attempts(lake: LakeLike, run: str, step: int) -> int:
    """The newest attempt of a step that has rollouts; 0 when none has. Trajectories are committed before groups."""
    return max(lake.read("trajectories", {"run": run, "step": step}, ["attempt"])["attempt"].to_pylist(), default=0)


def check_repeatable(lake: LakeLike, key: StepKey, last: int) -> None:
    """A new attempt is allowed only on the newest step: later steps were built on the old one."""
    if key.attempt <= 1 and last == 0:
        return
    if key.attempt != last + 1:
        raise StageError(f"{key}: the next attempt would be {last + 1}; set attempt to that, or 0 for the current one")
    if lake.read("trajectories", {"run": key.run, "step": key.step + 1}, ["step"]).num_rows:
        raise StageError(
            f"{key}: step {key.step + 1} was already drawn from its weights, so it cannot be repeated; "
            "repeat the newest step, or start another run"
        )
    if not lake.read("steps", {"run": key.run, "step": key.step, "attempt": last}, ["step"]).num_rows:
        raise StageError(f"{key}: attempt {last} has not finished; run it again with attempt 0, which continues it")
