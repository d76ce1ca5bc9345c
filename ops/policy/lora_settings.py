"""Settings of low-rank adapters. Torch-free, so that a spec is checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.ops.options import chosen
from furlong.ops.spec import SpecError, TrainerSpec


@dataclass(frozen=True)
class Lora:
    """What `trainer.lora` may set; the arithmetic is in `ops/policy/lora.py`."""

    rank: int = 0
    """Inner dimension of A and B."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise SpecError(
                f"trainer.lora: an adapter of rank {self.rank} and alpha {self.alpha} changes nothing; set a rank of 1 or "
                "more, e.g. 8, and an alpha above 0, or leave trainer.lora empty to train all weights"
            )


def lora_chosen(trainer: TrainerSpec) -> Lora | None:
    """The adapters that the spec asks for; None when all weights are trained.

    Raises:
        SpecError: an unknown setting, or one without effect.
    """
    return chosen("trainer.lora", Lora, trainer.lora) if trainer.lora else None
