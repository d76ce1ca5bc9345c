"""One batch of replies from prompt to last token: shared prompts computed once, rows in step, finished rows dropped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.kv_cache import CachePool, KVCache, close_gaps
from furlong.ops.policy.sampling import draw, uniforms
from furlong.ops.protocols import GenerateRequest, Sample

PREFILL_TOKENS = 2048
"""Prompt tokens computed at once, unless one prompt alone has more: bounds the memory of activations."""


@dataclass(frozen=True)
class Live:
    """The weights of one version, ready to serve."""

    version: int
    decoder: Decoder
    extras: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of drafts and adapters, by name: held and published like the decoder's, not used by it."""
    serial: int = 0
    """Unique within an engine, as a version may be loaded more than once; ranks refer to weights by it."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything held, by Hugging Face name."""
        return self.decoder.tensors | self.extras


class StepSource(Protocol):
    """Where a batch gets its weights, and learns what to end."""

    def step(self) -> AbstractContextManager[Live | None]:
        """The weights to hold during one step, as soon as steps may run; None when `aborted` has news to act on first."""

    def aborted(self) -> frozenset[str]:
        """Running requests to end."""

    def finished(self, request_id: str) -> None:
        """This request runs no longer."""


class Wave:
    """Rows of the batch are requests still running; `_rows` says which."""

    def __init__(
        self,
        requests: list[GenerateRequest],
        stop_ids: tuple[int, ...],
        source: StepSource,
        pool: CachePool,
    ):
        self._requests = requests
        self._source = source
        self._stop_ids = np.array(stop_ids, dtype=np.int64)
        longest = max(request.max_new_tokens for request in requests)
        self._limits = np.array([request.max_new_tokens for request in requests])
        self._seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        self._lengths = np.array([len(request.prompt) for request in requests])
        self._temperatures = torch.tensor([request.temperature for request in requests], dtype=torch.float32)
        self._tokens = np.zeros((len(requests), longest), dtype=np.int64)
        self._logprobs = np.zeros((len(requests), longest))
        self._versions: list[int] = []
        # Rows that share a prompt stand together, so that a batch of equal groups needs no gathering.
        numbers = {prompt: i for i, prompt in enumerate(sorted({r.prompt: None for r in requests}, key=len))}
        self._rows = np.argsort([numbers[request.prompt] for request in requests], kind="stable")
        self._pool = pool
        self._cache: KVCache | None = None
        self._samples: dict[str, Sample] = {}
        self._started = time.perf_counter()

    def run(self) -> dict[str, Sample]:
        """Samples by request id. `len(self._versions)` counts the tokens every running row has."""
        while self._drop_aborted():
            with self._source.step() as live:
                if live is not None:
                    logits = self._decode(live.decoder) if self._versions else self._prefill(live.decoder)
                    self._draw(logits, live.version)
                    self._drop_ended()
        return self._samples

    def _prefill(self, decoder: Decoder) -> Tensor:
        """Logits after each row's prompt; equal prompts are one computation."""
        asked = [self._requests[row].prompt for row in self._rows]
        prompts = list(dict.fromkeys(asked))
        index = {prompt: i for i, prompt in enumerate(prompts)}
        owner = [index[prompt] for prompt in asked]
        lengths = [len(prompt) for prompt in prompts]
        self._cache = KVCache(self._pool, decoder.architecture, lengths, owner, self._tokens.shape[1])
        parts = [decoder.prefill(torch.tensor(prompts[at]), self._cache, at) for at in _buckets(lengths)]
        return torch.cat(parts)[owner]

    def _decode(self, decoder: Decoder) -> Tensor:
        fed = len(self._versions) - 1
        tokens = torch.from_numpy(self._tokens[self._rows, fed])
        positions = torch.from_numpy(self._lengths[self._rows] + fed)
        return decoder.decode(tokens, positions, self._cache, fed)

    def _draw(self, logits: Tensor, version: int) -> None:
        position = len(self._versions)
        numbers = torch.from_numpy(uniforms(self._seeds[self._rows], position))
        names = [self._requests[row].request_id for row in self._rows]
        tokens, logprobs = draw(logits, self._temperatures[torch.from_numpy(self._rows)], numbers, names)
        self._tokens[self._rows, position] = tokens.numpy()
        self._logprobs[self._rows, position] = logprobs.numpy()
        self._versions.append(version)

    def _drop_ended(self) -> None:
        count = len(self._versions)
        stopped = np.isin(self._tokens[self._rows, count - 1], self._stop_ids)
        full = ~stopped & (self._limits[self._rows] == count)
        rows = self._rows
        self._drop(rows[stopped], "stop")
        self._drop(rows[full], "length")

    def _drop_aborted(self) -> bool:
        """Whether any rows are left."""
        names = self._source.aborted()
        if names:
            self._drop(np.array([row for row in self._rows if self._requests[row].request_id in names], int), "abort")
        return len(self._rows) > 0

    def _drop(self, ended: np.ndarray, reason: str) -> None:
        """Record these requests' samples and close the gaps they leave, moving rows from the end of the batch."""
        if not len(ended):
            return
        for row in ended:
            self._samples[self._requests[row].request_id] = self._sample(row, reason)
            self._source.finished(self._requests[row].request_id)
        order = close_gaps(~np.isin(self._rows, ended))
        if self._cache is not None and len(order):
            self._cache.keep(order, len(self._versions))
        self._rows = self._rows[order]

    def _sample(self, row: int, reason: str) -> Sample:
        count = len(self._versions)
        spans, start = [], 0
        for version, group in groupby(self._versions):
            end = start + len(list(group))
            spans.append((version, start, end))
            start = end
        return Sample(
            request_id=self._requests[row].request_id,
            tokens=tuple(self._tokens[row, :count].tolist()),
            logprobs=tuple(self._logprobs[row, :count].tolist()),
            versions=tuple(spans),
            finish_reason=reason,
            seconds=time.perf_counter() - self._started,
        )


def _buckets(lengths: list[int]) -> Iterator[slice]:
    """Runs of prompts of one length, each of at most PREFILL_TOKENS tokens or one prompt."""
    start = 0
    for length, group in groupby(lengths):
        end, size = start + len(list(group)), max(1, PREFILL_TOKENS // length)
        yield from (slice(at, min(at + size, end)) for at in range(start, end, size))
        start = end
