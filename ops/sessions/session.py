"""One conversation with the policy, or a tree of them, kept as the tokens that were sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.ops.identity import counter_seed
from furlong.ops.protocols import Sample
from furlong.ops.rollouts.spans import cover
from furlong.ops.rollouts.trajectory import Trajectory
from furlong.ops.sessions.drift import check_drift
from furlong.ops.sessions.leaves import kept_leaves, to_trajectory
from furlong.ops.sessions.matchers import Matcher, loose_tool_call
from furlong.ops.sessions.messages import Message, normalise, normalise_tools
from furlong.ops.sessions.node import Node, path, tokens_of
from furlong.ops.sessions.parse import parse_reply
from furlong.ops.sessions.stops import cut
from furlong.ops.sessions.template import ChatTemplate

MOST_REPLIES = 1024
"""Replies that one session holds; an agent that asks for more is going round in circles."""


class SessionError(ValueError):
    """A request or a reply that does not fit the session, which stays as it was; the message says why."""


class CutReply(SessionError):
    """The request goes on after a reply that was cut off, so that the policy never said what comes next."""


@dataclass(frozen=True)
class Turn:
    """A reply that is asked for."""

    parent: int | None
    """The reply before; None at the beginning of a conversation."""
    appended: tuple[Message, ...]
    """Messages after it, or from the beginning."""
    tools: tuple[dict[str, Any], ...]
    kept: int
    """How many of the parent's tokens the prompt begins with: all, or all but a stop token that the template replaces."""
    prompt: tuple[int, ...]
    """Token ids of the whole conversation, ready for the reply."""
    number: int
    """Replies before it in its conversation."""
    seen: int
    """Replies of the session when this one was asked for."""
    calls: bool
    """Whether tool calls are looked for in the reply."""


class Session:
    """A forest of replies: a request goes on after the longest conversation that it begins with, or starts a new one.

    `plan` is pure, and `commit` changes everything or nothing. Not safe for several threads; any number of turns may be
    planned before they are committed, in any order.
    """

    def __init__(self, template: ChatTemplate, matcher: Matcher = loose_tool_call):
        self.template = template
        self.nodes: list[Node] = []
        """Replies in the order of their commits."""
        self._matcher = matcher

    def plan(self, messages: list[Message], tools: Any = None, calls: bool = True) -> Turn:
        """What to draw a reply to these messages from; nothing is kept of it until `commit`.

        Args:
            messages: the whole conversation; where it repeats the session's, the session's spelling is used.
            tools: OpenAI tool schemas on offer.
            calls: False to read the reply as text whatever it looks like.
        Raises:
            MessageError: not a conversation that a reply can follow.
            TemplateError: the chat template cannot carry it.
            CutReply: the reply before was cut off.
            SessionError: the session is full.
        """
        asked, offered = normalise(messages), normalise_tools(tools)
        self._check_room(1)
        parent, matched = self._deepest(asked, offered)
        calls = calls and bool(offered)
        if parent is None:
            prompt = tuple(self.template.prompt_ids(asked, offered))
            return Turn(None, tuple(asked), offered, 0, prompt, 0, len(self.nodes), calls)
        sample = self.nodes[parent].sample
        if sample.finish_reason != "stop":
            raise CutReply(
                f"the reply before was cut off ({sample.finish_reason}) and cannot be followed; end the conversation there, "
                "or allow longer replies"
            )
        last = sample.tokens[-1]
        ended_by = last if last in self.template.stop_ids else None
        suffix = self.template.suffix(self.conversation(parent), asked[matched:], offered, ended_by)
        before = tokens_of(self.nodes, parent)
        kept = len(before) - suffix.dropped
        number = sum(1 for _ in path(self.nodes, parent))
        prompt = (*before[:kept], *suffix.ids)
        return Turn(parent, tuple(asked[matched:]), offered, kept, prompt, number, len(self.nodes), calls)

    def commit(self, turn: Turn, sample: Sample, stop: Sequence[str] = ()) -> Message:
        """Append the reply and return it as an assistant message. See `commit_all`."""
        return self.commit_all(turn, [sample], stop)[0]

    def commit_all(self, turn: Turn, samples: Sequence[Sample], stop: Sequence[str] = ()) -> list[Message]:
        """Append the replies to one turn, side by side, all or none; see `make_nodes` for the errors."""
        nodes = self.make_nodes(turn, samples, stop)
        self.nodes.extend(nodes)
        return [node.reply for node in nodes]

    def make_nodes(self, turn: Turn, samples: Sequence[Sample], stop: Sequence[str] = ()) -> list[Node]:
        """What `commit_all` would append; for callers that write it down first.

        Args:
            stop: texts that end a reply; what was sampled after the first is cut off.
        Raises:
            SessionError: a sample that is not a whole reply, a turn of another session, or a full session.
        """
        self._check_room(len(samples))
        before = tokens_of(self.nodes, turn.parent) if self._knows(turn.parent) else None
        if before is None or before[: turn.kept] != turn.prompt[: turn.kept]:
            raise SessionError("the turn was planned by another session; commit a reply where its prompt was planned")
        nodes = []
        for offset, sample in enumerate(samples):
            _check_sample(sample)
            sample, text = cut(self.template, sample, stop, len(turn.prompt))
            name = str(len(self.nodes) + offset)
            reply = parse_reply(text, name) if turn.calls else {"role": "assistant", "content": text}
            extra = turn.prompt[turn.kept :]
            nodes.append(Node(turn.parent, turn.seen, turn.appended, reply, turn.tools, turn.kept, extra, sample, text))
        return nodes

    def conversation(self, node: int) -> list[Message]:
        """All messages up to this reply, in the session's spelling."""
        return [m for each in path(self.nodes, node) for m in (*each.appended, each.reply)]

    def trajectories(self, trajectory_id: str, sample: int, seed: int) -> list[Trajectory]:
        """One per leaf, in the order of their commits: the first is `trajectory_id`, the others add `-l<leaf>`.

        A leaf whose very request was repeated after it was answered is left out. Of the tokens that leaves share, the loss
        mask is true in the first alone.
        """
        trained: dict[int, int] = {}
        return [
            to_trajectory(self.nodes, node, trained, trajectory_id, sample, leaf, seed)
            for leaf, node in enumerate(kept_leaves(self.nodes))
        ]

    def check(self) -> int:
        """Render every conversation again and compare; see `drift.check_drift`. Returns how many texts differ."""
        return sum(
            check_drift(self.template, trajectory, self.nodes[node].tools)
            for node, trajectory in zip(kept_leaves(self.nodes), self.trajectories("", 0, 0), strict=True)
        )

    @property
    def sampled(self) -> int:
        """Tokens sampled in all."""
        return sum(len(node.sample.tokens) for node in self.nodes)

    def _deepest(self, asked: list[Message], offered: tuple[dict[str, Any], ...]) -> tuple[int | None, int]:
        """The reply that ends the longest conversation which `asked` begins with, and how many messages that has."""
        found = [(matched, self.nodes[node].sample.finish_reason == "stop", exact, node)
                 for node, matched, exact in self._matches(asked, offered)]  # fmt: skip
        if not found:
            return None, 0
        matched, _, _, node = max(found)
        return node, matched

    def _matches(self, asked: list[Message], offered: Any) -> Iterator[tuple[int, int, int]]:
        """Replies whose whole conversation `asked` begins with: (node, messages, those of them spelled alike)."""
        reached: dict[int | None, tuple[int, int]] = {None: (0, 0)}
        for index, node in enumerate(self.nodes):
            begin, exact = reached.get(node.parent, (-1, 0))
            mine = (*node.appended, node.reply)
            theirs = asked[begin : begin + len(mine)] if begin >= 0 else []
            if node.tools != offered or len(theirs) < len(mine) or begin + len(mine) >= len(asked):
                continue
            if all(self._matcher(a, b, a is node.reply) for a, b in zip(mine, theirs, strict=True)):
                alike = exact + sum(a == b for a, b in zip(mine, theirs, strict=True))
                reached[index] = begin + len(mine), alike
                yield index, begin + len(mine), alike

    def _knows(self, parent: int | None) -> bool:
        return parent is None or 0 <= parent < len(self.nodes)

    def _check_room(self, more: int) -> None:
        if len(self.nodes) + more > MOST_REPLIES:
            raise SessionError(f"the session would hold more than {MOST_REPLIES} replies; end the agent's loop earlier")


def turn_seed(seed: int, number: int, ordinal: int = 0) -> int:
    """Seed of a reply: `number` replies come before it in its conversation, `ordinal` were drawn at that depth before."""
    if not number and not ordinal:
        return seed
    return counter_seed(seed, number, ordinal) if ordinal else counter_seed(seed, number)


def _check_sample(sample: Sample) -> None:
    name, count = sample.request_id, len(sample.tokens)
    if sample.finish_reason not in ("stop", "length", "deadline") or not count:
        raise SessionError(f"reply {name} has {count} tokens and ended by {sample.finish_reason}; draw it again")
    if not count == len(sample.logprobs) == len(sample.model_logprobs):
        raise SessionError(f"reply {name}: {count} tokens, {len(sample.logprobs)} and {len(sample.model_logprobs)} "
                           "log-probabilities; mend the engine")  # fmt: skip
    for value in (*sample.logprobs, *sample.model_logprobs):
        if not (math.isfinite(value) and value <= 0):
            raise SessionError(f"reply {name} has a log-probability of {value}; check the weights and the engine")
    if not cover(sample.versions, count):
        raise SessionError(f"reply {name}: spans {sample.versions} are not those of {count} tokens; mend the engine")
