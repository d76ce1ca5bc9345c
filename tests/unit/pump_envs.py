"""An environment that misbehaves where a test tells it to; named by `data.env` in the tests' specs."""

import threading

from furlong.ops.envs.protocol import EnvError, Observation
from furlong.ops.envs.single_turn import opening

GATE = threading.Event()
"""Conversations about HELD questions end only once it is set."""
HELD: set[str] = set()
BREAKS = [0]
"""Every how many episodes one raises; 0 for none."""


class Playground:
    """A single reply."""

    tools = ()

    def __init__(self, system: str):
        self._system = system
        self._lock, self._count = threading.Lock(), 0

    def begin(self, prompt):
        return opening(self._system, prompt["question"])

    def episode(self, prompt, seed):
        with self._lock:
            self._count += 1
            if BREAKS[0] and self._count % BREAKS[0] == 0:
                raise EnvError("no simulator is installed; install one")
        return _Episode(prompt["question"] in HELD)


class _Episode:
    def __init__(self, held: bool):
        self._held = held

    def step(self, reply, deadline):
        if self._held and not GATE.wait(deadline):
            raise TimeoutError("the test did not open the gate; open it")
        return Observation((), done=True)

    def close(self):
        """Nothing is held."""
