"""The thread that draws replies: it takes turns of a batch while there are requests, and ends some time after the last."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import Ended, Turn
from furlong.ops.policy.live import Live
from furlong.ops.policy.sampling import NonFiniteLogits
from furlong.ops.protocols import GenerateRequest
from furlong.resources.engines.outbox import Outbox
from furlong.resources.engines.step_gate import StepGate

IDLE_SECONDS = 2.0
"""How long the thread waits for further requests. It ends then, so that an engine nobody refers to can be freed."""


class Turns(Protocol):
    """Takes turns of one batch: `OneRank` and `TpRanks`."""

    @property
    def waiting(self) -> int:
        """Requests of the batch that have not begun."""

    def turn(self, turn: Turn, live: Live | None) -> Ended:
        """See `Batch.turn`; other errors than those of single requests may leave the batch in any state."""

    def clear(self) -> None:
        """Begin with an empty batch."""


class Scheduler:
    """Any thread may submit; finished samples are in the outbox, and no request is lost between the two."""

    def __init__(
        self, turns: Turns, gate: StepGate, outbox: Outbox, architecture: Architecture, prepare: Callable[[], None]
    ):
        """
        Args:
            prepare: called by the thread when it begins.
        """
        self._turns, self._gate, self._outbox = turns, gate, outbox
        self._architecture, self._prepare = architecture, prepare
        self._changed = threading.Condition()
        self._coming: list[GenerateRequest] = []
        self._submitted: dict[str, float] = {}
        self._overdue: dict[str, float] = {}
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._coming) + self._turns.waiting

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Those that are known, running or finished and not taken, are not begun again."""
        with self._changed:
            running = self._gate.names
            fresh = [r for r in requests if r.request_id not in running and r.request_id not in self._outbox]
            self._outbox.expect(request.request_id for request in requests)
            now = time.monotonic()
            for request in fresh:
                self._submitted[request.request_id] = now
                if request.deadline:
                    self._overdue[request.request_id] = now + request.deadline
            self._gate.began(request.request_id for request in fresh)
            self._coming += fresh
            self._changed.notify_all()
            if fresh and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self._prepare()
        while self._wait_for_work():
            try:
                self._turn()
            except Exception as err:  # raised again by whoever waits for the requests
                self._fail(err)

    def _wait_for_work(self) -> bool:
        """False when the thread is to end."""
        until = time.monotonic() + IDLE_SECONDS
        with self._changed:
            while not self._submitted:
                left = until - time.monotonic()
                if left <= 0:
                    self._thread = None
                    return False
                # Whether it timed out does not matter: a request may have come in before the lock was taken back.
                self._changed.wait(left)
        return True

    def _turn(self) -> None:
        soonest = min(self._overdue.values(), default=math.inf)
        with self._gate.step(soonest) as live:
            aborted = self._gate.aborted()
            with self._changed:
                requests, self._coming = tuple(self._coming), []
                now = time.monotonic()
                reasons = {name: "deadline" for name, until in self._overdue.items() if until <= now}
            reasons |= dict.fromkeys(aborted, "abort")
            retract = live is not None and self._gate.retracting()
            ended = self._turns.turn(Turn(requests, reasons, retract), live)
        self._deliver(ended)

    def _deliver(self, ended: Ended) -> None:
        now = time.monotonic()
        if ended.broken:
            names = [reply.request.request_id for reply in ended.broken]
            self._outbox.fail(names, NonFiniteLogits(names))
            self._forget(names)
        for reply, reason in ended.replies:
            name = reply.request.request_id
            self._outbox.put(reply.sample(reason, self._architecture, now - self._submitted[name]))
            self._forget([name])

    def _fail(self, err: Exception) -> None:
        """All requests end with this error; the next ones begin afresh."""
        with self._changed:
            names, self._coming = list(self._submitted), []
        self._turns.clear()
        self._outbox.fail(names, err)
        self._forget(names)

    def _forget(self, names: Sequence[str]) -> None:
        with self._changed:
            for name in names:
                del self._submitted[name]
                self._overdue.pop(name, None)
            for name in names:
                self._gate.finished(name)
