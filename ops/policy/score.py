"""Log-probabilities of tokens that are given, by the engine's own forward pass."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import CACHE_BYTES, MOST_LOGITS, PREFILL_TOKENS
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.generate import RequestError
from furlong.ops.policy.kv_cache import Held, KVCache
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.row_bits import row_bits
from furlong.ops.policy.sampling import NonFiniteLogits, chances_of, logprobs_of

Scored = tuple[tuple[int, ...], int]
"""Token ids, and the index of the first one to be scored."""


@torch.inference_mode()
def score(decoder: Decoder, rows: Sequence[Scored], temperature: float, invariant: bool = True) -> list[list[float]]:
    """See `Engine.score`; the bits are those that `batch.Batch` records when it draws the same tokens.

    Args:
        invariant: a row's bits do not depend on the others.
    Raises:
        RequestError: an unusable row or temperature; nothing was computed.
        NonFiniteLogits: naming rows whose logits are not finite, or cannot be divided by the temperature.
    """
    check_rows(rows, temperature, decoder.architecture)
    found = [_Row(number, tokens, first) for number, (tokens, first) in enumerate(rows)]
    waiting = deque(row for row in found if row.first < len(row.tokens))
    cache = KVCache(decoder.architecture, decoder.dtype, CACHE_BYTES)
    budget = min(PREFILL_TOKENS, max(1, MOST_LOGITS // decoder.architecture.vocab))
    with row_bits(invariant):
        while waiting:
            _feed(decoder, cache, _schedule(waiting, cache, budget), temperature)
            while waiting and not waiting[0].left:
                cache.close(waiting.popleft().held)
    broken = [f"row {row.number}" for row in found if not all(map(math.isfinite, row.logprobs))]
    if broken:
        raise NonFiniteLogits(broken)
    return [row.logprobs for row in found]


def check_rows(rows: Sequence[Scored], temperature: float, architecture: Architecture) -> None:
    """Raise RequestError unless a model of this architecture can score every row."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise RequestError(f"temperature={temperature}: tokens are scored at a positive, finite one; give such")
    for number, (tokens, first) in enumerate(rows):
        if trouble := _trouble(tokens, first, architecture):
            raise RequestError(f"row {number}: {trouble}")


def _trouble(tokens: tuple[int, ...], first: int, architecture: Architecture) -> str:
    if not 1 <= first <= len(tokens):
        return (
            f"the first of its {len(tokens)} tokens to be scored is {first}; give 1 or more, as nothing comes before token "
            "0, and no more than there are"
        )
    if len(tokens) > architecture.context:
        return f"its {len(tokens)} tokens are more than the model's context of {architecture.context}; shorten it"
    odd = [token for token in tokens if not 0 <= token < architecture.vocab]
    return f"token id {odd[0]} is outside the vocabulary of {architecture.vocab}; use the model's tokens" if odd else ""


@dataclass(eq=False)
class _Row:
    number: int
    tokens: tuple[int, ...]
    first: int
    fed: int = 0
    held: Held | None = None
    logprobs: list[float] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Tokens to feed; nothing comes after the last one."""
        return len(self.tokens) - 1 - self.fed


def _schedule(waiting: deque[_Row], cache: KVCache, budget: int) -> list[tuple[_Row, int]]:
    """Which rows to feed how many tokens, single ones first; their pages are there afterwards.

    Rows end in their order, so that all but the first one fed hold no pages from steps before.
    """
    found = []
    for row in waiting:
        count = min(row.left, budget)
        if not count:
            break
        row.held = row.held or cache.open()
        if cache.missing(row.held, row.fed + count) > cache.free:
            if found:
                break
            cache.enlarge(row.fed + count)
        cache.extend(row.held, row.fed + count)
        found.append((row, count))
        budget -= count
    return sorted(found, key=lambda pair: pair[1] > 1)


def _feed(decoder: Decoder, cache: KVCache, feeding: list[tuple[_Row, int]], temperature: float) -> None:
    spans = [Span(row.held, row.fed, count) for row, count in feeding]
    tokens, wanted, following, owners = [], [], [], []
    for row, count in feeding:
        for at in range(row.fed, row.fed + count):
            if at + 1 >= row.first:
                wanted.append(len(tokens))
                following.append(row.tokens[at + 1])
                owners.append(row)
            tokens.append(row.tokens[at])
        row.fed += count
    logits, _ = decoder.step(torch.tensor(tokens), Plan(spans, cache), torch.tensor(wanted, dtype=torch.long))
    if wanted:
        for row, logprob in zip(owners, _logprobs(logits.float(), following, temperature), strict=True):
            row.logprobs.append(logprob)


def _logprobs(logits: Tensor, tokens: list[int], temperature: float) -> list[float]:
    """As `sampling.draw` computes them: the temperature is a float32 there, and 1 divides nothing."""
    heat = 1.0 if temperature == 1 else torch.full((len(tokens), 1), temperature, dtype=torch.float32)
    chosen, rows = torch.tensor(tokens), torch.arange(len(tokens))
    values = logprobs_of(chances_of(logits, heat), chosen, rows)
    # A model that did not draw the token may give it less than the smallest float32, which is no reason for -infinity.
    tiny = values.isneginf()
    if tiny.any():
        exact = torch.log_softmax(logits[tiny].double() / temperature, dim=-1)
        values[tiny] = exact.gather(1, chosen[tiny][:, None]).squeeze(1)
    return torch.where(logits.sum(dim=-1).isfinite(), values, torch.nan).tolist()
