"""The rows of the lake: one Arrow schema per table, checked on every write and every read.

Prompt -> group -> trajectory -> token span -> weights version -> step: the key columns join across tables.
A field marked *measured* (a time, a place) may differ between two identical runs; `row_digest` leaves those out.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum

import pyarrow as pa

SCHEMA_VERSION = 2
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
    """The reply did not end within the token limit; score 0 by rule."""
    TIMEOUT = "timeout"
    """The verifier overran its deadline: no score, the trajectory is not trained on."""
    ERROR = "error"
    """The verifier raised: no score, the trajectory is not trained on."""


class Disposition(StrEnum):
    """What a step did with a trajectory. Every sampled trajectory gets exactly one."""

    TRAINED = "trained"
    """Its tokens entered the loss."""
    ZERO_VARIANCE = "zero_variance"
    """All scored trajectories of its group got the same reward, so it carries no gradient."""
    UNSCORED = "unscored"
    """The verifier gave no score (time-out or error)."""


def _measured(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, metadata={b"measured": b"1"})


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


_STR, _I32, _I64, _F32, _F64 = pa.string(), pa.int32(), pa.int64(), pa.float32(), pa.float64()
_STEP_KEY = [_required("run", _STR), _required("step", _I64), _required("attempt", _I32)]
_SPAN = pa.struct([("version", _I64), ("start", _I32), ("end", _I32)])
_TENSOR = pa.struct([("name", _STR), ("dtype", _STR), ("shape", pa.list_(_I64)), ("digest", _STR)])
_OUTCOME = pa.struct(
    [("trajectory_id", _STR), ("group_id", _STR), ("reward", _F64), ("advantage", _F64), ("disposition", _STR)]
)
_ATTESTATION = pa.struct([("engine", _STR), ("version", _I64), ("digest", _STR)])

TABLES: dict[str, pa.Schema] = {
    # One row per run: its identity, written before anything else.
    "runs": pa.schema(
        [
            _required("run", _STR),
            _required("spec_fingerprint", _STR),
            _required("spec", _STR),
            _required("dataset", _STR),
            _required("base_digest", _STR),
            _measured("code_version", _STR),
            _measured("created_at", _F64),
        ]
    ),
    # One row per question. `entry` is what the verifier needs, as JSON.
    "prompts": pa.schema(
        [
            _required("dataset", _STR),
            _required("prompt_id", _STR),
            _required("split", _STR),
            _required("position", _I64),
            _required("task", _STR),
            _required("question", _STR),
            _required("answer", _STR),
            _required("entry", _STR),
            _required("verifier", _STR),
        ]
    ),
    # One row per prompt drawn for a step; its trajectories share the prompt's tokens.
    "groups": pa.schema(
        [
            *_STEP_KEY,
            _required("group_id", _STR),
            _required("dataset", _STR),
            _required("prompt_id", _STR),
            _required("prompt_tokens", pa.list_(_I32)),
            _required("samples", _I32),
            _required("weights_version", _I64),
        ]
    ),
    # One row per reply. Per-token lists run over prompt + reply; logprobs are null where nothing was sampled.
    "trajectories": pa.schema(
        [
            *_STEP_KEY,
            _required("trajectory_id", _STR),
            _required("group_id", _STR),
            _required("prompt_id", _STR),
            _required("sample", _I32),
            _required("tokens", pa.list_(_I32)),
            _required("logprobs", pa.list_(_F32)),
            _required("loss_mask", pa.list_(pa.bool_())),
            _required("version_spans", pa.list_(_SPAN)),
            _required("finish_reason", _STR),
            _required("seed", _I64),
            _required("text", _STR),
            _measured("engine", _STR),
            _measured("started_at", _F64),
            _measured("seconds", _F64),
        ]
    ),
    # One row per (trajectory, verifier, verifier version). `score` is null for timeout and error.
    "rewards": pa.schema(
        [
            *_STEP_KEY,
            _required("trajectory_id", _STR),
            _required("verifier", _STR),
            _required("verifier_version", _STR),
            _required("verdict", _STR),
            pa.field("score", _F64),
            _required("extracted", _STR),
            _required("detail", _STR),
            _measured("seconds", _F64),
        ]
    ),
    # One row per optimiser step.
    "steps": pa.schema(
        [
            *_STEP_KEY,
            _required("version_before", _I64),
            _required("version_after", _I64),
            _required("batch_digest", _STR),
            _required("digest_before", _STR),
            _required("digest_after", _STR),
            _required("master_digest_after", _STR),
            _required("outcomes", pa.list_(_OUTCOME)),
            _required("reward_mean", _F64),
            _required("loss", _F64),
            _required("grad_norm", _F64),
            _required("learning_rate", _F64),
            _required("tokens_trained", _I64),
            _required("clip_fraction", _F64),
            _required("entropy", _F64),
            _required("mismatch_mean", _F64),
            _required("mismatch_max", _F64),
            _required("mismatch_p99", _F64),
            _required("mismatch_k3", _F64),
            _measured("trainer", _STR),
            _measured("seconds", _F64),
        ]
    ),
    # One row per weights version, for ever. It is written `staged` and replaced by `live` after every engine attested;
    # `collecting` is marked for removal but complete, `collected` means that its bytes may be gone. `kind` is `anchor`
    # when `anchor` names complete weights: `base` for the model's own folder, else a path below the lake. `transport`
    # and what follows tell how it reached the engines; `retried_because` is empty, or why an earlier try failed.
    "weight_versions": pa.schema(
        [
            _required("run", _STR),
            _required("version", _I64),
            _required("step", _I64),
            _required("attempt", _I32),
            _required("state", _STR),
            _required("kind", _STR),
            pa.field("parent", _I64),
            _required("digest", _STR),
            _required("tensors", pa.list_(_TENSOR)),
            pa.field("anchor", _STR),
            _required("full_bytes", _I64),
            _required("delta_bytes", _I64),
            _required("changed_fraction", _F64),
            _required("attestations", pa.list_(_ATTESTATION)),
            _measured("fence", _I64),
            _measured("transport", _STR),
            _measured("wire_bytes", _I64),
            _measured("stage_seconds", _F64),
            _measured("pause_seconds", _F64),
            _measured("retried_because", _STR),
            _measured("staged_at", _F64),
            _measured("live_at", _F64),
        ]
    ),
    # Names given to weights versions by people: `stable`, `candidate`. A tagged version is never collected.
    "weight_tags": pa.schema(
        [_required("run", _STR), _required("tag", _STR), _required("version", _I64), _measured("tagged_at", _F64)]
    ),
    # Changed bytes of one chunk of one tensor against `base_version`, or all its bytes where `encoding` is `raw` (a
    # tensor that is new, has another shape, or changed nearly everywhere); `digest` is of the complete new tensor.
    "weight_deltas": pa.schema(
        [
            _required("run", _STR),
            _required("version", _I64),
            _required("base_version", _I64),
            _required("name", _STR),
            _required("chunk", _I32),
            _required("offset", _I64),
            _required("length", _I64),
            _required("dtype", _STR),
            _required("shape", pa.list_(_I64)),
            _required("encoding", _STR),
            _required("digest", _STR),
            _required("data", pa.large_binary()),
        ]
    ),
    # One row per question, weights version and mode (`greedy` or `sampled`).
    "evals": pa.schema(
        [
            _required("run", _STR),
            _required("version", _I64),
            _required("mode", _STR),
            _required("prompt_id", _STR),
            _required("samples", _I32),
            _required("correct", _I32),
            _required("truncated", _I32),
            _required("mean_tokens", _F64),
            _required("texts", pa.list_(_STR)),
            _required("verdicts", pa.list_(_STR)),
        ]
    ),
}

BINARY_TABLES = frozenset({"weight_deltas"})
"""Tables whose rows are megabytes: written in small row groups, without column statistics on the payload."""


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
        body = {k: v.hex() if isinstance(v, bytes) else v for k, v in row.items()}
        lines.append(hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest())
    return hashlib.blake2b("\n".join(sorted(lines)).encode(), digest_size=32).hexdigest()
