"""One tensor, or one rank's piece of it, from its base and the rows of `weight_deltas` that change it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from jaxtyping import Shaped, UInt
from torch import Tensor

from furlong.ops.weights.codec import RAW, SPARSE, CodecError, check, decode_sparse, decode_words, word_type
from furlong.ops.weights.digest import digest_start, dtype_name, raw_bytes
from furlong.ops.weights.layout import Piece
from furlong.ops.weights.slab import Slab

_BLOCK = 2**20
"""Bytes copied, changed and digested at a time, so that they are still in cache for the next step."""


class DeltaError(ValueError):
    """Tensors or rows from which the exact new version cannot be made; the message names tensor and chunk."""


def patch(
    parts: list[dict[str, Any]],
    base: Shaped[Tensor, ...] | None,
    piece: Piece | None,
    into: Shaped[Tensor, ...] | None = None,
) -> Shaped[Tensor, ...]:
    """The new tensor, or its `piece`, in memory of its own.

    Args:
        parts: rows of one tensor of one version, in any order, `data` as a buffer.
        base: the tensor, or the piece of it, in the base version; not read where all chunks are `raw`.
        piece: None for the complete tensor, whose digest is verified.
        into: written into and returned where it has the layout of the result.
    Raises:
        DeltaError: as for `ops.weights.delta.apply`.
    """
    parts = sorted(parts, key=lambda part: part["chunk"])
    first, shape, dtype = parts[0], parts[0]["shape"], _dtype(parts[0])
    word = word_type(dtype.itemsize)
    _tiles(parts, dtype.itemsize)
    try:
        slab = Slab.of(piece, shape, dtype.itemsize // word.itemsize)
    except ValueError as err:
        raise DeltaError(f"{first['name']} of version {first['version']}: {err}") from err
    here = [*shape]
    if piece is not None and shape:
        here[piece.dim] = piece.stop - piece.start
    before = None
    if any(part["encoding"] != RAW for part in parts):
        _check_base(first, base, here)
        before = raw_bytes(base).view(word)
    elif sum(part["data"].size for part in parts) < math.prod(shape) * dtype.itemsize:
        raise DeltaError(
            f"{first['name']} of version {first['version']} has {first['dtype']}{shape} but fewer bytes in its rows; "
            "they were altered: rebuild the version from an anchor"
        )
    made = _room(first, here, dtype, base, into)
    fresh = raw_bytes(made).view(word)
    if slab.whole:
        _fill(parts, before, fresh, digest_start(dtype, shape))
    else:
        if before is not None:
            fresh[:] = before
        _fill_slab(parts, fresh, slab)
    return made


def check_parts(parts: list[dict[str, Any]]) -> None:
    """Refuse rows of one tensor, as `patch` takes them, with DeltaError unless they are complete and every payload is as it
    was written; the tensor itself is not made."""
    parts = sorted(parts, key=lambda part: part["chunk"])
    dtype = _dtype(parts[0])
    _tiles(parts, dtype.itemsize)
    for part in parts:
        _span(part, word_type(dtype.itemsize))


def _room(
    part: dict[str, Any], shape: list[int], dtype: torch.dtype, base: Tensor | None, into: Tensor | None
) -> Tensor:
    if into is None or into.dtype != dtype or list(into.shape) != shape or not _plain(into):
        return torch.empty(shape, dtype=dtype)
    if base is not None and into.untyped_storage().data_ptr() == base.untyped_storage().data_ptr() and into.numel():
        raise DeltaError(
            f"{part['name']} of version {part['version']} was to be written over its own base, which is still needed; "
            "hand over only tensors that the base version does not share"
        )
    return into


def _plain(tensor: Tensor) -> bool:
    """True when the tensor's values are its memory, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _fill(
    parts: list[dict[str, Any]], before: UInt[np.ndarray, " n"] | None, fresh: UInt[np.ndarray, " n"], hasher: blake3
) -> None:
    """Write the complete tensor and verify its digest; block by block, because memory is slower than all the rest."""
    word = fresh.dtype
    for part in parts:
        payload, lo, hi = _span(part, word)
        if part["encoding"] == SPARSE:
            index, moved = _decoded(part, decode_sparse, payload, hi - lo, word)
            index += lo
        else:
            index, words = None, _decoded(part, decode_words, part["encoding"], payload, hi - lo, word)
        edges = [*range(lo, hi, _BLOCK // word.itemsize), hi]
        cuts = [0] * len(edges) if index is None else np.searchsorted(index, edges).tolist()
        for at, end, cut, stop in zip(edges[:-1], edges[1:], cuts[:-1], cuts[1:], strict=True):
            block = fresh[at:end]
            if part["encoding"] == RAW:
                block[:] = words[at - lo : end - lo]
            elif index is None:
                np.bitwise_xor(before[at:end], words[at - lo : end - lo], out=block)
            else:
                block[:] = before[at:end]
                fresh[index[cut:stop]] += moved[cut:stop]
            hasher.update(block.view(np.uint8).data)
    found = hasher.hexdigest()
    if found != parts[0]["digest"]:
        raise DeltaError(
            f"{parts[0]['name']}, chunks 0 to {len(parts) - 1} of version {parts[0]['version']}: the result has digest "
            f"{found}, recorded is {parts[0]['digest']}; the base is not version {parts[0]['base_version']} or rows "
            "were altered: load that base, or rebuild the version from an anchor"
        )


def _fill_slab(parts: list[dict[str, Any]], fresh: UInt[np.ndarray, " s"], slab: Slab) -> None:
    word = fresh.dtype
    for part in parts:
        payload, lo, hi = _span(part, word)
        if part["encoding"] == SPARSE:
            index, moved = _decoded(part, decode_sparse, payload, hi - lo, word)
            index, moved = slab.locate(index + lo, moved)
            fresh[index] += moved
            continue
        words = _decoded(part, decode_words, part["encoding"], payload, hi - lo, word)
        for there, here, shape, columns in slab.cuts(lo, hi):
            cut = words[here].reshape(shape)[:, columns]
            target = fresh[there].reshape(cut.shape)
            target[:] = cut if part["encoding"] == RAW else target ^ cut


def _span(part: dict[str, Any], word: np.dtype) -> tuple[memoryview, int, int]:
    payload = _decoded(part, check, part["data"])
    return payload, part["offset"] // word.itemsize, (part["offset"] + part["length"]) // word.itemsize


def _decoded(part: dict[str, Any], decode, *given) -> Any:
    try:
        return decode(*given)
    except CodecError as err:
        raise DeltaError(
            f"{part['name']}, chunk {part['chunk']} of version {part['version']} cannot be applied: {err}; "
            "read the rows again, or rebuild the version from an anchor"
        ) from err


def _dtype(part: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, part["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise DeltaError(
            f"{part['name']}, chunk {part['chunk']} of version {part['version']} is for dtype {part['dtype']!r}, which "
            f"torch {torch.__version__} lacks; use a torch that has it, or rebuild the version from an anchor"
        )
    return dtype


def _check_base(part: dict[str, Any], base: Tensor, shape: list[int]) -> None:
    if (part["dtype"], shape) != (dtype_name(base), list(base.shape)):
        raise DeltaError(
            f"{part['name']}, chunk {part['chunk']} of version {part['version']} is for {part['dtype']}{shape}, but "
            f"the base is {dtype_name(base)}{list(base.shape)}; load base version {part['base_version']} of the same "
            "model"
        )


def _tiles(parts: list[dict[str, Any]], size: int) -> None:
    """Refuse unless the chunks, sorted by number, cover exactly the tensor of the first one's layout."""
    first, end = parts[0], 0
    if min(first["shape"], default=0) < 0:
        raise DeltaError(
            f"{first['name']} of version {first['version']} has shape {first['shape']}; the row was altered: rebuild "
            "the version from an anchor"
        )
    total = math.prod(first["shape"]) * size
    for number, part in enumerate(parts):
        where = f"{part['name']}, chunk {part['chunk']} of version {part['version']}"
        if (part["dtype"], part["shape"]) != (first["dtype"], first["shape"]):
            raise DeltaError(
                f"{where} is for {part['dtype']}{part['shape']}, but chunk {first['chunk']} is for "
                f"{first['dtype']}{first['shape']}; rows of two writers are mixed"
            )
        if part["digest"] != first["digest"]:
            raise DeltaError(f"{where} has another digest than chunk {first['chunk']}; rows of two writers are mixed")
        if part["chunk"] != number:
            fault = "appears twice" if part["chunk"] < number else f"is there, but chunk {number} is missing"
            raise DeltaError(f"{where} {fault}; read the version's rows again, or rebuild it from an anchor")
        if part["offset"] != end or part["length"] < min(total, 1) or part["length"] % size:
            raise DeltaError(
                f"{where} covers {part['length']} bytes from {part['offset']}, but elements of {size} bytes go on at "
                f"{end}; the row was altered: rebuild the version from an anchor"
            )
        end += part["length"]
    if end != total:
        raise DeltaError(
            f"{first['name']}, chunk {len(parts)} of version {first['version']} is missing: chunks cover {end} of "
            f"{total} bytes; read the version's rows again, or rebuild it from an anchor"
        )
