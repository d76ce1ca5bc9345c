"""Rows with nothing in them, to be filled in where a test cares."""

from typing import Any

import pyarrow as pa

from furlong.ops import records


def blank_row(table: str) -> dict[str, Any]:
    """None where a column may be null, else zero, empty text or an empty list."""

    def blank(field: pa.Field) -> Any:
        if field.nullable and not pa.types.is_list(field.type):
            return None
        return [] if pa.types.is_list(field.type) else "" if pa.types.is_string(field.type) else 0

    return {field.name: blank(field) for field in records.TABLES[table]}
