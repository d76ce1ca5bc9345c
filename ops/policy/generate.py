"""Which requests an engine of a model can draw replies for."""

from __future__ import annotations

from math import isfinite

from furlong.ops.policy.architecture import Architecture
from furlong.ops.protocols import GenerateRequest


class RequestError(ValueError):
    """Requests that cannot run; the message names the first one at fault. Nothing has run."""


def check_requests(requests: list[GenerateRequest], architecture: Architecture) -> None:
    """Raise RequestError unless every request can run on a model of this architecture."""
    seen: set[str] = set()
    for request in requests:
        if request.request_id in seen:
            raise RequestError(f"request {request.request_id!r} occurs twice; give each request of one call its own id")
        seen.add(request.request_id)
        trouble = _trouble_of_tokens(request, architecture) or _trouble_of_rules(request)
        if trouble:
            raise RequestError(f"request {request.request_id!r}: {trouble}")


def _trouble_of_tokens(request: GenerateRequest, architecture: Architecture) -> str:
    if not request.prompt:
        return "the prompt is empty; give at least one token id"
    for name, tokens in (("", request.prompt), ("of the prefix ", request.prefix), ("to stop at ", request.stop_ids)):
        odd = [token for token in tokens if not 0 <= token < architecture.vocab]
        if odd:
            return (
                f"token id {odd[0]} {name}is outside the vocabulary of {architecture.vocab}; use the model's tokenizer"
            )
    if request.max_new_tokens < 1:
        return f"max_new_tokens={request.max_new_tokens}; ask for at least 1"
    if len(request.prefix) >= request.max_new_tokens:
        return (
            f"its prefix of {len(request.prefix)} tokens leaves nothing of max_new_tokens={request.max_new_tokens}, which "
            "counts the prefix; that reply is finished"
        )
    total = len(request.prompt) + request.max_new_tokens
    if total > architecture.context:
        return (
            f"its prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} make {total}, more "
            f"than the model's context of {architecture.context}; shorten either"
        )
    return ""


def _trouble_of_rules(request: GenerateRequest) -> str:
    if not (isfinite(request.temperature) and request.temperature >= 0):
        return f"temperature={request.temperature}; give 0 (greedy) or a positive number"
    if request.top_k < 0:
        return f"top_k={request.top_k}; give 0 (all) or a positive number"
    if not 0 < request.top_p <= 1:
        return f"top_p={request.top_p}; give a number in (0, 1]"
    if not 0 <= request.min_p <= 1:
        return f"min_p={request.min_p}; give a number in [0, 1]"
    if not 0 <= request.seed < 2**63:
        return f"seed={request.seed}; give a number in [0, 2^63)"
    if not (isfinite(request.deadline) and request.deadline >= 0):
        return f"deadline={request.deadline}; give 0 (none) or a positive number of seconds"
    return ""
