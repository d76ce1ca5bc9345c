"""Draws the replies of a group, across whatever interrupts them: what is drawn once is never drawn again."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.rollouts.fragments import join, resume, to_row
from furlong.ops.rollouts.trajectory import Draw, EngineLost
from furlong.ops.stages.rollouts import check_sample

ABORT_SECONDS = 0.2
"""How often replies are ended anew, as one may have been on its way to its engine when all others were ended."""


class Unwanted(Exception):
    """The group is no longer wanted, or the pump closes; what was drawn is kept as fragments."""


class Drawer:
    """A `Draw` (ops.rollouts.trajectory); any number of threads draw at once."""

    def __init__(
        self,
        draw: Draw,
        abort: Callable[[list[str] | None], Any],
        wanted: Callable[[str], bool],
        keep: Callable[[list[dict[str, Any]]], None],
        run: str,
        deadline: float,
    ):
        """
        Args:
            draw: the router's.
            abort: ends these replies, or all under way.
            wanted: whether the group of this id is still to be drawn.
            keep: takes rows of `fragments` to commit.
            deadline: seconds for replies to end when they are told to, and for an update to be over.
        """
        self._draw, self._abort, self._wanted, self._keep, self._run = draw, abort, wanted, keep, run
        self._deadline = deadline
        self._changed = threading.Condition()
        self._held = False
        self._active: list[tuple[str, list[str]]] = []
        """Group and request ids of each call under way; agents of one group make several at once."""
        self._parts: dict[str, list[Sample]] = {}

    def restore(self, parts: dict[str, list[Sample]]) -> None:
        """What earlier drivers kept: reply -> its parts in order."""
        self._parts = parts

    def __call__(self, requests: list[GenerateRequest], key: str) -> list[Sample]:
        """See `Draw`; without requests, only look whether the group is wanted.

        Raises:
            Unwanted: the group ended meanwhile.
            EngineLost, and whatever the engine refuses requests with.
            StageError: a reply that is not finite, or has tokens without a weights version.
        """
        self._check(key)
        named = [_named(request) for request in requests]
        parts = {request.request_id: self._parts.pop(request.request_id, []) for request in named}
        pending = named
        while pending := [r for r in pending if not parts[r.request_id] or _interrupted(parts[r.request_id][-1])]:
            asked = [resume(request, parts[request.request_id]) for request in pending]
            with self._drawing(key, [request.request_id for request in asked]):
                samples = self._draw(asked, key)
            for request, ask, sample in zip(pending, asked, samples, strict=True):
                check_sample(ask, sample)
                if _interrupted(sample):
                    self._keep([to_row(self._run, ask, len(parts[request.request_id]), sample)])
                parts[request.request_id].append(sample)
        return [
            replace(join(parts[name.request_id]), request_id=request.request_id)
            for request, name in zip(requests, named, strict=True)
        ]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nothing is drawn inside: replies under way end, are kept, and go on afterwards."""
        with self._changed:
            self._held = True
        try:
            self._drain()
            yield
        finally:
            with self._changed:
                self._held = False
                self._changed.notify_all()

    def end_unwanted(self) -> None:
        """End the replies of groups that are not wanted any more; returns when none of them is under way."""
        self._drain(lambda key: not self._wanted(key))

    def _drain(self, ending: Callable[[str], bool] = lambda key: True) -> None:
        until = time.monotonic() + self._deadline
        with self._changed:
            self._changed.notify_all()
            while under_way := [names for key, names in self._active if ending(key)]:
                if time.monotonic() > until:
                    raise TimeoutError(
                        f"run {self._run}: {len(under_way)} calls did not stop drawing within {self._deadline:g} s of "
                        "being told to; see the engine's log, and run again"
                    )
                self._changed.release()
                try:
                    self._abort([name for names in under_way for name in names])
                finally:
                    self._changed.acquire()
                self._changed.wait(ABORT_SECONDS)

    @contextmanager
    def _drawing(self, key: str, request_ids: list[str]) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._held or not self._wanted(key), 2 * self._deadline):
                raise EngineLost(f"group {key} waited {2 * self._deadline:g} s for an update of the weights to be over")
            self._check(key)
            self._active.append(call := (key, request_ids))
        try:
            yield
        finally:
            with self._changed:
                self._active.remove(call)
                self._changed.notify_all()

    def _check(self, key: str) -> None:
        if not self._wanted(key):
            raise Unwanted(f"group {key} is not drawn any more; the ledger says why")


def _interrupted(sample: Sample) -> bool:
    return sample.finish_reason == "abort"


def _named(request: GenerateRequest) -> GenerateRequest:
    """Under a name that tells its prompt: after a restart a tool may answer differently, and an engine, like the table of
    fragments, knows one reply by one name."""
    digest = hashlib.blake2b(repr(request.prompt).encode(), digest_size=4).hexdigest()
    return replace(request, request_id=f"{request.request_id}.{digest}")
