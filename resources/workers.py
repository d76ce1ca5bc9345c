"""The processes that execute Dagster runs: each in a session of its own, belonging to nobody but the root folder.

A worker needs neither the web server nor the daemon that started it: its state is in Dagster's storage and in the lake.
Its name, `host:pid:start time`, says for ever which process it was, also when the number is used again.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from furlong.resources.processes import end_all, last_lines, mark, marked

PART = "worker"
"""Marks the processes of this kind (see `resources.processes`)."""
KEPT_LOGS = 100
"""Workers' own output, mostly empty: what Dagster knows of a run is in its event log."""
SHOWN_LINES = 15
START_SLACK = 1.0
"""Seconds by which two readings of one process's start may differ."""


@dataclass(frozen=True)
class Worker:
    """A process, on this machine or another one."""

    host: str
    pid: int
    started_at: float
    """Seconds since the epoch."""

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started_at:.2f}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        host, pid, started_at = text.rsplit(":", 2)
        return cls(host, int(pid), float(started_at))

    @classmethod
    def of(cls, pid: int) -> Worker:
        """The process that has this number on this machine now; psutil.NoSuchProcess when none has."""
        return cls(socket.gethostname(), pid, psutil.Process(pid).create_time())

    @property
    def elsewhere(self) -> bool:
        """Whether it is on another machine, where only that machine can look."""
        return self.host != socket.gethostname()

    def lives(self) -> bool:
        """Whether it still runs, as far as this machine can tell: one elsewhere counts as alive."""
        return self.elsewhere or self._process() is not None

    def interrupt(self) -> bool:
        """Ask it to end, as Ctrl-C would; False when it had ended, or is elsewhere."""
        if self.elsewhere or (process := self._process()) is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.terminate()
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended; False when it still runs after so many seconds."""
        until = time.monotonic() + seconds
        while self.lives():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def end(self) -> None:
        """Kill it, and what it started if it leads a group of its own."""
        if self.elsewhere or self._process() is None:
            return
        with suppress(ProcessLookupError):
            kill = os.killpg if os.getpgid(self.pid) == self.pid else os.kill
            kill(self.pid, signal.SIGKILL)

    def _process(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started_at) < START_SLACK
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None


def start_worker(root: Path, dagster_run: str, arguments: str) -> Worker:
    """Start the process that executes a Dagster run, and return at once.

    Args:
        root: the placement's folder.
        dagster_run: the run's id, which names the log.
        arguments: what `dagster api execute_run` is to be told, as Dagster words it. It goes through the environment,
            which other users of the machine cannot read.
    """
    log = log_of(root, dagster_run)
    log.parent.mkdir(parents=True, exist_ok=True)
    _forget_old_logs(log.parent)
    settings = {"DAGSTER_EXECUTE_RUN_ARGS": arguments, "FURLONG_ROOT": str(root), "PYTHONUNBUFFERED": "1"}
    with open(log, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "dagster", "api", "execute_run"], stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True, cwd=root, env=os.environ | mark(PART, root) | settings,
        )  # fmt: skip
    return Worker.of(process.pid)


def end_workers(root: Path, polite_seconds: float, deadline: float) -> list[str]:
    """End all workers of a root with their children; returns a line for each process."""
    return end_all(lambda: marked(mark(PART, root)), polite_seconds, deadline)


def log_of(root: Path, dagster_run: str) -> Path:
    """What a worker itself wrote: the place to look when it ended without a word in Dagster."""
    return root / "logs" / "workers" / f"{dagster_run}.log"


def last_words(root: Path, dagster_run: str) -> str:
    """The end of a worker's own output, for a message."""
    path = log_of(root, dagster_run)
    return f"Last lines of {path}:\n{last_lines(path, SHOWN_LINES)}"


def _forget_old_logs(folder: Path) -> None:
    for path in sorted(folder.glob("*.log"), key=lambda path: path.stat().st_mtime)[:-KEPT_LOGS]:
        path.unlink(missing_ok=True)
