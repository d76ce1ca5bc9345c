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
from furlong.ops.protocols import Commit, StaleFence
from furlong.resources.lake_filter import FilterError, Where, normalised, to_expression, to_sql
from furlong.resources.lake_table import Conflict, LakeError, LakeTable

_TRIES = 12
_FENCED = frozenset({"weight_versions"})
PUBLISHER = "publisher"
"""The role of those who make versions; each role of a run has its own fencing tokens."""
_STAGES = {
    "prompts": "prompts",
    "groups": "rollouts",
    "batches": "rollouts",
    "trajectories": "rollouts",
    "fragments": "rollouts",
    "failures": "rollouts",
    "ledger": "rollouts",
    "rewards": "rewards",
    "teacher_scores": "rewards",
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

    def create(self) -> None:
        """Create the tables that there are not yet, so that queries may name each, whether it has rows already or not."""
        for handle in self._tables.values():
            handle.ensure()

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

    def commit_once(self, table: str, key: Where, data: pa.Table, fence: int | None = None) -> Commit:
        """Append rows unless rows with this key exist; all or nothing, whoever else tries at the same time.

        Args:
            key: columns and values that every row of `data` has and that no row of another commit has.
            fence: the caller's token from `take_fence`; only for `weight_versions`.
        Returns:
            `wrote=False` when the same rows (measured columns aside) were there already.
        Raises:
            RowsDifferError: other rows stand under this key.
            StaleFence: a newer token was given out; nothing was written.
            LakeError: storage failed; nothing of `data` is visible unless an earlier try committed it.
        """
        handle, wanted, data = self._prepare(table, key, data)
        with handle.lock:
            for wait in _waits():
                snapshot = handle.ensure()
                mark = _checked_fence(handle, snapshot, key, PUBLISHER, fence)
                # A stage looks before it works; what was absent from this very version need not be looked for again.
                seen = self._absent.get(table) == (wanted, snapshot.version())
                found = data.slice(0, 0) if seen else handle.select(snapshot, wanted)
                if found.num_rows:
                    _same(handle, key, found, data)
                if found.num_rows or not data.num_rows:
                    return Commit(table, snapshot.version(), found.num_rows, wrote=False)
                try:
                    version = handle.write(snapshot, data, key.get("run", ""), _note(table, key), None, mark)
                    return Commit(table, version, data.num_rows, wrote=True)
                except Conflict:
                    time.sleep(wait)
        raise _contended(handle)

    def replace(
        self,
        table: str,
        key: Where,
        data: pa.Table,
        fence: int | None = None,
        role: str = PUBLISHER,
        expected: pa.Table | None = None,
    ) -> Commit:
        """Swap all rows with this key for `data` in one transaction; with no rows in `data` they are removed.

        Args:
            fence, role: the caller's token from `take_fence`, and for which role; only for `weight_versions`.
            expected: the rows that the caller read and built `data` from; None to swap whatever stands.
        Raises:
            RowsDifferError: other rows than `expected` stand; nothing was written.
            StaleFence: a newer token was given out; nothing was written.
        """
        handle, wanted, data = self._prepare(table, key, data)
        with handle.lock:
            for wait in _waits():
                snapshot = handle.ensure()
                mark = _checked_fence(handle, snapshot, key, role, fence)
                if expected is not None:
                    _same(handle, key, handle.select(snapshot, wanted), expected)
                try:
                    replaced = to_sql(wanted)
                    version = handle.write(snapshot, data, key.get("run", ""), _note(table, key), replaced, mark)
                    return Commit(table, version, data.num_rows, wrote=True)
                except Conflict:
                    time.sleep(wait)
        raise _contended(handle)

    def take_fence(self, run: str, role: str = PUBLISHER, held: int | None = None) -> int:
        """A fencing token higher than any given out for this run and role, for ever; holders of lower ones are shut out.

        It stands in the log of `weight_versions`, so that a fenced commit checks it and writes on one snapshot.

        Args:
            held: the token that the new one takes the place of, which must be the newest.
        Raises:
            StaleFence: `held` is not the newest; none was given out.
        """
        handle = self._handle("weight_versions")
        with handle.lock:
            for wait in _waits():
                try:
                    snapshot = handle.ensure()
                    _checked_fence(handle, snapshot, {"run": run}, role, held)
                    return handle.claim(snapshot, _fence_name(run, role))
                except Conflict:
                    time.sleep(wait)
        raise _contended(handle)

    def vacuum(self, table: str, retention_hours: int = 168, dry_run: bool = False) -> list[str]:
        """Remove data files that hold no row any more, and return (or, dry, only tell) their paths below the table.

        Files that the newest version needs stay; older versions of the table can no longer be read completely.

        Args:
            retention_hours: only files that left the table longer ago; a process that still reads an older snapshot
                needs its files, so 0 is for a lake that nobody else uses.
        """
        if retention_hours < 0:
            raise FilterError(f"{table}: a retention of {retention_hours} hours is in the future; give 0 or more")
        return self._handle(table).vacuum(retention_hours, dry_run)

    def compact(self, table: str) -> dict[str, int]:
        """Rewrite a table's many small files as few larger ones, the rows as they are; safe beside writers and readers.

        What was rewritten stays readable in older versions until `vacuum`. A run's partition is never mixed with another's.

        Returns:
            How many files were `removed` from the newest version, and `added` to it.
        Raises:
            LakeError: storage failed, or writers replaced rows each time; the table is as before.
        """
        handle = self._handle(table)
        with handle.lock:
            for wait in _waits():
                try:
                    return handle.compact()
                except Conflict:
                    time.sleep(wait)
        raise _contended(handle)

    def files(self, table: str) -> int:
        """How many data files the newest version of a table has; 0 when it does not exist yet."""
        return self._handle(table).files()

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

    def dataset(self, table: str) -> Any | None:
        """The newest version as a pyarrow dataset, for engines that push filters and columns down into it; None when the
        table does not exist yet."""
        handle = self._handle(table)
        with handle.lock:
            snapshot = handle.latest()
            return None if snapshot is None else handle.dataset(snapshot)

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


def _fence_name(run: str, role: str) -> str:
    """The application whose transaction version is the newest token: Delta keeps it in the log and in checkpoints, and
    lets two commits that both name it collide."""
    return f"fence/{role}/{run}"


def _checked_fence(
    handle: LakeTable, snapshot: Any, key: Where, role: str, fence: int | None
) -> tuple[str, int] | None:
    """The mark that a commit bears so that it collides with a taker of tokens; None for a commit without a token."""
    if fence is None:
        return None
    if handle.name not in _FENCED:
        raise FilterError(f"{handle.name} takes no fencing token, only {', '.join(sorted(_FENCED))} does; leave it out")
    name = _fence_name(key["run"], role)
    newest = handle.claimed(snapshot, name)
    if fence < newest:
        raise StaleFence(
            f"run {key['run']}: fencing token {fence} is out of date, {newest} is the newest: another {role} has taken "
            f"over this run, and nothing was written to {handle.name}; end this one, or take_fence again to take over "
            "in turn"
        )
    if fence > newest:
        raise LakeError(
            f"run {key['run']}: fencing token {fence} was never given out to a {role} by {handle.uri}, whose newest is "
            f"{newest}; nothing was written: was the lake replaced meanwhile? Use a token from take_fence"
        )
    return name, fence


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
