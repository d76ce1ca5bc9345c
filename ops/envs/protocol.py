"""What a question is played in: who begins the conversation, and who answers the policy's replies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Message = dict[str, Any]
"""An OpenAI chat message: role, content, and tool_calls or tool_call_id where they apply."""


class EnvError(RuntimeError):
    """The environment cannot go on with this conversation; the message says why. The try counts as failed."""


@dataclass(frozen=True)
class Observation:
    """What the environment answers to a reply."""

    messages: tuple[Message, ...]
    """To be appended after the reply; empty when `done`."""
    done: bool
    """Whether the conversation is over."""
    truncated: bool = False
    """Whether it is over for want of turns: then the trajectory counts as cut off."""


class Episode(Protocol):
    """One conversation under way; used by one thread at a time, ended by `close` whatever happens."""

    def step(self, reply: Message, deadline: float) -> Observation:
        """Answer the policy's reply within `deadline` seconds; raises EnvError or TimeoutError."""

    def close(self) -> None:
        """Release what the episode holds; harmless when repeated."""


class Env(Protocol):
    """Safe for several threads; any number of episodes at once."""

    tools: tuple[dict[str, Any], ...]
    """OpenAI tool schemas offered to the policy; empty for none."""

    def begin(self, prompt: dict[str, Any]) -> list[Message]:
        """The conversation up to the first reply, for a row of table `prompts`."""

    def episode(self, prompt: dict[str, Any], seed: int) -> Episode:
        """A new conversation about this prompt; what is random in it follows from `seed`."""
