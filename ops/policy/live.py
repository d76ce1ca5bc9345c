"""The weights of one version, ready to serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from furlong.ops.policy.decoder import Decoder


@dataclass(frozen=True)
class Live:
    """One weights version; immutable, as its decoder is."""

    version: int
    decoder: Decoder
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of drafts and adapters, by name: held and published like the decoder's, not used by it."""
    serial: int = 0
    """Unique within an engine, as a version may be loaded more than once; ranks refer to weights by it."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything held, by Hugging Face name."""
        return self.decoder.tensors | self.extras
