"""The weights of one version, ready to serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from furlong.ops.draft.block_drafter import BlockDrafter
from furlong.ops.draft.drafter import Drafter
from furlong.ops.policy.decoder import Decoder


@dataclass(frozen=True)
class Live:
    """One weights version; immutable, as its decoder is."""

    version: int
    decoder: Decoder
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of drafts and adapters, by name: held and published like the decoder's, not used by it."""
    base: dict[str, Tensor] = field(default_factory=dict)
    """The published form of weights that the decoder has merged with adapters, by name."""
    merged: dict[str, str] = field(default_factory=dict)
    """Digests of those weights as they came out of the merge, before the decoder laid them out."""
    serial: int = 0
    """Unique within an engine, as a version may be loaded more than once; ranks refer to weights by it."""
    drafter: Drafter | BlockDrafter | None = None
    """Made of those of the draft, where replies are to be drawn with it."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything held, as published, by Hugging Face name."""
        return self.decoder.tensors | self.base | self.extras
