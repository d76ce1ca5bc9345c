"""Any weights version again, bit for bit: from the nearest complete copy and the deltas since."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.ops.protocols import LakeLike
from furlong.ops.stages.chain import chain_rows, one_row
from furlong.ops.stages.context import StageError
from furlong.resources.weights.anchors import AnchorError, check_manifest, read_anchor, read_file

if TYPE_CHECKING:
    from torch import Tensor

    from furlong.resources.lake import Lake

BASE = "base"
"""The `anchor` of versions that are the model's own folder."""


class RebuildError(RuntimeError):
    """A version that cannot be had from the lake bit for bit; the message names version, tensor and chunk."""


def rebuild(lake: Lake, run: str, version: int, base_folder: str) -> dict[str, Tensor]:
    """Every tensor of a version by name, each compared with the version's manifest, changed or not.

    Args:
        base_folder: the model that the run's version 0 is, in Hugging Face layout.
    Raises:
        RebuildError: a link of the chain is missing, collected or damaged; nothing partial is ever returned.
    """
    row = full_row(lake, run, version)
    try:
        *path, anchor = [link["version"] for link in chain_rows(lake, run, version)]
    except StageError as err:
        raise RebuildError(str(err)) from err
    tensors = complete(lake, full_row(lake, run, anchor) if path else row, base_folder)
    for later in reversed(path):
        tensors = tensors | changed(lake, run, later, tensors)[0]
    return verified(tensors, row) if path else tensors


def full_row(lake: LakeLike, run: str, version: int) -> dict[str, Any]:
    """The version's whole row, manifest included; RebuildError when there is none."""
    row = one_row(lake, "weight_versions", {"run": run, "version": version})
    if row is None:
        raise RebuildError(f"run {run} has no weights version {version}; `furlong weights list` shows those it has")
    return row


def complete(lake: Lake, row: dict[str, Any], base_folder: str) -> dict[str, Tensor]:
    """The tensors of an anchor version, verified."""
    where = f"run {row['run']}: weights version {row['version']}"
    try:
        if row["anchor"] == BASE:
            return verified(_base(base_folder, row), row)
        same_digest(row)
        return read_anchor(lake.uri, row["anchor"], row["tensors"])
    except AnchorError as err:
        raise RebuildError(f"{where}: {err}") from err


def changed(
    lake: LakeLike, run: str, version: int, parent: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of `version` that differ from its parent's, and their digests, which the bytes were verified against."""
    from furlong.ops.weights.delta import DeltaError, apply

    rows = lake.read("weight_deltas", {"run": run, "version": version})
    try:
        fresh = apply(rows, parent) if rows.num_rows else {}
    except DeltaError as err:
        raise RebuildError(f"run {run}: weights version {version}: {err}") from err
    return fresh, dict(zip(rows["name"].to_pylist(), rows["digest"].to_pylist(), strict=True))


def verified(tensors: dict[str, Tensor], row: dict[str, Any]) -> dict[str, Tensor]:
    """Those of `tensors` that the row names, if they are what it says, one by one and all together.

    A name that an earlier version of the chain had and this one has not is left out: only the manifest tells.

    Raises:
        RebuildError: a tensor is missing or has another digest; the first is named.
    """
    same_digest(row)
    names = {tensor["name"] for tensor in row["tensors"]}
    mine = {name: tensors[name] for name in sorted(names & tensors.keys())}
    try:
        check_manifest(mine, row["tensors"], f"run {row['run']}: weights version {row['version']}")
    except AnchorError as err:
        raise RebuildError(str(err)) from err
    return mine


def same_digest(row: dict[str, Any]) -> None:
    """The manifest is what the version's digest is over, so that the one digest vouches for every tensor."""
    from furlong.ops.weights.digest import weights_digest

    digests = {tensor["name"]: tensor["digest"] for tensor in row["tensors"]}
    if not digests or (found := weights_digest(digests)) != row["digest"]:
        raise RebuildError(
            f"run {row['run']}: the manifest of weights version {row['version']} has "
            f"{f'digest {found[:12]}' if digests else 'no tensors'}, its row says {row['digest'][:12]}; restore the "
            "table weight_versions"
        )


def _base(base_folder: str, row: dict[str, Any]) -> dict[str, Tensor]:
    """The model's own tensors in the dtype of the manifest, to which wider ones were rounded for version 0."""
    import torch

    dtypes = {tensor["name"]: getattr(torch, tensor["dtype"]) for tensor in row["tensors"]}
    stored = read_file(Path(base_folder) / "model.safetensors")
    # Copied, because what the reader returns may be a window on the file.
    return {name: tensor.to(dtypes[name], copy=True) for name, tensor in stored.items() if name in dtypes}
