"""The lake in SQL: DuckDB over the Delta tables, read in place, with the views of `ops/lineage`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from furlong.ops import records
from furlong.ops.lineage.views import PARENTS, VIEWS
from furlong.resources.lake import Lake

if TYPE_CHECKING:
    import duckdb


class SqlError(ValueError):
    """A query that cannot be answered; the message is the engine's, with what there is to ask for."""


class Sql:
    """Tables and views as of the moment this is made; one object per thread.

    Nothing can be written through it, and no file but the lake's can be read.
    """

    def __init__(self, lake: Lake):
        import duckdb

        self._errors = duckdb.Error
        self._connection: duckdb.DuckDBPyConnection = duckdb.connect(":memory:")
        self._connection.execute("SET enable_progress_bar = false")
        self._tables = list(records.TABLES)
        for name, schema in records.TABLES.items():
            found = lake.dataset(name)
            self._connection.register(name, schema.empty_table() if found is None else found)
        self._connection.execute(f"CREATE TEMP TABLE version_parents AS {PARENTS}")
        for name, (_, query) in VIEWS.items():
            self._connection.execute(f"CREATE TEMP VIEW {name} AS {query}")
        self._connection.execute("SET enable_external_access = false")
        self._connection.execute("SET lock_configuration = true")

    def arrow(self, query: str, *values: Any) -> pa.Table:
        """The rows of a query; each `?` in it stands for one of `values`.

        Raises:
            SqlError: the query is wrong.
        """
        try:
            return self._connection.sql(query, params=list(values)).to_arrow_table()
        except self._errors as err:
            raise SqlError(f"{err}; tables: {', '.join(self._tables)}; views: {', '.join(VIEWS)}") from err

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """As dictionaries."""
        return self.arrow(query, *values).to_pylist()

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Sql:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
