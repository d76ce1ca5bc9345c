"""Continuous batching: replies join and leave between steps, and each step feeds every reply that is under way.

A step feeds one token of each reply that is up to date, and at most PREFILL_TOKENS of those that are not: new ones, and
ones whose keys and values are to be computed again. Whatever is decided here follows from the calls alone, so that the
ranks of a split model, which get the same calls, decide the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.kv_cache import KVCache, pages_of
from furlong.ops.policy.live import Live
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.row_bits import row_bits
from furlong.ops.policy.sampling import Drawn, Rules, draw, uniforms
from furlong.ops.protocols import GenerateRequest

CACHE_BYTES = 2**30
"""Memory for keys and values, unless a single reply needs more."""
MOST_LOGITS = 2**26
"""Most logits of one step, rows times vocabulary."""
PREFILL_TOKENS = 256
"""Tokens of prompts per step: bounds how long new requests hold up those under way."""


@dataclass
class Ended:
    """Replies that a turn ended, with the reason, in order; those whose logits were not finite apart."""

    replies: list[tuple[Reply, str]] = field(default_factory=list)
    broken: list[Reply] = field(default_factory=list)


@dataclass(frozen=True)
class Turn:
    """What one turn of the batch begins with."""

    requests: tuple[GenerateRequest, ...] = ()
    """To append: they passed `check_requests`, and no other of their ids is here."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Requests to end as they are, and why; those that are not here are passed over."""
    retract: bool = False
    """Compute all keys and values again before the next token."""


class Batch:
    """Requests run in the order they were added, as soon as rows and pages allow.

    When pages run out, the reply begun last is put off: it gives its pages back, and begins again, before those that
    wait, by computing keys and values of what it has. So the oldest one always goes on, and none waits for ever.
    """

    def __init__(self, whole: Architecture, part: Architecture, invariant: bool):
        """
        Args:
            whole: the model; part: what this rank has of it.
            invariant: a reply's bits do not depend on its company.
        """
        self._part = part
        self._cache: KVCache | None = None
        """Made at the first step, as it is in the dtype of the weights."""
        self._most_rows = max(1, MOST_LOGITS // whole.vocab)
        self._invariant = invariant
        self._waiting: deque[Reply] = deque()
        self._running: list[Reply] = []
        """In the order they began."""

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def size(self) -> int:
        """Requests that have not ended."""
        return len(self._waiting) + len(self._running)

    @torch.inference_mode()
    def turn(self, turn: Turn, live: Live | None) -> Ended:
        """Do what the turn says, then a step, unless `live` is None."""
        self._waiting.extend(Reply(request) for request in turn.requests)
        ended = self._end(turn.reasons)
        if turn.retract:
            for reply in self._running:
                reply.forget()
        if live is not None:
            stepped = self._step(live)
            ended.replies += stepped.replies
            ended.broken += stepped.broken
        return ended

    def _end(self, reasons: dict[str, str]) -> Ended:
        ended = Ended()
        for reply in [*self._running, *self._waiting]:
            reason = reasons.get(reply.request.request_id)
            if reason:
                ended.replies.append((reply, reason))
        gone = {reply for reply, _ in ended.replies}
        self._waiting = deque(reply for reply in self._waiting if reply not in gone)
        self._leave(gone)
        return ended

    def _step(self, live: Live) -> Ended:
        """One forward pass over at least one token, when there is any request."""
        if self._cache is None:
            self._cache = KVCache(self._part, live.decoder.dtype, CACHE_BYTES)
        with row_bits(self._invariant):
            self._begin()
            feeding = self._schedule(live)
            if not feeding:
                return Ended()
            return self._feed(feeding, live)

    def _begin(self) -> None:
        promised = sum(self._missing(reply, reply.left) for reply in self._running)
        while self._waiting and len(self._running) < self._most_rows:
            reply = self._waiting[0]
            need = pages_of(len(reply.tokens) + 1)
            # A little is kept back, as those under way will need more pages soon.
            if self._running and promised + need + len(self._running) // 8 > self._cache.free:
                return
            promised += need
            self._running.append(self._waiting.popleft())

    def _schedule(self, live: Live) -> list[tuple[Reply, int]]:
        """Which replies to feed how many tokens, single ones first; their pages are there afterwards."""
        budget, found = PREFILL_TOKENS, []
        sources: dict[tuple[int, ...], Reply] = {}
        experts = live.decoder.architecture.experts > 0
        for place, reply in enumerate(list(self._running)):
            if place >= len(self._running):
                break  # put off for older ones, like all after it
            if reply.left > 1:
                source = sources.get(reply.request.prompt)
                count = None if source is None else reply.shareable(source, live.serial, experts)
                if count is not None and source.fed < count:
                    continue  # its prompt is on its way
                if count is not None and self._make_room(reply, count):
                    self._cache.copy(source.held, reply.held, count)
                    reply.take(source, count)
                elif source is None or not source.knows_prompt(live.serial, experts):
                    sources[reply.request.prompt] = reply
            else:
                sources.setdefault(reply.request.prompt, reply)
            count = min(reply.left, budget) if reply.left > 1 else 1
            if count and place < len(self._running) and self._make_room(reply, count):
                found.append((reply, count))
                budget -= count if count > 1 else 0
        return sorted(found, key=lambda pair: pair[1] > 1)

    def _feed(self, feeding: list[tuple[Reply, int]], live: Live) -> Ended:
        spans = [Span(reply.held, reply.fed, count) for reply, count in feeding]
        tokens = [token for reply, count in feeding for token in reply.tokens[reply.fed : reply.fed + count]]
        last = np.cumsum([count for _, count in feeding]) - 1
        ready = [reply.left == count for reply, count in feeding]
        wanted = torch.from_numpy(last[ready])
        logits, chosen = live.decoder.step(torch.tensor(tokens), Plan(spans, self._cache), wanted)
        start, experts = 0, None if chosen is None else chosen.numpy()
        for reply, count in feeding:
            reply.feed(count, live.serial, None if experts is None else experts[start : start + count])
            start += count
        return self._draw([reply for (reply, _), now in zip(feeding, ready, strict=True) if now], logits, live.version)

    def _draw(self, replies: list[Reply], logits: Tensor, version: int) -> Ended:
        ended = Ended()
        if not replies:
            return ended
        drawn = _drawn(replies, logits)
        columns = (drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.model_logprobs.tolist())
        for reply, token, logprob, model in zip(replies, *columns, strict=True):
            if logprob != logprob:
                ended.broken.append(reply)
            elif reason := reply.draw(token, logprob, model, version):
                ended.replies.append((reply, reason))
        if ended.replies or ended.broken:
            self._leave({*ended.broken, *(reply for reply, _ in ended.replies)})
        return ended

    def _make_room(self, reply: Reply, count: int) -> bool:
        """Pages for its next `count` tokens, if need be those of replies begun later; False when it was put off itself."""
        while self._missing(reply, count) > self._cache.free:
            last = self._running[-1]
            if last is reply and len(self._running) == 1:
                self._cache.enlarge(reply.fed + count)
                break
            self._put_off(last)
            if last is reply:
                return False
        if reply.held is None:
            reply.held = self._cache.open()
        self._cache.extend(reply.held, reply.fed + count)
        return True

    def _missing(self, reply: Reply, count: int) -> int:
        have = 0 if reply.held is None else len(reply.held.pages)
        return max(0, pages_of(reply.fed + count) - have)

    def _put_off(self, reply: Reply) -> None:
        self._leave({reply})
        reply.forget()
        self._waiting.appendleft(reply)

    def _leave(self, replies: set[Reply]) -> None:
        self._running = [reply for reply in self._running if reply not in replies]
        for reply in replies:
            if reply.held is not None:
                self._cache.close(reply.held)
                reply.held = None


def _drawn(replies: list[Reply], logits: Tensor) -> Drawn:
    asked = [reply.request for reply in replies]
    rules = Rules(
        temperatures=np.array([request.temperature for request in asked], dtype=np.float32),
        top_k=np.array([request.top_k for request in asked]),
        top_p=np.array([request.top_p for request in asked]),
        min_p=np.array([request.min_p for request in asked]),
    )
    seeds = np.array([request.seed for request in asked], dtype=np.uint64)
    positions = np.array([len(reply.tokens) - len(reply.request.prompt) for reply in replies])
    return draw(logits, rules, torch.from_numpy(uniforms(seeds, positions)))
