"""Drafts as folders that other software writes and reads: config.json and model.safetensors.

Two layouts, told apart by config.json (see `ops/draft/config.py`): SGLang's, which SpecForge writes (`midlayer.*`), and that
of the speculators library, which vLLM reads (`layers.0.*`). Tensors keep their bits either way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from furlong.ops.draft.config import Layout, read_config, write_config
from furlong.ops.draft.shape import MAPS, DraftError, DraftShape
from furlong.ops.draft.tensors import check_tensors
from furlong.ops.draft.vocabulary import check_maps

CONFIG, TENSORS = "config.json", "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HERE, _THERE = "midlayer.", "layers.0."
_EMBEDDING = "embed_tokens.weight"


def write_draft(
    folder: str | Path, tensors: dict[str, Tensor], shape: DraftShape, layout: Layout,
    verifier: str | None = None, proposals: int = 4,
) -> None:  # fmt: skip
    """Write a draft.

    Args:
        folder: made if it is not there; must hold no other model.
        tensors: by name, without prefix.
        verifier, proposals: see `write_config`.
    Raises:
        DraftError: the tensors are not those of the shape, or the folder holds a model; nothing is written then.
    """
    folder = Path(folder)
    check_tensors(tensors, shape, "the draft to write")
    config = write_config(shape, layout, tensors["fc.weight"].dtype, verifier, proposals)
    if held := [name for name in (CONFIG, TENSORS, _INDEX) if (folder / name).exists()]:
        raise DraftError(f"{folder} holds a {held[0]}; nothing was written: name a new folder for the draft")
    folder.mkdir(parents=True, exist_ok=True)
    named = {name.replace(_HERE, _THERE, 1) if layout == "speculators" else name: t for name, t in tensors.items()}
    save_file({name: t.detach().cpu().contiguous() for name, t in named.items()}, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def read_shape(folder: str | Path, policy_layers: int | None = None) -> DraftShape:
    """The shape of the draft in a folder of either layout; see `read_config`."""
    path = Path(folder) / CONFIG
    return read_config(_json(path), path, policy_layers)[0]


def read_draft(folder: str | Path, policy_layers: int | None = None) -> tuple[dict[str, Tensor], DraftShape]:
    """The tensors of a draft in a folder of either layout, by their names here, without prefix, and its shape.

    A copy of the policy's embedding, which EAGLE-3 drafts may carry and never train, is passed over, and maps of a
    vocabulary that is the policy's whole.

    Args:
        policy_layers: of the policy, needed where config.json names no tapped layers.
    Raises:
        ModelError: a file is missing or damaged, a tensor is missing, one too many, of another shape or not finite, the maps
            contradict each other, or config.json cannot be used; the message names file and tensor.
    """
    folder = Path(folder)
    shape = read_shape(folder, policy_layers)
    tensors: dict[str, Tensor] = {}
    for path in _files(folder):
        try:
            found = load_file(path)
        except (SafetensorError, OSError) as err:
            raise DraftError(f"{path} cannot be read ({err}); it is damaged, copy or train it again") from err
        for stored, tensor in found.items():
            name = stored.replace(_THERE, _HERE, 1) if shape.kind == "eagle3" and stored.startswith(_THERE) else stored
            if name in tensors:
                raise DraftError(f"{path}: tensor {stored} is there twice; remove what another save left in the folder")
            tensors[name] = tensor
    if _EMBEDDING in tensors and tuple(tensors.pop(_EMBEDDING).shape) != (shape.vocab, shape.hidden):
        raise DraftError(
            f"{folder}: {_EMBEDDING} is not ({shape.vocab}, {shape.hidden}) as in config.json; the files are of two drafts"
        )
    if not shape.reduced and tensors.keys() & set(MAPS):
        _drop_whole_maps(tensors, shape, str(folder))
    check_tensors(tensors, shape, str(folder))
    return tensors, shape


def _drop_whole_maps(tensors: dict[str, Tensor], shape: DraftShape, where: str) -> None:
    """SpecForge stores maps always; those of a whole vocabulary must say so."""
    d2t, t2d = (tensors.pop(name, None) for name in MAPS)
    d2t = torch.zeros(shape.vocab, dtype=torch.int64) if d2t is None else d2t
    t2d = torch.ones(shape.vocab, dtype=torch.bool) if t2d is None else t2d
    if len(d2t) != shape.vocab or len(t2d) != shape.vocab:
        raise DraftError(
            f"{where}: d2t has {len(d2t)} and t2d {len(t2d)} entries, config.json describes all {shape.vocab} tokens; "
            "set draft_vocab_size to the draft's own"
        )
    check_maps(d2t, t2d, where)


def _files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if (folder / TENSORS).is_file() or not index.is_file():
        files = [folder / TENSORS]
    else:
        named = _json(index).get("weight_map")
        if not isinstance(named, dict):
            raise DraftError(f"{index} has no weight_map; copy the folder again")
        files = [folder / name for name in sorted(set(named.values()))]
    if missing := [file for file in files if not file.is_file()]:
        pickled = (
            " (pytorch_model.bin is not read: it can run code)" if (folder / "pytorch_model.bin").is_file() else ""
        )
        raise DraftError(f"{missing[0]} is missing{pickled}; save the complete draft there in safetensors format")
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise DraftError(f"{path} cannot be read ({err}); give a draft's folder in Hugging Face layout") from err
    if not isinstance(content, dict):
        raise DraftError(f"{path} is no JSON object; give a draft's folder in Hugging Face layout")
    return content
