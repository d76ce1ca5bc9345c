"""Locks that the operating system releases when their holder dies: one driver per run, one starter per cluster."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

FREE_AFTER = 1.0
"""Seconds for which a holder is waited for; bridges the moment in which a killed driver is still being torn down."""


class LockHeld(RuntimeError):
    """Another process holds the lock; the message names it."""


@contextmanager
def run_lock(root: Path, run: str, patience: float = FREE_AFTER) -> Iterator[None]:
    """Be the only driver of a run; the lock goes with the process, however that ends.

    Args:
        root: the placement's folder.
        run: the run's name.
        patience: seconds to wait for another driver to be done.
    Raises:
        LockHeld: another driver, named by its pid, is at work on this run.
    """
    path = root / "runs" / run / "lock"
    advice = "wait until it is done, or end it and run the same command: it continues from the last committed step"
    with exclusive(path, patience, f"run {run} is being driven", advice):
        yield


def is_driven(root: Path, run: str) -> bool:
    """True while some process, this one included, drives the run."""
    path = root / "runs" / run / "lock"
    if not path.is_file():
        return False
    with open(path, "r+") as handle:
        return not _try(handle)


def driven_runs(root: Path) -> dict[str, int]:
    """Runs being driven now, and the pid of each one's driver."""
    found = {}
    for path in sorted((root / "runs").glob("*/lock")):
        if is_driven(root, path.parent.name):
            found[path.parent.name] = _holder(path)
    return found


@contextmanager
def exclusive(path: Path, deadline: float, what: str, advice: str) -> Iterator[None]:
    """Hold the lock at `path`, waiting at most `deadline` seconds; `what` and `advice` word the error.

    Raises:
        LockHeld: it did not become free in time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + deadline
    with open(path, "a+") as handle:
        while not _try(handle):
            if time.monotonic() > until:
                raise LockHeld(f"{what} by process {_holder(path)} (lock {path}); {advice}")
            time.sleep(0.05)
        handle.truncate(0)
        handle.write(json.dumps({"pid": os.getpid()}))
        handle.flush()
        yield


def _try(handle: IO[str]) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(path: Path) -> int:
    """The pid written by the holder, or 0 in the instant before it is written."""
    text = path.read_text()
    return json.loads(text)["pid"] if text else 0
