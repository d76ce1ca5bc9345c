"""Expert ids of a conversation out of those of its replies: what was recorded first is never replaced."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.ops.protocols import Routing
from furlong.ops.sessions.node import Node


def part(routing: Routing, begin: int, end: int) -> Routing:
    """The rows of positions [begin, end), as far as there are any."""
    from furlong.ops.policy.routing import decode, encode

    low = max(begin, routing.first)
    rows = decode(routing)[low - routing.first : max(end, low) - routing.first]
    return encode(low, rows, routing.layers, routing.experts)


def of_conversation(nodes: Sequence[Node]) -> Routing | None:
    """The routing of a conversation, from its first token on; None for a model without experts.

    Each turn computes the tokens before it again, at most; the rows of the turn that was first with a token count.

    Raises:
        ValueError: some replies have a routing and others none, or rows are missing between two.
    """
    from furlong.ops.policy.routing import join

    recorded = [node.sample.routing for node in nodes]
    if not any(recorded):
        return None
    if not all(recorded):
        raise ValueError(
            f"reply {recorded.index(None)} of the conversation has no routing and others have; draw it again"
        )
    parts, done = [], 0
    for index, routing in enumerate(recorded):
        # a stop token that the next turn leaves out has had no forward pass in this conversation
        end = min(routing.first + routing.rows, nodes[index + 1].kept if index + 1 < len(nodes) else 1 << 62)
        if end > done:
            parts.append(part(routing, done, end))
            done = end
    return join(parts)
