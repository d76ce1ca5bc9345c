"""Several verifier processes side by side, so that a slow reply holds up no other."""

from __future__ import annotations

import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from furlong.resources.verifier import VerifierWorker

MOST = 4
"""Processes of a pool that does not say how many; each takes about 100 MB."""


class VerifierPool:
    """A `Verifier` for any number of threads at once, over several child processes.

    Items are scored in the order they come, across callers; each caller gets its answers in its own order.
    """

    def __init__(self, deadline: float, start_deadline: float = 60.0, workers: int | None = None):
        """`deadline`: seconds for one reply; `start_deadline`: seconds until a child must be ready, and for it to import
        a verifier; `workers`: child processes, as many as cores but at most MOST when None."""
        count = min(MOST, os.cpu_count() or 1) if workers is None else workers
        if count < 1:
            raise ValueError(f"workers={count}; a pool of verifiers needs at least 1")
        self._workers = [VerifierWorker(deadline, start_deadline) for _ in range(count)]
        self._idle: queue.SimpleQueue[VerifierWorker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Start the children without waiting for them; harmless when they run, and while they score."""
        with self._lock:
            idle = [self._idle.get() for _ in range(self._idle.qsize())]
        for worker in idle:
            worker.start()
            self._idle.put(worker)

    def score(self, items: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Give {verdict, score, extracted, detail, seconds} for each item, in order; see `VerifierWorker.score`.

        Raises:
            VerifierError: a child does not start; what of `items` had not begun is left out.
        """
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="verifier")
            futures = [self._threads.submit(self._one, item) for item in items]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End the children once they are done with the replies they are at; scoring again starts new ones."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one(self, item: dict[str, str]) -> dict[str, Any]:
        # There are as many threads as children, so one is always free.
        worker = self._idle.get()
        try:
            return worker.score([item])[0]
        finally:
            self._idle.put(worker)
