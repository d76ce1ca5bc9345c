"""Weights versions and collections, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from furlong.ops.weights.retention import Plan
    from furlong.resources.lake import Lake

STYLES = {"live": "green", "staged": "yellow", "collecting": "yellow", "collected": "dim"}
COLUMNS = ["version", "step", "state", "kind", "parent", "digest", "delta_bytes", "transport"]


def versions_table(lake: Lake, run: str) -> Table:
    """One line per version, oldest first."""
    from furlong.resources.weights.tags import list_tags

    names: dict[int, list[str]] = {}
    for tag, version in list_tags(lake, run).items():
        names.setdefault(version, []).append(tag)
    # Without lines between columns it fits the 80 characters of a pipe.
    table = Table(title=f"weights versions of run {run}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for heading in ("version", "step", "parent", "delta"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("state", "kind", "transport", "digest"):
        table.add_column(heading, no_wrap=True)
    table.add_column("tags", overflow="fold")
    rows = lake.read("weight_versions", {"run": run}, COLUMNS).to_pylist()
    for row in sorted(rows, key=lambda row: row["version"]):
        parent = "" if row["parent"] is None else str(row["parent"])
        numbers = (str(row["version"]), str(row["step"]), parent, _size(row["delta_bytes"]))
        words = (
            row["state"],
            row["kind"],
            row["transport"],
            row["digest"][:12],
            " ".join(names.get(row["version"], [])),
        )
        table.add_row(*numbers, *words, style=STYLES.get(row["state"]))
    return table


def print_plan(console: Console, run: str, plan: Plan, done: bool) -> None:
    """What a collection did, or would do."""
    would = "" if done else "would be "
    console.print(f"run {run}: {counted(len(plan.collected), 'version')} {would}collected: {_spans(plan.collected)}")
    console.print(f"stored completely first: {_spans(plan.anchored)}")
    console.print(f"kept: {_spans(plan.kept)}; and, as those are built on them: {_spans(plan.needed)}")
    console.print(f"{_size(plan.freed_bytes)} {would}freed")


def print_removed(console: Console, files: int, retention_hours: int) -> None:
    """What of the freed bytes has left the disk."""
    later = f"; those younger than {retention_hours} hours go with a later collect, or with --retention-hours 0"
    console.print(f"{counted(files, 'file')} of freed rows removed from disk{later if retention_hours else ''}")


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _spans(versions: tuple[int, ...]) -> str:
    """1, 2, 3, 7 as `1-3, 7`."""
    spans: list[list[int]] = []
    for version in versions:
        if spans and version == spans[-1][1] + 1:
            spans[-1][1] = version
        else:
            spans.append([version, version])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans) or "none"


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
