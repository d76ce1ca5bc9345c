"""Which versions of a run may go, and which must stay so that every kept one can be rebuilt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


class RetentionError(ValueError):
    """A run in which nothing can safely be collected; the message names the version at fault."""


@dataclass(frozen=True)
class Plan:
    """What a collection does."""

    kept: tuple[int, ...]
    """Wanted for themselves: the newest, the tagged, the staged, and what those were published on."""
    needed: tuple[int, ...]
    """Kept only because a kept version is built from them."""
    anchored: tuple[int, ...]
    """Kept versions to store completely first, as that is less than the history it frees."""
    collected: tuple[int, ...]
    """Those whose bytes go."""
    freed_bytes: int
    """Bytes of the collected ones, less those of the complete copies."""


def plan_collection(rows: list[dict[str, Any]], tagged: Iterable[int], keep_last: int, anchoring: bool = True) -> Plan:
    """Decide about every version that is not collected yet.

    Args:
        rows: version, state, kind, parent, anchor, full_bytes and delta_bytes of every version of the run.
        tagged: versions that have a tag.
        keep_last: how many of the newest live versions to keep, at least 1.
        anchoring: whether complete copies may be planned.
    Raises:
        RetentionError: `keep_last` is below 1, or a kept version cannot be rebuilt even now.
    """
    if keep_last < 1:
        raise RetentionError(f"keep_last={keep_last} would collect the version that engines serve; give 1 or more")
    alive = {row["version"]: row for row in rows if row["state"] != "collected"}
    kept = _wanted(alive, set(tagged), keep_last)
    segments = {version: _segment(alive, kept, version) for version in sorted(kept)}
    anchored = _worth_a_copy(alive, segments) if anchoring else []
    needed = {v for version, segment in segments.items() if version not in anchored for v in segment}
    collected = sorted(alive.keys() - kept - needed)
    copies = sum(alive[version]["full_bytes"] for version in anchored)
    freed = sum(stored_bytes(alive[version]) for version in collected) - copies
    return Plan(tuple(sorted(kept)), tuple(sorted(needed)), tuple(anchored), tuple(collected), freed)


def _wanted(alive: dict[int, dict[str, Any]], tagged: set[int], keep_last: int) -> set[int]:
    served = sorted(version for version, row in alive.items() if row["state"] != "staged")
    kept = set(served[-keep_last:]) | (tagged & alive.keys())
    kept |= {version for version, row in alive.items() if row["state"] == "staged" or row["anchor"] == "base"}
    # A publication falls back on the parent, and the newest step may be repeated, which begins at its parent.
    fresh = [alive[version] for version in kept if alive[version]["state"] == "staged" or version == served[-1]]
    return kept | {row["parent"] for row in fresh if row["parent"] in alive}


def _segment(alive: dict[int, dict[str, Any]], kept: set[int], version: int) -> list[int]:
    """The versions beside kept ones that `version` needs, down to its anchor or to a kept one, which has its own."""
    segment: list[int] = []
    at = version
    while alive[at]["kind"] != "anchor":
        parent = alive[at]["parent"]
        if parent not in alive or parent >= at:
            raise RetentionError(
                f"weights version {version} is to be kept, but {at} is built on {parent}, whose bytes are gone; nothing "
                "was collected: `furlong weights verify` shows what can still be rebuilt; untag those that cannot"
            )
        if parent in kept:
            break
        segment.append(parent)
        at = parent
    return segment


def _worth_a_copy(alive: dict[int, dict[str, Any]], segments: dict[int, list[int]]) -> list[int]:
    """Oldest first: versions whose complete copy takes less than the deltas that nothing but they need.

    An older copy among those does not count: else each collection would write a new one to be rid of the last.
    """
    users = Counter(version for segment in segments.values() for version in segment)
    chosen = []
    for version, segment in segments.items():
        alone = sum(alive[old]["delta_bytes"] for old in segment if users[old] == 1)
        if alive[version]["state"] != "staged" and alone > alive[version]["full_bytes"]:
            chosen.append(version)
            users.subtract(segment)
    return chosen


def stored_bytes(row: dict[str, Any]) -> int:
    """What the lake holds of a version, in bytes: its deltas, and its complete copy if it has one of its own."""
    stored_whole = row["kind"] == "anchor" and row["anchor"] != "base"
    return row["delta_bytes"] + (row["full_bytes"] if stored_whole else 0)
