"""Lets other threads act between two decode steps: pause, end requests, exchange the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from furlong.ops.policy.wave import Live


class EngineError(RuntimeError):
    """The engine cannot do what it was asked; the message says why and what to do. The live weights are unchanged."""


STEP_DEADLINE = 600.0
"""Seconds one step may keep others waiting; the longest step is the prefill of a wave."""
PAUSE_DEADLINE = 1800.0
"""Seconds a paused generation waits for `resume` or `abort` before it fails."""


class StepGate:
    """One thread takes steps; any thread may use the other methods. Implements `StepSource`."""

    def __init__(self, live: Live):
        self._live = live
        self._changed = threading.Condition()
        self._stepping = False
        self._paused = False
        self._exchanging = 0
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._news = False

    @property
    def live(self) -> Live:
        return self._live

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._running)

    @contextmanager
    def admitted(self, request_ids: Iterable[str]) -> Iterator[None]:
        """Requests that are running, whatever comes, no longer than this context."""
        with self._changed:
            self._running = set(request_ids)
        try:
            yield
        finally:
            with self._changed:
                self._running, self._aborted, self._news = set(), set(), False

    @contextmanager
    def step(self) -> Iterator[Live | None]:
        """See `StepSource`; EngineError when nobody resumed within PAUSE_DEADLINE."""
        with self._changed:
            self._wait(
                lambda: self._news or not (self._paused or self._exchanging),
                PAUSE_DEADLINE,
                "generation was paused and not resumed; call resume() or abort()",
            )
            self._stepping = not self._news
            live = self._live if self._stepping else None
        try:
            yield live
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def aborted(self) -> frozenset[str]:
        with self._changed:
            self._news = False
            return frozenset(self._aborted)

    def finished(self, request_id: str) -> None:
        with self._changed:
            self._running.discard(request_id)
            self._aborted.discard(request_id)

    def abort(self, request_ids: list[str] | None) -> int:
        """Mark running requests to end after the step under way, all when None; returns how many."""
        with self._changed:
            ending = self._running if request_ids is None else self._running & set(request_ids)
            fresh = ending - self._aborted
            self._aborted |= fresh
            self._news = self._news or bool(fresh)
            self._changed.notify_all()
            return len(fresh)

    def pause(self) -> None:
        """Returns once no step is under way."""
        with self._changed:
            self._paused = True
            self._wait(lambda: not self._stepping, STEP_DEADLINE, "a decode step does not end; restart the engine")

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def exchange(self, live: Live) -> None:
        """Replace the live weights while no step is under way."""
        with self._changed:
            self._exchanging += 1
            try:
                self._wait(lambda: not self._stepping, STEP_DEADLINE, "a decode step does not end; restart the engine")
                self._live = live
            finally:
                self._exchanging -= 1
                self._changed.notify_all()

    def _wait(self, until: Callable[[], object], seconds: float, advice: str) -> None:
        begin = time.monotonic()
        if not self._changed.wait_for(until, seconds):
            raise EngineError(f"waited {time.monotonic() - begin:.0f} s: {advice}")
