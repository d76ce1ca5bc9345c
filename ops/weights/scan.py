"""Where two runs of words differ and by how much, read in cache-sized blocks; the digest is taken on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int, UInt

_BLOCK = 2**21
"""Bytes compared, gathered and digested at a time: old, new and flags stay in a core's share of the last-level cache, and
the price of a numpy call (there are twenty) is small beside the work in it."""
# numpy lists the true values of an array with fewer than a tenth of them through a search that pays a mispredicted
# branch for each, and of a denser one in a loop without branches. Ones at the end, cut off again, choose the loop.
_PAD = 8
_BRANCHLESS = 0.1
_local = threading.local()


def scan(
    before: UInt[np.ndarray, " n"], after: UInt[np.ndarray, " n"], digest: Callable[[memoryview], object] | None = None
) -> tuple[Int[np.ndarray, " k"], UInt[np.ndarray, " k"]]:
    """Positions, rising, at which `after` differs from `before`, and the differences modulo the word size.

    Args:
        before, after: of one unsigned type.
        digest: is given the bytes of `after`, block by block, while they are in cache.
    """
    if not hasattr(_local, "flags"):
        _local.flags = np.empty(_BLOCK // 8, np.bool_)
        _local.groups = np.ones(_BLOCK // 64 + _BLOCK // 64 // _PAD, np.bool_)
    size = after.itemsize
    found = []
    for lo in range(0, len(after), _BLOCK // size):
        x, y = after[lo : lo + _BLOCK // size], before[lo : lo + _BLOCK // size]
        whole = x.nbytes // 8
        x8, y8 = x[: whole * 8 // size].view(np.uint64), y[: whole * 8 // size].view(np.uint64)
        flags = _local.flags[:whole]
        np.not_equal(x8, y8, out=flags)
        if digest is not None:
            digest(x.view(np.uint8).data)
        index, moved = _lanes(_positions(flags), x8, y8, after.dtype)
        if whole * 8 < x.nbytes:
            rest = np.flatnonzero(x[whole * 8 // size :] != y[whole * 8 // size :]) + whole * 8 // size
            index, moved = np.concatenate([index, rest]), np.concatenate([moved, x[rest] - y[rest]])
        if len(index):
            index += lo
            found.append((index, moved))
    if not found:
        return np.empty(0, np.int64), np.empty(0, after.dtype)
    if len(found) == 1:
        return found[0]
    indices, moves = zip(*found, strict=True)
    return np.concatenate(indices), np.concatenate(moves)


def _positions(flags: Bool[np.ndarray, " n"]) -> Int[np.ndarray, " k"]:
    count = np.count_nonzero(flags)
    if count >= _BRANCHLESS * len(flags) or len(flags) % 8:
        return np.flatnonzero(flags)
    if count == 0:
        return np.empty(0, np.int64)
    eights = flags.view(np.uint64)
    groups = _local.groups[: len(eights) + len(eights) // _PAD]
    groups[len(eights) :] = True
    np.not_equal(eights, 0, out=groups[: len(eights)])
    chosen = np.flatnonzero(groups)[: np.count_nonzero(groups[: len(eights)])]
    within = np.flatnonzero(eights[chosen].view(np.bool_))
    index = chosen.take(within >> 3)
    index <<= 3
    within &= 7
    index += within
    return index


def _lanes(
    at: Int[np.ndarray, " j"], x8: UInt[np.ndarray, " m"], y8: UInt[np.ndarray, " m"], word: np.dtype
) -> tuple[Int[np.ndarray, " k"], UInt[np.ndarray, " k"]]:
    """The words that differ within the 8-byte ones at `at`."""
    moved = x8.take(at).view(word)
    moved -= y8.take(at).view(word)
    if word.itemsize == 8:
        return at, moved
    lanes = 8 // word.itemsize
    shift = lanes.bit_length() - 1
    chosen = np.flatnonzero(moved != 0)
    at <<= shift
    index = at.take(chosen >> shift)
    moved = moved.take(chosen)
    chosen &= lanes - 1
    index += chosen
    return index, moved
