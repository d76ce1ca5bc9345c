"""A version's adapters in the folder layout of the PEFT library, for use with the base model elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.resources.weights.anchors import AnchorError, read_file, write_file

if TYPE_CHECKING:
    from torch import Tensor

FOLDER = "adapter"
"""Within an exported folder: at its top, transformers would add the adapter to weights that have it already."""
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."


def write_adapter(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write the `adapter.*` tensors of a version; the folder must not exist."""
    from furlong.ops.policy.lora import PREFIX, SCALE

    folder.mkdir()
    named = {_PREFIX + name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name != SCALE}
    write_file(named, folder / _TENSORS)
    (folder / _CONFIG).write_text(_config(tensors))


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """What `write_adapter` wrote, under its names in the lake.

    Raises:
        AnchorError: a file is missing, damaged or not as it was written.
    """
    import torch

    from furlong.ops.policy.lora import PREFIX, SCALE

    tensors = {PREFIX + name.removeprefix(_PREFIX): t for name, t in read_file(folder / _TENSORS).items()}
    try:
        text = (folder / _CONFIG).read_text()
        config = json.loads(text)
        tensors[SCALE] = torch.tensor(config["lora_alpha"] / config["r"], dtype=torch.float32)
        same = text == _config(tensors)
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError) as err:
        raise AnchorError(f"{folder / _CONFIG} cannot be read ({err}); export the version again") from err
    if not same:
        raise AnchorError(f"{folder / _CONFIG} is not as it was written; export the version again")
    return tensors


def _config(tensors: dict[str, Tensor]) -> str:
    """PEFT's description; lora_alpha / r gives exactly the scale, which float64 holds with room for r."""
    from furlong.ops.policy.lora import SCALE, names_of, weights_of

    weights = sorted(weights_of(tensors.keys() - {SCALE}))
    rank = len(tensors[names_of(weights[0])[0]])
    content = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": float(tensors[SCALE]) * rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({weight.split(".")[-2] for weight in weights}),
        "task_type": "CAUSAL_LM",
    }
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
