"""How much an SGLang server takes at once, chosen from the model's size and the machine's memory."""

from __future__ import annotations

from dataclasses import dataclass

from furlong.ops.policy.architecture import Architecture
from furlong.resources.engines.step_gate import EngineError

RUNNING = 32
"""Requests decoded at once, each with room for a usual reply."""
USUAL_TOKENS = 2048
SHARE = 0.25
"""Of the free memory, for keys and values."""
SPARE = 8
"""Positions that SGLang keeps to itself at the end of a request's context."""


@dataclass(frozen=True)
class Capacity:
    """What the client keeps to, so that the server never has to take a running request back."""

    running: int
    """Requests at once."""
    tokens: int
    """Positions in the server's cache: prompts and whole replies of all requests that it has."""
    longest: int
    """Positions of one request."""


def choose(architecture: Architecture, element_bytes: int, free_bytes: int) -> Capacity:
    """Room for 32 requests of the model's context, or of 2048 tokens where it is longer; less where memory is short.

    Args:
        element_bytes: of one number of a key or a value.
        free_bytes: memory that nobody uses.
    Raises:
        EngineError: not one request of the model's context fits.
    """
    per_token = token_bytes(architecture, element_bytes)
    one = architecture.context + 2 * SPARE
    wanted = max(one, RUNNING * min(one, USUAL_TOKENS + 2 * SPARE))
    tokens = min(wanted, int(free_bytes * SHARE) // per_token)
    if tokens < one:
        raise EngineError(
            f"a context of {architecture.context} tokens takes {one * per_token} bytes of keys and values, more than "
            f"{SHARE:.0%} of the {free_bytes} bytes of free memory; lower max_position_embeddings, or make room"
        )
    return Capacity(RUNNING, tokens, architecture.context)


def token_bytes(architecture: Architecture, element_bytes: int) -> int:
    """What the server keeps per token: keys, values and, as 4-byte numbers, experts."""
    pairs = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim * element_bytes
    return pairs + 4 * architecture.layers * architecture.top_k


def read(architecture: Architecture, info: dict[str, object]) -> Capacity:
    """That of a server somebody else started, by its own account (`/server_info`)."""
    tokens = int(info["max_total_num_tokens"])
    context = int(info.get("context_length") or architecture.context)
    longest = min(architecture.context, context - SPARE, tokens - SPARE)
    return Capacity(int(info.get("max_running_requests") or RUNNING), tokens, longest)
