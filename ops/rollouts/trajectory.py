"""What playing a prompt gives: trajectories, or a typed failure for each try that gave none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from furlong.ops.protocols import GenerateRequest, Routing, Sample
from furlong.ops.records import Failure

Draw = Callable[[list[GenerateRequest], str], list[Sample]]
"""Draws all replies, in the order asked; the text names what should stay on one engine, e.g. a group. Of no requests it
gives no replies, or raises what it would raise of others."""


class EngineLost(RuntimeError):
    """No engine could draw the replies, however often it was tried; the message says what was lost."""


@dataclass(frozen=True)
class Task:
    """One try at one trajectory."""

    trajectory_id: str
    """`<group_id>-s<sample>`, the same for every try; leaves after the first add `-l<leaf>`."""
    sample: int
    """Number within the group."""
    seed: int
    """63-bit root of everything random in this try; turn t > 0 of a conversation draws with a seed made from it and t."""
    attempt: int = 0
    """Number of the try; requests of later ones have ids of their own."""


@dataclass(frozen=True)
class Trajectory:
    """One conversation, token by token. Per-token tuples run over all of it and have one length."""

    trajectory_id: str
    sample: int
    leaf: int
    """0, or the number of a further branch of the same sample."""
    turns: int
    """Replies drawn."""
    messages: list[dict[str, Any]]
    """The conversation as OpenAI chat messages, the last reply included."""
    prompt: int
    """Number of tokens before the first sampled one."""
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    """None where nothing was sampled; else as `Sample.logprobs`."""
    model_logprobs: tuple[float | None, ...]
    loss_mask: tuple[bool, ...]
    """True where the policy sampled the token and, of tokens that leaves share, in the first leaf only."""
    versions: tuple[tuple[int, int, int], ...]
    """Spans (weights version, start, end) over `tokens`: exactly the sampled tokens."""
    finish_reason: str
    """Of the last reply; `length` too when the environment's turns ran out."""
    seed: int
    text: str
    """The last reply without its stop token, as the verifier gets it."""
    seconds: float
    """From the first request to the end."""
    routing: Routing | None = None
    """Of the whole conversation, from its first token on."""
    drafted: tuple[bool, ...] | None = None
    """As `Sample.drafted`; False where nothing was sampled."""


@dataclass(frozen=True)
class Failed:
    """One try that gave no trajectory."""

    trajectory_id: str
    sample: int
    attempt: int
    kind: Failure
    detail: str
    """One line for a person."""
    tokens: int
    """Sampled tokens that are thrown away with it."""


Outcome = list[Trajectory] | Failed
"""Of one task: the leaves of its sample, at least one, or why there are none."""
