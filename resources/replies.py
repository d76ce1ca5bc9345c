"""Replies that many threads wait for and one engine elsewhere draws: sent together, brought by one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from furlong.ops.protocols import GenerateRequest, Sample
from furlong.resources.actors import ActorLost, ActorTimeout

POLL = 1.0
"""Seconds that one call waits for finished samples: how soon a thread that is no longer needed ends, at the latest."""
GONE = (ActorLost, ActorTimeout)
"""After these nothing comes from the engine any more."""


@dataclass
class _Reply:
    future: Future[Sample] = field(default_factory=Future)
    waiters: int = 0
    sent: bool = False
    unwanted: bool = False
    """Aborted before it was sent: to be aborted once more when it was, as that call may have come first."""


class Replies:
    """Any thread may use any method.

    Two threads of its own live while there is something to do, and no longer: one submits, in one call, whatever
    gathered while its last call was on its way; the other brings finished samples and says which it has.
    """

    def __init__(
        self,
        submit: Callable[[list[GenerateRequest]], None],
        collect: Callable[[float, list[str]], list[Sample]],
        abort: Callable[[list[str] | None], int],
    ):
        """The three are those of `ops.protocols.Engine`, each answering within a deadline of its own."""
        self._submit, self._collect, self._abort = submit, collect, abort
        self._lock = threading.Lock()
        self._gathered: list[list[GenerateRequest]] = []
        self._replies: dict[str, _Reply] = {}
        self._early: dict[str, Sample] = {}
        """Samples that a driver before this one had asked for, until somebody here does."""
        self._unwanted: set[str] = set()
        self._taken: list[str] = []
        self._sending = self._collecting = False

    def generate(self, requests: list[GenerateRequest], deadline: float) -> list[Sample]:
        """Samples in the order asked; requests that the engine knows from a driver before are not drawn again.

        Raises:
            TimeoutError: not all came within `deadline` seconds.
            ActorLost, ActorTimeout: from any call to the engine; whoever waits gets it at once.
            Exception: the engine's, about these requests; they are aborted.
        """
        until = time.monotonic() + deadline
        replies = self._ask(requests)
        try:
            return [reply.future.result(max(0.0, until - time.monotonic())) for reply in replies]
        except BaseException:
            self._leave(requests, replies)
            raise

    def abort(self, request_ids: list[str] | None = None) -> int:
        """End these, or all; whoever waits for one gets what was drawn of it, others' samples are not kept."""
        with self._lock:
            names = [*self._replies, *self._early] if request_ids is None else request_ids
            for name in names:
                if reply := self._replies.get(name):
                    reply.unwanted = not reply.sent
                elif not self._early.pop(name, None):
                    self._unwanted.add(name)
        return self._abort(request_ids)

    def fail(self, error: Exception, request_ids: Iterable[str] | None = None) -> None:
        """Whoever waits for one of these, or for any, gets the error now."""
        with self._lock:
            names = list(self._replies) if request_ids is None else list(request_ids)
            failed = [reply for name in names if (reply := self._replies.pop(name, None))]
        for reply in failed:
            reply.future.set_exception(error)

    def _ask(self, requests: list[GenerateRequest]) -> list[_Reply]:
        with self._lock:
            names = [request.request_id for request in requests]
            fresh = [request for request in requests if request.request_id not in self._replies]
            replies = [self._replies.setdefault(name, _Reply()) for name in names]
            for name, reply in zip(names, replies, strict=True):
                reply.waiters += 1
                self._unwanted.discard(name)
                if name in self._early:
                    fresh = [request for request in fresh if request.request_id != name]
                    self._replies.pop(name).future.set_result(self._early.pop(name))
            if fresh:
                self._gathered.append(fresh)
                self._start()
        return replies

    def _start(self) -> None:
        """The threads that are needed and not there; the caller holds the lock."""
        if not self._sending:
            self._sending = True
            threading.Thread(target=self._send, name="furlong-submit", daemon=True).start()
        if not self._collecting:
            self._collecting = True
            threading.Thread(target=self._bring, name="furlong-collect", daemon=True).start()

    def _leave(self, requests: list[GenerateRequest], replies: list[_Reply]) -> None:
        """Stop waiting, as after an error or an interrupt: what nobody else waits for is aborted and not kept."""
        with self._lock:
            for reply in replies:
                reply.waiters -= 1
            names = [request.request_id for request in requests]
            left = [name for name in names if (reply := self._replies.get(name)) and reply.waiters <= 0]
            sent = [name for name in left if self._replies.pop(name).sent]
            self._unwanted.update(sent)
        # One that is gone draws nothing any more.
        with suppress(*GONE):
            if sent:
                self._abort(sent)

    def _send(self) -> None:
        while True:
            with self._lock:
                gathered, self._gathered = self._gathered, []
                calls = [wanted for call in gathered if (wanted := [r for r in call if r.request_id in self._replies])]
                if not calls:
                    self._sending = False
                    return
            self._submit_all(calls)

    def _submit_all(self, calls: list[list[GenerateRequest]]) -> None:
        names = [request.request_id for call in calls for request in call]
        with self._lock:
            sending = {name: reply for name in names if (reply := self._replies.get(name))}
        try:
            self._submit([request for call in calls for request in call])
            if late := self._sent(sending):
                self._abort(late)
        except GONE as err:
            self.fail(err)
        except Exception as err:  # raised again in whoever asked for it
            if len(calls) == 1:
                self.fail(err, names)
                return
            # One unusable request must not be the end of other threads'.
            for call in calls:
                self._submit_all([call])

    def _sent(self, replies: dict[str, _Reply]) -> list[str]:
        """Told that the engine has these; those that were aborted, or left by all, while they were on their way."""
        with self._lock:
            left = [n for n, reply in replies.items() if reply.waiters <= 0 and n not in self._replies]
            self._unwanted.update(left)
            for reply in replies.values():
                reply.sent = True
            return left + [name for name, reply in replies.items() if reply.unwanted]

    def _bring(self) -> None:
        while True:
            with self._lock:
                taken, self._taken = self._taken, []
                if not self._replies and not taken:
                    self._collecting = False
                    return
                seconds = POLL if self._replies else 0.0
            try:
                samples = self._collect(seconds, taken)
            except Exception as err:  # raised again in those who wait
                # An engine that goes on says which requests an error is of; of another one nobody knows.
                self.fail(err, None if isinstance(err, GONE) else getattr(err, "request_ids", None))
            else:
                self._deliver(samples)

    def _deliver(self, samples: list[Sample]) -> None:
        with self._lock:
            self._taken += [sample.request_id for sample in samples]
            for sample in samples:
                name = sample.request_id
                if reply := self._replies.pop(name, None):
                    reply.future.set_result(sample)
                elif name not in self._unwanted:
                    self._early[name] = sample
                self._unwanted.discard(name)
