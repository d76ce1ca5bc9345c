"""What a model folder holds, file by file, so that a damaged one is found before it is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3

from furlong.ops.identity import fingerprint

MANIFEST = "furlong.json"
NEEDED = ("config.json", "tokenizer.json")


class ModelError(ValueError):
    """A model folder that cannot be used; the message names the file and what to do."""


def write_manifest(folder: Path, made_from: dict[str, Any]) -> None:
    """Record the digest of every file of `folder` and what it was made from."""
    body = {"made_from": made_from, "files": digest_files(folder)}
    (folder / MANIFEST).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


def verify(folder: Path) -> str:
    """Compare every file with the manifest; returns the digest of the whole.

    Raises:
        ModelError: a file is missing, added or differs, or the manifest itself cannot be read.
    """
    advice = f"delete the folder {folder} to make it again"
    try:
        wanted = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ModelError(f"{folder / MANIFEST} cannot be read ({err}); {advice}") from err
    found = digest_files(folder)
    for name in sorted({*wanted, *found}):
        if name not in found:
            raise ModelError(f"{folder / name} is missing; {advice}")
        if name not in wanted:
            raise ModelError(f"{folder / name} does not belong there; remove it, or {advice}")
        if found[name] != wanted[name]:
            raise ModelError(f"{folder / name} is corrupt or was changed (its digest differs); {advice}")
    return fingerprint(found)


def inspect(folder: Path) -> str:
    """Check a folder that was not made here; returns the digest of the whole.

    Raises:
        ModelError: a needed file is missing, or a weights file is truncated.
    """
    from safetensors import SafetensorError, safe_open

    for name in NEEDED:
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name} is missing; save the complete model there")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ModelError(f"{folder} has no *.safetensors file; save the weights there in that format")
    for path in weights:
        try:
            with safe_open(path, "numpy"):
                pass
        except (SafetensorError, OSError) as err:
            raise ModelError(f"{path} is truncated or corrupt ({err}); copy or download it again") from err
    return fingerprint(digest_files(folder))


def digest_files(folder: Path) -> dict[str, str]:
    """BLAKE3 of each file directly in `folder`, but for the manifest, as 64 hex digits by name."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != MANIFEST)
    return {path.name: digest_file(path) for path in files}


def digest_file(path: Path) -> str:
    """BLAKE3 of one file."""
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()
