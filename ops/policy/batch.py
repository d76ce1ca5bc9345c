"""Continuous batching: replies join and leave between steps, and each step feeds every reply that is under way.

A step feeds one token of each reply that is up to date, with a draft's proposals after it if there is one, and at most
PREFILL_TOKENS of those that are not: new ones, and ones whose keys and values are to be computed again. Whatever is
decided here follows from the calls alone, so that the ranks of a split model, which get the same calls, decide the same.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from furlong.ops.draft.cost import Decision
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.decoder import Taps
from furlong.ops.policy.feed import Feed, drawn
from furlong.ops.policy.kv_cache import KVCache, pages_of
from furlong.ops.policy.live import Live
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.row_bits import row_bits
from furlong.ops.policy.speculation import Speculation
from furlong.ops.policy.tree_attention import keep
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
    decision: Decision | None = None
    """How many tokens a draft is to propose for each reply; None for the batch to decide by what it has measured."""


class Batch:
    """Requests run in the order they were added, as soon as rows and pages allow.

    When pages run out, the reply begun last is put off: it gives its pages back, and begins again, before those that
    wait, by computing keys and values of what it has. So the oldest one always goes on, and none waits for ever.
    """

    def __init__(self, whole: Architecture, part: Architecture, invariant: bool, draft: DraftSettings | None = None):
        """
        Args:
            whole: the model; part: what this rank has of it.
            invariant: a reply's bits do not depend on its company.
            draft: how to draw with the draft of weights that have one; None to draw without.
        """
        self._part = part
        self._cache: KVCache | None = None
        """Made at the first step, as it is in the dtype of the weights."""
        self._most_rows = max(1, MOST_LOGITS // whole.vocab)
        self._invariant = invariant
        self._speculation = Speculation(draft)
        self._drafts = draft is not None
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

    def speculation(self) -> dict[str, Any]:
        """See `SpeculationCounts.report`; any thread may ask."""
        return self._speculation.counts.report()

    @torch.inference_mode()
    def turn(self, turn: Turn, live: Live | None) -> Ended:
        """Do what the turn says, then a step, unless `live` is None."""
        self._waiting.extend(Reply(request, drafted=[] if self._drafts else None) for request in turn.requests)
        ended = self._end(turn.reasons)
        if turn.retract:
            for reply in self._running:
                reply.forget()
        if live is not None:
            stepped = self._step(live, turn.decision or self.decide(live))
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

    def decide(self, live: Live | None) -> Decision:
        """What the next step does of its own accord."""
        return self._speculation.decide(sum(reply.left == 1 for reply in self._running), live)

    def _step(self, live: Live, decision: Decision) -> Ended:
        """One forward pass over at least one token, when there is any request."""
        if self._cache is None:
            self._cache = KVCache(self._part, live.decoder.dtype, CACHE_BYTES)
        with row_bits(self._invariant):
            self._begin()
            feeding = self._schedule(live)
            if not feeding:
                return Ended()
            taps = self._speculation.begin(decision, live, self._cache, self._running)
            self._speculation.propose(feeding, live, self._cache, self._most_rows)
            order = sorted(feeding, key=lambda feed: (feed.tree is not None, feed.total > 1))
            return self._feed(order, live, taps)

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

    def _schedule(self, live: Live) -> list[Feed]:
        """Which replies to feed how many tokens; their pages are there afterwards."""
        budget, found = PREFILL_TOKENS, []
        sources: dict[tuple[int, ...], Reply] = {}
        experts = live.decoder.architecture.experts > 0
        for place, reply in enumerate(list(self._running)):
            if place >= len(self._running):
                break  # put off for older ones, like all after it
            if reply.left > 1:
                source = sources.get(reply.request.prompt)
                count = None if source is None else reply.shareable(source, live.serial, experts)
                if count is not None and live.drafter is not None:
                    # The draft's row of a prompt's last token is made of the reply's first one too.
                    count = min(count, len(reply.request.prompt) - 1)
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
                found.append(Feed(reply, count))
                budget -= count if count > 1 else 0
        return found

    def _feed(self, feeding: list[Feed], live: Live, taps: Taps | None) -> Ended:
        spans = [Span(feed.reply.held, feed.reply.fed, feed.total) for feed in feeding if feed.tree is None]
        plan = Plan(spans, self._cache, [feed.tree for feed in feeding if feed.tree])
        tokens, wanted = [], []
        for feed in feeding:
            tokens += feed.tokens
            wanted += range(len(tokens) - len(feed.proposals) - 1, len(tokens)) if feed.ready else []
        rows = torch.tensor(wanted, dtype=torch.long)
        seen = () if taps is None else (taps,)
        logits, chosen = live.decoder.step(torch.tensor(tokens), plan, rows, *seen)
        positions = [feed.reply.position for feed in feeding]
        ready, logits = self._sound([feed for feed in feeding if feed.ready], logits)
        ended, got = self._draw(ready, logits, live)
        start, experts, fed, kept = 0, None if chosen is None else chosen.numpy(), [], []
        for feed in feeding:
            # Of the proposals, those count as fed that another token was drawn after.
            count = feed.count + max(0, got.get(feed.reply, 1) - 1) if not feed.withdrawn else 0
            mine = None if experts is None else experts[start : start + feed.total][feed.rows(count)]
            feed.reply.feed(count, live.serial, mine)
            fed.append((feed, count))
            if feed.tree and count:
                kept.append((feed.tree, feed.path[:count]))
            start += feed.total
        keep(kept, self._cache)
        if ended.replies or ended.broken:
            self._leave({*ended.broken, *(reply for reply, _ in ended.replies)})
        self._speculation.follow(fed, taps, live, self._cache)
        self._speculation.end(feeding, positions, got)
        return ended

    def _sound(self, ready: list[Feed], logits: Tensor) -> tuple[list[Feed], Tensor]:
        """The replies to draw for, and their rows.

        A proposal may have keys and values that are not finite, which a probability of 0 does not hide from the tokens
        before it. Then the hidden state was not finite either, so that none of its logits is. Such a reply is fed again,
        without proposals, in the next step.
        """
        if not any(feed.proposals for feed in ready) or bool((sound := logits[:, 0].isfinite()).all()):
            return ready, logits
        kept, rows, start = [], [], 0
        for feed in ready:
            mine = range(start, start + 1 + len(feed.proposals))
            start += len(mine)
            feed.withdrawn = bool(feed.proposals) and not bool(sound[mine.start : mine.stop].all())
            if feed.withdrawn:
                self._cache.blank(feed.reply.held, feed.reply.fed)
            else:
                kept.append(feed)
                rows += mine
        return kept, logits[rows]

    def _draw(self, ready: list[Feed], logits: Tensor, live: Live) -> tuple[Ended, dict[Reply, int]]:
        """Which replies ended, and how many tokens each got."""
        ended, got = Ended(), {}
        if not ready:
            return ended, got
        ids = live.drafter.ids if live.drafter else None
        for feed, tokens in zip(ready, drawn(ready, logits, self._speculation.rule, ids), strict=True):
            reply, got[feed.reply] = feed.reply, 0
            for place, (token, logprob, model) in enumerate(tokens):
                if logprob != logprob:
                    ended.broken.append(reply)
                    break
                got[reply] += 1
                if reason := reply.draw(token, logprob, model, live.version, place < len(feed.path) - 1):
                    ended.replies.append((reply, reason))
                    break
        return ended, got

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
