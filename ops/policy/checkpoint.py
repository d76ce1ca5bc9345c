"""The tensors of a Hugging Face folder or safetensors file, every one of them expected, none missing or found twice."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.manifest import ModelError
from furlong.ops.weights.layout import Piece, cut

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Published dtypes by the name a spec uses."""


EXTRA_PREFIXES = ("draft.", "adapter.")
"""Names that begin so belong to a version but not to the policy itself."""


def is_extra(name: str) -> bool:
    """Whether the tensor belongs to a draft or an adapter."""
    return name.startswith(EXTRA_PREFIXES)


def read_tensors(
    path: str, architecture: Architecture, dtype: torch.dtype, pieces: dict[str, Piece] | None = None
) -> dict[str, Tensor]:
    """All weights by Hugging Face name, contiguous in memory of their own.

    Args:
        path: a folder with a model.safetensors, or with several files and their model.safetensors.index.json; or one
            safetensors file.
        dtype: what the policy's tensors are rounded to if stored wider; those of drafts and adapters stay as stored.
        pieces: which part of each of the policy's tensors to read; all of it when None.
    Raises:
        ModelError: a file is missing or damaged, or a tensor of the policy is missing, of another shape or not a
            floating-point one, or one is in two files, or neither the policy's nor a draft's or adapter's; the message
            names it.
    """
    wanted = architecture.shapes()
    tensors: dict[str, Tensor] = {}
    file_path = Path(path)
    try:
        with ExitStack() as opened:
            found: dict[str, tuple[Path, safe_open]] = {}
            for file_path in _files(Path(path)):
                file = opened.enter_context(safe_open(file_path, framework="pt", device="cpu"))
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if name in found:
                        raise ModelError(
                            f"tensor {name} is in {found[name][0]} and in {file_path}; remove what another save left there"
                        )
                    found[name] = file_path, file
            _compare_names(Path(path), {name for name in found if not is_extra(name)}, set(wanted))
            for name, shape in wanted.items():
                file_path, file = found[name]
                stored = file.get_tensor(name)
                if tuple(stored.shape) != shape or not stored.dtype.is_floating_point:
                    raise ModelError(
                        f"{file_path}: tensor {name} is {stored.dtype} {tuple(stored.shape)}, config.json asks for "
                        f"floating point {shape}; the two files are of different models"
                    )
                # Copied, because what the reader returns may be a window on the file.
                part = stored if pieces is None else cut(stored, pieces[name])
                tensors[name] = torch.empty(part.shape, dtype=dtype).copy_(part)
            for name in sorted(filter(is_extra, found)):
                file_path, file = found[name]
                tensors[name] = file.get_tensor(name).clone()
    except SafetensorError as err:
        raise ModelError(f"{file_path} cannot be read ({err}); it is damaged, download or convert it again") from err
    return tensors


def _files(path: Path) -> list[Path]:
    """Where the weights are: the file itself, a folder's only one, or those that its index names."""
    one, index = path / "model.safetensors", path / "model.safetensors.index.json"
    files = [path] if not path.is_dir() else [one]
    if path.is_dir() and not one.is_file() and index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [path / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as err:
            raise ModelError(f"{index} cannot be read ({err}); download it again") from err
    if missing := [file for file in files if not file.is_file()]:
        raise ModelError(f"{missing[0]} is missing; save the complete model there in safetensors format")
    return files


def _compare_names(path: Path, found: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise ModelError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all); save the complete model")
    if odd := sorted(found - wanted):
        raise ModelError(
            f"{path}: tensor {odd[0]} is not part of the model that config.json describes ({len(odd)} in all); "
            "correct config.json (tie_word_embeddings, model_type) or remove it"
        )
