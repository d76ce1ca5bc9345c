"""How the changed bytes of one chunk are coded; numpy and zstd only, exact for every bit pattern.

`sparse+zstd`: distances between changed elements, and how far each moved as an unsigned integer of its size. An
optimiser step moves a bfloat16 weight by a unit in the last place or two, so both streams hold few distinct values.
`xor+zstd`: XOR of old and new, split into byte planes, for chunks in which most elements changed.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard
from jaxtyping import Int, UInt, UInt8

XOR = "xor+zstd"
SPARSE = "sparse+zstd"
_LEVEL = 1
_HEADER = struct.Struct("<QQ")
_ESCAPE = 255
# Below this share of changed elements positions took fewer bytes than planes in every measurement (bf16 and fp32; moves
# of a few units, random, constant): from 0.9 times at one half to half at one in thirty. Coding both costs time only.
_SPARSE_ONLY = 1 / 2


class CodecError(ValueError):
    """A payload that is not what `encode_chunk` writes; the message says how."""


def word_type(itemsize: int) -> np.dtype:
    """The unsigned integer through which elements of `itemsize` bytes are compared (16-byte ones as two words)."""
    return np.dtype(f"<u{min(itemsize, 8)}")


def encode_chunk(
    old: UInt8[np.ndarray, " nbytes"], new: UInt8[np.ndarray, " nbytes"], itemsize: int
) -> tuple[str, bytes, int]:
    """Code `new` against `old`.

    Args:
        old, new: bytes of the same elements, a whole number of them.
        itemsize: bytes per element.
    Returns:
        The shorter encoding's name, its payload, and the number of changed words (0 when nothing changed).
    """
    before, after = old.view(word_type(itemsize)), new.view(word_type(itemsize))
    changed = before != after
    count = int(np.count_nonzero(changed))
    sparse = _compress(_pack_sparse(before, after, changed))
    if count < _SPARSE_ONLY * changed.size:
        return SPARSE, sparse, count
    planes = _compress(_to_planes(before ^ after))
    return (SPARSE, sparse, count) if len(sparse) <= len(planes) else (XOR, planes, count)


def decode_chunk(
    encoding: str, payload: bytes | memoryview, chunk: UInt8[np.ndarray, " nbytes"], itemsize: int
) -> None:
    """Turn the old bytes in `chunk` into the new ones, in place.

    Raises:
        CodecError: unknown encoding, or a payload that is truncated, corrupt or made for another chunk.
    """
    words = chunk.view(word_type(itemsize))
    if encoding == XOR:
        packed = _decompress(payload, words.nbytes)
        if len(packed) != words.nbytes:
            raise CodecError(f"it holds {len(packed)} bytes of XOR, but the chunk has {words.nbytes}")
        words ^= _from_planes(packed, words.dtype)
    elif encoding == SPARSE:
        most = _HEADER.size + words.size * (1 + 4 + words.itemsize)
        index, moved = _unpack_sparse(_decompress(payload, most), words.dtype)
        if len(index) and index[-1] >= words.size:
            raise CodecError(f"it changes element {index[-1]}, but the chunk has {words.size}")
        words[index] += moved
    else:
        raise CodecError(f"encoding {encoding!r} is unknown; this version reads {SPARSE!r} and {XOR!r}")


def _pack_sparse(before: UInt[np.ndarray, " n"], after: UInt[np.ndarray, " n"], changed: np.ndarray) -> bytes:
    index = np.flatnonzero(changed)
    gaps = np.diff(index, prepend=-1) - 1
    # One byte holds most gaps; the rest go on in a second stream, which keeps the first one's symbols few.
    short = np.minimum(gaps, _ESCAPE).astype(np.uint8)
    long = (gaps[gaps >= _ESCAPE] - _ESCAPE).astype("<u4")
    moved = after[index] - before[index]
    # Zigzag: small moves of either sign become small numbers, so the high planes are zero.
    folded = (moved << 1) ^ np.negative(moved >> (8 * moved.itemsize - 1))
    return b"".join(
        [
            _HEADER.pack(len(short), len(long)),
            short.tobytes(),
            _to_planes(long),
            _to_planes(folded.astype(before.dtype)),
        ]
    )


def _unpack_sparse(packed: bytes, word: np.dtype) -> tuple[Int[np.ndarray, " k"], UInt[np.ndarray, " k"]]:
    if len(packed) < _HEADER.size:
        raise CodecError(f"it holds {len(packed)} bytes, less than its header of {_HEADER.size}")
    count, escapes = _HEADER.unpack_from(packed)
    want = _HEADER.size + count * (1 + word.itemsize) + 4 * escapes
    if len(packed) != want:
        raise CodecError(f"it holds {len(packed)} bytes, but its header asks for {want}")
    body = np.frombuffer(packed, np.uint8, offset=_HEADER.size)
    short, long, folded = np.split(body, [count, count + 4 * escapes])
    gaps = short.astype(np.int64)
    escaped = np.flatnonzero(short == _ESCAPE)
    if len(escaped) != escapes:
        raise CodecError(f"it has {len(escaped)} long gaps, but its header says {escapes}")
    gaps[escaped] += _from_planes(long, np.dtype("<u4"))
    folded = _from_planes(folded, word)
    return np.cumsum(gaps + 1) - 1, (folded >> 1) ^ np.negative(folded & 1)


def _to_planes(words: UInt[np.ndarray, " n"]) -> bytes:
    """All lowest bytes, then all second ones, and so on: bytes that behave alike lie together."""
    return np.ascontiguousarray(words.view(np.uint8).reshape(len(words), words.itemsize).T).tobytes()


def _from_planes(packed: bytes | UInt8[np.ndarray, " nbytes"], word: np.dtype) -> UInt[np.ndarray, " n"]:
    planes = np.frombuffer(packed, np.uint8).reshape(word.itemsize, -1)
    return np.ascontiguousarray(planes.T).reshape(-1).view(word)


def _compress(packed: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(packed)


def _decompress(payload: bytes | memoryview, most: int) -> bytes:
    try:
        size = zstandard.frame_content_size(payload)
        # The size is read before anything is allocated: a corrupt header must not ask for the machine's memory.
        if not 0 <= size <= most:
            raise CodecError(f"its frame announces {size} bytes, but at most {most} are possible")
        return zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise CodecError(f"zstd cannot read it ({err})") from err
