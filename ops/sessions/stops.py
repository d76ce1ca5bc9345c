"""Ends a reply at a text: engines know stop tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from furlong.ops.protocols import Sample
from furlong.ops.sessions.routings import part
from furlong.ops.sessions.template import ChatTemplate


def cut(template: ChatTemplate, sample: Sample, stop: Sequence[str], prompt: int) -> tuple[Sample, str]:
    """The sample up to the token that completes the first of these texts, and its text before that.

    Tokens are drawn one after the other, so what is left is exactly what had been drawn if the engine had stopped there.
    The names of special tokens are no text.

    Args:
        prompt: number of tokens before the reply.
    """
    for begin, end in _runs(sample.tokens, template.special_ids):
        text = template.decode(sample.tokens[begin:end])
        found = [at for at in (text.find(word) for word in stop if word) if at >= 0]
        if found:
            length = begin + _completing(template, sample.tokens[begin:end], stop)
            return _first(sample, length, prompt), template.decode(sample.tokens[:begin]) + text[: min(found)]
    return sample, template.reply_text(sample.tokens)


def _runs(tokens: Sequence[int], special: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Stretches without special tokens."""
    begin = 0
    for at, token in enumerate(tokens):
        if token in special:
            yield begin, at
            begin = at + 1
    yield begin, len(tokens)


def _completing(template: ChatTemplate, tokens: Sequence[int], stop: Sequence[str]) -> int:
    """The least number of tokens whose text holds one of the texts; that of all tokens does."""
    low, high = 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if any(word in template.decode(tokens[:middle]) for word in stop if word):
            high = middle
        else:
            low = middle + 1
    return low


def _first(sample: Sample, length: int, prompt: int) -> Sample:
    return replace(
        sample,
        tokens=sample.tokens[:length],
        logprobs=sample.logprobs[:length],
        model_logprobs=sample.model_logprobs[:length],
        versions=tuple((v, a, min(b, length)) for v, a, b in sample.versions if a < length),
        finish_reason="stop",
        routing=part(sample.routing, 0, prompt + length - 1) if sample.routing else None,
        drafted=None if sample.drafted is None else sample.drafted[:length],
    )
