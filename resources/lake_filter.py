"""Selecting rows: a mapping of column to value (or list of values) as SQL for Delta and as an Arrow expression."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from furlong.ops import records

Where = dict[str, Any]


class FilterError(ValueError):
    """A `where` or `key` that no row could be compared with; the message names table and column."""


def normalised(table: str, where: Where) -> dict[str, list[Any]]:
    """Each column's wanted values as a list, checked against the table's column types."""
    schema = records.TABLES[table]
    wanted = {}
    for column, value in where.items():
        if column not in schema.names:
            raise FilterError(f"{table} has no column {column!r}; its columns are {', '.join(schema.names)}")
        values = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
        kind = schema.field(column).type
        fits = str if pa.types.is_string(kind) else int if pa.types.is_integer(kind) else None
        if fits is None:
            raise FilterError(
                f"{table}.{column} is {kind}: rows are selected by text and integer columns only; use another"
            )
        for item in values:
            if not isinstance(item, fits) or isinstance(item, bool):
                raise FilterError(
                    f"{table}.{column} is {kind}, but is compared with {item!r}; give {fits.__name__} values"
                )
        wanted[column] = values
    return wanted


def to_sql(wanted: dict[str, list[Any]]) -> str:
    """A predicate for Delta; each list holds at least one value."""
    return " AND ".join(
        f'"{column}" = {_literal(values[0])}' if len(values) == 1
        else f'"{column}" IN ({", ".join(map(_literal, values))})'
        for column, values in wanted.items()
    )  # fmt: skip


def to_expression(table: str, wanted: dict[str, list[Any]]) -> pc.Expression | None:
    """The same predicate for Arrow; None when every row is wanted."""
    schema = records.TABLES[table]
    whole = None
    for column, values in wanted.items():
        one = pc.field(column).isin(pa.array(values, schema.field(column).type))
        whole = one if whole is None else whole & one
    return whole


def _literal(value: str | int) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
