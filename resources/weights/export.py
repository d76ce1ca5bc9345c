"""A weights version as a folder in Hugging Face layout, complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.ops.policy.manifest import ModelError, digest_files, write_manifest
from furlong.ops.policy.manifest import verify as verify_files
from furlong.resources.flush import flush
from furlong.resources.weights import draft_folder, peft
from furlong.resources.weights.anchors import AnchorError, read_file, write_file
from furlong.resources.weights.rebuild import RebuildError, full_row, rebuild, verified

if TYPE_CHECKING:
    from torch import Tensor

    from furlong.ops.draft.shape import DraftShape
    from furlong.resources.lake import Lake

COPIED = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "chat_template*", "vocab.*", "merges.txt",
)  # fmt: skip
"""What an exported folder takes over from the base model's, by pattern."""


class ExportError(RuntimeError):
    """A folder that cannot be written; the message says why."""


def export_folder(
    lake: Lake, run: str, version: int, base_folder: str, target: str | Path, card: str | None = None,
    draft: DraftShape | None = None,
) -> Path:  # fmt: skip
    """Write a version to `target`: model.safetensors, config and tokenizer, and drafts and adapters where it has any.

    model.safetensors holds the policy's tensors with the bits that engines computed with, adapters merged. The draft, and
    adapters once more, alone, go to folders of their own (`resources.weights.draft_folder`, `peft`).

    Args:
        target: a folder that does not exist yet, or is empty.
        card: text of README.md; None for no such file.
        draft: shape of the run's drafts (`draft_folder.draft_shape`); needed where the version has one.
    Raises:
        ExportError: `target` holds something, adapters that cannot be merged, or a draft of another shape.
        RebuildError: the version cannot be had; nothing is left behind.
    """
    from furlong.ops.policy.checkpoint import is_extra

    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ExportError(
            f"{target} exists and is not empty; nothing was written: name a new folder, or empty this one"
        )
    row = full_row(lake, run, version)
    tensors = rebuild(lake, run, version, base_folder)
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.tmp", dir=target.parent))
        _write_tensors(temporary, tensors, draft)
        _copy_files(Path(base_folder), temporary, {t.dtype for name, t in tensors.items() if not is_extra(name)})
        if card is not None:
            (temporary / "README.md").write_text(card)
        write_manifest(temporary, {"run": run, "version": version, "digest": row["digest"]})
        for path in [*temporary.rglob("*"), temporary]:
            flush(path)
        temporary.chmod(0o755)  # mkdtemp's folders are private
        os.rename(temporary, target)
        flush(target.parent)
    except OSError as err:
        raise ExportError(f"{target} could not be written ({err}); free disk space or choose another folder") from err
    finally:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def check_export(
    lake: Lake, row: dict[str, Any], base_folder: str, folder: Path, draft: DraftShape | None = None
) -> None:
    """Refuse a folder that is not exactly this version: other bits in any tensor, a changed or missing file.

    Args:
        row: of `weight_versions`; its base weights are rebuilt where the folder has merged ones instead.
        draft: see `export_folder`.
    Raises:
        ExportError: it is not; the message names the first file or tensor.
    """
    try:
        verify_files(folder)
        tensors = read_export(folder)
        if odd := sorted(tensors.keys() - {tensor["name"] for tensor in row["tensors"]}):
            raise RebuildError(f"it holds a tensor {odd[0]} that is none of the version's; move it away, export again")
        if any(name.startswith("adapter.") for name in tensors):
            tensors |= _unmerged(tensors, rebuild(lake, row["run"], row["version"], base_folder))
        verified(tensors, row)
        if any(name.startswith("draft.") for name in tensors):
            draft_folder.check_draft_config(folder / draft_folder.FOLDER, tensors, draft)
    except (ModelError, AnchorError, RebuildError) as err:
        raise ExportError(f"{folder} is not version {row['version']} of run {row['run']} any more: {err}") from err


def read_export(folder: Path) -> dict[str, Tensor]:
    """Every tensor of an exported folder under its name in the lake, where adapted weights stand unmerged."""
    tensors = read_file(folder / "model.safetensors")
    if (folder / draft_folder.FOLDER).is_dir():
        tensors |= draft_folder.read_draft_folder(folder / draft_folder.FOLDER)
    if (folder / peft.FOLDER).is_dir():
        tensors |= peft.read_adapter(folder / peft.FOLDER)
    return tensors


def export_digest(folder: Path) -> tuple[str, int]:
    """Digest over all files of the folder itself, and the bytes of everything in it."""
    from furlong.ops.identity import fingerprint

    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return fingerprint(digest_files(folder)), size


def _write_tensors(folder: Path, tensors: dict[str, Tensor], draft: DraftShape | None) -> None:
    from furlong.ops.policy.lora import policy_of

    try:
        write_file(policy_of(tensors), folder / "model.safetensors")
        if any(name.startswith("draft.") for name in tensors):
            draft_folder.write_draft_folder(folder / draft_folder.FOLDER, tensors, draft)
    except ModelError as err:
        raise ExportError(f"nothing was written: {err}") from err
    if adapters := {name: tensor for name, tensor in tensors.items() if name.startswith("adapter.")}:
        peft.write_adapter(folder / peft.FOLDER, adapters)


def _unmerged(exported: dict[str, Tensor], rebuilt: dict[str, Tensor]) -> dict[str, Tensor]:
    """The version's own tensors in place of the exported merged ones, which must be what comes of them."""
    from furlong.ops.policy.lora import policy_of
    from furlong.ops.weights.digest import tensor_digest

    merged = {name: tensor for name, tensor in policy_of(rebuilt).items() if tensor is not rebuilt[name]}
    for name, tensor in sorted(merged.items()):
        if name not in exported or tensor_digest(exported[name]) != tensor_digest(tensor):
            raise RebuildError(f"tensor {name} of model.safetensors is not the base weight with its adapter merged")
    return {name: rebuilt[name] for name in merged}


def _copy_files(base: Path, folder: Path, dtypes: set[Any]) -> None:
    for path in sorted({path for pattern in COPIED for path in base.glob(pattern) if path.is_file()}):
        shutil.copyfile(path, folder / path.name)
    config = folder / "config.json"
    if not config.is_file():
        raise ExportError(
            f"{base} has no config.json, so no model could be loaded from {folder}; restore the base model"
        )
    if len(dtypes) == 1:
        # The base may be stored wider than it is published; loaders allocate what the config says.
        content = json.loads(config.read_text())
        content.pop("torch_dtype", None)
        content["dtype"] = str(dtypes.pop()).removeprefix("torch.")
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
