"""The tensors of a Hugging Face folder, every one of them expected, none missing."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.manifest import ModelError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Published dtypes by the name a spec uses."""


def read_tensors(folder: str, architecture: Architecture, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights by Hugging Face name, contiguous in memory of their own, rounded to `dtype` if stored wider.

    Raises:
        ModelError: model.safetensors is missing or damaged, or a tensor is missing, unexpected, of another shape or
            not a floating-point one; the message names it.
    """
    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        raise ModelError(f"{path} is missing; save the model there as one safetensors file")
    wanted = architecture.shapes()
    tensors: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            _compare_names(path, set(file.keys()), set(wanted))
            for name, shape in wanted.items():
                stored = file.get_tensor(name)
                if tuple(stored.shape) != shape or not stored.dtype.is_floating_point:
                    raise ModelError(
                        f"{path}: tensor {name} is {stored.dtype} {tuple(stored.shape)}, config.json asks for floating "
                        f"point {shape}; the two files are of different models"
                    )
                # Copied, because what the reader returns may be a window on the file.
                tensors[name] = torch.empty(shape, dtype=dtype).copy_(stored)
    except SafetensorError as err:
        raise ModelError(f"{path} cannot be read ({err}); it is damaged, download or convert it again") from err
    return tensors


def _compare_names(path: Path, found: set[str], wanted: set[str]) -> None:
    if missing := sorted(wanted - found):
        raise ModelError(f"{path}: tensor {missing[0]} is missing ({len(missing)} in all); save the complete model")
    if odd := sorted(found - wanted):
        raise ModelError(
            f"{path}: tensor {odd[0]} is not part of the model that config.json describes ({len(odd)} in all); "
            "correct config.json (tie_word_embeddings, model_type) or remove it"
        )
