"""Pieces in and out of one contiguous run of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

from furlong.ops.weights.layout import LayoutError, Piece, TensorSpec, check_inside, nbytes, offsets, shared, slab_shape


def pack(
    pieces: Sequence[Piece], held: dict[str, list[tuple[Piece, Tensor]]], specs: dict[str, TensorSpec],
    buffer: UInt8[Tensor, " nbytes"],
) -> None:  # fmt: skip
    """Write `pieces` into `buffer`, in order, out of the slabs that a source holds.

    Args:
        held: by tensor name, from `by_name`.
        buffer: at least as long as `offsets` says.
    Raises:
        LayoutError: no slab holds one of the pieces.
    """
    for piece, part in _parts(pieces, specs, buffer):
        for mine, slab in held.get(piece.name, ()):
            here, there = shared(mine, slab, piece, part)
            if there.shape == part.shape:
                part.copy_(here)
                break
        else:
            raise LayoutError(
                f"{piece}: this source was planned to send it but does not hold it; plan the transfer again"
            )


def unpack(
    pieces: Sequence[Piece], slabs: dict[str, tuple[Piece, Tensor]], specs: dict[str, TensorSpec],
    buffer: UInt8[Tensor, " nbytes"],
) -> None:  # fmt: skip
    """Write what `buffer` holds of each slab's elements into it; elements outside it are left out."""
    for piece, part in _parts(pieces, specs, buffer):
        if piece.name in slabs:
            mine, slab = slabs[piece.name]
            here, there = shared(mine, slab, piece, part)
            here.copy_(there)


def by_name(held: dict[Piece, Tensor], specs: dict[str, TensorSpec]) -> dict[str, list[tuple[Piece, Tensor]]]:
    """What a source holds, by tensor name.

    Raises:
        LayoutError: a tensor of another dtype or shape than its piece of the manifest's tensor.
    """
    found: dict[str, list[tuple[Piece, Tensor]]] = {}
    for piece in sorted(held):
        if piece.name in specs:
            check_slab(piece, held[piece], specs[piece.name])
            found.setdefault(piece.name, []).append((piece, held[piece]))
    return found


def check_slab(piece: Piece, slab: Shaped[Tensor, ...], spec: TensorSpec) -> None:
    """Refuse a tensor that is not of the dtype and shape of this piece with LayoutError."""
    check_inside(piece, spec)
    want, dtype = slab_shape(piece, spec), getattr(torch, spec.dtype)
    if slab.dtype != dtype or tuple(slab.shape) != want:
        raise LayoutError(
            f"{piece.name}: {piece.start} to {piece.stop} of dimension {piece.dim} is {slab.dtype}{list(slab.shape)}, but "
            f"the manifest asks for {dtype}{list(want)}; hold the version's own tensors"
        )


def _parts(
    pieces: Sequence[Piece], specs: dict[str, TensorSpec], buffer: UInt8[Tensor, " nbytes"]
) -> Iterator[tuple[Piece, Tensor]]:
    begins, _ = offsets(pieces, specs)
    for piece, at in zip(pieces, begins, strict=True):
        spec = specs[piece.name]
        run = buffer[at : at + nbytes(piece, spec)]
        yield piece, run.view(getattr(torch, spec.dtype)).reshape(slab_shape(piece, spec))
