"""Which part of which tensor lies where, and the plans by which a new version travels from trainer to engine ranks.

Plain data: an `Offer` is the same for everyone who takes part in one transfer, so nobody needs to ask anybody.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from jaxtyping import Shaped

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 16
"""Every piece in a buffer begins at a multiple of this many bytes, the size of the largest element."""


class LayoutError(ValueError):
    """Pieces that do not fit their tensor or each other; the message names the tensor and where."""


@dataclass(frozen=True, order=True)
class Piece:
    """Indices `start` to `stop` (exclusive) of dimension `dim` of one tensor, complete in every other dimension.

    A tensor that is not split is one piece with dim 0, from 0 to its first size; a 0-d tensor is piece (0, 0, 1).
    """

    name: str
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a weights version, as in `weight_versions.tensors`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * item_bytes(self.dtype)


@dataclass(frozen=True)
class Bucket:
    """Pieces that one source broadcasts as one contiguous run of bytes, in this order."""

    source: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Route:
    """Pieces that one source writes to one rank of one engine, in this order."""

    source: int
    engine: int
    rank: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Offer:
    """One transfer of one weights version."""

    session: str
    """Unique; names the rendezvous and shared buffers."""
    address: str
    """host:port of the rendezvous store, which the publisher keeps up during the transfer."""
    version: int
    base_version: int | None
    """Tensors that are not sent are taken from this live version; None when all are sent."""
    fence: int
    tensors: tuple[TensorSpec, ...]
    """Every tensor of the new version, sent or not."""
    engine_ranks: tuple[int, ...]
    """Number of ranks of each engine that takes part."""
    sources: int
    """Number of source ranks."""
    buckets: tuple[Bucket, ...] = ()
    """The broadcast plan; empty for p2p."""
    routes: tuple[Route, ...] = ()
    """The p2p plan; empty for broadcast."""
    deadline: float = 300.0
    """Seconds each wait in the transfer may take."""


def specs(tensors: list[dict[str, Any]]) -> list[TensorSpec]:
    """The `tensors` column of a `weight_versions` row."""
    return [TensorSpec(row["name"], row["dtype"], tuple(row["shape"]), row["digest"]) for row in tensors]


def whole(spec: TensorSpec) -> Piece:
    """The piece that is the complete tensor."""
    return whole_piece(spec.name, spec.shape)


def whole_piece(name: str, shape: Sequence[int]) -> Piece:
    """The piece that is all of a tensor of this shape."""
    return Piece(name, 0, 0, shape[0] if shape else 1)


def is_whole(piece: Piece, spec: TensorSpec) -> bool:
    """Whether `piece` is the complete tensor, whatever dimension it names."""
    return piece.start == 0 and piece.stop == extent(piece.dim, spec)


def extent(dim: int, spec: TensorSpec) -> int:
    """Size of dimension `dim`; a 0-d tensor counts as one of size 1.

    Raises:
        LayoutError: the tensor has no such dimension.
    """
    sizes = spec.shape or (1,)
    if not 0 <= dim < len(sizes):
        raise LayoutError(f"{spec.name}: a piece names dimension {dim} of shape {list(spec.shape)}; mend the layout")
    return sizes[dim]


def check_inside(piece: Piece, spec: TensorSpec) -> None:
    """Refuse a piece that reaches outside its tensor with LayoutError."""
    size = extent(piece.dim, spec)
    if not 0 <= piece.start <= piece.stop <= size:
        raise LayoutError(
            f"{spec.name}: piece {piece.start} to {piece.stop} of dimension {piece.dim} is not inside 0 to {size}; "
            "the layout belongs to a model of another shape"
        )


def slab_shape(piece: Piece, spec: TensorSpec) -> tuple[int, ...]:
    """Shape of the tensor that holds `piece`.

    Raises:
        LayoutError: the piece reaches outside its tensor.
    """
    check_inside(piece, spec)
    sizes = list(spec.shape)
    if sizes:
        sizes[piece.dim] = piece.stop - piece.start
    return tuple(sizes)


@cache
def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    import torch

    return getattr(torch, dtype).itemsize


def nbytes(piece: Piece, spec: TensorSpec) -> int:
    """Bytes of `piece`."""
    return math.prod(slab_shape(piece, spec)) * item_bytes(spec.dtype)


def intersect(a: Piece, b: Piece, spec: TensorSpec) -> Piece | None:
    """What two pieces of one tensor share; None when that is nothing.

    Raises:
        LayoutError: they split different dimensions, so that what they share is no piece.
    """
    if is_whole(a, spec):
        return b if b.start < b.stop else None
    if is_whole(b, spec):
        return a if a.start < a.stop else None
    if a.dim != b.dim:
        raise LayoutError(
            f"{spec.name}: one side splits dimension {a.dim} and the other dimension {b.dim}, so that neither can hand "
            "the other a piece; publish by broadcast or disk_delta, or split both alike"
        )
    lo, hi = max(a.start, b.start), min(a.stop, b.stop)
    return Piece(spec.name, a.dim, lo, hi) if lo < hi else None


def cut(tensor: Shaped[Tensor, ...], piece: Piece) -> Shaped[Tensor, ...]:
    """The view of a complete tensor that is `piece`; contiguous only where dimensions before `piece.dim` have size 1."""
    return tensor if tensor.dim() == 0 else tensor.narrow(piece.dim, piece.start, piece.stop - piece.start)


def shared(
    a: Piece, a_slab: Shaped[Tensor, ...], b: Piece, b_slab: Shaped[Tensor, ...]
) -> tuple[Shaped[Tensor, ...], Shaped[Tensor, ...]]:
    """The views, in two slabs of one tensor, of the elements that both hold; they may split different dimensions.

    Args:
        a, b: pieces of one tensor; a_slab, b_slab: their elements, shaped as `slab_shape` says.
    Returns:
        Two views of equal shape, with no elements where the pieces share none.
    """
    if a_slab.dim() == 0:
        return a_slab, b_slab
    if a.dim != b.dim:
        return a_slab.narrow(b.dim, b.start, b.stop - b.start), b_slab.narrow(a.dim, a.start, a.stop - a.start)
    lo = max(a.start, b.start)
    size = max(0, min(a.stop, b.stop) - lo)
    if size == 0:
        return a_slab.narrow(a.dim, 0, 0), b_slab.narrow(b.dim, 0, 0)
    return a_slab.narrow(a.dim, lo - a.start, size), b_slab.narrow(b.dim, lo - b.start, size)


def check_tiling(pieces: Iterable[Piece], target: Piece, spec: TensorSpec) -> None:
    """Refuse unless `pieces` cover `target` exactly once and nothing else, in any order.

    Raises:
        LayoutError: a gap, an overlap, or pieces that split another dimension than the target.
    """
    parts = sorted(pieces, key=lambda part: (part.start, part.stop))
    dims = {part.dim for part in parts if not is_whole(part, spec)}
    dim = dims.pop() if len(dims) == 1 else target.dim
    if dims or (dim != target.dim and not is_whole(target, spec)):
        raise LayoutError(f"{spec.name}: its pieces split dimensions {sorted(dims | {dim, target.dim})}; use one")
    at, end = (0, extent(dim, spec)) if is_whole(target, spec) else (target.start, target.stop)
    for part in parts:
        check_inside(part, spec)
        if part.start != at:
            fault = f"{at} to {part.start} is missing" if part.start > at else f"{part.start} to {at} is there twice"
            raise LayoutError(f"{spec.name}: of dimension {dim}, {fault}; plan the transfer again")
        at = extent(dim, spec) if is_whole(part, spec) else part.stop
    if at != end or not parts:
        fault = f"{at} to {end} is missing" if at <= end else f"{end} to {at} is superfluous"
        raise LayoutError(f"{spec.name}: of dimension {dim}, {fault}; plan the transfer again")


def offsets(pieces: Iterable[Piece], specs: dict[str, TensorSpec]) -> tuple[list[int], int]:
    """Where each piece begins in a buffer that holds them in this order, and the buffer's bytes."""
    begins, at = [], 0
    for piece in pieces:
        begins.append(at)
        at += -(-nbytes(piece, specs[piece.name]) // ALIGNMENT) * ALIGNMENT
    return begins, at


def sent_names(offer: Offer) -> set[str]:
    """Names of the tensors that a transfer carries; all others are unchanged."""
    carriers = (*offer.buckets, *offer.routes)
    return {piece.name for carrier in carriers for piece in carrier.pieces}
