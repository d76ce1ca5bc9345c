"""Which weights version sampled which tokens, as spans (version, start, end) over a list of tokens, end exclusive."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int, int]


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Without empty spans, and without seams between two of one version; they are given in order."""
    merged: list[Span] = []
    for version, start, end in spans:
        if start == end:
            continue
        if merged and merged[-1][0] == version and merged[-1][2] == start:
            start = merged.pop()[1]
        merged.append((version, start, end))
    return tuple(merged)


def cover(spans: Sequence[Span], tokens: int) -> bool:
    """Whether each of so many tokens is in exactly one span, and the spans are in order."""
    at = 0
    for _, start, end in spans:
        if start != at or end <= start:
            return False
        at = end
    return at == tokens


def shifted(spans: Iterable[Span], by: int) -> list[Span]:
    """Spans of the same tokens after `by` others."""
    return [(version, start + by, end + by) for version, start, end in spans]
