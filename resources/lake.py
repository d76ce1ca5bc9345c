"""The lake: every row that crosses a stage boundary, in Delta tables, committed exactly once.

Delta's application transactions record but do not deduplicate. So a commit looks for its key's rows on a snapshot and
writes to that same snapshot; the transaction's id makes two writers who both looked collide instead of both adding.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from furlong.ops import records
from furlong.ops.protocols import Commit
from furlong.resources.lake_filter import FilterError, Where, normalised, to_expression, to_sql
from furlong.resources.lake_table import Conflict, LakeError, LakeTable

_TRIES = 12
_STAGES = {
    "prompts": "prompts",
    "groups": "rollouts",
    "trajectories": "rollouts",
    "rewards": "rewards",
    "steps": "train_step",
    "weight_versions": "weight_publish",
    "weight_deltas": "weight_publish",
    "evals": "evals",
}


class RowsDifferError(LakeError):
    """Rows with this key stand already and are not the ones offered: two different results claim one place."""


class Lake:
    """All tables under one URI; one object per process serves all its threads."""

    def __init__(self, uri: str, storage_options: dict[str, str] | None = None):
        """
        Args:
            uri: a folder, or any object-store URI that deltalake takes; tables lie below it under their names.
            storage_options: passed to deltalake as they are (credentials, endpoint).
        """
        root = uri.rstrip("/") if "://" in uri else str(Path(uri).resolve())
        self.uri = root
        self._tables = {name: LakeTable(name, f"{root}/{name}", storage_options) for name in records.TABLES}
        self._absent: dict[str, tuple[dict[str, list[Any]], int]] = {}

    def read(
        self, table: str, where: Where | None = None, columns: list[str] | None = None, version: int | None = None
    ) -> pa.Table:
        """Validated rows whose columns equal (or, for a list, are among) the given values, in no promised order.

        Args:
            where: text and integer columns only; an empty list matches nothing.
            columns: those wanted, in this order; None for all.
            version: an older Delta version to read; None for the newest.
        Returns:
            The rows; none when the table does not exist yet.
        """
        handle, wanted = self._handle(table), normalised(table, where or {})
        normal = records.TABLES[table].empty_table()
        unknown = sorted(set(columns or []) - set(normal.column_names))
        if unknown:
            raise FilterError(f"{table} has no columns {unknown}; it has {', '.join(normal.column_names)}")
        with handle.lock:
            snapshot = handle.latest() if version is None else handle.at(version)
            if snapshot is None:
                return normal if columns is None else normal.select(columns)
            found = handle.select(snapshot, wanted, columns)
            if not found.num_rows and version is None:
                self._absent[table] = (wanted, snapshot.version())
            return found

    def commit_once(self, table: str, key: Where, data: pa.Table) -> Commit:
        """Append rows unless rows with this key exist; all or nothing, whoever else tries at the same time.

        Args:
            key: columns and values that every row of `data` has and that no row of another commit has.
        Returns:
            `wrote=False` when the same rows (measured columns aside) were there already.
        Raises:
            RowsDifferError: other rows stand under this key.
            LakeError: storage failed; nothing of `data` is visible unless an earlier try committed it.
        """
        handle, wanted, data = self._prepare(table, key, data)
        with handle.lock:
            for wait in _waits():
                snapshot = handle.ensure()
                # A stage looks before it works; what was absent from this very version need not be looked for again.
                seen = self._absent.get(table) == (wanted, snapshot.version())
                found = data.slice(0, 0) if seen else handle.select(snapshot, wanted)
                if found.num_rows:
                    _same(handle, key, found, data)
                if found.num_rows or not data.num_rows:
                    return Commit(table, snapshot.version(), found.num_rows, wrote=False)
                try:
                    version = handle.write(snapshot, data, key.get("run", ""), _note(table, key), None)
                    return Commit(table, version, data.num_rows, wrote=True)
                except Conflict:
                    time.sleep(wait)
        raise _contended(handle)

    def replace(self, table: str, key: Where, data: pa.Table) -> Commit:
        """Swap all rows with this key for `data` in one transaction; with no rows in `data` they are removed."""
        handle, wanted, data = self._prepare(table, key, data)
        with handle.lock:
            for wait in _waits():
                snapshot = handle.ensure()
                try:
                    version = handle.write(snapshot, data, key.get("run", ""), _note(table, key), to_sql(wanted))
                    return Commit(table, version, data.num_rows, wrote=True)
                except Conflict:
                    time.sleep(wait)
        raise _contended(handle)

    def version(self, table: str) -> int | None:
        """The newest Delta version; None when the table does not exist yet."""
        snapshot = self._handle(table).latest()
        return None if snapshot is None else snapshot.version()

    def count(self, table: str, where: Where | None = None) -> int:
        """How many rows `read` would give."""
        handle, wanted = self._handle(table), normalised(table, where or {})
        with handle.lock:
            snapshot = handle.latest()
            return 0 if snapshot is None else handle.count(snapshot, wanted)

    def history(self, table: str, limit: int | None = None) -> list[dict[str, Any]]:
        """Commits, newest first: Delta version, timestamp, operation, and run, step and stage where known."""
        return self._handle(table).history(limit)

    def _handle(self, table: str) -> LakeTable:
        if table not in self._tables:
            raise FilterError(f"the lake has no table {table!r}; it has {', '.join(self._tables)}")
        return self._tables[table]

    def _prepare(self, table: str, key: Where, data: pa.Table) -> tuple[LakeTable, dict[str, list[Any]], pa.Table]:
        handle, wanted = self._handle(table), normalised(table, key)
        data = records.validate(table, data)
        if not wanted or not all(wanted.values()):
            raise FilterError(f"{table}: key {key} selects nothing in particular; give each key column a value")
        # Writers of one run collide by the run's name; a key without it would let them pass each other.
        if "run" in data.column_names and not isinstance(key.get("run"), str):
            raise FilterError(f"{table}: key {key} does not name one run; add 'run'")
        strays = data.num_rows - data.filter(to_expression(table, wanted)).num_rows
        if strays:
            raise FilterError(
                f"{table}: {strays} of {data.num_rows} rows do not have the key {key}; correct key or rows"
            )
        return handle, wanted, data


def _same(handle: LakeTable, key: Where, found: pa.Table, offered: pa.Table) -> None:
    have, want = records.row_digest(handle.name, found), records.row_digest(handle.name, offered)
    if have != want:
        raise RowsDifferError(
            f"table {handle.name} at {handle.uri} holds {found.num_rows} rows for {key} with identity digest {have}, "
            f"but {offered.num_rows} rows with {want} were offered: a repeat must give the same rows. Nothing "
            "was written; use a new attempt number for a repeat on purpose, else find out which of the two is wrong"
        )


def _note(table: str, key: Where) -> dict[str, str]:
    note = {column: str(key[column]) for column in ("run", "step", "attempt") if isinstance(key.get(column), str | int)}
    if isinstance(key.get("version"), int):
        note["weights_version"] = str(key["version"])
    return note | ({"stage": _STAGES[table]} if table in _STAGES else {})


def _waits() -> list[float]:
    """Seconds to wait after each lost race: random, so that rivals part, and growing to about one second."""
    return [random.uniform(0, min(1.0, 0.01 * 2**n)) for n in range(_TRIES)]


def _contended(handle: LakeTable) -> LakeError:
    return LakeError(
        f"table {handle.name} at {handle.uri}: another writer of the same run won {_TRIES} times in a row, nothing was "
        "written; stop the second driver of this run, then run again"
    )
