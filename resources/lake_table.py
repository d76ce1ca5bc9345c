"""One Delta table of the lake: opened, checked, kept fresh, read with pruning, written in the right file layout."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import (
    ColumnProperties,
    CommitProperties,
    DeltaTable,
    PostCommitHookProperties,
    Schema,
    Transaction,
    WriterProperties,
    write_deltalake,
)
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from furlong.ops import records, tables
from furlong.resources.lake_filter import to_expression, to_sql

_MARK = "furlong schema version "
# Only these get statistics in the Delta log: they are what rows are selected by, and the log stays small.
_INDEXED = ("step", "attempt", "version", "base_version")
# An open table gathers one batch per commit and slows down with each; opening again costs less than 32 of them.
_REOPEN_AFTER = 32
_CHECKPOINT_EVERY = 100
_ROW_GROUP_BYTES = 64 * 2**20
_COMPACT_BYTES = 64 * 2**20
# Groups of rows that a reader of one step can still tell apart, as files no longer can.
_COMPACT_ROWS = 1024
_COMPACT_BINARY_ROWS = 8
# Log clean-up would end time travel after 30 days, and checkpoints are made here, where their failure can be named.
_HOOKS = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


class LakeError(RuntimeError):
    """The lake could not be read or written; the message names table, path and cause."""


class Conflict(Exception):
    """Another writer committed first; look again, then retry."""


class LakeTable:
    """A handle on one table, for one process; its lock makes each method, and whole check-then-write blocks, atomic."""

    def __init__(self, name: str, uri: str, storage_options: dict[str, str] | None):
        self.name = name
        self.uri = uri
        self.lock = threading.RLock()
        self._options = storage_options
        self._table: DeltaTable | None = None
        self._opened_at = 0

    def latest(self) -> DeltaTable | None:
        """The newest snapshot, None when the table does not exist."""
        with self.lock, self._naming("opening it"):
            if self._table is not None and self._table.version() - self._opened_at < _REOPEN_AFTER:
                self._table.update_incremental()
                self._check(self._table)
            else:
                self._table = self._open(None)
                self._opened_at = 0 if self._table is None else self._table.version()
            return self._table

    def at(self, version: int) -> DeltaTable:
        """The snapshot of an older Delta version."""
        with self._naming(f"opening its Delta version {version}"):
            table = self._open(version)
        if table is None:
            raise LakeError(
                f"table {self.name} at {self.uri} does not exist, so it has no version {version}; check the URI"
            )
        return table

    def ensure(self) -> DeltaTable:
        """The newest snapshot; creates the table if there is none, and is safe when others create it at once."""
        table = self.latest()
        if table is None:
            with self._naming("creating it"):
                try:
                    self._create()
                except DeltaError:
                    if not DeltaTable.is_deltatable(self.uri, self._options):
                        raise
            table = self.latest()
        if table is None:
            raise LakeError(
                f"table {self.name} at {self.uri} vanished while being created; do not delete a lake in use"
            )
        return table

    def select(self, table: DeltaTable, wanted: dict[str, list], columns: list[str] | None = None) -> pa.Table:
        """Matching rows of a snapshot, validated; files that cannot hold any are not opened."""
        schema = records.TABLES[self.name]
        if not all(wanted.values()):
            found = schema.empty_table()
            return found if columns is None else found.select(columns)
        with self._naming("reading it"):
            data = self._dataset(table, wanted).to_table(columns=columns, filter=to_expression(self.name, wanted))
        if columns is None:
            return records.validate(self.name, data)
        for column in columns:
            if not schema.field(column).nullable and data.column(column).null_count:
                raise records.SchemaError(f"{self.name}.{column}: null values, but it is required; rebuild the lake")
        return data.cast(pa.schema([schema.field(column) for column in columns]))

    def count(self, table: DeltaTable, wanted: dict[str, list]) -> int:
        if not all(wanted.values()):
            return 0
        with self._naming("counting its rows"):
            return self._dataset(table, wanted).count_rows(filter=to_expression(self.name, wanted))

    def write(
        self,
        table: DeltaTable,
        data: pa.Table,
        run: str,
        note: dict[str, str],
        replaced: str | None,
        mark: tuple[str, int] | None = None,
    ) -> int:
        """Commit to the very snapshot that was looked at, and return the new Delta version.

        Args:
            table: snapshot from `ensure`; a commit by another writer of the same run since then is a Conflict.
            replaced: SQL of the rows to swap for `data`; None to append.
            mark: an application and the number it has in this snapshot; a `claim` of it since then is a Conflict.
        """
        marks = [Transaction(f"{self.name}/{run}", table.version() + 1)]
        if mark is not None:
            marks.append(Transaction(*mark))
        properties = CommitProperties(custom_metadata=note, app_transactions=marks)
        with self.lock, self._naming("committing to it"):
            write_deltalake(
                table,
                data,
                mode="append" if replaced is None else "overwrite",
                predicate=replaced,
                writer_properties=_layout(self.name, data),
                commit_properties=properties,
                post_commithook_properties=_HOOKS,
            )
            _checkpoint(table)
            return table.version()

    def claimed(self, table: DeltaTable, application: str) -> int:
        """The highest number claimed for an application, as of this snapshot; 0 before the first."""
        return table.transaction_version(application) or 0

    def claim(self, table: DeltaTable, application: str) -> int:
        """Give out the next number: a commit of no rows, only a log entry. Another claim since `table` is a Conflict."""
        number = self.claimed(table, application) + 1
        properties = CommitProperties(
            custom_metadata={"claim": f"{application}/{number}"}, app_transactions=[Transaction(application, number)]
        )
        parts = table.metadata().partition_columns
        with self.lock, self._naming("claiming a number in it"):
            table.create_write_transaction(
                [], "append", table.schema(), parts, commit_properties=properties, post_commithook_properties=_HOOKS
            )
            table.update_incremental()
            _checkpoint(table)
        return number

    def vacuum(self, retention_hours: int, dry_run: bool) -> list[str]:
        """Remove data files that no row of the newest version is in and that are older; returns their paths."""
        table = self.latest()
        if table is None:
            return []
        with self.lock, self._naming("vacuuming it"):
            # Delta's own floor of a week protects readers of old versions; here the caller decides.
            gone = table.vacuum(
                retention_hours=retention_hours,
                dry_run=dry_run,
                enforce_retention_duration=False,
                post_commithook_properties=_HOOKS,
            )
            table.update_incremental()
            return gone

    def compact(self) -> dict[str, int]:
        """Rewrite small files as larger ones; see `Lake.compact`. A commit that took a file away meanwhile is a Conflict."""
        table = self.latest()
        if table is None:
            return {"removed": 0, "added": 0}
        rows = _COMPACT_BINARY_ROWS if self.name in tables.BINARY_TABLES else _COMPACT_ROWS
        with self.lock, self._naming("compacting it"):
            # One after another: what is rewritten is held in memory.
            told = table.optimize.compact(
                target_size=_COMPACT_BYTES,
                max_concurrent_tasks=1,
                writer_properties=_layout(self.name, None, rows),
                post_commithook_properties=_HOOKS,
            )
            table.update_incremental()
            if told["numFilesAdded"]:
                table.create_checkpoint()
            return {"removed": told["numFilesRemoved"], "added": told["numFilesAdded"]}

    def files(self) -> int:
        """How many data files the newest version has."""
        table = self.latest()
        return 0 if table is None else len(table.file_uris())

    def history(self, limit: int | None) -> list[dict]:
        with self.lock, self._naming("reading its history"):
            table = self.latest()
            return [] if table is None else table.history(limit)

    def _open(self, version: int | None) -> DeltaTable | None:
        try:
            table = DeltaTable(self.uri, version=version, storage_options=self._options)
        except TableNotFoundError:
            return None
        self._check(table)
        return table

    def _create(self) -> None:
        schema = records.TABLES[self.name]
        DeltaTable.create(
            self.uri,
            schema,
            partition_by=["run"] if "run" in schema.names else None,
            # Delta 1.6 refuses table properties it does not know, so the schema version stands in the description.
            description=f"{_MARK}{records.SCHEMA_VERSION}",
            configuration=_statistics(self.name),
            storage_options=self._options,
        )

    def _check(self, table: DeltaTable) -> None:
        """Refuse a table written under another schema version or with other columns."""
        mark = table.metadata().description or ""
        found = mark.removeprefix(_MARK) if mark.startswith(_MARK) else "none"
        advice = "point FURLONG_LAKE at another folder, or move this lake away and let the run rebuild it"
        if found != str(records.SCHEMA_VERSION):
            raise records.SchemaError(
                f"table {self.name} at {self.uri} has schema version {found}, this code needs "
                f"{records.SCHEMA_VERSION}; use the release that wrote it, {advice}"
            )
        have = [(f.name, f.type, f.nullable) for f in table.schema().fields]
        need = [(f.name, f.type, f.nullable) for f in Schema.from_arrow(records.TABLES[self.name]).fields]
        if have != need:
            odd = [f"found {a}, needed {b}" for a, b in zip(have, need, strict=False) if a != b]
            raise records.SchemaError(
                f"table {self.name} at {self.uri} has schema version {found} but {len(have)} columns where {len(need)} "
                f"are needed, or others ({'; '.join(odd[:2]) or 'one list is longer'}); {advice}"
            )

    def dataset(self, table: DeltaTable):
        """All rows of a snapshot, unread."""
        with self._naming("opening its files"):
            return self._dataset(table, {})

    def _dataset(self, table: DeltaTable, wanted: dict[str, list]):
        return table.to_pyarrow_dataset(file_pruning_predicate=to_sql(wanted) or None, filesystem=self._files())

    def _files(self) -> SubTreeFileSystem | None:
        """Arrow's own file system where it has one: deltalake's is written in Python, and Arrow's read-ahead threads
        that still call it while the interpreter exits would abort the process."""
        if "://" in self.uri:
            return None
        return SubTreeFileSystem(self.uri, LocalFileSystem())

    @contextmanager
    def _naming(self, doing: str) -> Iterator[None]:
        """Turn a storage failure into LakeError; after any failure the next call opens the table afresh."""
        try:
            yield
        except CommitFailedError as err:
            self._table = None
            raise Conflict(_one_line(err)) from err
        except (OSError, DeltaError, pa.ArrowException) as err:
            self._table = None
            raise LakeError(
                f"table {self.name} at {self.uri}: {doing} failed: {_one_line(err)}; what was committed before stands, "
                "nothing else is visible: remove the cause (a full disk, permissions, a damaged file) and run again"
            ) from err


def _checkpoint(table: DeltaTable) -> None:
    if table.version() % _CHECKPOINT_EVERY == 0:
        table.create_checkpoint()


def _statistics(name: str) -> dict[str, str]:
    indexed = [column for column in _INDEXED if column in records.TABLES[name].names]
    if not indexed:
        return {"delta.dataSkippingNumIndexedCols": "0"}
    return {"delta.dataSkippingStatsColumns": ",".join(indexed)}


def _layout(name: str, data: pa.Table | None, group_rows: int | None = None) -> WriterProperties:
    """How files are written: for `data`, or, where that is rows of the table read again, with groups of so many rows."""
    if name not in tables.BINARY_TABLES:
        return WriterProperties(compression="ZSTD", compression_level=1, max_row_group_size=group_rows)
    # Payloads are compressed already; with statistics each would be stored three times.
    plain = ColumnProperties(dictionary_enabled=False, statistics_enabled="NONE")
    payloads = [field.name for field in records.TABLES[name] if pa.types.is_large_binary(field.type)]
    if group_rows is None:
        largest = max((pc.max(pc.binary_length(data.column(column))).as_py() or 1 for column in payloads), default=1)
        group_rows = max(1, min(1024, _ROW_GROUP_BYTES // largest))
    return WriterProperties(
        compression="UNCOMPRESSED",
        max_row_group_size=group_rows,
        column_properties=dict.fromkeys(payloads, plain),
    )


def _one_line(error: Exception) -> str:
    """Storage errors come with colours, arrows and a stack trace; the first 300 characters of plain text say enough."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())[:300]
