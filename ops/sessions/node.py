"""A reply as a session keeps it, and the way to it from the beginning of its conversation."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from furlong.ops.protocols import Routing, Sample
from furlong.ops.sessions.messages import Message


@dataclass(frozen=True)
class Node:
    """A reply, with what was asked since the one before."""

    parent: int | None
    """Index of the reply before."""
    seen: int
    """Replies of the session when this one was asked for."""
    appended: tuple[Message, ...]
    """Messages since the reply before, or from the beginning."""
    reply: Message
    tools: tuple[dict[str, Any], ...]
    """On offer when it was drawn."""
    kept: int
    """How many tokens, up to the end of the reply before, come first."""
    extra: tuple[int, ...]
    """Tokens between those and the reply."""
    sample: Sample
    text: str
    """The reply as it reads, without its stop token or stop text."""


def path(nodes: Sequence[Node], node: int | None) -> list[Node]:
    """The replies from the beginning up to this one."""
    found = []
    while node is not None:
        found.append(nodes[node])
        node = nodes[node].parent
    return found[::-1]


def tokens_of(nodes: Sequence[Node], node: int | None) -> tuple[int, ...]:
    """All tokens of a conversation up to the end of this reply."""
    tokens: list[int] = []
    for each in path(nodes, node):
        del tokens[each.kept :]
        tokens += (*each.extra, *each.sample.tokens)
    return tuple(tokens)


def to_json(node: Node) -> dict[str, Any]:
    """Plain data that `from_json` gives the same reply back from."""
    row = asdict(node)
    if node.sample.routing:
        row["sample"]["routing"]["data"] = base64.b64encode(node.sample.routing.data).decode()
    return row


def from_json(row: dict[str, Any]) -> Node:
    """A reply written by `to_json`; KeyError or TypeError when it is something else."""
    sample = dict(row["sample"])
    for name in ("tokens", "logprobs", "model_logprobs"):
        sample[name] = tuple(sample[name])
    sample["versions"] = tuple((version, start, end) for version, start, end in sample["versions"])
    if routing := sample["routing"]:
        sample["routing"] = Routing(
            **{**routing, "layers": tuple(routing["layers"]), "data": base64.b64decode(routing["data"])}
        )
    if sample["drafted"] is not None:
        sample["drafted"] = tuple(sample["drafted"])
    lists = {name: tuple(row[name]) for name in ("appended", "tools", "extra")}
    return Node(**{**row, **lists, "sample": Sample(**sample)})
