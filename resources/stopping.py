"""Stopping a run on purpose: kept beside the run, so that it outlives drivers, web server, daemon and the machine's uptime.

A stopped run is taken on by nobody by itself; `clear_stop`, which a person's next launch calls too, lets it go on.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stop:
    """That, why and when a run was stopped."""

    reason: str
    """A person's words, or which button it was."""
    at: float
    """Seconds since the epoch."""


def request_stop(root: Path, run: str, reason: str) -> None:
    """Mark a run as stopped: its driver ends before the next step, and nothing automatic begins another.

    Args:
        root: the placement's folder.
    """
    path = _path(root, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"stop.{os.getpid()}")
    part.write_text(json.dumps({"reason": reason, "at": time.time()}))
    part.replace(path)


def stopped(root: Path, run: str) -> Stop | None:
    """The mark of a stopped run; None for one that may go on."""
    try:
        told = json.loads(_path(root, run).read_text())
    except FileNotFoundError:
        return None
    return Stop(told["reason"], told["at"])


def stopped_runs(root: Path) -> dict[str, Stop]:
    """All stopped runs and their marks."""
    names = sorted(path.parent.name for path in (root / "runs").glob("*/stop.json"))
    found = {name: stopped(root, name) for name in names}
    return {name: mark for name, mark in found.items() if mark}


def clear_stop(root: Path, run: str) -> Stop | None:
    """Let a run go on; returns the mark that was there."""
    mark = stopped(root, run)
    _path(root, run).unlink(missing_ok=True)
    return mark


def _path(root: Path, run: str) -> Path:
    return root / "runs" / run / "stop.json"
