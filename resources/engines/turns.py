"""How threads of an engine share Python's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

TURN = 5e-4
"""Seconds that a thread may keep the interpreter while another waits. Staging asks for it thousands of times; at Python's
own 5 ms it took up to 20 times as long while replies were drawn."""


@contextmanager
def short_turns() -> Iterator[None]:
    """The interpreter changes hands every `TURN` seconds at most."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
