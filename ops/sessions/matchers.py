"""Whether a message that an agent sends back is the one that the session keeps.

Where they match, the kept spelling stays. Each takes (kept, replayed, sampled): `sampled` tells that the kept message is
a reply of the policy.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from furlong.ops.sessions.messages import Message

Matcher = Callable[[Message, Message, bool], bool]


def strict(kept: Message, replayed: Message, sampled: bool) -> bool:
    """Nothing may differ."""
    return kept == replayed


def loose_tool_call(kept: Message, replayed: Message, sampled: bool) -> bool:
    """Arguments of tool calls are compared as JSON; ids, and what a client adds to a message, may differ."""
    return role_content(kept, replayed, sampled) and _calls(kept) == _calls(replayed)


def role_content(kept: Message, replayed: Message, sampled: bool) -> bool:
    """Only role and text must agree."""
    return (kept["role"], kept["content"]) == (replayed["role"], replayed["content"])


def replies_in_place(kept: Message, replayed: Message, sampled: bool) -> bool:
    """Whatever assistant message stands where a reply was is that reply: for harnesses that rewrite their history."""
    if sampled:
        return replayed["role"] == kept["role"]
    return loose_tool_call(kept, replayed, sampled)


MATCHERS: dict[str, Matcher] = {
    matcher.__name__: matcher for matcher in (strict, loose_tool_call, role_content, replies_in_place)
}


def _calls(message: Message) -> list[tuple[str, Any]]:
    return [
        (call["function"]["name"], _json(call["function"]["arguments"])) for call in message.get("tool_calls") or []
    ]


def _json(arguments: str) -> Any:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments
