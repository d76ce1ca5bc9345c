"""Calls into code that may hang, each in a thread that is left behind when it does."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

GRACE = 1.0
"""Seconds beyond its deadline that a call has to give up by itself."""
LOOK_SECONDS = 0.5


def bounded(
    calls: Sequence[Callable[[], T]], seconds: float, look: Callable[[], object] = lambda: None
) -> list[T | Exception]:
    """What each call returned or raised, in order; a TimeoutError for one that did not end in time.

    All run at once. A thread of a call that never ends stays until the process does, and what it returns then is lost.
    `look` is called twice a second meanwhile; what it raises ends the wait.
    """
    done: queue.SimpleQueue[tuple[int, T | Exception]] = queue.SimpleQueue()

    def work(index: int, call: Callable[[], T]) -> None:
        try:
            done.put((index, call()))
        except Exception as err:  # handed to the caller, who says what it means
            done.put((index, err))

    for index, call in enumerate(calls):
        threading.Thread(target=work, args=(index, call), daemon=True).start()
    until = time.monotonic() + seconds + GRACE
    found: dict[int, T | Exception] = {}
    while len(found) < len(calls):
        left = max(0.0, until - time.monotonic())
        try:
            index, result = done.get(timeout=min(LOOK_SECONDS, left))
        except queue.Empty:
            if left <= LOOK_SECONDS:
                break
            look()
        else:
            found[index] = result
    late = TimeoutError(f"the environment did not answer within {seconds:g} s; mend it, or raise reply_deadline")
    return [found.get(index, late) for index in range(len(calls))]
