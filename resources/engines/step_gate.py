"""Lets other threads act between two decode steps: pause, end requests, exchange the weights."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from furlong.ops.policy.live import Live


class EngineError(RuntimeError):
    """The engine cannot do what it was asked; the message says why and what to do. The live weights are unchanged."""


STEP_DEADLINE = 600.0
"""Seconds one step may keep others waiting."""


class StepGate:
    """One thread takes steps; any thread may use the other methods."""

    def __init__(self, live: Live):
        self._live = live
        self._changed = threading.Condition()
        self._stepping = False
        self._paused_until = -math.inf
        self._exchanging = 0
        self._running: set[str] = set()
        self._aborted: set[str] = set()
        self._news = False
        self._retract = False

    @property
    def live(self) -> Live:
        return self._live

    @property
    def paused(self) -> bool:
        """Whether a pause was neither ended by `resume` nor by its lease."""
        return time.monotonic() < self._paused_until

    @property
    def running(self) -> int:
        """Requests begun and not finished."""
        return len(self._running)

    @property
    def names(self) -> frozenset[str]:
        """Ids of those requests."""
        with self._changed:
            return frozenset(self._running)

    def began(self, request_ids: Iterable[str]) -> None:
        with self._changed:
            self._running.update(request_ids)

    @contextmanager
    def step(self, until: float = math.inf) -> Iterator[Live | None]:
        """The weights to hold during one step, as soon as steps may run; None when `aborted` has news to act on first,
        or at the time `until` (of time.monotonic). A pause holds a step up for as long as the pause's lease at most."""
        with self._changed:
            while not self._news and (self._exchanging or self.paused) and time.monotonic() < until:
                lease = self._paused_until - time.monotonic()
                ends = (lease if lease > 0 else STEP_DEADLINE, until - time.monotonic())
                self._changed.wait(max(0.0, min(ends)))
            self._stepping = not self._news and not self._exchanging and not self.paused
            live = self._live if self._stepping else None
        try:
            yield live
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    def aborted(self) -> frozenset[str]:
        """Running requests to end."""
        with self._changed:
            self._news = False
            return frozenset(self._aborted)

    def retracting(self) -> bool:
        """Whether weights came, since this was asked last, that keys and values are to be computed again with."""
        with self._changed:
            retract, self._retract = self._retract, False
            return retract

    def finished(self, request_id: str) -> None:
        """This request runs no longer."""
        with self._changed:
            self._running.discard(request_id)
            self._aborted.discard(request_id)
            self._changed.notify_all()

    def wait_finished(self, request_ids: Iterable[str], seconds: float) -> None:
        """Return once none of these runs, or after `seconds`."""
        names = set(request_ids)
        with self._changed:
            self._changed.wait_for(lambda: not names & self._running, seconds)

    def abort(self, request_ids: list[str] | None) -> int:
        """Mark running requests to end after the step under way, all when None; returns how many."""
        with self._changed:
            ending = self._running if request_ids is None else self._running & set(request_ids)
            fresh = ending - self._aborted
            self._aborted |= fresh
            self._news = self._news or bool(fresh)
            self._changed.notify_all()
            return len(fresh)

    def pause(self, lease: float) -> None:
        """Returns once no step is under way; of several pauses the latest one's lease counts.

        Args:
            lease: seconds, counted from the call, after which steps go on by themselves.
        Raises:
            EngineError: the step under way took longer than the lease, which is over.
        """
        if not 0 < lease < math.inf:
            raise EngineError(f"a pause of {lease} s: give a positive, finite lease, after which the pause may end")
        with self._changed:
            until = self._paused_until = time.monotonic() + lease
            self._changed.notify_all()  # whoever waits for the end of an earlier, longer lease
            self._changed.wait_for(lambda: not self._stepping or self._paused_until != until, lease)
            if self._stepping and self._paused_until == until:
                raise EngineError(
                    f"the decode step under way took longer than the pause's lease of {lease:g} s, so nothing is paused; "
                    "pause again with a longer lease"
                )

    def resume(self) -> None:
        with self._changed:
            self._paused_until = -math.inf
            self._changed.notify_all()

    def exchange(self, live: Live, retract: bool = False) -> None:
        """Replace the live weights while no step is under way.

        Args:
            retract: keys and values of replies under way are to be computed again.
        """
        with self._changed:
            self._exchanging += 1
            try:
                if not self._changed.wait_for(lambda: not self._stepping, STEP_DEADLINE):
                    raise EngineError(f"a decode step has not ended in {STEP_DEADLINE:.0f} s; restart the engine")
                self._live = live
                self._retract = self._retract or retract
            finally:
                self._exchanging -= 1
                self._changed.notify_all()
