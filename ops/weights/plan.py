"""Who sends which bytes to whom: the broadcast and the p2p plan of one weights version. Pure and deterministic."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from furlong.ops.weights.layout import (
    Bucket,
    LayoutError,
    Piece,
    Route,
    TensorSpec,
    check_inside,
    check_tiling,
    extent,
    intersect,
    is_whole,
    nbytes,
    offsets,
    whole,
)

BUCKET_BYTES = 64 * 2**20
"""Most bytes of one bucket of a broadcast, and so of its buffers."""
PARCEL_BYTES = 8 * 2**20
"""Bytes that a p2p route moves at a time: they are read again while still in a processor's cache."""
_FUSED = re.compile(r"^(?P<head>.*\.)(?:(?P<attention>[qkv]_proj)|(?P<mlp>gate_proj|up_proj))(?P<tail>\..*)$")
Holdings = Sequence[Sequence[Piece]]
Layouts = Sequence[Sequence[dict[str, Piece]]]


@dataclass(frozen=True)
class _Unit:
    """Pieces that one source should send together, and the sources that could."""

    pieces: tuple[Piece, ...]
    holders: tuple[int, ...]
    size: int


def broadcast_plan(holdings: Holdings, specs: dict[str, TensorSpec], names: Iterable[str]) -> tuple[Bucket, ...]:
    """Buckets that carry every tensor in `names` exactly once, in the order to send them.

    Each piece is sent by the least loaded of the sources that hold it. A bucket has at most `BUCKET_BYTES`; q, k, v of
    a layer and gate, up of a layer share a bucket where one source holds them and they fit.

    Args:
        holdings: for each source the pieces it holds; several may hold the same.
        specs: every tensor of the version by name.
    Raises:
        LayoutError: a tensor that no source holds completely together, or that cannot be cut small enough.
    """
    held = _by_name(holdings)
    units = _units(
        [part for name in sorted(set(names)) for part in _fragments(specs[name], held[name], whole(specs[name]))], specs
    )
    mine: dict[int, list[_Unit]] = defaultdict(list)
    for source, unit in _assign(units, [0] * len(holdings)):
        mine[source].append(unit)
    buckets: list[tuple[int, Bucket]] = []
    for source, owned in mine.items():
        owned.sort(key=lambda unit: unit.pieces)
        packed = _pack([unit.pieces for unit in owned], specs, BUCKET_BYTES)
        buckets += [(turn, Bucket(source, pieces)) for turn, pieces in enumerate(packed)]
    # Sources take turns, so that none has sent everything before the next one begins.
    return tuple(bucket for _, bucket in sorted(buckets, key=lambda item: (item[0], item[1].source)))


def p2p_plan(
    holdings: Holdings, layouts: Layouts, specs: dict[str, TensorSpec], names: Iterable[str]
) -> tuple[Route, ...]:
    """Routes by which each engine rank gets exactly its slab of every tensor in `names`, and no byte more.

    Args:
        layouts: for each engine, for each of its ranks, the piece it holds by name; a tensor without one is whole there.
    Raises:
        LayoutError: as in `broadcast_plan`, or source and engine split a tensor along different dimensions.
    """
    wanted, held = sorted(set(names)), _by_name(holdings)
    loads = [0] * len(holdings)
    carried: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    for engine, ranks in enumerate(layouts):
        for rank, layout in enumerate(ranks):
            fragments = []
            for name in wanted:
                target = layout.get(name, whole(specs[name]))
                check_inside(target, specs[name])
                fragments += _fragments(specs[name], held[name], target)
            units = [_Unit((piece,), holders, nbytes(piece, specs[piece.name])) for piece, holders in fragments]
            for source, unit in _assign(units, loads):
                carried[source, engine, rank] += unit.pieces
    return tuple(Route(*key, tuple(_join(carried[key], specs))) for key in sorted(carried))


def parcels(pieces: Sequence[Piece], specs: dict[str, TensorSpec]) -> list[tuple[Piece, ...]]:
    """The pieces of a route in order, as runs of at most `PARCEL_BYTES`; larger ones are cut.

    Only where one index of a tensor is larger, a run is as large as that."""
    parts = [(part,) for piece in pieces for part in _split(piece, specs[piece.name], PARCEL_BYTES)]
    return _pack(parts, specs, PARCEL_BYTES)


def in_turn(routes: Iterable[Route], offer_ranks: Sequence[int]) -> list[Route]:
    """The order in which all parties go through their routes: in each turn every source serves another rank, and as
    all follow one order nobody waits for somebody who waits for them."""
    first = [sum(offer_ranks[:engine]) for engine in range(len(offer_ranks))]
    total = max(1, sum(offer_ranks))
    return sorted(routes, key=lambda r: ((first[r.engine] + r.rank - r.source) % total, r.source, r.engine, r.rank))


def _by_name(holdings: Holdings) -> dict[str, list[tuple[int, Piece]]]:
    held: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for source, pieces in enumerate(holdings):
        for piece in pieces:
            held[piece.name].append((source, piece))
    return held


def _fragments(spec: TensorSpec, held: list[tuple[int, Piece]], target: Piece) -> list[tuple[Piece, tuple[int, ...]]]:
    """`target` cut wherever a source's piece begins or ends, each with the sources that hold it; small enough to send."""
    if nbytes(target, spec) == 0:
        holders = tuple(sorted({source for source, _ in held}))
        if not holders:
            raise LayoutError(f"{spec.name}: no source holds it; load the trainer's version completely")
        return [(target, holders)]
    shares = [(source, share) for source, piece in held if (share := intersect(target, piece, spec))]
    split = {share.dim for _, share in shares if not is_whole(share, spec)}
    if len(split) > 1:
        raise LayoutError(f"{spec.name}: sources split it along dimensions {sorted(split)}; gather it before sending")
    dim = split.pop() if split else target.dim
    ranges = [
        (source, 0, extent(dim, spec)) if is_whole(share, spec) else (source, share.start, share.stop)
        for source, share in shares
    ]
    edges = sorted({edge for _, lo, hi in ranges for edge in (lo, hi)})
    found = []
    for lo, hi in itertools.pairwise(edges):
        holders = tuple(sorted({source for source, begin, end in ranges if begin <= lo and hi <= end}))
        if holders:
            found += [(part, holders) for part in _sendable(Piece(spec.name, dim, lo, hi), spec)]
    check_tiling([piece for piece, _ in found], target, spec)
    return found


def _split(piece: Piece, spec: TensorSpec, limit: int) -> list[Piece]:
    """`piece` as parts of at most `limit` bytes, or of one index each where that is more.

    It is cut along its own dimension; a whole tensor along another where its own has too few indices.
    """
    size = nbytes(piece, spec)
    if size <= limit:
        return [piece]
    choices = [(piece.dim, piece.start, piece.stop)]
    if is_whole(piece, spec):
        choices += [(dim, 0, indices) for dim, indices in enumerate(spec.shape)]
    fitting = (choice for choice in choices if limit * (choice[2] - choice[1]) >= size)
    dim, lo, hi = next(fitting, choices[0])
    step = max(1, limit * (hi - lo) // size)
    return [Piece(spec.name, dim, at, min(at + step, hi)) for at in range(lo, hi, step)]


def _sendable(piece: Piece, spec: TensorSpec) -> list[Piece]:
    parts = _split(piece, spec, BUCKET_BYTES)
    if (most := nbytes(parts[0], spec)) > BUCKET_BYTES:
        raise LayoutError(
            f"{spec.name}: one index of dimension {piece.dim} has {most} bytes, more than a bucket's {BUCKET_BYTES}; "
            "split it along another dimension, or publish by disk_delta"
        )
    return parts


def _units(fragments: list[tuple[Piece, tuple[int, ...]]], specs: dict[str, TensorSpec]) -> list[_Unit]:
    """Fragments that an engine multiplies as one, together where the same sources hold them and a bucket fits them."""
    together: dict[tuple, list[Piece]] = defaultdict(list)
    for piece, holders in fragments:
        found = _FUSED.match(piece.name)
        kind = found and (found["head"], "attention" if found["attention"] else "mlp", found["tail"])
        together[(kind or piece, holders)].append(piece)
    units = []
    for (_, holders), pieces in together.items():
        fits = offsets(pieces, specs)[1] <= BUCKET_BYTES
        for group in [pieces] if fits else [[piece] for piece in pieces]:
            units.append(_Unit(tuple(group), holders, sum(nbytes(piece, specs[piece.name]) for piece in group)))
    return units


def _assign(units: list[_Unit], loads: list[int]) -> list[tuple[int, _Unit]]:
    """Give each unit to its least loaded holder, those with the least choice first, then the largest; adds to `loads`."""
    chosen = []
    for unit in sorted(units, key=lambda unit: (len(unit.holders), -unit.size, unit.pieces)):
        source = min(unit.holders, key=lambda holder: (loads[holder], holder))
        loads[source] += unit.size
        chosen.append((source, unit))
    return chosen


def _pack(groups: Iterable[Sequence[Piece]], specs: dict[str, TensorSpec], limit: int) -> list[tuple[Piece, ...]]:
    """Groups in order, as runs of at most `limit` bytes; a group is never torn, so one that is larger is a run."""
    runs: list[list[Piece]] = []
    room = 0
    for group in groups:
        size = offsets(group, specs)[1]
        if size > room or not runs:
            runs.append([])
            room = limit
        runs[-1] += group
        room -= size
    return [tuple(run) for run in runs]


def _join(pieces: list[Piece], specs: dict[str, TensorSpec]) -> list[Piece]:
    """Pieces sorted, with neighbours of one tensor merged."""
    joined: list[Piece] = []
    for piece in sorted(pieces):
        last = joined[-1] if joined else None
        if (
            last
            and (last.name, last.dim, last.stop) == (piece.name, piece.dim, piece.start)
            and piece.start < piece.stop
        ):
            joined[-1] = Piece(piece.name, piece.dim, last.start, piece.stop)
        else:
            joined.append(piece)
    return joined
