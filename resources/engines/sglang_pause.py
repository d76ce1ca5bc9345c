"""Whether a server may decode: not while a pause's lease lasts, nor while its weights are being changed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from furlong.resources.engines.sglang_http import CONTROL_DEADLINE, ServerClient
from furlong.resources.engines.step_gate import EngineError


class ServerPause:
    """Safe for several threads."""

    def __init__(self, server: ServerClient):
        self._server = server
        self._lock = threading.RLock()
        self._changing = 0
        self._until = -math.inf
        self._timer: threading.Timer | None = None

    @property
    def paused(self) -> bool:
        return self._changing > 0 or time.monotonic() < self._until

    def pause(self, lease: float) -> None:
        """Returns once no step is under way; of several pauses the latest one's lease counts.

        Args:
            lease: seconds, counted from the call, after which the server goes on by itself.
        """
        if not 0 < lease < math.inf:
            raise EngineError(f"a pause of {lease} s: give a positive, finite lease, after which the pause may end")
        with self._lock:
            self._until = time.monotonic() + lease
            self._start_timer(lease)
            self._stop()

    def resume(self) -> None:
        with self._lock:
            self._until = -math.inf
            self._stop_timer()
            self._go_if_free()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Nothing is decoded inside, whatever becomes of a lease meanwhile."""
        with self._lock:
            self._changing += 1
        try:
            with self._lock:
                self._stop()
            yield
        finally:
            with self._lock:
                self._changing -= 1
                self._go_if_free()

    def close(self) -> None:
        with self._lock:
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = threading.Timer(seconds, self._lapse)
        self._timer.daemon = True
        self._timer.start()

    def _lapse(self) -> None:
        with self._lock:
            left = self._until - time.monotonic()
            if left > 0:  # a later pause has set another end
                self._start_timer(left)
            else:
                self._go_if_free()

    def _stop(self) -> None:
        self._server.post("/pause_generation", {"mode": "in_place"}, CONTROL_DEADLINE)
        # The pause is not answered by the scheduler, but this is, and only after it.
        self._server.get("/server_info", CONTROL_DEADLINE)

    def _go_if_free(self) -> None:
        # A server that has ended is no reason to hide what it ended of, which the caller is about to tell.
        if not self.paused and not self._server.ended:
            self._server.post("/continue_generation", {}, CONTROL_DEADLINE)
