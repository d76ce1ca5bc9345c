"""Keeps the ranks of a split engine in step: all take the same turns and draw the same tokens, so only what the leader
alone knows is told: the requests, which of them to end, and the weights to step with.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from furlong.ops.draft.cost import Decision
from furlong.ops.policy.batch import Ended, Turn
from furlong.ops.protocols import GenerateRequest


def turn_to_json(turn: Turn) -> dict[str, Any]:
    """Plain lists and dictionaries; `turn_from_json` gives an equal turn."""
    return asdict(turn)


def turn_from_json(body: dict[str, Any]) -> Turn:
    """What `turn_to_json` was given."""
    requests = [
        GenerateRequest(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
        for row in body["requests"]
    ]
    decision = None if body["decision"] is None else Decision(**body["decision"])
    return Turn(tuple(requests), body["reasons"], body["retract"], decision)


def drawn_digest(ended: Ended) -> str:
    """Equal exactly when two ranks drew the same tokens with the same weights versions."""
    rows = [(reply.request.request_id, reply.tokens, reply.versions, reason) for reply, reason in ended.replies]
    broken = [reply.request.request_id for reply in ended.broken]
    return hashlib.blake2b(repr((rows, broken)).encode(), digest_size=16).hexdigest()
