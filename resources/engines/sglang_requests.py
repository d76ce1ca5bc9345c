"""Replies drawn by an SGLang server: one call for each, as many at once as the server decodes."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.generate import RequestError, check_requests
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.resources.engines.outbox import Outbox
from furlong.resources.engines.sglang_capacity import Capacity
from furlong.resources.engines.sglang_http import CONTROL_DEADLINE, ServerClient, ServerLost
from furlong.resources.engines.sglang_reply import Part, first_row, make_sample, read_part
from furlong.resources.engines.step_gate import EngineError

REPLY_DEADLINE = 1800.0
"""Seconds until a reply must be complete, pauses included."""
WATCH_SECONDS = 0.05
"""How often deadlines are looked at, and the server is told again of what is to end."""
MOST_TRIES = 3
"""Calls for one part of a reply, where a connection broke and the server lives."""


@dataclass(eq=False)
class _Asked:
    """A request that has not finished."""

    request: GenerateRequest
    submitted: float
    parts: list[Part] = field(default_factory=list)
    name: str | None = None
    """What the call under way is known by in the server; None while it waits for its turn."""
    ending: str | None = None
    """Why it is to end: `abort` or `deadline`."""
    retracted: int | None = None
    """The version whose tokens are kept, when the call under way is to end so that another begins."""
    tries: int = 0

    @property
    def positions(self) -> int:
        """Of the prompt and the longest reply."""
        return len(self.request.prompt) + self.request.max_new_tokens

    @property
    def drawn(self) -> list[int]:
        """Tokens after the request's prefix."""
        return [token for part in self.parts for token in part.tokens]

    @property
    def is_late(self) -> bool:
        deadline = self.request.deadline
        return 0 < deadline < time.monotonic() - self.submitted and not self.ending


class ServerRequests:
    """Safe for several threads."""

    def __init__(
        self,
        server: ServerClient,
        capacity: Capacity,
        architecture: Architecture,
        stop_ids: tuple[int, ...],
        cache_key: Callable[[], str],
    ):
        """
        Args:
            cache_key: names the weights that serve; prompts share cached keys and values only under one key.
        """
        self._server, self._capacity, self._architecture = server, capacity, architecture
        self._stop_ids, self._cache_key = stop_ids, cache_key
        # A server that had another engine may still be at what that one asked for.
        self._tag, self._numbers = secrets.token_hex(4), count()
        self._box = Outbox()
        self._changed = threading.Condition()
        self._asked: dict[str, _Asked] = {}
        self._queue: deque[_Asked] = deque()
        self._at_server = 0
        """Positions of the calls under way."""
        self._workers = 0
        self._trouble: EngineError | None = None

    @property
    def running(self) -> int:
        """Requests submitted and not finished, those that wait included."""
        return len(self._asked)

    @property
    def waiting(self) -> int:
        """Requests that the server has not been given yet."""
        return len(self._queue)

    def submit(self, requests: list[GenerateRequest]) -> None:
        """See `Engine.submit`.

        Raises:
            RequestError: an unusable one; none was begun.
            EngineError: the server is lost.
        """
        self._check(requests)
        now = time.monotonic()
        with self._changed:
            if self._trouble:
                raise self._trouble
            self._box.expect(request.request_id for request in requests)
            for request in requests:
                if request.request_id not in self._asked and request.request_id not in self._box:
                    asked = self._asked[request.request_id] = _Asked(request, now)
                    self._queue.append(asked)
            self._start_workers()
            self._changed.notify_all()

    def collect(self, seconds: float, taken: list[str]) -> list[Sample]:
        return self._box.collect(seconds, taken)

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Draw all replies, in the order asked; when one fails the others are ended, which nobody would wait for."""
        self._check(requests)
        names = [request.request_id for request in requests]
        with self._box.claimed(names):
            try:
                self.submit(requests)
                return self._box.wait(names, REPLY_DEADLINE)
            except BaseException:
                self.abort(names)
                raise

    def abort(self, request_ids: list[str] | None) -> int:
        """End running requests, all when None; one that is paused ends when it goes on. Returns how many."""
        wanted = None if request_ids is None else set(request_ids)
        with self._changed:
            found = [
                asked for name, asked in self._asked.items() if (wanted is None or name in wanted) and not asked.ending
            ]
            self._end(found, "abort")
        return len(found)

    def retract(self, version: int) -> None:
        """End the calls under way, so that others go on after their tokens with new keys and values.

        What is drawn after `version` was replaced and before they end is thrown away: old keys and values made it.
        """
        with self._changed:
            for asked in self._asked.values():
                if asked.name:
                    asked.retracted = version
            self._changed.notify_all()

    def close(self) -> None:
        """Fail what has not finished; harmless when there is nothing."""
        self._lose(EngineError("the engine was closed before the reply was complete; start it again"))

    def _check(self, requests: list[GenerateRequest]) -> None:
        check_requests(requests, self._architecture)
        for request in requests:
            # Checked here, because the server would cut the reply short without a word.
            total = len(request.prompt) + request.max_new_tokens
            if total > self._capacity.longest:
                raise RequestError(
                    f"request {request.request_id!r}: its prompt of {len(request.prompt)} tokens and "
                    f"max_new_tokens={request.max_new_tokens} are more than the {self._capacity.longest} that the server "
                    "takes; shorten either"
                )

    def _start_workers(self) -> None:
        if not self._workers:
            threading.Thread(target=self._watch, daemon=True).start()
        for _ in range(min(len(self._asked), self._capacity.running) - self._workers):
            self._workers += 1
            threading.Thread(target=self._work, daemon=True).start()

    def _end(self, some: list[_Asked], reason: str) -> None:
        """Under the lock. Those that wait end at once, the others when the server has ended them."""
        for asked in some:
            asked.ending = reason
            if not asked.name:
                self._queue.remove(asked)
                self._finish(asked, reason)
        self._changed.notify_all()

    def _finish(self, asked: _Asked, reason: str) -> None:
        seconds = time.monotonic() - asked.submitted
        self._box.put(make_sample(asked.request, asked.parts, reason, seconds, self._architecture))
        self._asked.pop(asked.request.request_id, None)

    def _lose(self, error: EngineError) -> None:
        """Nothing can be drawn any more."""
        with self._changed:
            self._trouble = self._trouble or error
            self._box.fail(list(self._asked), self._trouble)
            self._asked.clear()
            self._queue.clear()
            self._changed.notify_all()

    def _watch(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked or self._trouble)
                if self._trouble:
                    return
                self._end([asked for asked in self._asked.values() if asked.is_late], "deadline")
                ending = [a.name for a in self._asked.values() if a.name and (a.ending or a.retracted is not None)]
            try:
                # Again and again, as the server forgets the end of a request that has not reached it yet.
                for name in ending:
                    self._server.post("/abort_request", {"rid": name}, CONTROL_DEADLINE)
            except EngineError as err:
                if not self._server.answers(CONTROL_DEADLINE):
                    self._lose(err)
            time.sleep(WATCH_SECONDS)

    def _work(self) -> None:
        while asked := self._next():
            try:
                self._done(asked, self._call(asked))
            except ServerLost as err:
                self._try_again(asked, err)
            except Exception as err:  # whoever waits for the request is told
                with self._changed:
                    if self._asked.pop(asked.request.request_id, None):
                        self._box.fail([asked.request.request_id], err)
            finally:
                with self._changed:
                    self._at_server -= asked.positions
                    self._changed.notify_all()

    def _next(self) -> _Asked | None:
        """The next request that the server has room for; None when there will be none."""
        with self._changed:
            while not self._trouble:
                if self._queue and self._at_server + self._queue[0].positions <= self._capacity.tokens:
                    asked = self._queue.popleft()
                    asked.name = f"{self._tag}.{next(self._numbers)}:"
                    self._at_server += asked.positions
                    return asked
                self._changed.wait()
            return None

    def _call(self, asked: _Asked) -> Part:
        request, drawn = asked.request, asked.drawn
        fed = [*request.prompt, *request.prefix, *drawn]
        first = first_row(request, len(drawn))
        experts = (
            {"return_routed_experts": True, "routed_experts_start_len": first} if self._architecture.experts else {}
        )
        body = {
            "rid": asked.name,
            "input_ids": fed,
            "sampling_params": {
                "max_new_tokens": asked.positions - len(fed),
                "temperature": request.temperature,
                "top_k": request.top_k or -1,
                "top_p": request.top_p,
                "min_p": request.min_p,
                "stop_token_ids": [*self._stop_ids, *request.stop_ids],
                "sampling_seed": request.seed,
                "custom_params": {"prompt": len(request.prompt), "greedy": request.temperature == 0},
            },
            "extra_key": self._cache_key(),
            **experts,
        }
        answer = self._server.post("/generate", body, REPLY_DEADLINE)
        return read_part(request, len(fed), first, answer, self._architecture)

    def _done(self, asked: _Asked, part: Part) -> None:
        with self._changed:
            retracted, asked.retracted, asked.name, asked.tries = asked.retracted, None, None, 0
            if self._trouble:
                return
            if retracted is not None:
                part = part.before_flip(retracted)
            asked.parts.append(part)
            if own := self._own_end(asked, part):
                self._finish(asked, own)
            elif asked.ending:
                self._finish(asked, asked.ending)
            elif retracted is not None:
                self._queue.appendleft(asked)
            else:
                raise EngineError(
                    f"request {asked.request.request_id!r} was ended by somebody else than this engine; let no other "
                    "client abort requests of its server"
                )

    def _own_end(self, asked: _Asked, part: Part) -> str | None:
        """Its reason when the reply has come to its own end, perhaps in the very step that it was ended in."""
        if part.finish != "abort":
            return part.finish
        if part.tokens and part.tokens[-1] in (*self._stop_ids, *asked.request.stop_ids):
            return "stop"
        return "length" if len(asked.request.prefix) + len(asked.drawn) == asked.request.max_new_tokens else None

    def _try_again(self, asked: _Asked, err: ServerLost) -> None:
        """A connection may break without its server; the reply is then drawn again, by the same random numbers."""
        asked.tries += 1
        if asked.tries < MOST_TRIES and self._server.answers(CONTROL_DEADLINE):
            with self._changed:
                asked.name = asked.retracted = None
                if asked.ending:
                    self._finish(asked, asked.ending)
                elif not self._trouble:
                    self._queue.appendleft(asked)
        else:
            self._lose(err)
