"""Complete weights versions as safetensors files below the lake: `anchors/<run>/<version>-<digest>.safetensors`.

Delta tables hold what changed; a whole model in rows would only be slower to read. The row of a version names its file.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError, safe_open

from furlong.resources.flush import flush

if TYPE_CHECKING:  # a driver only asks for paths, and should not need torch for that
    from torch import Tensor

FOLDER = "anchors"
_PARTIAL = ".part-"


class AnchorError(RuntimeError):
    """Complete weights that cannot be written, found or trusted; the message names file and tensor."""


def write_anchor(lake_uri: str, run: str, version: int, tensors: dict[str, Tensor], digest: str) -> str:
    """Store a version completely; it is there, whole and on disk, before this returns. Again is harmless.

    Args:
        lake_uri: folder or fsspec URI of the lake.
        tensors: every tensor of the version, dense on CPU.
        digest: the version's `weights_digest`, with which what was written is compared.
    Returns:
        The path below the lake, for the `anchor` column.
    Raises:
        AnchorError: the file reads back as other weights, or cannot be written.
    """
    anchor = f"{FOLDER}/{run}/{version}-{digest[:12]}.safetensors"
    files, root = _files(lake_uri)
    target = f"{root}/{anchor}"
    try:
        if isinstance(files, LocalFileSystem):
            Path(target).parent.mkdir(parents=True, exist_ok=True)
            partial = Path(target).with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
            with _removed(partial):
                _save(partial, tensors, digest)
                partial.rename(target)
                flush(partial.parent)
        else:
            with tempfile.TemporaryDirectory() as folder:
                partial = Path(folder) / "anchor.safetensors"
                _save(partial, tensors, digest)
                files.makedirs(os.path.dirname(target), exist_ok=True)
                # An object appears whole when its upload ends.
                files.put_file(str(partial), target)
    except (OSError, SafetensorError) as err:
        raise AnchorError(
            f"{lake_uri}: version {version} of run {run} could not be stored as {anchor}: {err}; nothing refers to it: "
            "free disk space or correct permissions and run again"
        ) from err
    return anchor


def read_anchor(lake_uri: str, anchor: str, manifest: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Every tensor of a stored version in memory of its own, each compared with the manifest.

    Args:
        anchor: as in `weight_versions.anchor`; manifest: `weight_versions.tensors` of the same row.
    Raises:
        AnchorError: the file is missing or damaged, or a tensor is missing, unexpected or has another digest.
    """
    with tempfile.TemporaryDirectory() as cache:
        path = anchor_path(lake_uri, anchor, cache)
        # Copied, because what the reader returns may be a window on the file.
        tensors = {name: tensor.clone() for name, tensor in read_file(path).items()}
    check_manifest(tensors, manifest, f"anchor {anchor} of the lake {lake_uri}")
    return tensors


def anchor_path(lake_uri: str, anchor: str, cache: str | None = None) -> str:
    """A local path of the file; one of a remote lake is downloaded to `cache` (by default the user's) at most once.

    Raises:
        AnchorError: there is no such file.
    """
    files, root = _files(lake_uri)
    place = f"{root}/{anchor}"
    if not files.exists(place):
        raise AnchorError(
            f"{lake_uri} has no file {anchor}, which a row of weight_versions names; restore it, or use another version"
        )
    if isinstance(files, LocalFileSystem):
        return place
    # The name holds the digest, so a file of that name has those bytes.
    local = Path(cache or Path.home() / ".cache" / "furlong" / FOLDER) / anchor
    if not local.is_file():
        local.parent.mkdir(parents=True, exist_ok=True)
        partial = local.with_name(f"{_PARTIAL}{uuid.uuid4().hex}")
        with _removed(partial):
            files.get_file(place, str(partial))
            partial.rename(local)
    return str(local)


def read_file(path: str | Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file; they may be windows on it.

    Raises:
        AnchorError: it is missing, truncated or no such file.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in sorted(file.keys())}
    except (OSError, SafetensorError) as err:
        raise AnchorError(f"{path} cannot be read ({err}); it is damaged: restore it, or use another version") from err


def write_file(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file, which others than its owner may read too."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the library makes it private


def check_manifest(tensors: dict[str, Tensor], manifest: list[dict[str, Any]], where: str) -> None:
    """Compare the digest of every tensor with the manifest's; AnchorError names the first that differs."""
    from furlong.ops.weights.digest import tensor_digest

    if not manifest:
        raise AnchorError(
            f"{where}: the manifest names no tensors, so nothing can be compared; restore weight_versions"
        )
    wanted = {tensor["name"]: tensor["digest"] for tensor in manifest}
    for name in sorted(wanted.keys() | tensors.keys()):
        found = tensor_digest(tensors[name]) if name in tensors else None
        if found != wanted.get(name):
            raise AnchorError(
                f"{where}: tensor {name} has digest {str(found)[:12]}, the manifest says {str(wanted.get(name))[:12]}; "
                "its bytes were damaged or are another version's: use another version, or restore the lake"
            )


def list_anchors(lake_uri: str, run: str) -> dict[str, float]:
    """Path below the lake -> seconds since it was written, for every file in the run's folder, unfinished ones too."""
    files, root = _files(lake_uri)
    folder = f"{root}/{FOLDER}/{run}"
    if not files.isdir(folder):
        return {}
    found = files.find(folder)
    now = time.time()
    return {f"{FOLDER}/{run}/{path.rsplit('/', 1)[-1]}": now - files.modified(path).timestamp() for path in found}


def remove_anchor(lake_uri: str, anchor: str) -> None:
    """Remove the file; harmless when it is gone."""
    files, root = _files(lake_uri)
    if files.exists(f"{root}/{anchor}"):
        files.rm_file(f"{root}/{anchor}")


def _save(path: Path, tensors: dict[str, Tensor], digest: str) -> None:
    """Write, flush, read back: what is on disk is proved, not what was in memory."""
    from furlong.ops.weights.digest import tensor_digest, weights_digest

    write_file({name: tensors[name].detach().contiguous() for name in sorted(tensors)}, path)
    flush(path)
    found = weights_digest({name: tensor_digest(tensor) for name, tensor in read_file(path).items()})
    if found != digest:
        raise AnchorError(
            f"complete weights with digest {found[:12]} were written where {digest[:12]} was announced; nothing was "
            "kept: tensors and digest are of different versions, or the disk is faulty"
        )


def _files(lake_uri: str) -> tuple[fsspec.AbstractFileSystem, str]:
    try:
        files, root = fsspec.core.url_to_fs(lake_uri)
    except (ImportError, ValueError) as err:
        raise AnchorError(
            f"complete weights below {lake_uri} cannot be reached ({err}); install the fsspec package for that kind of "
            "storage, or set FURLONG_LAKE to another place"
        ) from err
    return files, root.rstrip("/")


@contextmanager
def _removed(partial: Path) -> Iterator[None]:
    try:
        yield
    finally:
        partial.unlink(missing_ok=True)
