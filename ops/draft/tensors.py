"""A draft's tensors: whether they are what its shape asks for, and their names in a weights version."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from furlong.ops.draft.shape import MAPS, PREFIX, DraftError, DraftShape
from furlong.ops.draft.vocabulary import check_maps


def check_tensors(tensors: Mapping[str, Tensor], shape: DraftShape, where: str) -> None:
    """DraftError unless these are exactly the tensors of the shape, finite and of one floating-point format.

    Args:
        tensors: by name, without prefix.
        where: the folder or version that they are from, for the error.
    """
    wanted = shape.shapes()
    if missing := sorted(wanted.keys() - tensors.keys()):
        raise DraftError(f"{where}: tensor {missing[0]} is missing ({len(missing)} in all); give the complete draft")
    if odd := sorted(tensors.keys() - wanted.keys()):
        raise DraftError(
            f"{where}: tensor {odd[0]} is not part of the draft that is described ({len(odd)} in all); it would be ignored: "
            "correct the description, or remove it"
        )
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size:
            raise DraftError(
                f"{where}: tensor {name} is {tuple(tensors[name].shape)}, {size} was described (hidden {shape.hidden}, taps "
                f"{list(shape.taps)}, vocabulary {shape.draft_vocab} of {shape.vocab}); give the draft's own description"
            )
    for name in shape.parameters():
        if not tensors[name].is_floating_point() or not bool(torch.isfinite(tensors[name]).all()):
            raise DraftError(f"{where}: tensor {name} ({tensors[name].dtype}) is not all finite numbers; make it again")
    if len(kinds := sorted({str(tensors[name].dtype) for name in shape.parameters()})) > 1:
        raise DraftError(f"{where}: tensors are of formats {', '.join(kinds)}; store all in one")
    if shape.reduced:
        check_maps(*(tensors[name] for name in MAPS), where)


def of_version(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The draft's tensors among those of a weights version, without prefix; empty where it has none."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def to_version(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A draft's tensors under their names in a weights version."""
    return {PREFIX + name: tensor for name, tensor in tensors.items()}
