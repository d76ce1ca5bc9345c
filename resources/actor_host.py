"""The one class that Ray instantiates: it holds an engine, a trainer or anything else, and passes calls on.

The object's own class needs to know nothing of Ray. This module imports nothing heavy: thread counts must be in the
environment before torch is first imported.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.resources.memory import release_freed

WORK_SECONDS = 0.2
"""A call that took longer may have freed gigabytes, which the other actors need next."""
BANNER = "=== furlong actor"
"""Starts the line that each actor writes first into its log."""


@dataclass(frozen=True)
class Failure:
    """What a method raised, in a form that always survives the way back."""

    error: BaseException | None
    """The exception itself, or None when it cannot be sent."""
    summary: str
    """Type and message."""
    traceback: str
    """The actor's traceback as text."""


class ActorHost:
    """Lives in its own process, which ends with it."""

    def __init__(self, role: str, run: str, log: str, threads: int, gpus: int):
        if "torch" in sys.modules:
            raise RuntimeError(
                f"the process for {role} has torch loaded already, so its thread count cannot be set any more; remove "
                "torch from whatever Ray imports at worker start (RAY_START_HOOK, sitecustomize)"
            )
        _redirect(Path(log))
        count = threads or len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count()))
        # Ray has set 1 by now. Passive: threads that wait for work must leave the cores to the other actor.
        os.environ.update(OMP_NUM_THREADS=str(count), MKL_NUM_THREADS=str(count), OMP_WAIT_POLICY="passive")
        print(f"{BANNER} {role} of run {run}, process {os.getpid()}, {time.strftime('%F %T')}", flush=True)
        self._held: Any = None
        self._making = threading.Lock()
        self._settings = {"threads": threads, "gpus": gpus, "made": None}

    def describe(self) -> dict[str, Any]:
        """The settings the process was started with and the recipe of its object; answers at any time."""
        return self._settings

    def hold(self, factory: str, args: tuple[Any, ...]) -> Failure | None:
        """Make the object, once: whoever asks again finds it made, or waits for it.

        Args:
            factory: `module:name` of a class or function; named, so that the driver need not import it.
            args: what to call it with.
        """
        with self._making:
            if self._held is None:
                made = _guarded(lambda: _find(factory)(*args))
                if isinstance(made, Failure):
                    return made
                self._held = made
                self._settings["made"] = recipe(factory, args)
        return None

    def perform(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of the object."""
        begin = time.monotonic()
        result = _guarded(lambda: getattr(self._held, method)(*args))
        if time.monotonic() - begin > WORK_SECONDS:
            release_freed()
        return result


def recipe(factory: str, args: tuple[Any, ...]) -> str:
    """12 hex digits over what an object was made from: actors of another recipe are replaced."""
    return hashlib.blake2b(repr((factory, args)).encode(), digest_size=6).hexdigest()


def _find(factory: str) -> Callable[..., Any]:
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)


def _guarded(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as err:  # every one of them is raised again in the driver
        text = "".join(traceback.format_exception(err))
        print(text, file=sys.stderr, flush=True)
        return Failure(err if _survives(err) else None, f"{type(err).__qualname__}: {err}", text)


def _survives(err: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(err))) is type(err)
    except Exception:  # whatever its own reduce or init raises, the answer is no
        return False


def _redirect(log: Path) -> None:
    """Send everything the process writes, C++ and crash reports included, to its own log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    # The crashing thread alone: the stacks of all would push it out of the lines that are shown.
    faulthandler.enable(file=2, all_threads=False)
