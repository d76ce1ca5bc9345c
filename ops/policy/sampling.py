"""Drawing tokens from logits with random numbers that are a function of (seed, reply position) alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt64
from torch import Tensor

_BLOCK = 128
"""Tokens per block of the two-level cumulative sum."""
_CHUNK = 2**20
"""Logits handled at a time, so that they stay in the processor's cache between passes."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class NonFiniteLogits(ArithmeticError):
    """A model returned NaN or infinity; the message names the requests."""


def uniforms(seeds: UInt64[np.ndarray, " rows"], position: int) -> Float[np.ndarray, " rows"]:
    """Numbers in [0, 1), multiples of 2^-53: SplitMix64 (Steele, Lea, Flood 2014) at counter `position`.

    The seed is mixed first, so that neighbouring seeds do not give shifted copies of one stream.
    """
    counter = np.uint64((position + 1) * int(_GOLDEN) % 2**64)
    return (_mix(_mix(seeds + _GOLDEN) + counter) >> np.uint64(11)) * 2.0**-53


def draw(
    logits: Float[Tensor, "rows vocab"],
    temperatures: Float[Tensor, " rows"],
    numbers: Float[Tensor, " rows"],
    request_ids: Sequence[str],
) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
    """One token per row, by inversion of the cumulative distribution of softmax(logits / temperature).

    Args:
        logits: any floating dtype; widened to float32 before anything else.
        temperatures: float32; 0 picks the most likely token, the lowest id among equals.
        numbers: float64 uniforms in [0, 1]; 1 counts as the largest number below it.
        request_ids: one per row, named in errors.
    Returns:
        Token ids, and their log-probabilities (nat, float64) under the distribution each was drawn from; greedy rows'
        under softmax(logits).
    Raises:
        NonFiniteLogits: a row holds NaN or an infinity, or dividing by its temperature overflows.
    """
    rows = max(1, _CHUNK // logits.shape[1])
    parts = [
        _draw_chunk(some, temperatures[at : at + rows], numbers[at : at + rows])
        for at, some in zip(range(0, len(logits), rows), logits.split(rows), strict=True)
    ]
    tokens, logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    bad = [request_ids[row] for row in (~logprobs.isfinite()).nonzero().flatten().tolist()]
    if bad:
        raise NonFiniteLogits(
            f"the model's logits are not finite for request {', '.join(bad[:3])} ({len(bad)} in all); check the digest "
            "of the weights version, and its temperature"
        )
    return tokens, logprobs


def _draw_chunk(logits_BV: Tensor, temperatures: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    greedy = temperatures == 0
    # A sum is finite only if all its terms are, and is the one vectorised pass that says so.
    finite = logits_BV.sum(dim=-1).isfinite()
    scaled = logits_BV.float()
    if not bool(((temperatures == 1) | greedy).all()):
        scaled = scaled / torch.where(greedy, 1.0, temperatures)[:, None]
    chances = _blocks(torch.softmax(scaled, dim=-1), 0.0)
    masses = chances.sum(dim=-1).double()
    tokens = _invert(chances, masses, numbers)
    if bool(greedy.any()):
        tokens[greedy] = _argmax(_blocks(scaled[greedy], float("-inf")))
    chosen = chances.flatten(1).gather(1, tokens[:, None]).squeeze(1).double()
    # float32 shares sum to 1 within rounding only; their float64 sum takes that error out of the logarithm. A clamp
    # keeps NaN, so that it is seen.
    logprobs = (chosen / masses.sum(dim=-1)).log().clamp(max=0.0)
    return tokens, torch.where(finite, logprobs, torch.nan)


def _invert(chances: Float[Tensor, "b blocks n"], masses: Float[Tensor, "b blocks"], numbers: Tensor) -> Tensor:
    """First token whose cumulative probability exceeds the number: the block first, then the token in it.

    Sums run in float64 over the block masses, and again over the tokens of the block found, whose own total is what the
    remainder is scaled by. So only the float32 sum of one block of 128 shares is inexact, by under 1e-6 of that block's
    probability. A token of probability 0 never raises a cumulative sum, so it is never the first to exceed anything.
    """
    rows = torch.arange(len(masses))
    block, rest = _first_above(masses, numbers)
    token, _ = _first_above(chances[rows, block].double(), rest)
    return block * chances.shape[2] + token


def _first_above(weights: Float[Tensor, "b n"], fractions: Float[Tensor, " b"]) -> tuple[Tensor, Tensor]:
    """Index where the running sum first exceeds fraction * total, and how far into that weight, as a fraction."""
    running = weights.cumsum(dim=-1)
    total = running[:, -1]
    target = torch.minimum(fractions * total, torch.nextafter(total, torch.zeros_like(total)))
    # NaN compares false everywhere, which would index past the end; such rows are refused by the caller.
    index = (running <= target[:, None]).sum(dim=-1).clamp(max=weights.shape[1] - 1)
    at = index[:, None]
    weight = weights.gather(1, at).squeeze(1)
    before = torch.where(index > 0, running.gather(1, (at - 1).clamp(min=0)).squeeze(1), 0.0)
    return index, (target - before) / weight


def _argmax(scores: Float[Tensor, "b blocks n"]) -> Int[Tensor, " b"]:
    """Two short searches: one over a whole row is not vectorised and takes several times as long."""
    block = scores.amax(dim=-1).argmax(dim=-1)
    return block * scores.shape[2] + scores[torch.arange(len(scores)), block].argmax(dim=-1)


def _blocks(values: Float[Tensor, "b vocab"], filler: float) -> Float[Tensor, "b blocks n"]:
    short = -values.shape[1] % _BLOCK
    padded = F.pad(values, (0, short), value=filler) if short else values
    return padded.view(len(values), -1, _BLOCK)


def _mix(x: UInt64[np.ndarray, " rows"]) -> UInt64[np.ndarray, " rows"]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
