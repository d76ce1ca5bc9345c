"""Bookkeeping of one drive, i.e. one process taking a run's steps: wall time, overhead per step, peak memory.

It decides nothing; it is kept beside the run (`runs/<run>/drives.jsonl`) so that the report can add drives up.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from furlong.ops.stages.context import StageReport
from furlong.resources.memory import resident_bytes


class Drive:
    """Counts one drive; `overhead` is a step's wall time minus the time spent in engine, trainer and verifier."""

    SAMPLE_SECONDS = 2.0

    def __init__(self, root: Path):
        self.begin = time.time()
        self.steps: list[dict[str, float]] = []
        self.stage_seconds: dict[str, float] = {}
        self.peak_rss = 0
        self._work = 0.0
        self._stop = threading.Event()
        self._root = root
        threading.Thread(target=self._sample, name="memory", daemon=True).start()

    def add(self, report: StageReport) -> None:
        """Count a stage."""
        self._work += report.work_seconds
        self.stage_seconds[report.stage] = self.stage_seconds.get(report.stage, 0.0) + report.seconds

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Count a step."""
        begin, self._work = time.perf_counter(), 0.0
        yield
        wall = time.perf_counter() - begin
        self.steps.append({"step": step, "wall": wall, "work": self._work, "overhead": wall - self._work})

    def _sample(self) -> None:
        while not self._stop.wait(self.SAMPLE_SECONDS):
            self.peak_rss = max(self.peak_rss, resident_bytes(self._root))

    def save(self, folder: Path) -> None:
        """End the drive and append it to the run's drives; a second call does nothing."""
        if self._stop.is_set():
            return
        self._stop.set()
        self.peak_rss = max(self.peak_rss, resident_bytes(self._root))
        folder.mkdir(parents=True, exist_ok=True)
        row = {
            "pid": os.getpid(),
            "started_at": self.begin,
            "seconds": time.time() - self.begin,
            "peak_rss_bytes": self.peak_rss,
            "stage_seconds": self.stage_seconds,
            "steps": self.steps,
        }
        with open(folder / "drives.jsonl", "a") as file:
            file.write("\n" + json.dumps(row) + "\n")  # the line before may have been cut off

    @staticmethod
    def write_report(folder: Path, report: dict[str, Any]) -> None:
        """Write report.json whole or not at all."""
        part = folder / "report.json.part"
        part.write_text(json.dumps(report, indent=2) + "\n")
        part.replace(folder / "report.json")

    @staticmethod
    def saved(folder: Path) -> list[dict[str, Any]]:
        """All drives of a run that ended in an orderly way, oldest first; a line cut off by a kill is none."""
        path = folder / "drives.jsonl"
        found = []
        for line in path.read_text().splitlines() if path.is_file() else []:
            with suppress(json.JSONDecodeError):
                found.append(json.loads(line))
        return found
