"""One question, one reply."""

from __future__ import annotations

from typing import Any

from furlong.ops.envs.protocol import Message, Observation

_OVER = Observation((), done=True)


def opening(system: str, question: str) -> list[Message]:
    """The conversation up to the first reply; no system message when `system` is empty."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": question}]


class SingleTurn:
    """An `Env` whose conversations are over after the first reply."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, system: str = ""):
        self._system = system

    def begin(self, prompt: dict[str, Any]) -> list[Message]:
        """System message and question."""
        return opening(self._system, prompt["question"])

    def episode(self, prompt: dict[str, Any], seed: int) -> SingleTurn:
        """The environment itself: an episode holds nothing."""
        return self

    def step(self, reply: Message, deadline: float) -> Observation:
        """The end."""
        return _OVER

    def close(self) -> None:
        """Nothing is held."""
