"""Run as a program by the tests: drive a run, as `drive.py` does, in bad weather.

python storm.py CONFIG_JSON

Every eighth reply is answered ten times later than the others, every twelfth conversation breaks off, and every fiftieth
time that an engine is asked for finished samples its connection is lost.
"""

import itertools
import time

from furlong.ops.envs.protocol import EnvError, Observation
from furlong.ops.envs.single_turn import opening
from furlong.resources.remote_engine import RemoteEngine

MEDIAN = 0.1
"""Seconds that an answer takes."""
_episodes, _collected = itertools.count(1), itertools.count(1)


class Storm:
    """An environment of a single turn; `storm:Storm` in `data.env`."""

    tools = ()

    def __init__(self, system: str):
        self._system = system

    def begin(self, prompt):
        return opening(self._system, prompt["question"])

    def episode(self, prompt, seed):
        number = next(_episodes)
        if number % 12 == 0:
            raise EnvError("the connection to the simulator broke; connect again")
        return _Episode(10 * MEDIAN if number % 8 == 0 else MEDIAN)


class _Episode:
    def __init__(self, seconds: float):
        self._seconds = seconds

    def step(self, reply, deadline):
        time.sleep(self._seconds)
        return Observation((), done=True)

    def close(self):
        """Nothing is held."""


def break_connections() -> None:
    honest = RemoteEngine.collect

    def collect(self, seconds, taken):
        found = honest(self, seconds, taken)
        if next(_collected) % 50 == 0:
            raise ConnectionResetError("the engine's connection broke after it had answered")
        return found

    RemoteEngine.collect = collect


if __name__ == "__main__":
    from drive import main

    break_connections()
    main()
