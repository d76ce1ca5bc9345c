"""A trainer's whole state in a folder: complete, or absent."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from furlong.ops.weights.digest import tensor_digest, weights_digest
from furlong.resources.flush import flush

FORMAT = 1
"""Raised when the contents change; a folder of another format is refused."""
TENSORS, ABOUT = "state.safetensors", "state.json"


class SnapshotError(ValueError):
    """A saved state that cannot be used; the message names the folder and what is wrong with it."""


def write(folder: str, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write into a neighbour folder, flush to disk, then rename, so that `folder` is never half written.

    A folder of that name is replaced; between two renames a crash can leave none, never a partial one.

    Args:
        tensors: contiguous CPU tensors that nobody changes meanwhile.
        about: plain data stored beside them.
    Raises:
        OSError: the disk is full or the place cannot be written; what stood at `folder` still does.
    """
    target = Path(folder)
    fresh, old = (target.with_name(f".{target.name}.{word}-{os.getpid()}") for word in ("new", "old"))
    shutil.rmtree(fresh, ignore_errors=True)
    try:
        fresh.mkdir(parents=True)
        save_file(tensors, fresh / TENSORS)
        digest = weights_digest({name: tensor_digest(tensor) for name, tensor in tensors.items()})
        content = {"format": FORMAT, "digest": digest, **about}
        (fresh / ABOUT).write_text(json.dumps(content, sort_keys=True))
        for path in (fresh / TENSORS, fresh / ABOUT, fresh):
            flush(path)
    except SafetensorError as err:
        shutil.rmtree(fresh, ignore_errors=True)
        raise OSError(f"state could not be written to {folder} ({err}); free some disk space") from err
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    flush(target.parent)
    shutil.rmtree(old, ignore_errors=True)


class Saved:
    """A state on disk whose digest was checked; tensors are read one at a time, so none is held twice.

    Raises:
        SnapshotError: a missing, damaged or foreign file.
    """

    def __init__(self, folder: str) -> None:
        try:
            self.about = json.loads((Path(folder) / ABOUT).read_text())
            self._file = safe_open(Path(folder) / TENSORS, "pt")
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        except (OSError, ValueError, SafetensorError) as err:
            raise SnapshotError(f"{folder} holds no readable state ({err}); restore an earlier save") from err
        if self.about.get("format") != FORMAT:
            raise SnapshotError(f"{folder}: format {self.about.get('format')}, this version reads {FORMAT}; save anew")
        digest = weights_digest({name: tensor_digest(self.tensor(name)) for name in self.shapes})
        if self.about.get("digest") != digest:
            raise SnapshotError(
                f"{folder} was damaged: its bytes do not give the recorded digest; restore another save"
            )

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it was written."""
        return self._file.get_tensor(name)
