"""The learning rate of each step."""

from __future__ import annotations

import math

from furlong.ops.spec import AlgorithmSpec


def learning_rate(algorithm: AlgorithmSpec, steps: int, step: int) -> float:
    """Linear warm-up, then constant, linear or cosine decay; depends on nothing but its arguments.

    With w = warmup_steps: step s <= w gets peak * s / w, so the first step already learns and step w is at the peak.
    After it the share u runs from 0 at step w (at step 1 when w is 0) to 1 at the last step, and the rate falls from the
    peak to peak * final_lr_fraction: by u for `linear`, by (1 - cos(pi u)) / 2 for `cosine` (Loshchilov & Hutter 2017,
    "SGDR", eq. 5).

    Args:
        algorithm: peak, warm-up and shape.
        steps: optimiser steps in the whole run.
        step: the step about to be taken, from 1 to `steps`.
    Returns:
        the learning rate, per optimiser step.
    Raises:
        ValueError: `step` outside the run, for which the shape is not defined.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is outside this run of {steps} steps; number steps from 1 or raise spec.steps")
    peak, warmup = algorithm.learning_rate, algorithm.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if algorithm.decay == "constant":
        return peak
    top = max(warmup, 1)
    share = (step - top) / (steps - top) if steps > top else 0.0
    fall = (1.0 - math.cos(math.pi * share)) / 2 if algorithm.decay == "cosine" else share
    return peak * (1.0 - (1.0 - algorithm.final_lr_fraction) * fall)
