"""Calls to several parties at once, each of which must answer in time."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any


class Overran(RuntimeError):
    """A party did not answer within its deadline."""


def together(
    calls: dict[str, Callable[[], Any]],
    deadline: float,
    give_up: Callable[[], None] | None = None,
    patience: float = 0.0,
    tell: Callable[[str, Exception], None] = lambda name, err: None,
) -> tuple[dict[str, Any], dict[str, Exception]]:
    """Make all calls at once, each in a thread of its own.

    Args:
        calls: by the name of the party that answers.
        deadline: seconds for all of them. A call that overruns is left behind, not ended.
        give_up: ends what the calls wait for; made once when not all have answered in time.
        patience: where calls depend on each other, the seconds that the others get after the first failure to tell what
            they know, and after `give_up` again.
        tell: told of each failure as it comes.
    Returns:
        What each answered, and for the others the error, in the order in which they failed.
    """
    heard: queue.SimpleQueue[tuple[str, Any, Exception | None]] = queue.SimpleQueue()

    def make(name: str, call: Callable[[], Any]) -> None:
        try:
            heard.put((name, call(), None))
        except Exception as err:
            heard.put((name, None, err))

    for name, call in calls.items():
        # Not waited for at exit: whoever overran may never answer.
        threading.Thread(target=make, args=(name, call), daemon=True).start()
    until = time.monotonic() + deadline
    answers: dict[str, Any] = {}
    failures: dict[str, Exception] = {}
    while len(answers) + len(failures) < len(calls):
        try:
            name, answer, err = heard.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            if give_up is None:
                break
            give_up()
            give_up, until = None, time.monotonic() + patience
            continue
        if err is None:
            answers[name] = answer
        else:
            failures[name] = err
            tell(name, err)
            until = min(until, time.monotonic() + patience) if patience else until
    late = [name for name in calls if name not in answers and name not in failures]
    return answers, failures | {name: Overran(f"no answer within {deadline:g} s; see its log") for name in late}
