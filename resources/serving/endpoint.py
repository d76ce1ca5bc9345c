"""Sessions that agents reach by a URL: an OpenAI-compatible chat completion becomes a turn of a token-exact session."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from furlong.ops.identity import counter_seed
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.rollouts.trajectory import Draw, EngineLost, Trajectory
from furlong.ops.sessions.matchers import Matcher, loose_tool_call
from furlong.ops.sessions.messages import MessageError
from furlong.ops.sessions.session import CutReply, Session, SessionError, Turn, turn_seed
from furlong.ops.sessions.template import ChatTemplate, TemplateError
from furlong.resources.serving.ask import Ask, read_ask
from furlong.resources.serving.completion import Completion
from furlong.resources.serving.errors import ApiError
from furlong.resources.serving.journal import Journal
from furlong.resources.serving.keys import Keys


@dataclass(frozen=True)
class Defaults:
    """How replies are drawn where a client does not say."""

    temperature: float
    """Of all replies in sessions that are trained."""
    max_new_tokens: int
    """Longest reply in sessions that are trained; a client may ask for shorter ones."""
    reply_deadline: float
    """Seconds one reply may take."""
    context_length: int
    """Longest conversation with its reply, in tokens."""


class ReplyLate(TimeoutError):
    """A reply that was not finished within its deadline, and is not part of the session."""


@dataclass
class _Seat:
    """A session and what goes on in it."""

    trajectory_id: str
    session: Session
    seed: int
    attempt: int
    key: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False
    begun: dict[int, int] = field(default_factory=dict)
    """Depth -> replies asked for there."""
    trouble: Exception | None = None
    """Why the last reply that was asked for could not be given; None when it was."""
    fatal: Exception | None = None
    """What the engines' router raised that was neither a lost engine nor a late reply."""
    first: float | None = None
    last: float | None = None
    """When the first request came and the last reply went, on the monotonic clock."""


class Endpoint:
    """Safe for any number of threads. `resources.serving.server` gives it an address."""

    def __init__(
        self,
        template: ChatTemplate,
        generate: Draw,
        defaults: Defaults,
        journal: str | Path,
        matcher: Matcher = loose_tool_call,
        most: int = 256,
        key: str = "",
    ):
        """
        Args:
            template: of the model.
            generate: draws replies, called by many threads at once.
            defaults: how.
            journal: folder for the sessions; those it holds are open again.
            matcher: tells which messages of a request are those of the session.
            most: replies that may be under way; further ones are refused with 429.
            key: opens everything that is served; a random one when empty.
        """
        self.keys = Keys(key)
        self.template, self.defaults, self.most = template, defaults, most
        self.address = ""
        """http://host:port, once served."""
        self.unrecorded = 0
        """Replies whose session had been closed, or whose client had gone, before they came."""
        self._generate, self._matcher = generate, matcher
        self._journal = Journal(journal)
        self._lock = threading.Lock()
        self._free = threading.Semaphore(most)
        self._seats: dict[str, _Seat] = {}
        for record in self._journal.sessions():
            seat = self._new_seat(record.trajectory_id, record.seed, record.attempt, "")
            seat.session.nodes = record.nodes
            for node in record.nodes:
                depth = _depth(record.nodes, node.parent)
                seat.begun[depth] = seat.begun.get(depth, 0) + 1
            self._seats[record.trajectory_id] = seat

    def open(self, trajectory_id: str, seed: int, attempt: int = 0, key: str = "") -> str:
        """Base URL of a session. One of this name, seed and attempt goes on; another one of this name is replaced.

        Args:
            seed: root of the seeds of its replies.
            attempt: number of the try, part of the replies' request ids.
            key: passed to `generate`; the session's name when empty.
        """
        with self._lock:
            if not self.address:
                raise RuntimeError("the endpoint has no address yet; start a Server for it first")
            seat = self._seats.get(trajectory_id)
            if seat is None or seat.closed or (seat.seed, seat.attempt) != (seed, attempt):
                if seat is not None:
                    self._close(seat)
                self._journal.begin(trajectory_id, seed, attempt)
                seat = self._seats[trajectory_id] = self._new_seat(trajectory_id, seed, attempt, key)
            seat.key = key or trajectory_id
        return f"{self.address}/sessions/{quote(trajectory_id, safe='')}/v1"

    def take(self, trajectory_id: str, sample: int = 0) -> list[Trajectory]:
        """Close the session and give its trajectories, none when nothing was asked; may be repeated until `discard`.

        Args:
            sample: its number within its group.
        Raises:
            DriftError: the tokens are not what the messages say.
            KeyError: no session of this name.
        """
        seat = self._seat(trajectory_id)
        self._close(seat)
        with seat.lock:
            seat.session.check()
            found = seat.session.trajectories(trajectory_id, sample, seat.seed)
            if seat.first is None or seat.last is None:
                return found
            return [replace(trajectory, seconds=seat.last - seat.first) for trajectory in found]

    def discard(self, trajectory_id: str) -> None:
        """Forget a session, on disk too; harmless when there is none."""
        with self._lock:
            seat = self._seats.pop(trajectory_id, None)
            if seat is not None:
                self._close(seat)
                self._journal.drop(trajectory_id)

    def trouble(self, trajectory_id: str) -> Exception | None:
        """Why the last reply that this session asked for was not given; None when it was."""
        return self._seat(trajectory_id).trouble

    def fatal(self, trajectory_id: str) -> Exception | None:
        """What `generate` raised that no other try would mend, such as that the group is not wanted any more."""
        return self._seat(trajectory_id).fatal

    def sampled(self, trajectory_id: str) -> int:
        """Tokens sampled in this session."""
        return self._seat(trajectory_id).session.sampled

    def sessions(self) -> list[str]:
        """Names of the sessions that are not discarded."""
        with self._lock:
            return sorted(self._seats)

    def complete(
        self, trajectory_id: str | None, body: Any, gone: Callable[[], bool] = lambda: False
    ) -> tuple[Ask, Completion]:
        """Answer a chat completion request.

        Args:
            trajectory_id: of the session that the replies become part of; None for replies that are kept nowhere.
            body: of the request, as JSON values.
            gone: whether nobody waits for the reply any more; then it does not become part of the session.
        Raises:
            ApiError: what the client is told instead; the session is as it was.
        """
        ask = read_ask(body)
        if not self._free.acquire(blocking=False):
            raise ApiError(429, f"{self.most} replies are under way; ask again later", code="too_many_requests")
        try:
            if trajectory_id is None:
                name = f"sampling-{secrets.token_hex(8)}"
                seed = 0 if ask.seed is not None else secrets.randbits(63)
                return ask, self._answer(self._new_seat(name, seed, 0, name), ask, gone, trained=False)
            return ask, self._answer(self._open_seat(trajectory_id), ask, gone, trained=True)
        finally:
            self._free.release()

    def _answer(self, seat: _Seat, ask: Ask, gone: Callable[[], bool], trained: bool) -> Completion:
        try:
            with seat.lock:
                seat.first = seat.first or time.monotonic()
                turn, requests = self._plan(seat, ask, trained)
                begun = seat.begun[turn.number]
            samples = _whole(requests, self._drawn(seat, requests, turn.number, begun))
            lost = gone()
            with seat.lock:
                nodes = seat.session.make_nodes(turn, samples, ask.stop)
                lost = lost or seat.closed
                if trained and not lost:
                    self._journal.add(seat.trajectory_id, nodes)
                if not lost:
                    seat.session.nodes.extend(nodes)
                    seat.trouble, seat.last = None, time.monotonic()
        except Exception as err:
            seat.trouble = err
            raise _told(err) from err
        if lost:
            with self._lock:
                self.unrecorded += len(nodes)
        return Completion(nodes, len(turn.prompt), int(time.time()), ask.logprobs)

    def _drawn(self, seat: _Seat, requests: list[GenerateRequest], number: int, begun: int) -> Sequence[Sample]:
        try:
            return self._generate(requests, seat.key or seat.trajectory_id)
        except EngineLost:
            with seat.lock:
                if seat.begun[number] == begun:  # the client asks again, and gets the reply that it would have got
                    seat.begun[number] = begun - len(requests)
            raise
        except TimeoutError:
            raise
        except Exception as err:
            seat.fatal = err
            raise

    def _plan(self, seat: _Seat, ask: Ask, trained: bool) -> tuple[Turn, list[GenerateRequest]]:
        defaults = self.defaults
        if trained:
            _check_trained(ask, defaults)
        turn = seat.session.plan(ask.messages, ask.tools, ask.calls)
        room = defaults.context_length - len(turn.prompt)
        if room < 1:
            raise ApiError(
                400,
                f"the conversation has {len(turn.prompt)} tokens, which leaves no room for a reply in the model's context "
                f"of {defaults.context_length}; shorten it",
                "messages",
                "context_length_exceeded",
            )
        limit = min(ask.max_tokens or defaults.max_new_tokens, defaults.max_new_tokens if trained else room, room)
        temperature = defaults.temperature if ask.temperature is None else float(ask.temperature)
        first = seat.begun.get(turn.number, 0)
        seat.begun[turn.number] = first + ask.n
        requests = []
        # the same seed from a client is another draw in each trajectory of a group, or they would all be alike
        root = seat.seed if ask.seed is None else counter_seed(seat.seed, "client", ask.seed)
        for choice in range(ask.n):
            ordinal = first + choice
            request = GenerateRequest(
                request_id="",
                prompt=turn.prompt,
                seed=turn_seed(root, turn.number, ordinal if ask.seed is None else choice),
                max_new_tokens=limit,
                temperature=temperature,
                top_k=ask.top_k or 0,
                top_p=1.0 if ask.top_p is None else float(ask.top_p),
                min_p=float(ask.min_p or 0),
                deadline=defaults.reply_deadline,
            )
            # after a crash, an engine may know replies to other prompts at this place of the session
            mark = hashlib.blake2b(repr(request).encode(), digest_size=4).hexdigest()
            name = f"{seat.trajectory_id}:{seat.attempt}.{turn.number}-{ordinal}-{mark}"
            requests.append(replace(request, request_id=name))
        return turn, requests

    def _new_seat(self, trajectory_id: str, seed: int, attempt: int, key: str) -> _Seat:
        return _Seat(trajectory_id, Session(self.template, self._matcher), seed, attempt, key)

    def _open_seat(self, trajectory_id: str) -> _Seat:
        try:
            seat = self._seat(trajectory_id)
        except KeyError as err:
            raise ApiError(404, err.args[0], code="session_not_found") from err
        if seat.closed:
            raise ApiError(
                409, f"session {trajectory_id} is closed; its trajectory has been taken", code="session_closed"
            )
        return seat

    def _seat(self, trajectory_id: str) -> _Seat:
        with self._lock:
            if trajectory_id not in self._seats:
                raise KeyError(f"there is no session {trajectory_id!r}; open it first")
            return self._seats[trajectory_id]

    def _close(self, seat: _Seat) -> None:
        with seat.lock:
            seat.closed = True


def _check_trained(ask: Ask, defaults: Defaults) -> None:
    """Replies that are trained on must come from the very distribution that the trainer computes."""
    wanted = {"temperature": defaults.temperature, "top_p": 1, "top_k": 0, "min_p": 0}
    for name, value in wanted.items():
        asked = getattr(ask, name)
        if asked is not None and not (asked == value or (name == "top_k" and asked == -1)):
            raise ApiError(
                400,
                f"{name}={asked} would not be what is trained, which is {name}={value:g}; leave it out, or sample without "
                "training at /v1",
                name,
                "unsupported_parameter",
            )


def _whole(requests: Sequence[GenerateRequest], samples: Sequence[Sample]) -> Sequence[Sample]:
    if [sample.request_id for sample in samples] != [request.request_id for request in requests]:
        raise SessionError(f"{len(samples)} replies came for {len(requests)} requests, or others; mend the router")
    for sample in samples:
        if sample.finish_reason == "deadline":
            raise ReplyLate(f"the reply took over {sample.seconds:.0f} s; allow more time, or ask for shorter replies")
        if sample.finish_reason == "abort":
            raise EngineLost("the reply was interrupted and not resumed; ask again")
    return samples


def _told(err: Exception) -> ApiError:
    """What a client is told about an error; the whole of it stays with the session."""
    if isinstance(err, ApiError):
        return err
    if isinstance(err, MessageError):
        return ApiError(400, str(err), "messages")
    if isinstance(err, CutReply):
        return ApiError(422, str(err), "messages", "reply_was_cut")
    if isinstance(err, TemplateError):
        return ApiError(422, str(err), "messages", "template_refuses")
    if isinstance(err, TimeoutError):
        return ApiError(408, str(err), code="deadline")
    if isinstance(err, EngineLost):
        return ApiError(503, f"no engine could draw the reply: {err}", code="engine_lost")
    if isinstance(err, SessionError):
        return ApiError(500, str(err), code="bad_reply")
    return ApiError(500, f"the reply could not be drawn: {type(err).__name__}: {err}")


def _depth(nodes: Sequence[Any], parent: int | None) -> int:
    depth = 0
    while parent is not None:
        parent, depth = nodes[parent].parent, depth + 1
    return depth
