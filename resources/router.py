"""Replies from whichever engine is fit: divided by load, moved when an engine is lost, while lost ones are replaced."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from furlong.ops.protocols import Engine, GenerateRequest, Sample
from furlong.ops.rollouts.trajectory import EngineLost
from furlong.resources.remote_engine import RemoteEngine
from furlong.resources.replies import GONE
from furlong.resources.weights.fleet import Fleet, one_line
from furlong.resources.weights.together import together

PERIOD = 5.0
"""Seconds between two probes of an engine."""
LONGEST_REST = 60.0
"""Seconds between two tries to replace an engine, at most; the first come at every period."""
TRIES = 3
"""Engines that a call may lose before it is given up: it may be the call that kills them."""
PATIENCE = 600.0
"""Seconds that a call waits for an engine while there is none."""
SLACK = 16
"""Requests that an engine may have in flight beyond twice the least loaded one's before keys move away from it."""
KEYS = 1 << 16
"""Keys, and replies, whose engine is remembered."""
ABORT_DEADLINE = 60.0
"""Seconds for engines to hear that replies are no longer wanted."""
_GOODBYE = 3.0
"""Seconds that threads get to end."""
_PASSING = (*GONE, ConnectionError)
"""After these an engine is started anew; other errors come again however often that is done."""


class Router:
    """Any thread may use any method; hundreds may draw at once.

    A request goes only to engines that have proved, by digest, the live version. One that fails a call, or its probe, is
    taken out at once and replaced in the background; its calls are made again elsewhere with the same request ids, which
    gives the same replies.
    """

    def __init__(self, fleet: Fleet, period: float = PERIOD, tries: int = TRIES, patience: float = PATIENCE):
        self.fleet = fleet
        self._period, self._tries, self._patience = period, tries, patience
        self._changed = fleet.changed
        self._loads: Counter[int] = Counter()
        self._last: OrderedDict[str, int] = OrderedDict()
        self._drawn: OrderedDict[str, str] = OrderedDict()
        self._places: dict[str, int | None] = {}
        """For each request that a thread is in `generate` with, the engine that it is at; None between two."""
        self._aborted: set[str] = set()
        """Those of them that were aborted; they are not begun elsewhere."""
        self._closed = False
        self._keepers = [
            threading.Thread(target=self._keep, args=(number,), name=f"furlong-keeper-{number}", daemon=True)
            for number in range(len(fleet.members))
        ]
        for keeper in self._keepers:
            keeper.start()

    def generate(self, requests: list[GenerateRequest], key: str) -> list[Sample]:
        """Samples in the order asked, all from one engine.

        Args:
            requests: with ids that are theirs for ever.
            key: what should stay on one engine, such as a group's id; it goes where it went last, while that engine
                serves and is not much busier than another.
        Raises:
            EngineLost: no engine served within the router's patience, or the call lost one engine after another.
            Exception: the engine's, about these very requests.
        """
        names = [request.request_id for request in requests]
        with self._changed:
            self._places |= dict.fromkeys(names)
        try:
            return self._draw(requests, key)
        finally:
            with self._changed:
                self._aborted.difference_update(names)
                for name in names:
                    self._places.pop(name, None)

    def bring(self, version: int, fence: int) -> None:
        """Have all engines serve `version`; returns once one of them has proved it, the others follow.

        Raises:
            StageError: that version is not live.
            EngineLost: no engine could be started within the router's patience.
            Exception: what kept every one of them from serving, such as a damaged lake.
        """
        self.fleet.aim(version, fence)
        until = time.monotonic() + self._patience
        with self._changed:
            while not self.fleet.serving():
                self._look(until)
                troubles = self.fleet.troubles
                lasting = [err for err in troubles if err is not None and not isinstance(err, _PASSING)]
                if len(lasting) == len(troubles):
                    raise lasting[0]
                self._changed.wait(until - time.monotonic())

    def at(self, version: int, fence: int) -> Shared:
        """All engines that serve `version` as one, for requests that do not belong together; each is asked what it serves
        first. Raises as `bring`."""
        for number in self.fleet.serving():
            self.fleet.probe(number)
        if self.fleet.live != version or not self.fleet.serving():
            self.bring(version, fence)
        return Shared(self)

    def live_version(self) -> int | None:
        """The version that engines are to serve; None before the first `bring`."""
        return self.fleet.live

    def drawn_by(self, request_id: str) -> str:
        """Fingerprint of the engine that drew one of the last replies; EngineLost for one that is not among them."""
        with self._changed:
            if request_id not in self._drawn:
                raise EngineLost(
                    f"no engine is remembered for reply {request_id}: it was not drawn here, or more than {KEYS} ago; ask "
                    "right after `generate`"
                )
            return self._drawn[request_id]

    def abort(self, request_ids: list[str] | None = None) -> int:
        """End these replies, or all, keeping what they have; returns how many were running. Replies that a driver before
        this one had asked for are among them."""
        members = self.fleet.present()
        with self._changed:
            ending = list(self._places) if request_ids is None else request_ids
            self._aborted.update(name for name in ending if name in self._places)
            self._changed.notify_all()
            # What nobody here has asked for may be anywhere.
            names = {n: [name for name in ending if self._places.get(name, n) == n] for n in members}
        if request_ids is None:
            calls = {str(n): engine.abort for n, engine in members.items()}
        else:
            calls = {str(n): partial(engine.abort, names[n]) for n, engine in members.items() if names[n]}
        answers, failures = together(calls, ABORT_DEADLINE)
        for number, err in failures.items():
            self.fleet.lose(int(number), members[int(number)], err)
        return sum(answers.values())

    def loads(self) -> list[dict[str, Any]]:
        """For each engine its fingerprint, whether it serves, the requests it has in flight, and what is wrong with it."""
        with self._changed:
            serving = self.fleet.serving()
            return [
                {
                    "engine": self.fleet.engines[number],
                    "serving": number in serving,
                    "in_flight": self._loads[number],
                    "trouble": one_line(trouble) if (trouble := self.fleet.troubles[number]) else "",
                }
                for number in range(len(self.fleet.members))
            ]

    def close(self) -> None:
        """Whoever waits gets EngineLost; engines in actors go on with what they draw, for the next driver."""
        until = time.monotonic() + _GOODBYE
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # Again for those who chose an engine just before, and ask it only now.
        while self._loads.total() and time.monotonic() < until:
            for engine in self.fleet.present().values():
                if isinstance(engine, RemoteEngine):
                    engine.close()
                else:
                    engine.abort()  # one in this process has no next driver
            with self._changed:
                self._changed.wait(0.1)
        for keeper in self._keepers:
            # One that is starting an engine ends when that is done.
            keeper.join(max(0.0, until - time.monotonic()))

    def _draw(self, requests: list[GenerateRequest], key: str) -> list[Sample]:
        lost: list[str] = []
        while len(lost) < self._tries:
            number, engine, wanted = self._choose(key, requests, lost)
            try:
                samples = {sample.request_id: sample for sample in engine.generate(wanted)} if wanted else {}
            except (RuntimeError, OSError) as err:
                self._check_open()
                self.fleet.lose(number, engine, err)
                lost.append(f"engine {number}: {one_line(err)}")
            else:
                self._check_open()
                self._remember(samples, number)
                return [samples.get(request.request_id) or _nothing(request) for request in requests]
            finally:
                with self._changed:
                    self._loads[number] -= len(wanted)
                    self._places |= {request.request_id: None for request in wanted}
                    self._changed.notify_all()
        raise EngineLost(
            f"{requests[0].request_id} ({len(requests)} in this call) lost {len(lost)} engines, one after another, and is "
            f"not tried again: {'; '.join(lost)}"
        )

    def _choose(
        self, key: str, requests: list[GenerateRequest], lost: list[str]
    ) -> tuple[int, Engine | None, list[GenerateRequest]]:
        """An engine that serves, and the requests that were not aborted, which it has in flight from now on; when none
        are left, any engine."""
        until = time.monotonic() + self._patience
        with self._changed:
            self._check_open()
            while wanted := [request for request in requests if request.request_id not in self._aborted]:
                if serving := self.fleet.serving():
                    number = min(serving, key=lambda n: (self._loads[n], n))
                    last = self._last.get(key)
                    if last in serving and self._loads[last] <= 2 * self._loads[number] + SLACK:
                        number = last
                    self._loads[number] += len(wanted)
                    self._places |= {request.request_id: number for request in wanted}
                    _put(self._last, key, number)
                    return number, serving[number], wanted
                self._look(until, lost)
                self._changed.wait(until - time.monotonic())
            return 0, None, []

    def _look(self, until: float, lost: list[str] = ()) -> None:
        """EngineLost when there is nothing to wait for any more."""
        self._check_open()
        if time.monotonic() >= until:
            troubles = [f"engine {n}: {one_line(err)}" for n, err in enumerate(self.fleet.troubles) if err]
            raise EngineLost(
                f"no engine served version {self.fleet.live} for {self._patience:g} s: "
                f"{'; '.join([*troubles, *lost]) or 'none was asked to'}"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise EngineLost("the run is not driven any more; open it again to draw replies")

    def _remember(self, samples: dict[str, Sample], number: int) -> None:
        with self._changed:
            for name in samples:
                _put(self._drawn, name, self.fleet.engines[number])

    def _keep(self, number: int) -> None:
        """The life of a keeper: probe its engine while it serves, and make it serve when it does not."""
        rest = self._period
        while not self._closed:
            out = number not in self.fleet.serving()
            if not out:
                self.fleet.probe(number)
            elif self.fleet.live is not None:
                try:
                    self.fleet.mend(number)
                except Exception as err:  # shown by `loads`, raised by `bring`, told to whoever waits too long
                    print(f"engine {number} of run {self.fleet.run} stays out: {one_line(err)}", flush=True)
                    self._pause(number, rest)
                    rest = min(2 * rest, LONGEST_REST)
                    continue
            rest = self._period
            with self._changed:
                # A word that this engine fell out, or can be brought in now, ends the wait.
                self._changed.wait_for(lambda: self._closed or self.fleet.waits(number), self._period)

    def _pause(self, number: int, rest: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self.fleet.troubles[number], rest)


class Shared:
    """Implements `ops.stages.context.Engines`."""

    def __init__(self, router: Router):
        self._router = router

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Samples in the order asked; each engine draws a run of neighbouring prompts. Raises as `Router.generate`; then,
        and on an interrupt, the other replies are ended."""
        parts = [part for part in _shares(requests, len(self._router.fleet.serving()) or 1) if part]
        if len(parts) <= 1:
            return self._router.generate(requests, requests[0].request_id) if requests else []
        with ThreadPoolExecutor(len(parts)) as pool:
            draws = [pool.submit(self._router.generate, part, part[0].request_id) for part in parts]
            try:
                return [sample for draw in draws for sample in draw.result()]
            except BaseException:
                self._router.abort([request.request_id for request in requests])
                raise

    def fingerprint(self) -> str:
        """See `Fleet.fingerprint`."""
        return self._router.fleet.fingerprint()


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


def _nothing(request: GenerateRequest) -> Sample:
    """Of a request that was aborted while no engine had it."""
    return Sample(request.request_id, (), (), (), (), "abort", 0.0)


def _put(known: OrderedDict[str, Any], name: str, value: Any) -> None:
    known[name] = value
    known.move_to_end(name)
    while len(known) > KEYS:
        known.popitem(last=False)
