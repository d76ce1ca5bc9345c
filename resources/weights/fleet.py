"""The engines of a run. None of them serves before it has proved, by digest, the version it is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from furlong.ops.protocols import Engine, LakeLike, StaleFence
from furlong.ops.stages.chain import delta_path, one_row
from furlong.ops.stages.context import StageError
from furlong.ops.stages.weight_publish import verify
from furlong.resources.actors import ActorLost, ActorTimeout
from furlong.resources.weights.anchors import anchor_path

_TURN = 1800.0
"""Seconds that a publication waits while every engine is being started anew."""


class Fleet:
    """Brings engines to a version of the lake, replaces lost ones, and knows which of them proved what is live.

    Any thread may use any method. Whoever changes an engine has its lock: a publication those of its members, from
    beginning to end, and so the engines that are being replaced meanwhile are no members of it; they are brought to
    whatever is live after it. `changed` is notified whenever the answer of a method may have changed.
    """

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
        self.changed = threading.Condition()
        self.live: int | None = None
        """The version that engines are to serve; None until one is asked for."""
        self.engines: list[str] = [""] * len(members)
        """Fingerprint of each, as it last said."""
        self.troubles: list[Exception | None] = [None] * len(members)
        """Why each does not serve, if somebody tried."""
        self._replace = replace
        self._fence = 0
        self._proved: list[int | None] = [None] * len(members)
        self._lost = [False] * len(members)
        self._locks = [threading.Lock() for _ in members]
        self._epoch: tuple[int, ...] = ()
        """The members of the publication under way, if one is."""

    def aim(self, version: int, fence: int) -> dict[str, Any]:
        """From now on engines serve only once they have proved `version`; its row. StageError when it is not live."""
        row = self._row(version)
        with self.changed:
            self.live, self._fence = version, fence
            self.troubles = [None] * len(self.members)
            self.changed.notify_all()
        return row

    def serving(self) -> dict[int, Engine]:
        """The engines that have proved the live version and were not lost since, by number."""
        with self.changed:
            return {n: engine for n, engine in enumerate(self.members) if self._serves(n)}

    def present(self) -> dict[int, Engine]:
        """The engines that were not lost, whatever they serve, by number."""
        with self.changed:
            return {n: engine for n, engine in enumerate(self.members) if not self._lost[n]}

    def waits(self, number: int) -> bool:
        """Whether `mend` has something to do for this engine, and can."""
        with self.changed:
            if self.live is None or self._serves(number) or self._locks[number].locked():
                return False
            return self._lost[number] or not self._epoch

    def lose(self, number: int, engine: Engine, why: Exception) -> None:
        """Told that this engine failed: it serves no more, and is replaced before it is brought to a version again."""
        with self.changed:
            if self.members[number] is engine and not self._lost[number]:
                print(f"engine {number} of run {self.run} is taken out: {one_line(why)}", flush=True)
                self._lost[number], self._proved[number], self.troubles[number] = True, None, why
                self.changed.notify_all()

    def probe(self, number: int) -> None:
        """Ask an engine how it is, within its own deadline; one that fails is lost, one at another version unproved."""
        with self.changed:
            engine, proved, flipping = self.members[number], self._proved[number], self._epoch
        try:
            version = engine.health()["version"]
        except (RuntimeError, OSError) as err:
            self.lose(number, engine, err)
            return
        with self.changed:
            # A publication's members change their version before they are marked.
            settled = not flipping and not self._epoch and self._proved[number] == proved
            if settled and proved is not None and version != proved:
                print(f"engine {number} of run {self.run} serves version {version} of its own accord", flush=True)
                self._proved[number] = None
                self.changed.notify_all()

    def mend(self, number: int) -> None:
        """Replace an engine that was lost, and bring it to the live version, unless it is in other hands or a publication is
        under way: then it is for a later call. What stops it is among `troubles`, and raised."""
        if not self._locks[number].acquire(blocking=False):
            return
        try:
            self._revive(number)
            with self.changed:
                version = None if self._epoch else self.live
            if version is None:
                return
            self._bring(number, self._row(version))
            with self.changed:
                if self._epoch or self.live != version:
                    self._proved[number] = None  # what it proved is about to be old
                self.troubles[number] = None
        except Exception as err:
            self.troubles[number] = err
            raise
        finally:
            self._release([number])

    @contextmanager
    def publication(self) -> Iterator[None]:
        """Around `before` and `proved`: the engines that nobody is replacing become its members, and nobody else changes
        them, nor lets others in, until it ends."""
        members = self._hold_present()
        with self.changed:
            self._epoch = tuple(members)
        try:
            yield
        finally:
            with self.changed:
                members, self._epoch = self._epoch, ()
                self._release(members)

    def before(self, row: dict[str, Any], fence: int) -> list[Engine]:
        """Within `publication`: its members, ready for `row`: at its parent, or at itself if a dead publisher came so
        far. One that cannot be made ready is left behind, unless it is the last."""
        parent = self._row(row["parent"])
        with self.changed:
            self._fence = fence
            members = self._epoch
        failures = self._make_ready(members, row, parent, revive=False)
        if len(failures) == len(members):
            failures = self._make_ready(members, row, parent, revive=True)
        self._leave_behind(failures)
        return [self.members[number] for number in self._epoch]

    def _make_ready(
        self, members: Sequence[int], row: dict[str, Any], parent: dict[str, Any], revive: bool
    ) -> dict[int, Exception]:
        """What kept members from being ready. Without `revive` a dead one is not waited for: others may go on alone."""
        failures: dict[int, Exception] = {}

        def ready(number: int) -> None:
            try:
                health = self._health(number) if revive else self._hear(number)
                if health["version"] != row["version"] or not self._proves(number, row):
                    self._bring(number, parent)
            except (RuntimeError, OSError) as err:
                failures[number] = err

        self._each(ready, numbers=members)
        return failures

    def proved(self, version: int) -> None:
        """Within `publication`: told when every member's proof of `version` was checked."""
        with self.changed:
            self.live = version
            for number in self._epoch:
                # Unless it was lost after its proof.
                self._proved[number] = None if self._lost[number] else version
            self.changed.notify_all()

    def forget(self) -> None:
        """Told that others may have used the engines meanwhile: each has to prove anew what it serves."""
        with self.changed:
            self.live = None
            self._proved = [None] * len(self.members)

    def fingerprint(self) -> str:
        """Of all engines, as they last said; they have the same model and settings, so usually one."""
        return " | ".join(sorted({name for name in self.engines if name}))

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

    def _serves(self, number: int) -> bool:
        return self.live is not None and self._proved[number] == self.live and not self._lost[number]

    def _release(self, numbers: Iterable[int]) -> None:
        with self.changed:
            for number in numbers:
                self._locks[number].release()
            self.changed.notify_all()

    def _leave_behind(self, failures: dict[int, Exception]) -> None:
        """Go on without these members; raises the first failure where that is not possible."""
        if not failures:
            return
        stale = [err for err in failures.values() if isinstance(err, StaleFence)]
        if stale or len(failures) == len(self._epoch):
            raise [*stale, *failures.values()][0]
        for number, err in failures.items():
            self.lose(number, self.members[number], err)
        with self.changed:
            self._epoch = tuple(number for number in self._epoch if number not in failures)
            self._release(failures)

    def _hold_present(self) -> list[int]:
        """The locks of all engines that nobody is changing, and of one at least."""
        until = time.monotonic() + _TURN
        with self.changed:
            while not (held := [n for n, lock in enumerate(self._locks) if lock.acquire(blocking=False)]):
                if not self.changed.wait(until - time.monotonic()):
                    raise StageError(
                        f"every engine of run {self.run} has been in other hands for over {_TURN:.0f} s, so nothing can "
                        f"be published: {'; '.join(one_line(err) for err in self.troubles if err)}"
                    )
            return held

    def _bring(self, number: int, row: dict[str, Any]) -> None:
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
            verify(row, engine.load_anchor(place, version, chain, self._fence, wanted))
        self._proved[number] = version

    def _proves(self, number: int, row: dict[str, Any]) -> bool:
        return self.members[number].attest().digest == row["digest"]

    def _health(self, number: int) -> dict[str, Any]:
        """Of a living engine: one that was lost, or is gone, or broken inside, is started anew."""
        if not self._lost[number]:
            try:
                return self._hear(number)
            except (ActorLost, ActorTimeout, RuntimeError) as err:
                self.lose(number, self.members[number], err)
        self._revive(number)
        return self._hear(number)

    def _hear(self, number: int) -> dict[str, Any]:
        health = self.members[number].health()
        self.engines[number] = health["engine"]
        return health

    def _revive(self, number: int) -> None:
        """Start an engine anew that was lost."""
        if self._lost[number]:
            engine = self._replace(number)
            with self.changed:
                self.members[number], self._lost[number], self._proved[number] = engine, False, None

    def _each(self, act: Callable[[int], None], numbers: Sequence[int]) -> None:
        """Act on these engines at once; raises the first error after all have ended."""
        # Of one engine in this very thread, which an interrupt ends at once.
        if len(numbers) == 1:
            act(numbers[0])
            return
        with ThreadPoolExecutor(len(numbers)) as pool:
            for done in [pool.submit(act, number) for number in numbers]:
                done.result()


def one_line(err: Exception) -> str:
    """The first line of what an error says, which in a lost actor's is what happened to it."""
    return f"{type(err).__name__}: {str(err).partition(chr(10))[0]}"
