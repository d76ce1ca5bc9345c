"""The rows of the lake: one Arrow schema per table, checked on every write and every read.

Prompt -> group -> trajectory -> token span -> weights version -> step: the key columns join across tables.
The schemas themselves are in `tables.py`.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum

import pyarrow as pa

from furlong.ops.tables import TABLES

SCHEMA_VERSION = 7
"""Raised with every incompatible change of a table; a lake written under another one is refused."""


class SchemaError(ValueError):
    """Rows or a table that do not fit the schema; the message names the table and the column."""


class Verdict(StrEnum):
    """What a verifier found. Only the first four carry a score."""

    CORRECT = "correct"
    """The reply ended in time and the verifier accepted it: score 1 (or the verifier's own partial score)."""
    INCORRECT = "incorrect"
    """The reply ended in time, was understood, and is wrong."""
    UNPARSABLE = "unparsable"
    """No answer could be found in the reply; score 0 by rule, not by judgement."""
    TRUNCATED = "truncated"
    """The last reply was cut off, or the conversation ran out of turns or of context; score 0 by rule."""
    TIMEOUT = "timeout"
    """The verifier overran its deadline: no score, the trajectory is not trained on."""
    ERROR = "error"
    """The verifier raised: no score, the trajectory is not trained on."""


class State(StrEnum):
    """Where a prompt group stands. Every group is in exactly one state; `rejected` is final, and `trained` is unless its
    step is repeated on purpose."""

    RESERVED = "reserved"
    """Its prompt is drawn and its row of `groups` stands; nothing runs yet, or what ran has to run again."""
    RUNNING = "running"
    """Its trajectories are being drawn."""
    FINISHED = "finished"
    """All its trajectories are in the lake; it waits to be part of a batch."""
    ADMITTED = "admitted"
    """It is part of the batch of a step."""
    TRAINED = "trained"
    """The step has taken its optimiser step."""
    REJECTED = "rejected"
    """It is not trained on; the reason says why."""


class Rejection(StrEnum):
    """Why a group is not trained on."""

    ZERO_VARIANCE = "zero_variance"
    """All its trajectories got the same reward, and the run's filter rejects such groups. Its prompt is done with."""
    STALE = "stale"
    """Tokens of it were sampled by weights too old. Another group takes its prompt."""
    SURPLUS = "surplus"
    """It was begun in case others would be rejected, and was not needed. Its prompt is drawn again later."""
    SUPERSEDED = "superseded"
    """Its step was repeated on purpose. The groups of the new attempt take its prompt."""


class Failure(StrEnum):
    """Why one try at a trajectory gave none. Another try is made, with another seed where the draw itself was at fault."""

    DEADLINE = "deadline"
    """The reply, a tool or the agent took too long."""
    ENGINE_LOST = "engine_lost"
    """The engine died or could not be reached."""
    ENVIRONMENT = "environment"
    """The environment or the agent raised."""
    VERIFIER = "verifier"
    """The verifier raised or overran its deadline: the reply is scored once more, and what comes of that is its verdict in
    `rewards`. It counts against the budget; there is no row of `failures`, as the trajectory stands."""
    DRIFT = "drift"
    """The tokens of the session are not what its messages render to."""


class Disposition(StrEnum):
    """What a step did with a trajectory. Every sampled trajectory gets exactly one."""

    TRAINED = "trained"
    """Its tokens entered the loss."""
    ZERO_VARIANCE = "zero_variance"
    """All scored trajectories of its group got the same reward, and the algorithm learns from nothing but differences
    within groups, so it carries no gradient."""
    UNSCORED = "unscored"
    """The verifier gave no score (time-out or error)."""
    NOT_CHOSEN = "not_chosen"
    """The algorithm learns from others of its group (the best of it, or best and worst)."""


def rows(table: str, columns: list[dict]) -> pa.Table:
    """Build a table from row dictionaries and validate it; a missing or unknown key raises SchemaError."""
    schema = TABLES[table]
    for row in columns:
        if set(row) != set(schema.names):
            odd = sorted(set(row) ^ set(schema.names))
            raise SchemaError(f"{table}: columns {odd} are missing or unknown; see TABLES[{table!r}]")
    try:
        return validate(table, pa.Table.from_pylist(columns, schema=schema))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        raise SchemaError(f"{table}: a value does not fit its column ({err}); see TABLES[{table!r}]") from err


def validate(table: str, data: pa.Table) -> pa.Table:
    """Return `data` cast to the exact schema, or raise SchemaError naming the first column at fault."""
    schema = TABLES[table]
    if data.schema.names != schema.names:
        raise SchemaError(f"{table}: has columns {data.schema.names}, needs {schema.names}; rebuild the lake")
    for field in schema:
        column = data.column(field.name)
        if not field.nullable and column.null_count:
            raise SchemaError(f"{table}.{field.name}: {column.null_count} null values, but it is required; fill them")
    try:
        return data.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as err:
        raise SchemaError(f"{table}: columns have other types than schema version {SCHEMA_VERSION}: {err}") from err


def row_digest(table: str, data: pa.Table) -> str:
    """64 hex digits over all rows in any order, leaving out measured columns: equal for two identical runs."""
    names = [f.name for f in TABLES[table] if not (f.metadata or {}).get(b"measured")]
    lines = []
    for row in data.select(names).to_pylist():
        body = json.dumps(row, sort_keys=True, default=bytes.hex)
        lines.append(hashlib.blake2b(body.encode(), digest_size=16).hexdigest())
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=32).hexdigest()
