"""Weights versions as changed bytes: rows of `weight_deltas` from two sets of tensors, and back.

A changed tensor is stored as chunks that tile it without gaps, so a lost row is always noticed; an unchanged tensor
has no rows at all, which only the digest over the whole version (`ops.weights.digest.weights_digest`) can vouch for.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from furlong.ops import records
from furlong.ops.weights.codec import CodecError, decode_chunk, encode_chunk, word_type
from furlong.ops.weights.digest import dtype_name, raw_bytes, tensor_digest

CHUNK_BYTES = 16 * 2**20
"""Most raw tensor bytes behind one row."""
_THREADS = 2


class DeltaError(ValueError):
    """Tensors or rows from which the exact new version cannot be made; the message names tensor and chunk."""


def encode(
    version: int, base_version: int, run: str, old: dict[str, Tensor], new: dict[str, Tensor], digests: dict[str, str]
) -> pa.Table:
    """Rows of `weight_deltas` that turn `old` into `new`, sorted by name and chunk; equal input gives equal bytes.

    Args:
        version, base_version: weights versions of `new` and `old`; run: the run they belong to.
        old, new: dense CPU tensors with equal names, dtypes and shapes.
        digests: `tensor_digest` of each new tensor; receivers check their result against it.
    Raises:
        DeltaError: the two sets differ in names, dtypes or shapes, or a digest is missing.
    """
    _same_layout(old, new)
    missing = sorted(set(new) - set(digests))
    if missing:
        raise DeltaError(f"no digest for tensors {missing[:3]}: receivers verify each one; pass tensor_digest of all")
    before = {name: raw_bytes(tensor) for name, tensor in old.items()}
    after = {name: raw_bytes(tensor) for name, tensor in new.items()}
    spans = [
        (n, lo, min(lo + CHUNK_BYTES, len(after[n])))
        for n in sorted(new)
        for lo in range(0, len(after[n]), CHUNK_BYTES)
    ]

    def code(span: tuple[str, int, int]) -> tuple[str, bytes, int]:
        name, lo, hi = span
        return encode_chunk(before[name][lo:hi], after[name][lo:hi], new[name].element_size())

    with ThreadPoolExecutor(_THREADS) as pool:
        coded = list(pool.map(code, spans))
    changed = {name for (name, _, _), (_, _, count) in zip(spans, coded, strict=True) if count}
    kept = [(span, part) for span, part in zip(spans, coded, strict=True) if span[0] in changed]
    columns = {
        "run": [run] * len(kept),
        "version": [version] * len(kept),
        "base_version": [base_version] * len(kept),
        "name": [name for (name, _, _), _ in kept],
        "chunk": [lo // CHUNK_BYTES for (_, lo, _), _ in kept],
        "offset": [lo for (_, lo, _), _ in kept],
        "length": [hi - lo for (_, lo, hi), _ in kept],
        "dtype": [dtype_name(new[name]) for (name, _, _), _ in kept],
        "shape": [list(new[name].shape) for (name, _, _), _ in kept],
        "encoding": [encoding for _, (encoding, _, _) in kept],
        "digest": [digests[name] for (name, _, _), _ in kept],
        "data": [payload for _, (_, payload, _) in kept],
    }
    return records.validate("weight_deltas", pa.table(columns, schema=records.TABLES["weight_deltas"]))


def apply(rows: pa.Table, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The complete new tensors for the names in `rows`, bit for bit; nothing is written into `tensors`.

    Args:
        rows: `weight_deltas` rows of one version of one run, in any order.
        tensors: the base version's dense CPU tensors, at least those named in `rows`.
    Raises:
        DeltaError: rows of several versions; a missing, duplicate, overlapping or unreadable chunk; another dtype or
            shape than the base's; or a result whose digest is not the recorded one.
    """
    rows = records.validate("weight_deltas", rows)
    parts = rows.drop_columns(["data"]).to_pylist()
    origins = {(part["run"], part["version"], part["base_version"]) for part in parts}
    if len(origins) > 1:
        raise DeltaError(
            f"rows of {len(origins)} (run, version, base_version) are mixed, e.g. {sorted(origins)[:2]}: deltas are "
            "applied one version at a time; select one"
        )
    by_name: dict[str, list[dict[str, Any]]] = {}
    for part, payload in zip(parts, rows.column("data"), strict=True):
        by_name.setdefault(part["name"], []).append({**part, "data": payload.as_buffer()})
    absent = sorted(set(by_name) - set(tensors))
    if absent:
        raise DeltaError(f"tensors {absent[:3]} of the delta are not in the base; load its base version completely")
    with ThreadPoolExecutor(_THREADS) as pool:
        # Largest first, so that no thread is left alone with the embedding at the end.
        names = sorted(by_name, key=lambda name: (-tensors[name].nbytes, name))
        fresh = dict(zip(names, pool.map(lambda name: _rebuild(by_name[name], tensors[name]), names), strict=True))
    return {name: fresh[name] for name in sorted(fresh)}


def full_bytes(tensors: dict[str, Tensor]) -> int:
    """Bytes of all tensors, uncompressed: what publishing the whole version would move."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def changed_fraction(old: dict[str, Tensor], new: dict[str, Tensor]) -> float:
    """Share in [0, 1] of elements whose bits differ; 0.0 when there are no elements.

    Raises:
        DeltaError: the two sets differ in names, dtypes or shapes.
    """
    _same_layout(old, new)

    def count(name: str) -> int:
        size = new[name].element_size()
        differ = raw_bytes(old[name]).view(word_type(size)) != raw_bytes(new[name]).view(word_type(size))
        return int(np.count_nonzero(differ.reshape(new[name].numel(), -1).any(axis=1) if size > 8 else differ))

    with ThreadPoolExecutor(_THREADS) as pool:
        changed = sum(pool.map(count, [name for name in new if new[name].numel()]))
    return changed / max(1, sum(tensor.numel() for tensor in new.values()))


def _same_layout(old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    odd = sorted(set(old) ^ set(new))
    if odd:
        raise DeltaError(
            f"tensors {odd[:3]} are in only one of the versions; a delta needs equal names, write an anchor"
        )
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            raise DeltaError(
                f"{name}: {dtype_name(old[name])}{list(old[name].shape)} became "
                f"{dtype_name(tensor)}{list(tensor.shape)}; a delta needs equal dtypes and shapes, write an anchor"
            )


def _rebuild(parts: list[dict[str, Any]], base: Tensor) -> Tensor:
    parts = sorted(parts, key=lambda part: part["chunk"])
    name, size = parts[0]["name"], base.element_size()
    _tiles(parts, base)
    fresh = raw_bytes(base).copy()
    for part in parts:
        lo = part["offset"]
        try:
            decode_chunk(part["encoding"], part["data"], fresh[lo : lo + part["length"]], size)
        except CodecError as err:
            raise DeltaError(
                f"{name}, chunk {part['chunk']} of version {part['version']} cannot be applied: {err}; "
                "read the rows again, or rebuild the version from an anchor"
            ) from err
    tensor = torch.from_numpy(fresh).view(base.dtype).reshape(base.shape)
    found = tensor_digest(tensor)
    if found != parts[0]["digest"]:
        raise DeltaError(
            f"{name}, chunks 0 to {len(parts) - 1} of version {parts[0]['version']}: the result has digest {found}, "
            f"recorded is {parts[0]['digest']}; the base is not version {parts[0]['base_version']} or rows were "
            "altered: load that base, or rebuild the version from an anchor"
        )
    return tensor


def _tiles(parts: list[dict[str, Any]], base: Tensor) -> None:
    """Refuse unless the chunks, sorted by number, cover exactly the tensor they and the base describe."""
    name, size, end = parts[0]["name"], base.element_size(), 0
    for number, part in enumerate(parts):
        where = f"{name}, chunk {part['chunk']} of version {part['version']}"
        if (part["dtype"], part["shape"]) != (dtype_name(base), list(base.shape)):
            raise DeltaError(
                f"{where} is for {part['dtype']}{part['shape']}, but the base is {dtype_name(base)}{list(base.shape)}; "
                f"load base version {part['base_version']} of the same model"
            )
        if part["digest"] != parts[0]["digest"]:
            raise DeltaError(
                f"{where} has another digest than chunk {parts[0]['chunk']}; rows of two writers are mixed"
            )
        if part["chunk"] != number:
            fault = "appears twice" if part["chunk"] < number else f"is there, but chunk {number} is missing"
            raise DeltaError(f"{where} {fault}; read the version's rows again, or rebuild it from an anchor")
        if part["offset"] != end or part["length"] <= 0 or part["length"] % size:
            raise DeltaError(
                f"{where} covers {part['length']} bytes from {part['offset']}, but elements of {size} bytes go on at "
                f"{end}; the row was altered: rebuild the version from an anchor"
            )
        end += part["length"]
    if end != base.nbytes:
        raise DeltaError(
            f"{name}, chunk {len(parts)} of version {parts[0]['version']} is missing: chunks cover {end} of "
            f"{base.nbytes} bytes; read the version's rows again, or rebuild it from an anchor"
        )
