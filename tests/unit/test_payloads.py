"""What a row of `weight_deltas` holds, read with nothing but Python's integers, as the docstring of the codec has it."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
import zstandard
from blake3 import blake3
from torch import Tensor

from furlong.ops.weights import delta
from furlong.ops.weights.digest import manifest

CHUNK = 1008
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.complex128, torch.bool]


def plain_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_numbers(planes: list[bytes], count: int) -> list[int]:
    whole = [p if len(p) == count else zstandard.ZstdDecompressor().decompress(p) for p in planes]
    assert all(len(plane) == count for plane in whole)
    return [sum(plane[i] << 8 * n for n, plane in enumerate(whole)) for i in range(count)]


def decode(encoding: str, payload: bytes, before: bytes, size: int) -> bytes:
    """The new bytes of a chunk from its old ones, whose words have `size` bytes."""
    body, check = payload[:-16], payload[-16:]
    assert blake3(body).digest()[:16] == check
    if encoding == "raw":
        return body
    count, first, second = struct.unpack_from("<IBB", body)
    planes, at = [], 6 + 4 * (first + second)
    for length in struct.unpack_from(f"<{first + second}I", body, 6):
        planes.append(body[at : at + length])
        at += length
    signs = body[at:]
    distances, values = read_numbers(planes[:first], count), read_numbers(planes[first:], count)
    words = [int.from_bytes(before[n : n + size], "little") for n in range(0, len(before), size)]
    if encoding == "xor+zstd":
        assert (first, signs, count) == (0, b"", len(words))
        words = [old ^ value for old, value in zip(words, values, strict=True)]
    else:
        assert (encoding, len(signs)) == ("sparse+zstd", (count + 7) // 8)
        place = 0
        for n in range(count):
            place += distances[n]
            down = signs[n // 8] >> 7 - n % 8 & 1
            words[place] = (words[place] + (-1 if down else 1) * (values[n] + 1)) % 256**size
    return b"".join(word.to_bytes(size, "little") for word in words)


def step(dtype: torch.dtype, count: int, density: float, by: str) -> tuple[bytes, bytes]:
    """Random bytes, NaNs of every kind among them, and what they become."""
    rng = np.random.default_rng(count)
    size = min(dtype.itemsize, 8)
    old = np.frombuffer(rng.bytes(count * dtype.itemsize), f"<u{size}").copy()
    if dtype == torch.bool:
        old &= 1
    new, hit = old.copy(), rng.random(old.size) < density
    if dtype == torch.bool:
        new[hit] ^= 1
    elif by == "unit":
        new[hit] += rng.choice(np.array([1, -1]), hit.sum()).astype(new.dtype)
    elif by == "half the range":
        new[hit] += new.dtype.type(1 << 8 * size - 1)
    else:
        new[hit] = np.frombuffer(rng.bytes(int(hit.sum()) * size), new.dtype)
    return old.tobytes(), new.tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by", ["unit", "half the range", "anything"])
def test_payloads_are_as_documented(dtype: torch.dtype, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "CHUNK_BYTES", CHUNK)
    seen = set()
    for shape in ((), (0, 3), (7,), (3, 701)):
        for density in (0.0, 0.003, 0.01, 0.1, 0.49, 0.6, 0.97, 1.0):
            count = int(np.prod(shape))
            old, new = step(dtype, count, density, by)
            tensors = [
                torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)
                for raw in (old, new)
            ]
            told = manifest({"x": tensors[1]})[0]
            rows = delta.encode(2, 1, "run", {"x": tensors[0]}, {"x": tensors[1]}, {"x": told["digest"]}).to_pylist()
            made = b""
            for number, row in enumerate(rows):
                part = old[row["offset"] : row["offset"] + row["length"]]
                assert (row["chunk"], row["offset"], len(part) <= CHUNK) == (number, len(made), True)
                assert (row["dtype"], row["shape"], row["digest"]) == (told["dtype"], list(shape), told["digest"])
                made += decode(row["encoding"], row["data"], part, min(dtype.itemsize, 8))
                seen.add(row["encoding"])
            assert made == (new if rows else b"")
            assert rows or old == new
    assert {"sparse+zstd", "raw"} <= seen
