"""Commits what rollouts yield in few transactions: whatever has gathered since the last goes into one per table."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from typing import Any

import pyarrow as pa

from furlong.ops import records
from furlong.ops.protocols import LakeLike

_ORDER = ("groups", "failures", "fragments", "trajectories", "rewards")
"""Each before what is made from it: trajectories that a crash has lost are drawn anew, under newer weights, and would not be
those that rewards stand for; rewards that it has lost are given again."""
_KEY = {"groups": "group_id", "failures": "trajectory_id", "fragments": "request_id"}
"""The column that tells a row of a table from others of its run; `trajectory_id` where nothing is said."""


class Writer:
    """Any thread may add; one at a time flushes. Ledger events are committed last: they tell of rows that stand."""

    def __init__(self, lake: LakeLike, run: str):
        self._lake, self._run = lake, run
        self._adding, self._flushing = threading.Lock(), threading.Lock()
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._events: list[dict[str, Any]] = []
        self._commits: deque[tuple[str, dict[str, Any], pa.Table]] = deque()
        """What is to be committed, in this order, and has not surely been."""
        self._since = 0.0

    def add(self, table: str, rows: list[dict[str, Any]]) -> None:
        """Rows to commit with the next flush."""
        with self._adding:
            self._note()
            self._rows[table] += rows

    def tell(self, events: pa.Table) -> None:
        """Rows of `ledger`, for after the rows added before."""
        with self._adding:
            self._note()
            self._events += events.to_pylist()

    def age(self) -> float:
        """Seconds that the oldest row has been waiting; 0 when none is."""
        with self._adding:
            return time.monotonic() - self._since if self._since else 0.0

    def flush(self) -> None:
        """Everything added before this call is in the lake when it returns.

        Raises:
            LakeError: storage failed. What follows the failed commit waits for the next flush, which makes that commit
                anew first, row for row, as it may have taken place: an event is never in the lake without those before.
        """
        with self._flushing:
            with self._adding:
                self._commits += self._gathered()
                self._rows, self._events, self._since = defaultdict(list), [], 0.0
            while self._commits:
                self._lake.commit_once(*self._commits[0])
                self._commits.popleft()

    def _gathered(self) -> list[tuple[str, dict[str, Any], pa.Table]]:
        """Table, key and rows of each commit that is due."""
        made = []
        for table in _ORDER:
            for some in _apart(table, self._rows.get(table, [])):
                column = _KEY.get(table, "trajectory_id")
                key = {"run": self._run, column: [row[column] for row in some]}
                if table == "failures":
                    key["try"] = some[0]["try"]
                made.append((table, key, records.rows(table, some)))
        if self._events:
            key = {"run": self._run, "seq": [event["seq"] for event in self._events]}
            made.append(("ledger", key, records.rows("ledger", self._events)))
        return made

    def _note(self) -> None:
        self._since = self._since or time.monotonic()


def _apart(table: str, rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows in sets that one key can tell from all others."""
    if table != "failures":
        return [rows] if rows else []
    return [[row for row in rows if row["try"] == number] for number in sorted({row["try"] for row in rows})]
