"""A version's draft in a folder of its own, in the layout that SGLang and SpecForge have for EAGLE-3."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from furlong.ops.policy.manifest import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from furlong.ops.draft.shape import DraftShape
    from furlong.ops.spec import RunSpec

FOLDER = "draft"
"""Within an exported folder."""
_LAYOUT = "sglang"


def draft_shape(spec: RunSpec, model_folder: str | Path) -> DraftShape | None:
    """The shape of the drafts in a run's versions, None where it has none: tensors alone do not tell heads and taps.

    Args:
        model_folder: the run's base model.
    Raises:
        ModelError: the folder, or that of the draft to start from, cannot be read.
    """
    from furlong.ops.draft.settings import draft_of
    from furlong.ops.draft.start import shape_of
    from furlong.ops.policy.architecture import read_architecture

    settings = draft_of(spec)
    return None if settings is None else shape_of(settings, read_architecture(str(model_folder)))


def write_draft_folder(folder: Path, tensors: dict[str, Tensor], shape: DraftShape | None) -> None:
    """Write the `draft.*` tensors of a version; the folder must not exist.

    Raises:
        ModelError: there is no shape, or the tensors are not of it.
    """
    from furlong.ops.draft.layouts import write_draft
    from furlong.ops.draft.tensors import of_version

    if shape is None:
        raise ModelError(
            "the version has a draft, but its run's spec describes none (draft: is empty), so nobody could load it; "
            "export it with the spec that it was trained with"
        )
    write_draft(folder, of_version(tensors), shape, _LAYOUT)


def read_draft_folder(folder: Path) -> dict[str, Tensor]:
    """What `write_draft_folder` wrote, under its names in the lake; ModelError when it is damaged."""
    from furlong.ops.draft.layouts import read_draft
    from furlong.ops.draft.tensors import to_version

    return to_version(read_draft(folder)[0])


def check_draft_config(folder: Path, tensors: dict[str, Tensor], shape: DraftShape | None) -> None:
    """ModelError unless config.json says of these tensors what `write_draft_folder` says: sizes, taps, vocabulary, dtype.

    Args:
        tensors: as `read_draft_folder` gives them.
    """
    from furlong.ops.draft.config import write_config
    from furlong.ops.draft.layouts import CONFIG
    from furlong.ops.draft.tensors import of_version

    if shape is None:
        raise ModelError(f"{folder} has a draft, but the run's spec describes none; move the folder away")
    wanted = write_config(shape, _LAYOUT, of_version(tensors)["fc.weight"].dtype)
    try:
        found = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as err:
        raise ModelError(f"{folder / CONFIG} cannot be read ({err}); export the version again") from err
    if found != wanted:
        odd = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        raise ModelError(
            f"{folder / CONFIG} has {odd[0]}={found.get(odd[0])!r}, the version's draft has {wanted.get(odd[0])!r}; export "
            "the version again"
        )


def read_fitting_draft(folder: str | Path, shape: DraftShape, policy_layers: int) -> dict[str, Tensor]:
    """The tensors, by name without prefix, of a draft in a folder of either layout.

    Args:
        shape: of the run that is to draw with it.
        policy_layers: of its policy.
    Raises:
        ModelError: the folder cannot be read, or its draft is computed otherwise than the run's: by another number of
            heads, other taps or another vocabulary.
    """
    from furlong.ops.draft.layouts import read_draft

    tensors, found = read_draft(folder, policy_layers)
    for name, mine in asdict(shape).items():
        # How far it was trained to look changes nothing that is computed.
        if name != "context" and (its := getattr(found, name)) != mine:
            raise ModelError(
                f"{folder}: the draft's {name} is {its}, that of the run's drafts {mine}; publish a draft that was made for "
                "this run, or start a run with draft.start set to the folder"
            )
    return tensors
