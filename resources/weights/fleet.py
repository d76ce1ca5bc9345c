"""The engines of a run. None of them serves before it has proved, by digest, the version it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

from furlong.ops.protocols import Engine, GenerateRequest, LakeLike, Sample
from furlong.ops.stages.chain import delta_path, one_row
from furlong.ops.stages.context import StageError
from furlong.ops.stages.weight_publish import verify
from furlong.resources.actors import ActorLost, ActorTimeout
from furlong.resources.weights.anchors import anchor_path
from furlong.resources.weights.together import together

_ABORT = 60.0
"""Seconds for engines to hear that their replies are no longer wanted."""


class Fleet:
    """Brings engines to a version of the lake, replaces dead ones, and divides requests among those that proved it."""

    def __init__(
        self, run: str, lake: LakeLike, base_folder: str, members: list[Engine], replace: Callable[[int], Any]
    ):
        """
        Args:
            run: the run's name; lake: where its versions are.
            base_folder: the model that version 0 is.
            members: the engines, each at any version.
            replace: starts engine number i anew and returns it.
        """
        self.run, self.lake, self.base_folder = run, lake, base_folder
        self.members = members
        self._replace = replace
        self._proved: list[int | None] = [None] * len(members)

    def at(self, version: int, fence: int) -> Fleet:
        """This fleet, every engine proved to serve `version`; StageError when that is not live."""
        row = self._row(version)
        self._each(lambda number: self._bring(number, row, fence))
        return self

    def before(self, row: dict[str, Any], fence: int) -> list[Engine]:
        """The engines, ready for the publication of `row`: at its parent, or at itself if a dead publisher came so far."""
        parent = self._row(row["parent"])

        def ready(number: int) -> None:
            if self._health(number)["version"] != row["version"] or not self._proves(number, row):
                self._bring(number, parent, fence)

        self._each(ready)
        return self.members

    def proved(self, version: int) -> None:
        """Told when every engine's proof of `version` was checked by the publication."""
        self._proved = [version] * len(self.members)

    def forget(self) -> None:
        """Told that others may have used the engines meanwhile: each has to prove anew what it serves."""
        self._proved = [None] * len(self.members)

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Samples in the order asked; each engine draws a run of neighbouring prompts."""
        shares = _shares(requests, len(self.members))

        def draw(number: int) -> list[Sample]:
            return self.members[number].generate(shares[number]) if shares[number] else []

        return [sample for samples in self._each(draw, self._abort) for sample in samples]

    def fingerprint(self) -> str:
        """Of all engines; they have the same model and settings, so usually one."""
        return " | ".join(sorted({engine.health()["engine"] for engine in self.members}))

    def _row(self, version: int) -> dict[str, Any]:
        """Of a version that engines may serve."""
        row = one_row(self.lake, "weight_versions", {"run": self.run, "version": version})
        if row is None or row["state"] == "staged":
            is_what = "not in the lake" if row is None else "staged: no engine has proved it"
            raise StageError(
                f"run {self.run}: weights version {version} is {is_what}, so nothing is drawn from it; run the "
                "weight_publish of its step first"
            )
        return row

    def _bring(self, number: int, row: dict[str, Any], fence: int) -> None:
        serving, version = self._health(number)["version"], row["version"]
        if serving == version == self._proved[number]:
            return
        # Whatever fails from here on leaves an engine that has to prove itself before it serves.
        self._proved[number] = None
        engine = self.members[number]
        if serving != version or not self._proves(number, row):
            anchor, path = delta_path(self.lake, self.run, version)
            chain = [self.lake.read("weight_deltas", {"run": self.run, "version": later}) for later in path]
            place = self.base_folder if anchor == "base" else anchor_path(self.lake.uri, anchor)
            wanted = {tensor["name"]: tensor["digest"] for tensor in row["tensors"]}
            verify(row, engine.load_anchor(place, version, chain, fence, wanted))
        self._proved[number] = version

    def _proves(self, number: int, row: dict[str, Any]) -> bool:
        return self.members[number].attest().digest == row["digest"]

    def _health(self, number: int) -> dict[str, Any]:
        """Of a living engine: one that is gone, or broken inside, is started anew."""
        try:
            return self.members[number].health()
        except (ActorLost, ActorTimeout, RuntimeError) as err:
            print(f"engine {number} of run {self.run} is replaced: {err}", flush=True)
            self._proved[number] = None
            self.members[number] = self._replace(number)
            return self.members[number].health()

    def _abort(self) -> None:
        """End all replies. What a lost engine says to that would only hide why it was lost."""
        together({str(number): engine.abort for number, engine in enumerate(self.members)}, _ABORT)

    def _each(self, act: Callable[[int], Any], give_up: Callable[[], None] = lambda: None) -> list[Any]:
        """Act on all engines at once; raises the first error after `give_up`, and after all have ended."""
        numbers = range(len(self.members))
        # Of one engine in this very thread, which an interrupt ends at once.
        with ThreadPoolExecutor(len(numbers)) if len(numbers) > 1 else nullcontext() as pool:
            try:
                acts = [pool.submit(act, number).result for number in numbers] if pool else [partial(act, 0)]
                return [finish() for finish in acts]
            except BaseException:
                give_up()
                raise


def _shares(requests: list[GenerateRequest], count: int) -> list[list[GenerateRequest]]:
    """Contiguous shares of nearly equal length, cut between prompts where that is possible."""
    shares: list[list[GenerateRequest]] = [[] for _ in range(count)]
    at = 0
    for index, request in enumerate(requests):
        full = len(shares[at]) * count >= len(requests)
        if full and at + 1 < count and request.prompt != requests[index - 1].prompt:
            at += 1
        shares[at].append(request)
    return shares
