"""Replies drawn by an SGLang server: one call for each, as many at once as the server decodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from itertools import count
from typing import Any

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.generate import RequestError, check_requests
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.resources.engines.sglang_pause import CONTROL_DEADLINE
from furlong.resources.engines.sglang_server import MAX_RUNNING, MAX_TOKENS, SGLangServer
from furlong.resources.engines.step_gate import EngineError

REPLY_DEADLINE = 1800.0
"""Seconds until a reply must be complete, pauses included."""
POLL_SECONDS = 0.25


class ServerRequests:
    """Safe for several threads."""

    def __init__(
        self, server: SGLangServer, architecture: Architecture, stop_ids: tuple[int, ...], cache_key: Callable[[], str]
    ):
        """
        Args:
            cache_key: names the weights that serve; prompts share cached keys and values only under one key.
        """
        self._server, self._architecture, self._stop_ids = server, architecture, stop_ids
        self._cache_key = cache_key
        self._numbers = count()
        self._lock = threading.Lock()
        self._running: dict[str, str] = {}
        self._ending: set[str] = set()

    @property
    def running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._running)

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Draw all replies, in the order asked.

        Raises:
            RequestError: an unusable request; raised before anything runs.
            EngineError: the server ended, or refused one.
        """
        check_requests(requests, self._architecture)
        for request in requests:
            # Checked here, because the server would cut the reply short without a word.
            if len(request.prompt) + request.max_new_tokens > MAX_TOKENS // 2:
                raise RequestError(
                    f"request {request.request_id!r}: its prompt of {len(request.prompt)} tokens and "
                    f"max_new_tokens={request.max_new_tokens} are more than {MAX_TOKENS // 2}, half of the server's "
                    "cache; shorten either"
                )
        call = next(self._numbers)
        names = {request.request_id: f"{call}:{index}:" for index, request in enumerate(requests)}
        with self._lock:
            self._running |= {name: request_id for request_id, name in names.items()}
        try:
            with ThreadPoolExecutor(MAX_RUNNING) as pool:
                drawn = [pool.submit(self._draw, names[request.request_id], request) for request in requests]
                self._watch(drawn, set(names.values()))
                return [future.result() for future in drawn]
        finally:
            with self._lock:
                for name in names.values():
                    self._running.pop(name, None)
                    self._ending.discard(name)

    def abort(self, request_ids: list[str] | None) -> int:
        """End running requests, all when None; one that is paused ends when it goes on. Returns how many."""
        with self._lock:
            names = {n for n, rid in self._running.items() if request_ids is None or rid in request_ids} - self._ending
            self._ending |= names
        self._end(sorted(names))
        return len(names)

    def _watch(self, drawn: list[Future], names: set[str]) -> None:
        """Wait for all; when one fails, end the rest, which nobody would wait for."""
        pending = set(drawn)
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
            with self._lock:
                if any(future.exception() for future in done):
                    self._ending |= names & self._running.keys()
                ending = sorted(names & self._ending & self._running.keys())
            # Again and again, as the server forgets the end of a request that has not reached it yet.
            self._end(ending)

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            self._server.post("/abort_request", {"rid": name}, CONTROL_DEADLINE)

    def _draw(self, name: str, request: GenerateRequest) -> Sample:
        with self._lock:
            if name in self._ending:
                self._running.pop(name, None)
                return Sample(request.request_id, (), (), (), "abort", 0.0)
        body = {
            "rid": name,
            "input_ids": list(request.prompt),
            "sampling_params": {
                "max_new_tokens": request.max_new_tokens,
                "temperature": request.temperature,
                "stop_token_ids": list(self._stop_ids),
            },
            "return_logprob": True,
            "extra_key": self._cache_key(),
        }
        answer = self._server.post("/generate", body, REPLY_DEADLINE)
        with self._lock:
            self._running.pop(name, None)
        return _sample(request, answer)


def _sample(request: GenerateRequest, answer: dict[str, Any]) -> Sample:
    meta = answer["meta_info"]
    tokens = tuple(answer["output_ids"])
    chosen = meta.get("output_token_logprobs") or []
    if [token for _, token, _ in chosen] != list(tokens):
        raise EngineError(
            f"request {request.request_id!r}: the server returned {len(tokens)} tokens and log-probabilities of "
            f"{len(chosen)} others; this client speaks to SGLang 0.5.23, install that one with `make sglang`"
        )
    return Sample(
        request_id=request.request_id,
        tokens=tokens,
        logprobs=tuple(logprob for logprob, _, _ in chosen),
        versions=_spans(request, meta.get("weight_versions") or [], len(tokens)),
        finish_reason=meta["finish_reason"]["type"],
        seconds=meta["e2e_latency"],
    )


def _spans(request: GenerateRequest, found: list[dict[str, Any]], tokens: int) -> tuple[tuple[int, int, int], ...]:
    spans: list[tuple[int, int, int]] = []
    for version, start, end in ((int(span["version"]), span["start"], span["end"]) for span in found):
        if spans and spans[-1][0] == version:
            # A version that was put in and taken out again between two tokens has left a seam.
            start = spans.pop()[1]
        if start < end:
            spans.append((version, start, end))
    edges = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != edges[:-1] or edges[-1] != tokens:
        raise EngineError(
            f"request {request.request_id!r}: the server's weights versions {found} do not cover its {tokens} tokens; "
            "this client speaks to SGLang 0.5.23, install that one with `make sglang`"
        )
    return tuple(spans)
