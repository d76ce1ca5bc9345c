"""Which experts tokens went through, packed for the lake and unpacked again; numpy and zstd only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from jaxtyping import Integer, UInt

from furlong.ops.policy.architecture import MOST_EXPERTS
from furlong.ops.protocols import Routing


class RoutingError(ValueError):
    """Expert ids that contradict their shape or each other; the message says where."""


def encode(first: int, rows: Integer[np.ndarray, "rows layers top_k"], layers: Sequence[int], experts: int) -> Routing:
    """Pack the expert ids of consecutive tokens.

    Args:
        first: position, in prompt + reply, of the token that row 0 belongs to.
        rows: expert ids in [0, experts), different ones for each token and layer; there may be no rows.
        layers: index in the model of each layer with experts, ascending.
        experts: experts to choose from, at most 65536.
    Raises:
        RoutingError: another shape, or an id that is out of range or occurs twice.
    """
    if rows.ndim != 3 or not np.issubdtype(rows.dtype, np.integer):
        raise RoutingError(
            f"expert ids are {rows.dtype} of shape {rows.shape}; give integers of shape rows x layers x top_k"
        )
    if rows.shape[1] != len(layers):
        raise RoutingError(f"expert ids of {rows.shape[1]} layers were given for layers {list(layers)}; name each one")
    head = Routing(int(first), len(rows), tuple(map(int, layers)), rows.shape[2], int(experts), b"")
    _check_head(head)
    _check_ids(head, rows)
    data = zstandard.ZstdCompressor(write_content_size=True).compress(rows.astype(_word(experts)).tobytes())
    return replace(head, data=data)


def decode(routing: Routing) -> UInt[np.ndarray, "rows layers top_k"]:
    """The expert ids, as uint8 up to 256 experts, else as uint16; read-only.

    Raises:
        RoutingError: the data are damaged, or not what the other fields say.
    """
    _check_head(routing)
    shape, word = (routing.rows, len(routing.layers), routing.top_k), _word(routing.experts)
    wanted = routing.rows * len(routing.layers) * routing.top_k * word.itemsize
    try:
        found = zstandard.frame_content_size(routing.data)
        if found != wanted:
            raise RoutingError(
                f"{_where(routing)}: the data hold {found} bytes, shape {shape} asks for {wanted}; {_MEND}"
            )
        data = zstandard.ZstdDecompressor().decompress(routing.data, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise RoutingError(f"{_where(routing)}: zstd cannot read the data ({err}); {_MEND}") from err
    rows = np.frombuffer(data, word).reshape(shape)
    _check_ids(routing, rows)
    return rows


def join(parts: Sequence[Routing]) -> Routing:
    """One routing out of consecutive ones, such as those of a reply that was interrupted and resumed.

    Raises:
        RoutingError: there are none, one does not begin where the one before ended, or they are of different models.
    """
    if not parts:
        raise RoutingError("no routings were given to join; give at least one")
    for before, after in pairwise(parts):
        if _model(before) != _model(after):
            raise RoutingError(
                f"(layers, top_k, experts) {_model(before)} cannot be joined with {_model(after)}; join what one model "
                "recorded"
            )
        if after.first != before.first + before.rows:
            raise RoutingError(
                f"a routing of positions {before.first} to {before.first + before.rows} is followed by one that begins "
                f"at {after.first}; give the parts in order, without gaps and overlaps"
            )
    return encode(parts[0].first, np.concatenate([decode(part) for part in parts]), parts[0].layers, parts[0].experts)


def as_row(routing: Routing) -> dict[str, Any]:
    """The routing as the struct in column `routing` of `trajectories` and `fragments`."""
    return {name: getattr(routing, name) for name in _FIELDS} | {"layers": list(routing.layers)}


def from_row(row: Mapping[str, Any]) -> Routing:
    """The routing of a struct that `as_row` made.

    Raises:
        RoutingError: a field is missing or makes no sense; the data are looked at by `decode` only.
    """
    missing = [name for name in _FIELDS if row.get(name) is None]
    if missing:
        raise RoutingError(f"a row has no {missing[0]}; read all fields of the routing: {', '.join(_FIELDS)}")
    routing = Routing(**{name: row[name] for name in _FIELDS} | {"layers": tuple(row["layers"])})
    _check_head(routing)
    return routing


_FIELDS = tuple(field.name for field in fields(Routing))
_MEND = "the row was damaged: sample its trajectory again"


def _word(experts: int) -> np.dtype:
    return np.dtype("u1" if experts <= 256 else "<u2")


def _model(routing: Routing) -> tuple[tuple[int, ...], int, int]:
    return routing.layers, routing.top_k, routing.experts


def _where(routing: Routing) -> str:
    return f"routing of positions {routing.first} to {routing.first + routing.rows}"


def _check_head(routing: Routing) -> None:
    layers = routing.layers
    if routing.first < 0 or routing.rows < 0:
        raise RoutingError(f"first={routing.first} and rows={routing.rows}; neither can be negative")
    if not layers or layers[0] < 0 or any(a >= b for a, b in pairwise(layers)):
        raise RoutingError(f"layers {list(layers)}; name at least one, in ascending order, from 0")
    if not 1 <= routing.top_k <= routing.experts <= MOST_EXPERTS:
        raise RoutingError(
            f"top_k={routing.top_k} of experts={routing.experts}; choose 1 to all of at most {MOST_EXPERTS} experts"
        )


def _check_ids(routing: Routing, rows: Integer[np.ndarray, "rows layers top_k"]) -> None:
    if not rows.size:
        return
    if rows.min() < 0 or rows.max() >= routing.experts:
        wrong = (rows < 0) | (rows >= routing.experts)
        trouble = f"is outside 0 to {routing.experts - 1}"
    else:
        order = np.sort(rows, axis=-1)
        twice = order[..., 1:] == order[..., :-1]
        if not twice.any():
            return
        wrong = np.zeros(rows.shape, bool)
        wrong[np.nonzero(twice.any(-1))] = True
        trouble = "is among experts of which one occurs twice"
    row, layer, _ = at = tuple(int(i[0]) for i in np.nonzero(wrong))
    raise RoutingError(
        f"expert id {rows[at]} of position {routing.first + row}, layer {routing.layers[layer]} {trouble}; record what the "
        "router chose"
    )
