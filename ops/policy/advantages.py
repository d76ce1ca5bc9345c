"""Advantages of trajectories: how rewards, compared with those of the other replies to the same prompt, count.

Pure numpy: the stage that records a step's outcomes has no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from furlong.ops.policy.algorithms import algorithm_of
from furlong.ops.records import Disposition
from furlong.ops.spec import AlgorithmSpec

STD_FLOOR = 1e-6
"""Added to a group's population standard deviation, as GRPO's implementations do; it only keeps the division defined."""


@dataclass(frozen=True)
class Outcome:
    """What one trajectory brings to the step."""

    reward: float | None
    """The verifier's score; None when it gave none."""
    advantage: float
    """0 exactly when `disposition` is not `trained`; it may be 0 when it is."""
    disposition: Disposition
    """Whether the trajectory's tokens enter the loss, and if not, why."""


def group_advantages(rewards: list[float | None], groups: list[str], algorithm: AlgorithmSpec) -> list[Outcome]:
    """Advantages by the spec's algorithm; with r the rewards of a trajectory's group, n of them, scored ones only:

        grpo, gspo, distill    (r_i - mean r) / (std r + STD_FLOOR), or r_i - mean r without `normalise_std`
                               (Shao et al. 2024, "DeepSeekMath", section 4.1.2); std with divisor n
        dr_grpo                r_i - mean r (Liu et al. 2025, "Understanding R1-Zero-Like Training")
        rloo                   r_i - mean of the other n - 1 (Ahmadian et al. 2024, "Back to Basics", eq. 8)
        reinforce_pp           r_i (Hu et al. 2025, "REINFORCE++"); `ops/policy/returns.py` goes on from it
        ppo                    r_i (Schulman et al. 2017); the value model's advantages of tokens begin with it
        reinforce_pp_baseline  r_i - mean r (the same, "w/ baseline"), whitened over the step's tokens later
        dpo                    1 for the highest reward, -1 for the lowest (the first of equals); others are not chosen
        sft                    1 for the highest reward if it is above 0, equals included; others are not chosen
                               (Yuan et al. 2023, "Scaling relationship on learning mathematical reasoning", RFT)

    A group whose scored rewards are all equal (so also one with one scored trajectory) compares nothing: it is dropped
    with `zero_variance`, save where rewards are not compared within the group (reinforce_pp, ppo, sft) or are not all
    that is learnt from (distill).

    Args:
        rewards: one score per trajectory, finite, or None where the verifier gave none.
        groups: the group id of each trajectory; a group's trajectories need not stand together.
    Returns:
        one Outcome per trajectory, in the given order.
    Raises:
        ValueError: lists of different lengths, or a reward that is NaN or infinite.
    """
    if len(rewards) != len(groups):
        raise ValueError(f"{len(rewards)} rewards but {len(groups)} group ids; give one of each per trajectory")
    members: dict[str, list[int]] = {}
    outcomes = [Outcome(None, 0.0, Disposition.UNSCORED)] * len(rewards)
    for index, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is None:
            continue
        if not math.isfinite(reward):
            raise ValueError(
                f"reward {index} (group {group}) is {reward}; a verifier without a score must give None, not a number"
            )
        members.setdefault(group, []).append(index)
    for indices in members.values():
        scores = np.array([rewards[index] for index in indices], np.float64)
        for index, made in zip(indices, _of_group(scores, algorithm), strict=True):
            outcomes[index] = made
    return outcomes


def _of_group(scores: np.ndarray, algorithm: AlgorithmSpec) -> list[Outcome]:
    name, flat = algorithm.name, scores.min() == scores.max()
    if flat and algorithm_of(algorithm).compares:
        return [Outcome(float(score), 0.0, Disposition.ZERO_VARIANCE) for score in scores]
    if name in ("dpo", "sft"):
        chosen = _pair(scores) if name == "dpo" else ((scores == scores.max()) & (scores > 0)).astype(np.float64)
        kinds = [Disposition.TRAINED if sign else Disposition.NOT_CHOSEN for sign in chosen]
        return [Outcome(*row) for row in zip(scores.tolist(), chosen.tolist(), kinds, strict=True)]
    return [
        Outcome(float(s), float(a), Disposition.TRAINED)
        for s, a in zip(scores, _compared(scores, algorithm), strict=True)
    ]


def _pair(scores: np.ndarray) -> np.ndarray:
    signs = np.zeros_like(scores)
    signs[scores.argmax()], signs[scores.argmin()] = 1.0, -1.0
    return signs


def _compared(scores: np.ndarray, algorithm: AlgorithmSpec) -> np.ndarray:
    if algorithm.name in ("reinforce_pp", "ppo"):
        return scores
    if scores.min() == scores.max():
        return np.zeros_like(scores)
    centred = scores - np.mean(scores)
    if algorithm.name == "rloo":
        return centred * (len(scores) / (len(scores) - 1))
    if algorithm.normalise_std and algorithm.name in ("grpo", "gspo", "distill"):
        return centred / (np.std(scores) + STD_FLOOR)
    return centred
