"""Batched sampling: requests are checked together, run in waves that fit the cache, and answered in the order asked."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

import torch

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.kv_cache import CachePool
from furlong.ops.policy.wave import StepSource, Wave
from furlong.ops.protocols import GenerateRequest, Sample

CACHE_BYTES = 512 * 2**20
"""Largest key/value cache of a wave of more than one reply."""
MOST_LOGITS = 2**26
"""Most logits of one step, rows times vocabulary."""


class RequestError(ValueError):
    """Requests that cannot run; the message names the first one at fault. Nothing has run."""


@torch.inference_mode()
def generate(
    requests: list[GenerateRequest],
    architecture: Architecture,
    stop_ids: tuple[int, ...],
    source: StepSource,
    pool: CachePool,
) -> list[Sample]:
    """Draw all replies, in the order asked.

    Each distinct prompt of a wave is computed once. A reply's random numbers depend on its own seed only; its logits
    may differ in the last bits with the company it is computed in, as matrix products are blocked by batch size.

    Args:
        requests: see `GenerateRequest`.
        architecture: of the weights that `source` hands out.
        stop_ids: tokens that end a reply.
        source: the live weights before each step, and which requests to end.
        pool: memory for keys and values.
    Raises:
        RequestError: an unusable request; raised before anything runs.
        NonFiniteLogits: from `sampling.draw`.
    """
    check_requests(requests, architecture)
    samples: dict[str, Sample] = {}
    for some in _waves(requests, architecture):
        samples |= Wave(some, stop_ids, source, pool).run()
    return [samples[request.request_id] for request in requests]


def check_requests(requests: list[GenerateRequest], architecture: Architecture) -> None:
    """Raise RequestError unless every request can run on a model of this architecture."""
    seen: set[str] = set()
    for request in requests:
        name = f"request {request.request_id!r}"
        if request.request_id in seen:
            raise RequestError(f"{name} occurs twice; give each request of one call its own id")
        seen.add(request.request_id)
        if not request.prompt:
            raise RequestError(f"{name}: the prompt is empty; give at least one token id")
        odd = [token for token in request.prompt if not 0 <= token < architecture.vocab]
        if odd:
            raise RequestError(
                f"{name}: token id {odd[0]} is outside the vocabulary of {architecture.vocab}; use the model's tokenizer"
            )
        if request.max_new_tokens < 1:
            raise RequestError(f"{name}: max_new_tokens={request.max_new_tokens}; ask for at least 1")
        total = len(request.prompt) + request.max_new_tokens
        if total > architecture.context:
            raise RequestError(
                f"{name}: its prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} make "
                f"{total}, more than the model's context of {architecture.context}; shorten either"
            )
        if not (isfinite(request.temperature) and request.temperature >= 0):
            raise RequestError(f"{name}: temperature={request.temperature}; give 0 (greedy) or a positive number")
        if not 0 <= request.seed < 2**63:
            raise RequestError(f"{name}: seed={request.seed}; give a number in [0, 2^63)")


def _waves(requests: list[GenerateRequest], architecture: Architecture) -> Iterator[list[GenerateRequest]]:
    """Consecutive requests whose cache, as wide as the longest prompt and reply among them, and whose logits fit."""
    slot_bytes = 2 * architecture.layers * architecture.kv_heads * architecture.head_dim * torch.float32.itemsize
    most_rows = max(1, MOST_LOGITS // architecture.vocab)
    wave: list[GenerateRequest] = []
    prompts: set[tuple[int, ...]] = set()
    longest = reply = 0
    for request in requests:
        prompts.add(request.prompt)
        longest, reply = max(longest, len(request.prompt)), max(reply, request.max_new_tokens)
        slots = len(prompts) * longest + (len(wave) + 1) * reply
        if wave and (slots * slot_bytes > CACHE_BYTES or len(wave) == most_rows):
            yield wave
            wave, prompts, longest, reply = [], {request.prompt}, len(request.prompt), request.max_new_tokens
        wave.append(request)
    if wave:
        yield wave
