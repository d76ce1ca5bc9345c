"""Drawing tokens from logits with random numbers that are a function of (seed, reply position) alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt64
from torch import Tensor

_BLOCK = 128
"""Tokens per block of the two-level cumulative sum."""
_LIKELIEST = 1024
"""Tokens that are put in order first, as ordering a whole vocabulary takes longer than a decode step."""
_CHUNK = 2**20
"""Logits handled at a time, so that they stay in the processor's cache between passes."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STREAM = np.uint64(0xD1342543DE82EF95)
"""Any odd number unlike the other: keys of streams must not differ by a few counters."""


class NonFiniteLogits(ArithmeticError):
    """A model returned NaN or infinity; the message names the requests."""

    def __init__(self, request_ids: list[str]):
        super().__init__(
            f"the model's logits are not finite for request {', '.join(request_ids[:3])} ({len(request_ids)} in all); "
            "check the digest of the weights version, and its temperature"
        )
        self.request_ids = request_ids

    def __reduce__(self) -> tuple:
        return type(self), (self.request_ids,)


@dataclass(frozen=True)
class Rules:
    """How each row is drawn; see `GenerateRequest`."""

    temperatures: Float[np.ndarray, " rows"]
    top_k: Int[np.ndarray, " rows"]
    top_p: Float[np.ndarray, " rows"]
    min_p: Float[np.ndarray, " rows"]

    def of(self, rows: slice | Bool[np.ndarray, " rows"] | Int[np.ndarray, " some"]) -> Rules:
        return Rules(self.temperatures[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True)
class Drawn:
    """One token per row."""

    tokens: Int[Tensor, " rows"]
    logprobs: Float[Tensor, " rows"]
    """Log-probability (nat, float64) under the distribution it was drawn from; greedy rows' under softmax(logits). NaN
    where the logits are not finite, or dividing them by the temperature overflows: such a row's token means nothing."""
    model_logprobs: Float[Tensor, " rows"]
    """Log-probability (nat, float64) under softmax(logits)."""


def uniforms(
    seeds: UInt64[np.ndarray, "*#rows"],
    positions: int | Int[np.ndarray, "*#rows"],
    streams: int | Int[np.ndarray, "*#rows"] = 0,
) -> Float[np.ndarray, "*rows"]:
    """Numbers in [0, 1), multiples of 2^-53: SplitMix64 (Steele, Lea, Flood 2014) at counter `positions`.

    The seed is mixed first, so that neighbouring seeds do not give shifted copies of one stream; so is what another
    stream adds to it.

    Args:
        streams: from 0. Tokens are drawn with stream 0; drafts use others.
    """
    counters = (np.atleast_1d(np.asarray(positions)).astype(np.uint64) + np.uint64(1)) * _GOLDEN
    others = np.atleast_1d(np.asarray(streams)).astype(np.uint64)
    keys = _mix(seeds + _GOLDEN)
    keys = np.where(others > 0, _mix(keys + others * _STREAM), keys)
    return (_mix(keys + counters) >> np.uint64(11)) * 2.0**-53


@dataclass(frozen=True)
class Laws:
    """What each row is drawn from."""

    chances: Float[Tensor, "rows blocks n"]
    """Probabilities (float32) of the tokens that the row's rules keep, filled up with zeros to whole blocks. They sum to 1
    only nearly, and not even that where rules drop tokens: divide by `mass`. Greedy rows' are softmax(logits)."""
    masses: Float[Tensor, "rows blocks"]
    """Sums of the blocks (float64)."""
    own: Float[Tensor, "rows blocks n"]
    """softmax(logits); `chances` itself when that is what they are for all rows."""
    finite: Bool[Tensor, " rows"]
    likeliest: Int[Tensor, " rows"]
    """The greedy rows' token, -1 for the others."""

    @property
    def mass(self) -> Float[Tensor, " rows"]:
        return self.masses.sum(dim=-1)

    def draw(self, numbers: Float[Tensor, " rows"]) -> Int[Tensor, " rows"]:
        """One token per row by inversion; greedy rows' likeliest."""
        return torch.where(self.likeliest >= 0, self.likeliest, invert(self.chances, self.masses, numbers))

    def logprobs(self, tokens: Int[Tensor, " t"], rows: Int[Tensor, " t"]) -> tuple[Tensor, Tensor]:
        """`Drawn.logprobs` and `Drawn.model_logprobs` of these tokens, each drawn from one of the rows."""
        finite = self.finite[rows]
        logprobs = torch.where(finite, _logprobs(self.chances, self.masses, tokens, rows), torch.nan)
        if self.own is self.chances:
            return logprobs, logprobs
        return logprobs, torch.where(finite, logprobs_of(self.own, tokens, rows), torch.nan)


def draw(logits: Float[Tensor, "rows vocab"], rules: Rules, numbers: Float[Tensor, " rows"]) -> Drawn:
    """One token per row, by inversion of the cumulative distribution of softmax(logits / temperature), of which top-k,
    then top-p of what that leaves, then min-p may keep a part.

    Args:
        logits: any floating dtype; widened to float32 before anything else.
        rules: temperature 0 picks the most likely token, the lowest id among equals.
        numbers: float64 uniforms in [0, 1]; 1 counts as the largest number below it.
    """
    rows = max(1, _CHUNK // logits.shape[1])
    spans = [slice(at, at + rows) for at in range(0, len(logits), rows)]
    parts = [_draw_chunk(laws_of(logits[span], rules.of(span)), numbers[span]) for span in spans]
    return Drawn(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _draw_chunk(laws: Laws, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    tokens = laws.draw(numbers)
    return tokens, *laws.logprobs(tokens, torch.arange(len(tokens)))


def laws_of(logits: Float[Tensor, "rows vocab"], rules: Rules) -> Laws:
    """What `draw` draws each row from."""
    logits_BV = logits.float()
    greedy = rules.temperatures == 0
    # A sum is finite only if all its terms are, and is the one vectorised pass that says so.
    finite = logits_BV.sum(dim=-1).isfinite()
    heated = (rules.temperatures != 1) & ~greedy
    cut = _cuts(rules) & ~greedy
    chances = chances_of(logits_BV, 1.0)
    own = chances
    if heated.any() or cut.any():
        chances = chances.clone()
    if heated.any():
        chances[heated] = chances_of(logits_BV[heated], torch.from_numpy(rules.temperatures[heated])[:, None])
    if cut.any():
        chances[cut] = _kept(chances[cut], rules.of(cut))
    likeliest = torch.full((len(logits_BV),), -1)
    if greedy.any():
        likeliest[greedy] = _argmax(_blocks(logits_BV[greedy], float("-inf")))
    return Laws(chances, chances.sum(dim=-1).double(), own, finite, likeliest)


def chances_of(
    logits: Float[Tensor, "b vocab"], temperature: float | Float[Tensor, "b 1"]
) -> Float[Tensor, "b blocks n"]:
    """softmax(logits / temperature) in float32, filled up with zeros to whole blocks."""
    scaled = logits if isinstance(temperature, float) and temperature == 1.0 else logits / temperature
    return _blocks(torch.softmax(scaled, dim=-1), 0.0)


def logprobs_of(
    chances: Float[Tensor, "b blocks n"], tokens: Int[Tensor, " t"], rows: Int[Tensor, " t"]
) -> Float[Tensor, " t"]:
    """Log-probability (nat, float64) of each token under the row of `chances` that it was drawn from."""
    return _logprobs(chances, chances.sum(dim=-1).double(), tokens, rows)


def _logprobs(chances: Tensor, masses: Tensor, tokens: Tensor, rows: Tensor) -> Float[Tensor, " t"]:
    chosen = chances.flatten(1)[rows, tokens].double()
    # float32 shares sum to 1 within rounding only; their float64 sum takes that error out of the logarithm. A clamp
    # keeps NaN, so that it is seen.
    return (chosen / masses.sum(dim=-1)[rows]).log().clamp(max=0.0)


def _cuts(rules: Rules) -> Bool[np.ndarray, " rows"]:
    return (rules.top_k > 0) | (rules.top_p < 1) | (rules.min_p > 0)


def _kept(chances: Float[Tensor, "b blocks n"], rules: Rules) -> Float[Tensor, "b blocks n"]:
    """The probabilities of the tokens that stay, and 0 for the others; the most likely one always stays. Of equally
    likely tokens those of lower id come first."""
    flat, mass = chances.flatten(1), chances.sum(dim=-1).double().sum(dim=-1)
    found = torch.zeros_like(flat)
    # Whether the likeliest few are enough is a row's own matter, so that its bits do not depend on other rows.
    rest = torch.ones(len(flat), dtype=torch.bool)
    if flat.shape[1] > _LIKELIEST:
        likely, ids = _by_likelihood(*flat.topk(_LIKELIEST, dim=-1))
        stays = _stays(likely, mass, rules)
        # All that are as likely as the last of the few might stay or go with it, and some are not among the few.
        rest = (stays & (likely <= likely[:, -1:])).any(dim=-1)
        # top-p is a share of all that top-k leaves, which are more than the few.
        rest |= torch.from_numpy((rules.top_k > _LIKELIEST) & (rules.top_p < 1))
        found.scatter_(1, ids, torch.where(stays, likely, 0.0))
    if rest.any():
        likely, ids = flat[rest].sort(dim=-1, descending=True, stable=True)
        stays = _stays(likely, mass[rest], rules.of(rest.numpy()))
        found[rest] = torch.zeros_like(likely).scatter_(1, ids, torch.where(stays, likely, 0.0))
    return found.view(chances.shape)


def _stays(likely: Float[Tensor, "b some"], mass: Float[Tensor, " b"], rules: Rules) -> Bool[Tensor, "b some"]:
    """For tokens in order of likelihood; `mass` is that of all."""
    few = torch.from_numpy(rules.top_k > 0)
    most = torch.from_numpy(np.where(rules.top_k > 0, rules.top_k, likely.shape[1]))
    likely = torch.where(torch.arange(likely.shape[1]) < most[:, None], likely, 0.0)
    running = likely.double().cumsum(dim=-1)
    wanted = torch.from_numpy(rules.top_p.astype(np.float64)) * torch.where(few, running[:, -1], mass)
    floor = torch.from_numpy(rules.min_p.astype(np.float32))[:, None] * likely[:, :1]
    before = running - likely.double()
    stays = (
        (likely >= floor) & (likely > 0) & ((before < wanted[:, None]) | torch.from_numpy(rules.top_p >= 1)[:, None])
    )
    stays[:, 0] = True
    return stays


def _by_likelihood(likely: Float[Tensor, "b some"], ids: Int[Tensor, "b some"]) -> tuple[Tensor, Tensor]:
    """Likeliest first, then by id."""
    ids, order = ids.sort(dim=-1)
    likely, order = likely.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return likely, ids.gather(1, order)


def invert(
    chances: Float[Tensor, "b blocks n"], masses: Float[Tensor, "b blocks"], numbers: Float[Tensor, " b"]
) -> Int[Tensor, " b"]:
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
    # NaN compares false everywhere, which would index past the end; such rows are reported by the caller.
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
