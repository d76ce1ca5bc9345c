"""The engine's attention over pages, with a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.exact.tree import Segment, Tree
from furlong.ops.policy.kv_cache import PAGE, KVCache, pages_of
from furlong.ops.policy.paged_attention import Plan, Span

QUERIES_AT_ONCE = 512
"""Tokens that the engine's attention is given in one call; like the next, bounds the memory of scores."""
SCORES_AT_ONCE = 2**20


class Attention:
    """Where the keys and values of a tree's tokens go, and what each token sees; the same for every layer.

    Every sequence has pages of its own, so what several begin with is computed once and stored for each of them, as the
    engine does for replies to one prompt. Layers take turns with one layer's pages.
    """

    def __init__(self, arch: Architecture, dtype: torch.dtype, tree: Tree):
        """`dtype` is that of the weights, in which keys and values are kept."""
        self._arch, self._dtype = arch, dtype
        lengths: dict[int, int] = {}
        for segment in tree.segments:
            lengths[segment.sequence] = max(lengths.get(segment.sequence, 0), len(segment.path))
        pages = sum(pages_of(length) for length in lengths.values())
        one = replace(arch, layers=1)
        self._cache = KVCache(one, dtype, 0)
        self._cache.enlarge(pages * PAGE)
        self._held = {}
        for sequence, length in lengths.items():
            self._held[sequence] = self._cache.open()
            self._cache.extend(self._held[sequence], length)
        self._stored, self._pages, self._offsets = self._places(tree.segments)
        self._plans = [
            Plan([Span(self._held[s.sequence], s.first, s.count) for s in some], self._cache)
            for some in _cut(tree.segments, lambda s: s.count, QUERIES_AT_ONCE)
        ]
        by_length = sorted(tree.segments, key=lambda s: len(s.path))
        size = arch.heads * max(s.count for s in by_length)
        self._groups = [_group(some) for some in _cut(by_length, lambda s: size * len(s.path), SCORES_AT_ONCE)]

    def _places(self, segments: list[Segment]) -> tuple[Tensor, Tensor, Tensor]:
        """For every place of a page that is used: which node is stored there."""
        last = {segment.sequence: segment.path for segment in sorted(segments, key=lambda s: len(s.path))}
        nodes, pages, offsets = [], [], []
        for sequence, path in last.items():
            at = np.arange(len(path))
            nodes.append(path)
            pages.append(np.asarray(self._held[sequence].pages)[at // PAGE])
            offsets.append(at % PAGE)
        return tuple(torch.from_numpy(np.concatenate(column)) for column in (nodes, pages, offsets))

    def forward(self, heads: Float[Tensor, "nodes all_heads d"]) -> Float[Tensor, "nodes heads_d"]:
        """What the engine computes from queries (scaled), keys and values."""
        N, K = self._arch.heads, self._arch.kv_heads
        kv = heads[:, N:]
        wide = F.pad(kv, (0, self._cache.keys(0).shape[-1] - kv.shape[-1]))
        self._cache.write(0, self._pages, self._offsets, wide[self._stored].view(len(self._stored), 2, K, -1))
        seen, start = [], 0
        for plan in self._plans:
            some = heads[start : start + len(plan.positions)]
            seen.append(plan.attend(0, some[:, :N], some[:, N:]))
            start += len(some)
        return torch.cat(seen)

    def backward(
        self,
        heads: Float[Tensor, "nodes all_heads d"],
        seen: Float[Tensor, "nodes heads_d"],
        grad: Float[Tensor, "nodes heads_d"],
    ) -> Float[Tensor, "nodes all_heads d"]:
        """Gradient of softmax(ln 2 Q K^T) V, whose probabilities are computed again (Dao et al. 2022, appendix B.4). That
        keys are rounded when they are stored has no gradient."""
        N, K, D = self._arch.heads, self._arch.kv_heads, self._arch.head_dim
        q, k, v = heads.split([N, K, K], dim=1)
        k = k.to(self._dtype).float()
        grad = grad.view(-1, N, D)
        # The sum over keys of P dP, by way of the output.
        along = torch.linalg.vecdot(grad, seen.view(-1, N, D))[..., None]
        found = torch.zeros_like(heads)
        dq, dk, dv = found.split([N, K, K], dim=1)
        for group in self._groups:
            Q, dO, total = (group.folded(x, K) for x in (q, grad, along))
            keys, values = group.keys_of(k), group.keys_of(v)
            shares = group.shares(Q, keys, K)
            slope = torch.bmm(dO, values.transpose(1, 2)).sub_(total).mul_(shares).mul_(math.log(2))
            group.add_queries(dq, torch.bmm(slope, keys))
            group.add_keys(dk, torch.bmm(slope.transpose(1, 2), Q))
            group.add_keys(dv, torch.bmm(shares.transpose(1, 2), dO))
        return found


@dataclass(frozen=True)
class _Group:
    """Segments side by side, filled up to one size."""

    queries: Int[Tensor, "segments most_queries"]
    keys: Int[Tensor, "segments most_keys"]
    hidden: Bool[Tensor, "segments 1 most_queries most_keys"]
    filled: Bool[Tensor, " segments_most_queries"]
    """What of `queries` fills up."""

    def folded(self, x: Float[Tensor, "nodes heads m"], kv_heads: int) -> Float[Tensor, "segments_kv_heads rows m"]:
        """Rows of the queries that share a key/value head; those that fill up are 0, and so is their gradient."""
        S, C = self.queries.shape
        some = x[self.queries.flatten()].masked_fill_(self.filled[:, None, None], 0.0)
        some = some.view(S, C, kv_heads, -1, x.shape[-1]).permute(0, 2, 3, 1, 4)
        return some.reshape(S * kv_heads, -1, x.shape[-1])

    def keys_of(self, x: Float[Tensor, "nodes kv_heads d"]) -> Float[Tensor, "segments_kv_heads most_keys d"]:
        return x[self.keys].transpose(1, 2).reshape(-1, self.keys.shape[1], x.shape[-1])

    def shares(self, queries: Tensor, keys: Tensor, kv_heads: int) -> Float[Tensor, "segments_kv_heads rows most_keys"]:
        """softmax(ln 2 Q K^T) over what each query sees."""
        scores = torch.bmm(queries * math.log(2), keys.transpose(1, 2))
        S, C, L = len(self.queries), self.queries.shape[1], self.keys.shape[1]
        scores.view(S, -1, C, L).masked_fill_(self.hidden, float("-inf"))
        return torch.softmax(scores, dim=-1)

    def add_queries(
        self, total: Float[Tensor, "nodes heads d"], rows: Float[Tensor, "segments_kv_heads rows d"]
    ) -> None:
        S, C = self.queries.shape
        N, D = total.shape[1:]
        total.index_add_(0, self.queries.flatten(), rows.view(S, N, C, D).transpose(1, 2).reshape(S * C, N, D))

    def add_keys(
        self, total: Float[Tensor, "nodes kv d"], rows: Float[Tensor, "segments_kv_heads most_keys d"]
    ) -> None:
        S, L = self.keys.shape
        K, D = total.shape[1:]
        total.index_add_(0, self.keys.flatten(), rows.view(S, K, L, D).transpose(1, 2).reshape(S * L, K, D))


def _group(segments: list[Segment]) -> _Group:
    C, L = max(s.count for s in segments), max(len(s.path) for s in segments)
    queries, keys = np.zeros((len(segments), C), np.int64), np.zeros((len(segments), L), np.int64)
    at = np.full((len(segments), C), L)
    for i, s in enumerate(segments):
        queries[i, : s.count] = s.path[s.first :]
        keys[i, : len(s.path)] = s.path
        at[i, : s.count] = np.arange(s.first, len(s.path))
    hidden = np.arange(L) > at[:, None, :, None]
    arrays = (queries, keys, hidden, (at == L).reshape(-1))
    return _Group(*(torch.from_numpy(array) for array in arrays))


def _cut(segments: list[Segment], size: Callable[[Segment], int], most: int) -> Iterator[list[Segment]]:
    """Runs of segments whose sizes add up to `most`, or one alone."""
    some, total = [], 0
    for segment in segments:
        if some and total + size(segment) > most:
            yield some
            some, total = [], 0
        some.append(segment)
        total += size(segment)
    yield some


class Attend(torch.autograd.Function):
    """`Attention.forward`, differentiable in `heads`."""

    @staticmethod
    def forward(ctx: FunctionCtx, heads: Tensor, attention: Attention) -> Tensor:
        seen = attention.forward(heads)
        ctx.save_for_backward(heads, seen)
        ctx.attention = attention
        return seen

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.attention.backward(*ctx.saved_tensors, grad.contiguous()), None
