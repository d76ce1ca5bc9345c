"""The tensors of a Hugging Face folder or safetensors file, every one of them expected, none missing."""

from __future__ import annotations

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
        path: a folder with a model.safetensors, or such a file.
        dtype: what the policy's tensors are rounded to if stored wider; those of drafts and adapters stay as stored.
        pieces: which part of each of the policy's tensors to read; all of it when None.
    Raises:
        ModelError: the file is missing or damaged, or a tensor of the policy is missing, of another shape or not a
            floating-point one, or one is neither the policy's nor a draft's or adapter's; the message names it.
    """
    file_path = Path(path) / "model.safetensors" if Path(path).is_dir() else Path(path)
    if not file_path.is_file():
        raise ModelError(f"{file_path} is missing; save the model there as one safetensors file")
    wanted = architecture.shapes()
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(file_path, framework="pt", device="cpu") as file:
            found = set(file.keys())
            _compare_names(file_path, {name for name in found if not is_extra(name)}, set(wanted))
            for name, shape in wanted.items():
                stored = file.get_tensor(name)
                if tuple(stored.shape) != shape or not stored.dtype.is_floating_point:
                    raise ModelError(
                        f"{file_path}: tensor {name} is {stored.dtype} {tuple(stored.shape)}, config.json asks for "
                        f"floating point {shape}; the two files are of different models"
                    )
                # Copied, because what the reader returns may be a window on the file.
                part = stored if pieces is None else cut(stored, pieces[name])
                tensors[name] = torch.empty(part.shape, dtype=dtype).copy_(part)
            tensors |= {name: file.get_tensor(name).clone() for name in sorted(found) if is_extra(name)}
    except SafetensorError as err:
        raise ModelError(f"{file_path} cannot be read ({err}); it is damaged, download or convert it again") from err
    return tensors


def _compare_names(path: Path, found: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise ModelError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all); save the complete model")
    if odd := sorted(found - wanted):
        raise ModelError(
            f"{path}: tensor {odd[0]} is not part of the model that config.json describes ({len(odd)} in all); "
            "correct config.json (tie_word_embeddings, model_type) or remove it"
        )
