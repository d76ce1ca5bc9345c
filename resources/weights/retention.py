"""Frees the bytes of weights versions that nothing needs; their rows and numbers stay for ever.

Killed anywhere and run again it ends the same, and at no time is a version that is not `collected` without its bytes:

    complete copies   file, then its row as an anchor: a file without a row is only clutter
    `collecting`      marked in one commit; the bytes are all there and every version still rebuilds
    look              rows and tags read again, after the mark (see tags.py); what is needed now becomes live again
    `collected`       one commit; from here on nobody builds on these versions, whether their bytes are there or not
    bytes             deltas and files of collected versions deleted; those that a kill left are found again by state

Collectors take a fencing token, so a second one shuts out the first before it reads, and the marks it then finds belong
to nobody else. Publishers need no word in this: what one may build on (the newest version and its parent) is always kept.
"""

from __future__ import annotations

from typing import Any

from furlong.ops import records
from furlong.ops.stages.chain import CHAIN_COLUMNS
from furlong.ops.weights.retention import Plan, plan_collection, stored_bytes
from furlong.resources.lake import Lake
from furlong.resources.weights.anchors import list_anchors, remove_anchor, write_anchor
from furlong.resources.weights.rebuild import rebuild
from furlong.resources.weights.tags import drop_void_tags, list_tags

ROLE = "collector"
GRACE = 24 * 3600.0
"""Seconds before an anchor file that no row names counts as left over: its writer may still be about to commit the row."""


def collection_plan(lake: Lake, run: str, keep_last: int) -> Plan:
    """What `collect` would do now."""
    return plan_collection(_rows(lake, run), list_tags(lake, run).values(), keep_last)


def collect(lake: Lake, run: str, keep_last: int, base_folder: str, grace: float = GRACE) -> Plan:
    """Collect every version that is not among the last `keep_last`, tagged, staged, or needed by one of those.

    A kept version that holds more history than a complete copy of it weighs is stored completely first.

    Returns:
        What was done; vacuum `weight_deltas` to free the space on disk.
    Raises:
        RetentionError: `keep_last` is below 1, or a kept version is broken; nothing was collected.
        RebuildError: a version to store completely is damaged; nothing was collected.
        StaleFence: another collector took over; it does the rest.
    """
    fence = lake.take_fence(run, ROLE)
    first = collection_plan(lake, run, keep_last)
    for version in first.anchored:
        _anchor(lake, run, version, base_folder, fence)
    _set_state(lake, run, list(first.collected), "collecting", fence)
    # Rows before tags: of every row seen as `collecting`, the tags read then are younger than its mark.
    rows = _rows(lake, run)
    final = plan_collection(rows, list_tags(lake, run).values(), keep_last, anchoring=False)
    marked = {row["version"] for row in rows if row["state"] == "collecting"}
    _set_state(lake, run, sorted(marked - set(final.collected)), "live", fence)
    done = sorted(marked & set(final.collected))
    _set_state(lake, run, done, "collected", fence)
    _delete_bytes(lake, run, grace)
    drop_void_tags(lake, run)
    stored = {row["version"]: row for row in rows}
    copies = sum(stored[version]["full_bytes"] for version in first.anchored)
    freed = sum(stored_bytes(stored[version]) for version in done) - copies
    return Plan(final.kept, final.needed, first.anchored, tuple(done), freed)


def _rows(lake: Lake, run: str) -> list[dict[str, Any]]:
    return lake.read("weight_versions", {"run": run}, CHAIN_COLUMNS).to_pylist()


def _anchor(lake: Lake, run: str, version: int, base_folder: str, fence: int) -> None:
    where = {"run": run, "version": version}
    tensors = rebuild(lake, run, version, base_folder)
    row = lake.read("weight_versions", where).to_pylist()[0]
    anchor = write_anchor(lake.uri, run, version, tensors, row["digest"])
    fresh = records.rows("weight_versions", [{**row, "kind": "anchor", "anchor": anchor}])
    lake.replace("weight_versions", where, fresh, fence=fence, role=ROLE)


def _set_state(lake: Lake, run: str, versions: list[int], state: str, fence: int) -> None:
    """One commit for all of them. Rows that are live or collecting are rewritten by collectors alone."""
    if not versions:
        return
    where = {"run": run, "version": versions}
    fresh = [{**row, "state": state} for row in lake.read("weight_versions", where).to_pylist()]
    lake.replace("weight_versions", where, records.rows("weight_versions", fresh), fence=fence, role=ROLE)


def _delete_bytes(lake: Lake, run: str, grace: float) -> None:
    rows = _rows(lake, run)
    gone = [row["version"] for row in rows if row["state"] == "collected"]
    held = sorted(set(lake.read("weight_deltas", {"run": run, "version": gone}, ["version"])["version"].to_pylist()))
    if held:
        lake.replace("weight_deltas", {"run": run, "version": held}, records.TABLES["weight_deltas"].empty_table())
    # Ages first: a file that a row names by the time the rows are read is not left over, however old.
    ages = list_anchors(lake.uri, run)
    rows = _rows(lake, run)
    named = {row["anchor"] for row in rows if row["state"] != "collected"}
    dead = {row["anchor"] for row in rows if row["state"] == "collected"}
    for anchor, age in ages.items():
        if anchor not in named and (anchor in dead or age > grace):
            remove_anchor(lake.uri, anchor)
