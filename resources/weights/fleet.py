"""The engines of a run. None of them serves before it has proved, by digest, the version it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from furlong.ops.protocols import Engine, GenerateRequest, LakeLike, Sample
from furlong.ops.stages.chain import delta_path, one_row
from furlong.ops.stages.weight_publish import verify
from furlong.resources.actors import ActorLost, ActorTimeout
from furlong.resources.weights.anchors import anchor_path


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
        """This fleet, every engine proved to serve `version`."""
        self._each(lambda number: self._bring(number, version, fence))
        return self

    def before(self, row: dict[str, Any], fence: int) -> list[Engine]:
        """The engines, ready for the publication of `row`: at its parent, or at itself if a dead publisher came so far."""

        def ready(number: int) -> None:
            if self._health(number)["version"] != row["version"] or not self._proves(number, row):
                self._bring(number, row["parent"], fence)

        self._each(ready)
        return self.members

    def proved(self, version: int) -> None:
        """Told when every engine's proof of `version` was checked by the publication."""
        self._proved = [version] * len(self.members)

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Samples in the order asked; each engine draws a run of neighbouring prompts."""
        shares = _shares(requests, len(self.members))

        def draw(number: int) -> list[Sample]:
            return self.members[number].generate(shares[number]) if shares[number] else []

        try:
            return [sample for samples in self._each(draw) for sample in samples]
        except BaseException:
            for engine in self.members:
                engine.abort()
            raise

    def fingerprint(self) -> str:
        """Of all engines; they have the same model and settings, so usually one."""
        return " | ".join(sorted({engine.health()["engine"] for engine in self.members}))

    def _bring(self, number: int, version: int, fence: int) -> None:
        serving = self._health(number)["version"]
        if serving == version == self._proved[number]:
            return
        engine = self.members[number]
        row = one_row(self.lake, "weight_versions", {"run": self.run, "version": version})
        if serving != version or not self._proves(number, row):
            anchor, path = delta_path(self.lake, self.run, version)
            chain = [self.lake.read("weight_deltas", {"run": self.run, "version": later}) for later in path]
            place = self.base_folder if anchor == "base" else anchor_path(self.lake.uri, anchor)
            verify(row, engine.load_anchor(place, version, chain, fence))
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

    def _each(self, act: Callable[[int], Any]) -> list[Any]:
        """Act on all engines at once; raises the first error after all have ended."""
        if len(self.members) == 1:
            return [act(0)]
        with ThreadPoolExecutor(len(self.members)) as pool:
            return [future.result() for future in [pool.submit(act, n) for n in range(len(self.members))]]


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
