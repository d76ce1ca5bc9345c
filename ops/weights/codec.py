"""How the changed words of one chunk are coded; numpy and zstd only, exact for every bit pattern.

`sparse+zstd`: distances between changed words, and how far each moved. An optimiser step moves a bfloat16 weight by a
unit in the last place or two, so the sizes of the moves hold few distinct values; their signs are as good as random.
`xor+zstd`: XOR of old and new, for chunks in which most words changed. `raw`: the new bytes.

Numbers of one kind are cut into planes (all lowest bytes, all second ones, and so on; those above the largest number
are left out), and each plane is a zstd frame, or itself where that is not longer. A payload, little-endian:

    u32 numbers, u8 planes of the first kind, u8 planes of the second, u32 length of each plane, planes, signs, check

The kinds are distances and sizes of moves less one; XOR has no first kind and no signs, `raw` nothing but bytes and
check: the first 16 bytes of blake3 over all before it, so that a flipped bit is noticed without the whole tensor.

`numbers` counts the changed words, for XOR all words. A word is an element of 1, 2, 4 or 8 bytes; one of 16 bytes is two
words. The first distance is from the chunk's first word. A move is the shorter way round the word's range (up where both
are equally long); its sign is a bit, 1 for down, the first sign in the highest bit of the first byte.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard
from blake3 import blake3
from jaxtyping import Int, UInt, UInt8

XOR = "xor+zstd"
SPARSE = "sparse+zstd"
RAW = "raw"
_HEADER = struct.Struct("<IBB")
_CHECK = 16
# Planes repeat too little for long matches to pay, and looking for short ones costs most of the time: what gains is
# the coder of single symbols.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, window_log=17, write_content_size=True
)
_TOO_SHORT = 24
"""Bytes in a plane below which a frame's own header outweighs any gain."""
# Below this share of changed elements positions took fewer bytes than planes in every measurement (bf16 and fp32; moves
# of a few units, random, constant). Coding both costs time only.
_SPARSE_ONLY = 1 / 2
# Above this share of the raw bytes the rest saved is not worth decoding.
_PAYS = 0.95
_local = threading.local()


class CodecError(ValueError):
    """A payload that is not what `encode_chunk` writes; the message says how."""


def word_type(itemsize: int) -> np.dtype:
    """The unsigned integer through which elements of `itemsize` bytes are compared (16-byte ones as two words)."""
    return np.dtype(f"<u{min(itemsize, 8)}")


def encode_chunk(
    before: UInt[np.ndarray, " n"],
    after: UInt[np.ndarray, " n"],
    index: Int[np.ndarray, " k"],
    moved: UInt[np.ndarray, " k"],
) -> tuple[str, bytes]:
    """Code `after` against `before`, which differ at `index` by `moved` (`ops.weights.scan.scan`).

    Returns:
        The shortest encoding's name and its payload.
    """
    encoding, payload = SPARSE, _pack_sparse(index, moved) if len(index) <= _PAYS * len(after) else b""
    if len(index) >= _SPARSE_ONLY * len(after):
        dense = _pack(len(after), [], _planes(before ^ after, after.itemsize), b"")
        encoding, payload = (encoding, payload) if payload and len(payload) <= len(dense) else (XOR, dense)
    return (encoding, payload) if len(payload) < _PAYS * after.nbytes else (RAW, raw_chunk(after.view(np.uint8)))


def raw_chunk(new: UInt8[np.ndarray, " nbytes"]) -> bytes:
    """The payload of encoding `raw`."""
    return b"".join([new, blake3(new).digest(_CHECK)])


def check(payload: bytes | memoryview) -> memoryview:
    """The payload without its check.

    Raises:
        CodecError: they do not agree.
    """
    view = memoryview(payload).cast("B")
    if len(view) < _CHECK or blake3(view[:-_CHECK]).digest(_CHECK) != bytes(view[-_CHECK:]):
        raise CodecError(f"its {len(view)} bytes do not agree with the check at their end")
    return view[:-_CHECK]


def decode_sparse(
    payload: memoryview, size: int, word: np.dtype
) -> tuple[Int[np.ndarray, " k"], UInt[np.ndarray, " k"]]:
    """Positions in a chunk of `size` words, and what to add there; the inverse of `encode_chunk` for SPARSE.

    Raises:
        CodecError: truncated, corrupt, or made for another chunk.
    """
    count, gaps, sizes, signs = _unpack(payload, size, 4, word.itemsize)
    if len(signs) != -(-count // 8):
        raise CodecError(f"it holds {len(signs)} bytes of signs for {count} changes")
    index = np.add.accumulate(_number(gaps, count, np.dtype("<u4")), dtype=np.int64)
    if count and index[-1] >= size:
        raise CodecError(f"it changes element {index[-1]}, but the chunk has {size}")
    negative = np.unpackbits(signs, count=count).astype(word)
    moved = np.subtract(1, negative << 1, dtype=word, casting="unsafe")
    if sizes:
        moved += (_number(sizes, count, word) ^ (0 - negative)) + negative
    return index, moved


def decode_words(encoding: str, payload: memoryview, size: int, word: np.dtype) -> UInt[np.ndarray, " n"]:
    """All words of a chunk of `size` words: those to XOR with for XOR, the new ones for RAW.

    Raises:
        CodecError: unknown encoding; truncated, corrupt, or made for another chunk.
    """
    if encoding not in (RAW, XOR):
        raise CodecError(f"encoding {encoding!r} is unknown; this version reads {SPARSE!r}, {XOR!r} and {RAW!r}")
    if encoding == RAW:
        if len(payload) != size * word.itemsize:
            raise CodecError(f"it holds {len(payload)} bytes, but the chunk has {size * word.itemsize}")
        return np.frombuffer(payload, word)
    count, _, planes, signs = _unpack(payload, size, 0, word.itemsize)
    if count != size or len(signs):
        raise CodecError(f"it holds {count} words of XOR and {len(signs)} bytes more, but the chunk has {size} words")
    return _number(planes, count, word)


def _pack_sparse(index: Int[np.ndarray, " k"], moved: UInt[np.ndarray, " k"]) -> bytes:
    gaps = np.empty_like(index)
    gaps[:1] = index[:1]
    np.subtract(index[1:], index[:-1], out=gaps[1:])
    size = np.negative(moved)
    negative = size < moved
    np.minimum(size, moved, out=size)
    size -= 1
    return _pack(len(index), _planes(gaps, 4), _planes(size, moved.itemsize), np.packbits(negative))


def _planes(numbers: Int[np.ndarray, " n"] | UInt[np.ndarray, " n"], most: int) -> list[UInt8[np.ndarray, " n"]]:
    used = -(-int(numbers.max()).bit_length() // 8) if len(numbers) else 0
    planes = [numbers.astype(np.uint8)] if used else []
    return planes + [(numbers >> 8 * n).astype(np.uint8) for n in range(1, min(used, most))]


def _pack(count: int, first: list, second: list, signs: bytes | UInt8[np.ndarray, " s"]) -> bytes:
    coded = [_code(plane) for plane in (*first, *second)]
    lengths = struct.pack(f"<{len(coded)}I", *map(len, coded))
    body = b"".join([_HEADER.pack(count, len(first), len(second)), lengths, *coded, signs])
    return body + blake3(body).digest(_CHECK)


def _unpack(
    payload: memoryview, most: int, most_first: int, most_second: int
) -> tuple[int, list[UInt8[np.ndarray, " n"]], list[UInt8[np.ndarray, " n"]], UInt8[np.ndarray, " s"]]:
    if len(payload) < _HEADER.size:
        raise CodecError(f"it holds {len(payload)} bytes, less than its header of {_HEADER.size}")
    count, first, second = _HEADER.unpack_from(payload)
    # Sizes are checked before anything is allocated: a corrupt header must not ask for the machine's memory.
    if count > most or first > most_first or second > most_second:
        raise CodecError(
            f"its header asks for {count} numbers in {first} + {second} planes, but at most {most} in {most_first} + "
            f"{most_second} are possible"
        )
    at = _HEADER.size + 4 * (first + second)
    if len(payload) < at:
        raise CodecError(f"it holds {len(payload)} bytes, less than its header of {at}")
    planes = []
    for length in struct.unpack_from(f"<{first + second}I", payload, _HEADER.size):
        if at + length > len(payload):
            raise CodecError(f"it ends {at + length - len(payload)} bytes before a plane does")
        planes.append(_decode(payload[at : at + length], count))
        at += length
    return count, planes[:first], planes[first:], np.frombuffer(payload[at:], np.uint8)


def _code(plane: UInt8[np.ndarray, " n"]) -> bytes | UInt8[np.ndarray, " n"]:
    if len(plane) < _TOO_SHORT:
        return plane
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    coded = _local.compressor.compress(plane)
    return coded if len(coded) < len(plane) else plane


def _decode(coded: memoryview, count: int) -> UInt8[np.ndarray, " n"]:
    if len(coded) == count:
        return np.frombuffer(coded, np.uint8)
    try:
        size = zstandard.frame_content_size(coded)
        if size != count:
            raise CodecError(f"the frame of a plane announces {size} bytes, but the header says {count}")
        if not hasattr(_local, "decompressor"):
            _local.decompressor = zstandard.ZstdDecompressor()
        return np.frombuffer(_local.decompressor.decompress(coded, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as err:
        raise CodecError(f"zstd cannot read a plane ({err})") from err


def _number(planes: list[UInt8[np.ndarray, " n"]], count: int, word: np.dtype) -> UInt[np.ndarray, " n"]:
    if not planes:
        return np.zeros(count, word)
    numbers = planes[0].astype(word)
    for n, plane in enumerate(planes[1:], 1):
        numbers |= plane.astype(word) << 8 * n
    return numbers
