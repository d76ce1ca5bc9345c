"""Speculative decoding (Leviathan et al. 2023): a draft proposes tokens, and one step of the policy verifies them.

A step is fed a reply's last token and the proposals after it, a chain or a tree, and gives the policy's logits after each
of them: the very bits of as many single steps, as a token's do not depend on what is fed beside it (`row_bits`). What is
kept of them, and what is drawn after it, `ops.draft.verify` decides and proves lossless. With `match` even each token,
log-probability and choice of experts is that of decoding token by token, by induction over positions. What was fed beyond
the last token drawn does not count as fed: a chain's is overwritten when its positions are fed again, a tree's never stored.

With `match` the draft draws each proposal with the number that the policy draws with: the nearer its distribution is to the
policy's, the more often both inversions end at the same token. `rejection` needs numbers of their own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from furlong.ops.draft.cost import CostModel, Decision, StepSeconds
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.identity import counter_seed
from furlong.ops.policy.decoder import Taps
from furlong.ops.policy.draft_block import DraftBlock
from furlong.ops.policy.draft_chain import DraftChain
from furlong.ops.policy.draft_tree import DraftTree, nodes_of
from furlong.ops.policy.feed import Feed
from furlong.ops.policy.kv_cache import PAGE, KVCache
from furlong.ops.policy.live import Live
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.speculation_counts import SpeculationCounts

MOST_WAITING = PAGE
"""Positions of a reply whose features wait for the draft at most, so that they stay small beside its keys and values."""
OFF = Decision(0, "no draft")


@dataclass
class _Step:
    """The step under way."""

    decision: Decision
    begun: float
    extend: float = 0.0
    propose: float = 0.0


class Speculation:
    """Proposes for the replies of one batch, as many tokens as is measured to pay.

    But for that number, what it proposes follows from replies and weights alone, so that the ranks of a split model, which
    are told the number, propose the same.
    """

    def __init__(self, settings: DraftSettings | None):
        self._settings = settings
        self._model = CostModel(settings.proposals, not settings.adaptive) if settings else None
        self._serial: int | None = None
        self._step = _Step(OFF, 0.0)
        self.counts = SpeculationCounts()

    def decide(self, replies: int, live: Live | None) -> Decision:
        """How many proposals the next step should verify for each of so many replies that are up to date."""
        if self._model is None or live is None or live.drafter is None:
            return OFF
        if live.serial != self._serial:
            self._serial = live.serial
            self._model.renewed()
        return self._model.decide(max(1, replies))

    def begin(self, decision: Decision, live: Live, cache: KVCache, running: list[Reply]) -> Taps | None:
        """A step begins; what it has to take for the draft, None when replies are drawn without one."""
        self._step = _Step(decision, time.perf_counter())
        if self._settings is None or live.drafter is None:
            return None
        shape = live.drafter.shape
        if cache.attach(shape.layers, shape.kv_heads, shape.head_dim):
            for reply in running:
                reply.draft.forget()
        return Taps(shape.taps)

    def propose(self, feeding: list[Feed], live: Live, cache: KVCache, most_rows: int) -> None:
        """Add proposals where they can be made.

        Args:
            most_rows: of logits in a step.
        """
        ready = sum(feed.ready for feed in feeding)
        if live.drafter is None or not ready or not self._step.decision.proposals:
            return
        most, block = self._step.decision.proposals, live.drafter.shape.block
        while most > 0 and nodes_of(self._settings.width, most) >= most_rows // ready:
            most -= 1
        asked = [(feed, room) for feed in feeding if (room := self._room(feed, most, block, cache)) > 0]
        if not asked:
            return
        draft = self._proposer(live, cache)
        started = time.perf_counter()
        # Rows of one position come first in a plan.
        asked.sort(key=lambda pair: pair[0].reply.draft.pending > 1)
        hidden = draft.follow([feed.reply for feed, _ in asked], keep=0)
        followed = time.perf_counter()
        draft.propose(asked, hidden)
        self._step.extend, self._step.propose = followed - started, time.perf_counter() - followed

    def _proposer(self, live: Live, cache: KVCache) -> DraftChain | DraftTree | DraftBlock:
        coupled = self._settings.verify == "match"
        if live.drafter.shape.kind == "block":
            return DraftBlock(live, cache, coupled)
        if self._settings.width > 1:
            return DraftTree(live, cache, coupled, self._settings.width)
        return DraftChain(live, cache, coupled)

    def _room(self, feed: Feed, most: int, block: int, cache: KVCache) -> int:
        """How many proposals a reply can take, one after the other: it is up to date, its draft too, and no other is put
        off for them.

        Args:
            block: slots that the draft needs at least.
        """
        reply = feed.reply
        if reply.left != 1 or reply.draft.end != reply.fed or not reply.draft.pending or self.in_shadow(reply):
            return 0
        # What is verified gives one token more.
        room = min(most, reply.request.max_new_tokens - reply.position - 1)
        while room > 0 and cache.missing(reply.held, reply.fed + max(1 + room, block)) > cache.free:
            room -= 1
        if room > 0:
            cache.extend(reply.held, reply.fed + max(1 + room, block))
        return room

    def in_shadow(self, reply: Reply) -> bool:
        """Whether the reply is one of those drawn without the draft: a function of its request's id."""
        share = 0.0 if self._settings is None else self._settings.shadow
        return counter_seed("shadow", reply.request.request_id) < share * 2**63

    @property
    def rule(self) -> str:
        """By which proposals are verified."""
        return self._settings.verify if self._settings else "match"

    def follow(self, fed: list[tuple[Feed, int]], taps: Taps | None, live: Live, cache: KVCache) -> None:
        """Keep what the draft needs of the positions that count as fed.

        Args:
            fed: what the step was fed, in order, and how much of each counts.
        """
        if taps is None:
            return
        features, start = live.drafter.features(taps.seen), 0
        for feed, count in fed:
            reply = feed.reply
            # Those in the shadow give the draft's rows of their prompt to others with the same one.
            if not self.in_shadow(reply) or reply.fed <= len(reply.request.prompt):
                reply.draft.add(reply.fed - count, features[start : start + feed.total][feed.rows(count)])
            start += feed.total
        full = [feed.reply for feed, _ in fed if feed.reply.held and feed.reply.draft.pending > MOST_WAITING]
        if full:
            full.sort(key=lambda reply: reply.draft.pending > 2)
            # The token after the last position may not be drawn yet.
            self._proposer(live, cache).follow(full, keep=1)

    def end(self, feeding: list[Feed], positions: list[int], drawn: dict[Reply, int]) -> None:
        """Count what the step has done.

        Args:
            positions: where each reply's next token was, before the step.
            drawn: how many tokens each reply that was ready got.
        """
        if self._settings is None:
            return
        step, seconds = self._step, time.perf_counter() - self._step.begun
        speculated = [feed for feed in feeding if feed.proposals and drawn.get(feed.reply)]
        for feed, position in zip(feeding, positions, strict=True):
            if got := drawn.get(feed.reply):
                self.counts.replied(self.in_shadow(feed.reply), got, seconds)
                if feed.proposals:
                    self.counts.verified(position, *_judged(feed, got), feed.reply.request.task)
        if speculated:
            accepted = [drawn[feed.reply] - 1 for feed in speculated]
            self._model.verified([feed.depth for feed in speculated], accepted)
        # Steps that also computed prompts, or verified few replies only, say nothing of others.
        if not drawn or any(feed.count > 1 for feed in feeding):
            return
        kind = f"on: {step.decision.why}" if speculated else f"off: {step.decision.why}"
        if step.decision.proposals and not speculated:
            kind = "off: no reply can"
        self.counts.turned(kind, len(feeding), sum(drawn.values()), seconds, step.extend + step.propose)
        if step.decision is OFF or (step.decision.proposals and 2 * len(speculated) <= len(feeding)):
            return
        parts = StepSeconds(seconds - step.extend - step.propose, step.extend, step.propose)
        self._model.stepped(len(feeding), step.decision.proposals, parts)


def _judged(feed: Feed, drawn: int) -> tuple[int, int]:
    """To which depth a reply's proposals were judged, and how many were accepted.

    After one that ends the reply the policy draws no token of its own, and judges no further proposal.
    """
    return (drawn, drawn) if drawn < len(feed.path) else (feed.depth, drawn - 1)
