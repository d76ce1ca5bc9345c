"""Weights versions as changed bytes: rows of `weight_deltas` from two sets of tensors, and back.

A changed tensor is stored as chunks that tile it without gaps, so a lost row is always noticed; an unchanged tensor
has no rows at all, which only the digest over the whole version (`ops.weights.digest.weights_digest`) can vouch for.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
from blake3 import blake3
from torch import Tensor

from furlong.ops import records
from furlong.ops.weights.codec import RAW, encode_chunk, raw_chunk, word_type
from furlong.ops.weights.digest import digest_start, dtype_name, raw_bytes
from furlong.ops.weights.layout import Piece
from furlong.ops.weights.patch import DeltaError, check_parts, patch
from furlong.ops.weights.scan import scan

CHUNK_BYTES = 16 * 2**20
"""Most raw tensor bytes behind one row."""
THREADS = 2
"""Threads that `encode` and `apply` use."""
_WORTH_A_THREAD = 2**20
T = TypeVar("T")


@dataclass(frozen=True)
class Encoded:
    """A version as changed bytes, and what was learnt while comparing."""

    rows: pa.Table
    """Of `weight_deltas`, sorted by name and chunk."""
    digests: dict[str, str]
    """`tensor_digest` of every new tensor, changed or not."""
    changed_fraction: float
    """Share in [0, 1] of the new elements whose bits differ from the old ones or that have no counterpart there (a new
    name, another dtype or shape); 0.0 when there are no elements."""


@dataclass(frozen=True)
class _Coded:
    chunks: list[tuple[int, int, str, bytes]]
    digest: str
    elements: int


def encode_and_digest(
    version: int, base_version: int, run: str, old: dict[str, Tensor], new: dict[str, Tensor]
) -> Encoded:
    """As `encode`, with the digests and the changed share found in the same pass over the bytes."""
    coded = _code_all(old, new, digesting=True)
    digests = {name: coded[name].digest for name in sorted(new)}
    changed = sum(part.elements for part in coded.values()) / max(1, sum(tensor.numel() for tensor in new.values()))
    return Encoded(_rows(version, base_version, run, new, coded, digests), digests, changed)


def encode(
    version: int, base_version: int, run: str, old: dict[str, Tensor], new: dict[str, Tensor], digests: dict[str, str]
) -> pa.Table:
    """Rows of `weight_deltas` that turn `old` into `new`, sorted by name and chunk; equal input gives equal bytes.

    Args:
        version, base_version: weights versions of `new` and `old`; run: the run they belong to.
        old, new: dense CPU tensors. What is only in `old` gets no rows: only a manifest can leave it out, and who
            applies rows alone keeps it (`weight_publish` refuses such a version). What is only in `new`, or has another
            dtype or shape there, gets `raw` rows.
        digests: `tensor_digest` of each new tensor; receivers check their result against it.
    Raises:
        DeltaError: a digest is missing.
    """
    missing = sorted(set(new) - set(digests))
    if missing:
        raise DeltaError(f"no digest for tensors {missing[:3]}: receivers verify each one; pass tensor_digest of all")
    return _rows(version, base_version, run, new, _code_all(old, new, digesting=False), digests)


def apply(
    rows: pa.Table,
    tensors: dict[str, Tensor],
    pieces: dict[str, Piece] | None = None,
    into: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The new tensors for the names in `rows`, bit for bit; nothing is written into `tensors`.

    Args:
        rows: `weight_deltas` rows of one version of one run, in any order.
        tensors: the base version's dense CPU tensors, at least those named in `rows`; not needed where all chunks of
            a tensor are `raw`.
        pieces: for a rank that holds parts of tensors, which part of each name in `rows`: `tensors` and the result
            then hold just these. The digest of a tensor can be verified only where its piece is complete; for the
            others whoever puts the pieces together has to.
        into: tensors that nobody reads any more, such as those of the version before the base. A result with the
            layout of the one of its name is written there, and returned: getting fresh memory from the system takes
            several times as long as all the rest. After an error their contents are undefined.
    Raises:
        DeltaError: rows of several versions; a missing, duplicate, overlapping or unreadable chunk; another dtype or
            shape than the base's; a name without base or piece; a tensor in `into` that shares memory with its base;
            or a result whose digest is not the recorded one.
    """
    rows = records.validate("weight_deltas", rows)
    by_name = _by_name(rows)
    absent = sorted(n for n in by_name if n not in tensors and any(part["encoding"] != RAW for part in by_name[n]))
    if absent:
        raise DeltaError(f"tensors {absent[:3]} of the delta are not in the base; load its base version completely")
    unplaced = sorted(set(by_name) - set(pieces)) if pieces is not None else []
    if unplaced:
        raise DeltaError(
            f"it is not said which piece of tensors {unplaced[:3]} this rank holds; give pieces for all names in the "
            "rows, or leave out the rows of tensors it does not hold"
        )

    def rebuild(name: str) -> Tensor:
        piece = None if pieces is None else pieces[name]
        return patch(by_name[name], tensors.get(name), piece, None if into is None else into.get(name))

    fresh = _for_each(rebuild, {name: sum(part["length"] for part in by_name[name]) for name in by_name})
    return {name: fresh[name] for name in sorted(fresh)}


def check_rows(rows: pa.Table, digests: dict[str, str]) -> None:
    """Refuse the rows of one version unless every changed tensor is there with all its chunks, as they were written.

    What a version is rebuilt from is looked at here without rebuilding it, for those who got the tensors otherwise.

    Args:
        digests: of the version's tensors, by name.
    Raises:
        DeltaError: rows of several versions, of a tensor that is not among `digests` or has another digest there, or a
            missing, duplicate, overlapping or altered chunk.
    """
    for name, parts in _by_name(records.validate("weight_deltas", rows)).items():
        check_parts(parts)
        if parts[0]["digest"] != digests.get(name):
            raise DeltaError(
                f"{name}: rows of version {parts[0]['version']} give digest {parts[0]['digest'][:12]}, the manifest says "
                f"{str(digests.get(name))[:12]}; they are of two writers: restore the rows of weight_deltas"
            )


def full_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of all tensors, uncompressed: what publishing the whole version would move."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _by_name(rows: pa.Table) -> dict[str, list[dict]]:
    """The rows of each tensor, as `patch` takes them; DeltaError when they are of several versions."""
    parts = rows.drop_columns(["data"]).to_pylist()
    origins = {(part["run"], part["version"], part["base_version"]) for part in parts}
    if len(origins) > 1:
        raise DeltaError(
            f"rows of {len(origins)} (run, version, base_version) are mixed, e.g. {sorted(origins)[:2]}: deltas are "
            "applied one version at a time; select one"
        )
    by_name: dict[str, list[dict]] = {}
    for part, payload in zip(parts, rows.column("data"), strict=True):
        by_name.setdefault(part["name"], []).append({**part, "data": payload.as_buffer()})
    return by_name


def _same_layout(old: Tensor | None, new: Tensor) -> bool:
    return old is not None and old.dtype == new.dtype and old.shape == new.shape


def _elements(words: np.ndarray, tensor: Tensor) -> int:
    """How many elements the changed words, in rising order, belong to."""
    if tensor.element_size() <= 8:
        return len(words)
    return len(np.unique(words // (tensor.element_size() // 8)))


def _code_all(old: dict[str, Tensor], new: dict[str, Tensor], digesting: bool) -> dict[str, _Coded]:
    return _for_each(
        lambda name: _code(old.get(name), new[name], digesting), {name: tensor.nbytes for name, tensor in new.items()}
    )


def _for_each(work: Callable[[str], T], sizes: dict[str, int]) -> dict[str, T]:
    """Results of `work` by name, from as many threads as pay (numpy, zstd and blake3 let go of the lock).

    Args:
        sizes: bytes by name; the largest goes first, so that no thread is left alone with it at the end.
    """
    # Threads take names from one iterator, which the interpreter makes safe: a future for each would cost as much as
    # coding a small tensor.
    names = iter(sorted(sizes, key=lambda name: (-sizes[name], name)))
    if THREADS == 1 or sum(sizes.values()) < _WORTH_A_THREAD:
        return {name: work(name) for name in names}
    with ThreadPoolExecutor(THREADS) as pool:
        shares = [pool.submit(lambda: [(name, work(name)) for name in names]) for _ in range(THREADS)]
        return dict(pair for share in shares for pair in share.result())


def _code(old: Tensor | None, new: Tensor, digesting: bool) -> _Coded:
    """The chunks (first byte, byte after the last, encoding, payload) of a tensor; none when nothing changed."""
    hasher = digest_start(new.dtype, new.shape) if digesting else blake3()
    word = word_type(new.element_size())
    after = raw_bytes(new).view(word)
    before = raw_bytes(old).view(word) if _same_layout(old, new) else None
    chunks, elements = [], new.numel() if before is None else 0
    # A tensor without bytes that is new or has another layout still needs a row, which tells the layout.
    for lo in range(0, max(1, after.nbytes) if before is None else after.nbytes, CHUNK_BYTES):
        hi = min(lo + CHUNK_BYTES, after.nbytes)
        span = slice(lo // word.itemsize, hi // word.itemsize)
        if before is None:
            chunks.append((lo, hi, RAW, raw_chunk(after[span].view(np.uint8))))
            if digesting:
                hasher.update(after[span].view(np.uint8))
            continue
        index, moved = scan(before[span], after[span], hasher.update if digesting else None)
        elements += _elements(index, new)
        chunks.append((lo, hi, *encode_chunk(before[span], after[span], index, moved)))
    return _Coded(chunks if elements or before is None else [], hasher.hexdigest() if digesting else "", elements)


def _rows(
    version: int, base_version: int, run: str, new: dict[str, Tensor], coded: dict[str, _Coded], digests: dict[str, str]
) -> pa.Table:
    kept = [(name, number, *chunk) for name in sorted(new) for number, chunk in enumerate(coded[name].chunks)]
    columns = {
        "run": [run] * len(kept),
        "version": [version] * len(kept),
        "base_version": [base_version] * len(kept),
        "name": [name for name, *_ in kept],
        "chunk": [number for _, number, *_ in kept],
        "offset": [lo for _, _, lo, *_ in kept],
        "length": [hi - lo for _, _, lo, hi, *_ in kept],
        "dtype": [dtype_name(new[name]) for name, *_ in kept],
        "shape": [list(new[name].shape) for name, *_ in kept],
        "encoding": [encoding for *_, encoding, _ in kept],
        "digest": [digests[name] for name, *_ in kept],
        "data": [payload for *_, payload in kept],
    }
    return records.validate("weight_deltas", pa.table(columns, schema=records.TABLES["weight_deltas"]))
