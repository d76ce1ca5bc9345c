"""Finished samples, kept until whoever asked says that it has them; for every kind of engine."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from furlong.ops.protocols import Sample


class Outbox:
    """What `submit` promises and `collect` and `generate` keep; any thread may use any method.

        box.expect(ids)                       at `submit`, of new and known ones
        box.put(sample)                       a request has finished
        box.fail([request_id], error)         it cannot: whoever waits for it, or collects next, gets the error, once
        request_id in box                     finished or failed, and not taken: do not draw it again
        box.collect(seconds, taken)           as `Engine.collect`
        with box.claimed(ids):                samples that `collect` leaves alone, because this thread waits for them
            ... submit ...
            samples = box.wait(ids, deadline) in the order asked; TimeoutError after `deadline` seconds

    An engine puts a sample before it stops calling the request running, and `submit` looks among the running ones
    first, so that no request falls between the two.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._samples: dict[str, Sample] = {}
        self._errors: dict[str, Exception] = {}
        self._claims: Counter[str] = Counter()
        self._delivered: set[str] = set()
        self._unwanted: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        with self._changed:
            return request_id in self._samples or request_id in self._errors

    def expect(self, request_ids: Iterable[str]) -> None:
        """Somebody wants these again, whatever became of who asked before; for `submit`."""
        with self._changed:
            self._unwanted.difference_update(request_ids)

    def put(self, sample: Sample) -> None:
        """Keep it, unless one of its id is kept already: then that one stands, as it may have been returned."""
        with self._changed:
            if sample.request_id in self._unwanted:
                self._unwanted.discard(sample.request_id)
                return
            self._samples.setdefault(sample.request_id, sample)
            self._changed.notify_all()

    def fail(self, request_ids: Sequence[str], error: Exception) -> None:
        """These requests have no sample, and may be submitted again once the error was told."""
        with self._changed:
            wanted = [name for name in request_ids if name not in self._unwanted]
            self._unwanted -= set(request_ids)
            self._errors |= dict.fromkeys(wanted, error)
            self._changed.notify_all()

    def collect(self, seconds: float, taken: Iterable[str]) -> list[Sample]:
        """See `Engine.collect`; samples that another thread waits for are not among them.

        Raises:
            Exception: that of a request that failed; it and others of the same error are forgotten, samples are not.
        """
        until = time.monotonic() + seconds
        with self._changed:
            for request_id in taken:
                if not self._claims[request_id]:
                    self._samples.pop(request_id, None)
            while True:
                self._raise([name for name in self._errors if not self._claims[name]])
                found = [sample for name, sample in self._samples.items() if not self._claims[name]]
                left = until - time.monotonic()
                if found or left <= 0:
                    return found
                self._changed.wait(left)

    @contextmanager
    def claimed(self, request_ids: Sequence[str]) -> Iterator[None]:
        """Keep these from `collect` meanwhile. Those that `wait` returned are forgotten afterwards, and when the context
        ends with an error, those too that are finished or finish later: nobody asks for them any more."""
        with self._changed:
            self._claims.update(request_ids)
        try:
            yield
        except BaseException:
            self._release(request_ids, wanted=False)
            raise
        self._release(request_ids, wanted=True)

    def _release(self, request_ids: Sequence[str], wanted: bool) -> None:
        with self._changed:
            self._claims.subtract(request_ids)
            for request_id in request_ids:
                if self._claims[request_id] > 0:
                    continue
                del self._claims[request_id]
                known = request_id in self._samples or request_id in self._errors
                if request_id in self._delivered or not wanted:
                    self._delivered.discard(request_id)
                    self._samples.pop(request_id, None)
                    self._errors.pop(request_id, None)
                if not wanted and not known:
                    self._unwanted.add(request_id)
            self._changed.notify_all()

    def wait(self, request_ids: Sequence[str], deadline: float) -> list[Sample]:
        """The samples of these claimed requests, in this order, once all are there.

        Raises:
            TimeoutError: after `deadline` seconds; nothing is forgotten.
            Exception: that of the first request that failed; it is forgotten.
        """
        until = time.monotonic() + deadline
        with self._changed:
            while True:
                self._raise([name for name in request_ids if name in self._errors])
                missing = [name for name in request_ids if name not in self._samples]
                if not missing:
                    self._delivered.update(request_ids)
                    return [self._samples[name] for name in request_ids]
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"request {missing[0]!r} ({len(missing)} in all) has not finished within {deadline:g} s; wait "
                        "longer, or abort it"
                    )
                self._changed.wait(left)

    def _raise(self, failed: list[str]) -> None:
        """The first one's error, once for all requests that it is the error of and that are among these."""
        if failed:
            error = self._errors[failed[0]]
            # Whoever waits for others in the same call has to know that it is not about those.
            error.request_ids = [name for name in failed if self._errors[name] is error]
            for name in error.request_ids:
                del self._errors[name]
            raise error
