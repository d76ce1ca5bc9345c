"""Versions with adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from furlong.ops.policy.lora import SCALE, is_adapted, names_of, start
from furlong.ops.spec import RunSpec

RANK = 3


def base_of(folder: str | Path) -> dict[str, Tensor]:
    """Version 0 as it is published."""
    return {name: tensor.bfloat16() for name, tensor in load_file(f"{folder}/model.safetensors").items()}


def adapted(base: dict[str, Tensor], seed: int, size: float = 0.1, scale: float = 2.0) -> dict[str, Tensor]:
    """The version with an adapter on every weight that gets one; B is random with this standard deviation."""
    draw = torch.Generator().manual_seed(seed)
    found = {SCALE: torch.tensor(scale)}
    for name, tensor in base.items():
        if is_adapted(name):
            a, b = start(seed, name, tuple(tensor.shape), RANK)
            found |= dict(zip(names_of(name), (a, size * torch.randn(b.shape, generator=draw)), strict=True))
    return base | found


def with_adapters(spec: RunSpec, rank: int = RANK, alpha: float = 6.0, dtype: str = "bfloat16") -> RunSpec:
    """A run that trains adapters and publishes in `dtype`."""
    trainer = spec.trainer.model_copy(update={"lora": {"rank": rank, "alpha": alpha}})
    return spec.model_copy(update={"trainer": trainer, "model": spec.model.model_copy(update={"dtype": dtype})})
