"""What speculation has done since its batch began: counted where it happens, read by an engine's health."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

POSITIONS = (64, 256, 1024, 4096)
"""Where buckets of positions in a reply end; the last bucket has no end."""


@dataclass
class SpeculationCounts:
    """Depths count from 0 here; a verify is one reply's share of one step with proposals."""

    verifies: int = 0
    drawn: int = 0
    """Proposals accepted, and one for each verify, so that drawn / verifies is the acceptance length. A verify gives as many
    tokens, but where a proposal ended the reply: then one less."""
    proposed: Counter[int] = field(default_factory=Counter)
    """By depth."""
    accepted: Counter[int] = field(default_factory=Counter)
    """By depth."""
    verifies_at: Counter[int] = field(default_factory=Counter)
    """By the bucket of the position where a verify began."""
    drawn_at: Counter[int] = field(default_factory=Counter)
    verifies_of: Counter[str] = field(default_factory=Counter)
    """By the task of the reply's question."""
    drawn_of: Counter[str] = field(default_factory=Counter)
    turns: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Steps that drew tokens and computed no prompts, by what became of speculation, beginning with `on` or `off`, and the
    size of the batch: n for more than 2^(n-1) and at most 2^n replies."""
    turn_tokens: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Tokens drawn in them."""
    turn_seconds: Counter[tuple[str, int]] = field(default_factory=Counter)
    draft_seconds: float = 0.0
    """Part of the seconds that the draft took."""
    reply_tokens: Counter[bool] = field(default_factory=Counter)
    """Tokens drawn, by whether the reply is in the shadow."""
    reply_seconds: Counter[bool] = field(default_factory=Counter)
    """Seconds of the steps that drew them, once for each reply that took part."""

    def verified(self, position: int, proposed: int, accepted: int, task: str = "") -> None:
        """One reply's proposals were verified.

        Args:
            position: in the reply, of the first token drawn.
            proposed: those that the policy judged.
            task: of the reply's question.
        """
        bucket = sum(position >= end for end in POSITIONS)
        self.verifies += 1
        self.drawn += accepted + 1
        self.verifies_at[bucket] += 1
        self.drawn_at[bucket] += accepted + 1
        self.verifies_of[task] += 1
        self.drawn_of[task] += accepted + 1
        self.proposed.update(range(proposed))
        self.accepted.update(range(accepted))

    def replied(self, shadow: bool, drawn: int, seconds: float) -> None:
        """A step drew tokens of one reply."""
        self.reply_tokens[shadow] += drawn
        self.reply_seconds[shadow] += seconds

    def turned(self, kind: str, replies: int, drawn: int, seconds: float, draft_seconds: float) -> None:
        """A step drew tokens of so many replies."""
        key = (kind, (replies - 1).bit_length())
        self.turns[key] += 1
        self.turn_tokens[key] += drawn
        self.turn_seconds[key] += seconds
        self.draft_seconds += draft_seconds

    def speedup(self) -> float | None:
        """How many times as long all steps would have taken at the pace of those without proposals, batch size by batch
        size; None when no size has both. Sizes that have no such steps are left out."""
        plain = {size: [0, 0.0] for _, size in list(self.turns)}
        every = {size: [0, 0.0] for size in plain}
        for key in list(self.turns):
            for found in (every, plain) if key[0].startswith("off") else (every,):
                found[key[1]][0] += self.turn_tokens[key]
                found[key[1]][1] += self.turn_seconds[key]
        both = [size for size in plain if plain[size][0]]
        taken = sum(every[size][1] for size in both)
        if not taken or all(every[size] == plain[size] for size in both):
            return None
        return sum(every[size][0] * plain[size][1] / plain[size][0] for size in both) / taken

    def report(self) -> dict[str, Any]:
        """Plain numbers; lists are by depth from 1, `positions` by bucket, `steps` by kind and size of the batch.

        A reply in the shadow takes part in steps that verify others' proposals, so that `replies` compares latencies;
        `speedup` compares steps.
        """
        depths = range(max(list(self.proposed), default=-1) + 1)
        ends = [*POSITIONS, None]
        return {
            "verifies": self.verifies,
            "proposed": [self.proposed[depth] for depth in depths],
            "accepted": [self.accepted[depth] for depth in depths],
            "acceptance_length": self.drawn / self.verifies if self.verifies else None,
            "positions": [
                {"below": ends[at], "verifies": self.verifies_at[at], "tokens": self.drawn_at[at]}
                for at in sorted(self.verifies_at)
            ],
            "tasks": [
                {"task": task, "verifies": self.verifies_of[task], "tokens": self.drawn_of[task]}
                for task in sorted(self.verifies_of)
            ],
            "steps": [
                {
                    "kind": key[0],
                    "replies": 2 ** key[1],
                    "count": self.turns[key],
                    "tokens": self.turn_tokens[key],
                    "seconds": self.turn_seconds[key],
                }
                for key in sorted(self.turns)
            ],
            "speedup": self.speedup(),
            "draft_seconds": self.draft_seconds,
            "replies": {
                name: {"tokens": self.reply_tokens[shadow], "seconds": self.reply_seconds[shadow]}
                for name, shadow in (("drafted", False), ("shadow", True))
            },
        }
