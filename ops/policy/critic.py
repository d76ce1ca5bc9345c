"""Settings of PPO's value model. Torch-free, so that a spec is checked before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from furlong.ops.options import chosen
from furlong.ops.spec import AlgorithmSpec, SpecError


@dataclass(frozen=True)
class Critic:
    """What `algorithm.critic` may set; the arithmetic is in `ops/policy/gae.py`. Decay, betas and weight decay are those of
    the policy's AdamW."""

    learning_rate: float = 0.0
    """Peak learning rate of the value model's own AdamW; 0 for the policy's."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    max_grad_norm: float = 1.0
    """Gradient clipping by global L2 norm."""
    gamma: float = 1.0
    """Discount per trained token."""
    lam: float = 0.95
    """Weight of later errors of the value in an advantage, per trained token: 1 for the return less the value."""
    updates: int = 1
    """Optimiser steps of the value model per batch."""
    clip: float = 0.2
    """How far a value may move from the step's start before its loss stops it; matters from the second update on."""

    def __post_init__(self) -> None:
        good = (
            0 <= self.learning_rate < math.inf
            and self.warmup_steps >= 0
            and self.max_grad_norm > 0
            and 0 <= self.gamma <= 1
            and 0 <= self.lam <= 1
            and self.updates >= 1
            and self.clip > 0
        )
        if not good:
            raise SpecError(
                f"algorithm.critic: {self} cannot train a value model; learning_rate and warmup_steps must be 0 or more, "
                "max_grad_norm and clip above 0, gamma and lam within [0, 1], updates 1 or more"
            )


def critic_of(algorithm: AlgorithmSpec) -> Critic:
    """The value model's settings.

    Raises:
        SpecError: an unknown setting, or one out of bounds.
    """
    return chosen("algorithm.critic", Critic, algorithm.critic)


def critic_rule(algorithm: AlgorithmSpec) -> AlgorithmSpec:
    """The rule by which the value model's AdamW steps: the policy's, with the rates and the clip of `algorithm.critic`."""
    critic = critic_of(algorithm)
    return algorithm.model_copy(
        update={
            "learning_rate": critic.learning_rate or algorithm.learning_rate,
            "warmup_steps": critic.warmup_steps,
            "max_grad_norm": critic.max_grad_norm,
        }
    )
