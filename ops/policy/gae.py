"""PPO with a value model: generalised advantages, the value's loss, and how much the value explains."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROUNDING = 1e-12
"""Returns that differ by less, relative to their size, are the same but for the rounding of sums of float64 numbers."""


def generalised_advantages(
    reward: float,
    penalties: Float[Tensor, " reply"],
    values: Float[Tensor, " reply"],
    mask: Bool[Tensor, " reply"],
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, " reply"], Float[Tensor, " reply"]]:
    """A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t, and G_t = A_t + V_t.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation", eq. 11-16. Time
    runs over trained tokens only: what tools said between is one transition, and its values are not read. r_t is
    -penalty_t, plus `reward` at the last trained token, after which V is 0.

    Args:
        reward: the trajectory's.
        penalties: subtracted from each token's reward, e.g. kl_coef times its divergence from the reference.
        values: V_t, the value model's estimate before token t.
        mask: true where trained.
    Returns:
        advantages and returns (targets of the value model), both 0 where the mask is false.
    Raises:
        ValueError: no trained token, so nowhere for the reward to go, or a non-finite number at one.
    """
    trained = mask.nonzero().flatten()
    rewards, kept = -penalties[trained], values[trained]
    if not len(trained) or not bool(torch.isfinite(rewards).all() and torch.isfinite(kept).all()):
        raise ValueError(
            f"advantages over {len(trained)} trained tokens with penalties {rewards.tolist()[:5]} and values "
            f"{kept.tolist()[:5]}; give at least one, and finite numbers at each"
        )
    rewards[-1] += reward
    after = torch.cat([kept[1:], kept.new_zeros(1)])
    delta = rewards + gamma * after - kept
    found, later = delta.tolist(), 0.0
    for t in range(len(found) - 1, -1, -1):
        found[t] = later = found[t] + gamma * lam * later
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[trained] = torch.tensor(found, dtype=values.dtype)
    returns[trained] = advantages[trained] + kept
    return advantages, returns


def estimates(
    rewards: Float[Tensor, " tokens"],
    penalties: Float[Tensor, " tokens"],
    values: Float[Tensor, " tokens"],
    trajectory: Int[Tensor, " tokens"],
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """`generalised_advantages` of each trajectory among the trained tokens of a step: advantages and returns.

    Args:
        rewards: each token's trajectory's.
        trajectory: ascending; a trajectory's tokens are in order.
    """
    sizes = torch.unique_consecutive(trajectory, return_counts=True)[1].tolist()
    made = [
        generalised_advantages(float(reward[0]), penalty, value, torch.ones_like(value, dtype=torch.bool), gamma, lam)
        for reward, penalty, value in zip(*(x.split(sizes) for x in (rewards, penalties, values)), strict=True)
    ]
    advantages, returns = zip(*made, strict=True) if made else ((values,), (values,))
    return torch.cat(advantages), torch.cat(returns)


def value_loss(
    values: Float[Tensor, " tokens"],
    old_values: Float[Tensor, " tokens"],
    returns: Float[Tensor, " tokens"],
    clip: float,
    denominators: Float[Tensor, " tokens"],
) -> tuple[Float[Tensor, " tokens"], Bool[Tensor, " tokens"]]:
    """L_t = 1 / (2 n_t) max((V - G)^2, (V_old + clip(V - V_old, -clip, clip) - G)^2).

    The clipped value loss of PPO's implementations (described by Engstrom et al. 2020, "Implementation Matters in Deep
    Policy Gradients", section 3): a value that has moved further than `clip` towards its target gets no more gradient.

    Args:
        values: of trained tokens; differentiable.
        old_values: at the step's start.
        returns: G_t.
        denominators: n_t from `loss.token_denominators`, over the whole step.
    Returns:
        each token's share, to be summed; and where the clipped error was the larger one.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    plain, bounded = (values - returns).square(), (near - returns).square()
    return torch.maximum(plain, bounded) / (2 * denominators), bounded.detach() > plain.detach()


def explained_variance(values: Float[Tensor, " tokens"], returns: Float[Tensor, " tokens"]) -> float | None:
    """1 - Var(G - V) / Var(G): 1 when the value model foretells every return, 0 when it does no better than a constant;
    None when all returns are the same, so that there is nothing to explain."""
    spread = returns.var(unbiased=False)
    if not spread > ROUNDING**2 * (returns.square() + values.square()).mean():
        return None
    return 1.0 - float((returns - values).var(unbiased=False) / spread)
