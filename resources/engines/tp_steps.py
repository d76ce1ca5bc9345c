"""Keeps the ranks of a split engine in step: all draw the same tokens, so only what the leader alone knows is told.

That is with which weights the next step runs, and which requests end before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from furlong.ops.policy.sampling import NonFiniteLogits
from furlong.ops.policy.wave import Live
from furlong.ops.protocols import Sample
from furlong.resources.engines.step_gate import StepGate
from furlong.resources.engines.tp_channel import Channel


class BatchEnded(Exception):
    """The leader has given up the batch between two steps."""


class LeaderSteps:
    """The gate's steps, told to the other ranks. Implements `StepSource`."""

    def __init__(self, gate: StepGate, tell: Callable[[dict[str, Any]], None], lost: Callable[[Exception], Exception]):
        """
        Args:
            tell: sends the other ranks a message.
            lost: called when a step broke off in the middle, which leaves the other ranks waiting in it for ever; it
                ends them and gives the error to raise.
        """
        self._gate, self._tell, self._lost = gate, tell, lost
        self.ended = gate.aborted()

    @contextmanager
    def step(self) -> Iterator[Live | None]:
        with self._gate.step() as live:
            if live is None:
                self.ended = self._gate.aborted()
                self._tell({"ended": sorted(self.ended)})
                yield None
                return
            self._tell({"serial": live.serial})
            try:
                yield live
            except NonFiniteLogits:
                raise  # every rank has the same logits, and raises it too
            except Exception as err:
                raise self._lost(err) from err

    def aborted(self) -> frozenset[str]:
        return self.ended

    def finished(self, request_id: str) -> None:
        self._gate.finished(request_id)


class FollowerSteps:
    """What the leader tells. Implements `StepSource`."""

    def __init__(self, channel: Channel, find: Callable[[int], Live], ended: list[str]):
        self._channel, self._find = channel, find
        self._ended = frozenset(ended)

    @contextmanager
    def step(self) -> Iterator[Live | None]:
        # No deadline: a pause may be long, and the process ends with its leader.
        message, _ = self._channel.receive(None)
        if "serial" in message:
            yield self._find(message["serial"])
        elif "ended" in message:
            self._ended = frozenset(message["ended"])
            yield None
        else:
            raise BatchEnded("the leader gave this batch up; see its error")

    def aborted(self) -> frozenset[str]:
        return self._ended

    def finished(self, request_id: str) -> None:
        """The leader counts the running ones."""


def drawn_digest(samples: list[Sample]) -> str:
    """Equal exactly when two ranks drew the same tokens with the same weights versions."""
    rows = [(s.request_id, s.tokens, s.versions, s.finish_reason) for s in samples]
    return hashlib.blake2b(repr(rows).encode(), digest_size=16).hexdigest()
