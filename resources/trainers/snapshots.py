"""A trainer's whole state in a folder: complete, or absent, and the same however the trainer was laid over ranks.

The state is a set of complete tensors by name, cut into pieces. Each rank writes those it owns into a file of its own;
an index says of every tensor its shape and dtype, and of every piece where it lies and its digest. A reader asks for
any piece of any tensor, so another layout only reads other pieces.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from furlong.ops.weights.digest import dtype_name, tensor_digest
from furlong.ops.weights.layout import LayoutError, Piece, TensorSpec, check_tiling, shared, slab_shape, whole_piece
from furlong.resources.flush import flush
from furlong.resources.trainers.ranks import Ranks

FORMAT = 2
"""Raised when the contents change; a folder of another format is refused."""
INDEX = "state.json"
Shapes = dict[str, tuple[int, ...]]


class SnapshotError(ValueError):
    """A saved state that cannot be used; the message names the folder and what is wrong with it."""


def write(
    folder: str, pieces: dict[Piece, Tensor], shapes: Shapes, about: dict[str, Any], ranks: Ranks | None = None
) -> None:
    """Write into a neighbour folder, flush to disk, then rename, so that `folder` is never half written.

    Called on every rank. A folder of that name is replaced; between two renames a crash can leave none, never a partial
    one. What goes wrong on one rank is raised on all.

    Args:
        pieces: what this rank owns, as contiguous CPU tensors that nobody changes meanwhile; over all ranks they must
            cover every tensor exactly once. Empty ones are left out.
        shapes: shape of the complete tensor of each piece.
        about: plain data stored in the index; rank 0's counts.
        ranks: this rank among all; None when it is alone.
    Raises:
        OSError: the disk is full or the place cannot be written; what stood at `folder` still does.
        LayoutError: the ranks' pieces leave a gap, overlap, or disagree about a tensor.
    """
    ranks = ranks or Ranks()
    target = Path(folder)
    # One name for all ranks: only rank 0 knows its process id.
    owner = ranks.exchange(os.getpid())[0]
    fresh, old = (target.with_name(f".{target.name}.{word}-{owner}") for word in ("new", "old"))
    try:
        _together(ranks, lambda: ranks.first and _make(fresh))
        rows = _together(ranks, lambda: _write_own(fresh, ranks.rank, pieces, shapes))
        _together(ranks, lambda: ranks.first and _complete(fresh, old, target, rows, about))
    except BaseException:
        if ranks.first:
            shutil.rmtree(fresh, ignore_errors=True)
        raise


def _together(ranks: Ranks, work: Callable[[], Any]) -> list[Any]:
    """Every rank's result, or on every rank the first error."""
    result, error = None, None
    try:
        result = work()
    except (OSError, LayoutError) as err:
        error = err
    except SafetensorError as err:
        error = OSError(f"state could not be written ({err}); free some disk space")
    ranks.agree(error)
    return ranks.exchange(result)


def _make(fresh: Path) -> None:
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)


def _write_own(fresh: Path, rank: int, pieces: dict[Piece, Tensor], shapes: Shapes) -> dict[str, Any]:
    """This rank's file; returns its part of the index."""
    name = f"rank-{rank:05d}.safetensors"
    tensors, rows, dtypes = {}, [], {}
    for piece, tensor in pieces.items():
        spec = _spec(piece.name, dtype_name(tensor), shapes[piece.name])
        if tuple(tensor.shape) != slab_shape(piece, spec):
            raise LayoutError(
                f"{piece} of shape {shapes[piece.name]} is given as {tuple(tensor.shape)}; mend the layout"
            )
        dtypes[piece.name] = spec.dtype
        if tensor.numel() or not all(spec.shape):
            tensors[key := f"{piece.name}[{piece.dim}:{piece.start}:{piece.stop}]"] = tensor
            rows.append({"name": piece.name, "dim": piece.dim, "start": piece.start, "stop": piece.stop,
                         "file": name, "key": key, "digest": tensor_digest(tensor)})  # fmt: skip
    save_file(tensors, fresh / name)
    flush(fresh / name)
    return {"pieces": rows, "tensors": {n: {"shape": list(shapes[n]), "dtype": dtypes[n]} for n in dtypes}}


def _complete(fresh: Path, old: Path, target: Path, parts: list[dict[str, Any]], about: dict[str, Any]) -> None:
    """Rank 0's share: the index, which makes the folder readable, and the rename, which makes it known."""
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, form in part["tensors"].items():
            if tensors.setdefault(name, form) != form:
                raise LayoutError(f"{name}: ranks disagree, {tensors[name]} and {form}; mend the layout")
    rows = [row for part in parts for row in part["pieces"]]
    _check_cover(tensors, rows)
    content = {**about, "format": FORMAT, "tensors": tensors, "pieces": rows}
    (fresh / INDEX).write_text(json.dumps(content, sort_keys=True))
    for path in (fresh / INDEX, fresh):
        flush(path)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _check_cover(tensors: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    held: dict[str, list[Piece]] = {name: [] for name in tensors}
    for row in rows:
        held[row["name"]].append(_piece(row))
    for name, form in tensors.items():
        spec = _spec(name, form["dtype"], tuple(form["shape"]))
        check_tiling(held[name], whole_piece(name, spec.shape), spec)


def _spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, dtype, shape, "")


def _piece(row: dict[str, Any]) -> Piece:
    return Piece(row["name"], row["dim"], row["start"], row["stop"])


class Saved:
    """A state on disk. Bytes are compared with their digests before they are first given out.

    Attributes:
        about: what `write` was given, beside the index itself.
        shapes, dtypes: of each complete tensor, by name.
    Raises:
        SnapshotError: a missing, damaged or foreign file.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        try:
            self.about = json.loads((self._folder / INDEX).read_text())
            if self.about.get("format") != FORMAT:
                found = self.about.get("format")
                raise SnapshotError(f"{folder}: format {found}, this version reads {FORMAT}; save anew")
            self._rows = self.about["pieces"]
            self.shapes = {name: tuple(form["shape"]) for name, form in self.about["tensors"].items()}
            self.dtypes = {name: getattr(torch, form["dtype"]) for name, form in self.about["tensors"].items()}
            _check_cover(self.about["tensors"], self._rows)
            self._files = {name: safe_open(self._folder / name, "pt") for name in {row["file"] for row in self._rows}}
        except SnapshotError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as err:
            raise SnapshotError(f"{folder} holds no readable state ({err}); restore an earlier save") from err
        self._held: dict[str, list[dict[str, Any]]] = {}
        for row in self._rows:
            self._held.setdefault(row["name"], []).append(row)
        self._checked: set[str] = set()

    def check(self, pieces: Iterable[Piece]) -> None:
        """Compare everything that `piece` would read for these with its digest, so that reading them cannot fail."""
        for piece in pieces:
            for row in self._overlapping(piece):
                self._read(row)

    def piece(self, piece: Piece) -> Tensor:
        """A fresh tensor of the elements that `piece` names, put together from whatever pieces hold them."""
        dtype = self.dtypes[piece.name]
        spec = _spec(piece.name, str(dtype).removeprefix("torch."), self.shapes[piece.name])
        slab = torch.empty(slab_shape(piece, spec), dtype=dtype)
        for row in self._overlapping(piece):
            to, out_of = shared(piece, slab, _piece(row), self._read(row))
            to.copy_(out_of)
        return slab

    def tensor(self, name: str) -> Tensor:
        """A complete tensor."""
        return self.piece(whole_piece(name, self.shapes[name]))

    def _overlapping(self, piece: Piece) -> list[dict[str, Any]]:
        rows = self._held[piece.name]
        return [r for r in rows if r["dim"] != piece.dim or (r["start"] < piece.stop and piece.start < r["stop"])]

    def _read(self, row: dict[str, Any]) -> Tensor:
        try:
            tensor = self._files[row["file"]].get_tensor(row["key"])
        except SafetensorError as err:
            raise SnapshotError(f"{self._folder} holds no readable {row['key']} ({err}); restore another save") from err
        if row["key"] not in self._checked:
            if tensor_digest(tensor) != row["digest"]:
                raise SnapshotError(
                    f"{self._folder} was damaged: the bytes of {row['key']} do not give the recorded digest; restore "
                    "another save"
                )
            self._checked.add(row["key"])
        return tensor
