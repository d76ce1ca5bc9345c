"""Causal attention over packed documents whose line is cut over ranks: keys and values travel round a ring.

Ring attention (Liu et al. 2023, section 3) with zigzag chunks (see `ops.policy.lines.zigzag`). Partial softmaxes are
merged as in FlashAttention-2 (Dao 2023, section 3.1); the backward pass recomputes each block's probabilities from the
merged log-sum-exp, and the gradients of keys and values travel on with them until they are home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.ops.policy.lines import NOBODY, zigzag

CHUNKS = 2
"""Per rank."""


@dataclass(frozen=True)
class Route:
    """Who attends to what, for every rank of the ring; each rank knows all of the line's documents and positions."""

    group: dist.ProcessGroup
    documents: Int[Tensor, "ranks chunks size"]
    positions: Int[Tensor, "ranks chunks size"]
    meets: tuple[tuple[tuple[bool, ...], ...], ...]
    """meets[source][q][k]: whether any query of own chunk q sees any key of chunk k of rank `source`."""

    def visible(self, queries: int, source: int, keys: int) -> Bool[Tensor, "size size"]:
        """Which query of own chunk `queries` sees which key of chunk `keys` of rank `source`."""
        me = dist.get_rank(self.group)
        return _visible(
            (self.documents[me, queries], self.positions[me, queries]),
            (self.documents[source, keys], self.positions[source, keys]),
        )


def route(documents: Int[Tensor, " width"], positions: Int[Tensor, " width"], group: dist.ProcessGroup) -> Route:
    """The route of one line, the same for all its layers.

    Raises:
        PackingError: the width is no multiple of twice the ranks.
    """
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    order = torch.stack([zigzag(len(documents), rank, ranks) for rank in range(ranks)]).view(ranks, CHUNKS, -1)
    at = documents[order], positions[order]
    meets = tuple(
        tuple(
            tuple(
                bool(_visible((at[0][me, q], at[1][me, q]), (at[0][source, k], at[1][source, k])).any())
                for k in range(CHUNKS)
            )
            for q in range(CHUNKS)
        )
        for source in range(ranks)
    )
    return Route(group, *at, meets)


def ring_attention(
    query: Float[Tensor, "heads width head_dim"],
    key: Float[Tensor, "kv_heads width head_dim"],
    value: Float[Tensor, "kv_heads width head_dim"],
    route: Route,
    scaling: float,
) -> Float[Tensor, "heads width head_dim"]:
    """softmax(scaling * Q K^T) V over each document's keys up to the query's position; 0 at padding.

    All ranks of the group call it together, and again in the backward pass. Keys and values travel in their dtype;
    everything is computed from them in float32 (float64 for float64 inputs) and rounded once.

    Args:
        query, key, value: at this rank's positions of the line, in the order of `zigzag`.
    """
    return _Ring.apply(query, key, value, route, scaling)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, route: Route, scaling: float) -> Tensor:
        q = _chunked(query, key.shape[0])
        out = torch.zeros_like(q)
        top = torch.full(q.shape[:-1], float("-inf"), dtype=q.dtype, device=q.device)
        mass = torch.zeros_like(top)
        for source, (keys, values) in _travel(torch.stack([key, value]), route.group):
            for at, k, see in _blocks(route, source):
                scores = _scores(q[at], _chunk(keys, k), see, scaling)
                higher = torch.maximum(top[at], scores.amax(-1))
                # A query without a key so far has no highest score; any finite number stands in for it.
                level = torch.where(higher == float("-inf"), 0.0, higher)
                odds = torch.exp(scores - level[..., None])
                shrink = torch.exp(top[at] - level)
                out[at] = out[at] * shrink[..., None] + torch.matmul(odds, _chunk(values, k))
                mass[at] = mass[at] * shrink + odds.sum(-1)
                top[at] = higher
        out = torch.where(mass[..., None] > 0, out / mass[..., None], 0.0)
        lse = torch.where(mass > 0, top + mass.log(), 0.0)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.route, ctx.scaling = route, scaling
        return _whole(out).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        q, g = _chunked(query, key.shape[0]), _chunked(grad, key.shape[0])
        grad_q = torch.zeros_like(q)
        # Sum over keys of probability * its gradient (Dao 2023, section 3.1.2).
        inner = (g * out).sum(-1)
        load = torch.stack([key, value])
        grad_load = torch.zeros(load.shape, dtype=q.dtype, device=load.device)
        ranks = dist.get_world_size(ctx.route.group)
        for source, (keys, values) in _travel(load, ctx.route.group):
            for at, k, see in _blocks(ctx.route, source):
                key_chunk = _chunk(keys, k)
                odds = torch.exp(_scores(q[at], key_chunk, see, ctx.scaling) - lse[at][..., None])
                slope = torch.matmul(g[at], _chunk(values, k).transpose(-1, -2))
                slope = odds * (slope - inner[at][..., None]) * ctx.scaling
                grad_q[at] += torch.matmul(slope, key_chunk)
                mine = _chunk(grad_load, k)
                mine[0] += torch.matmul(slope.transpose(-1, -2), q[at]).sum(1)
                mine[1] += torch.matmul(odds.transpose(-1, -2), g[at]).sum(1)
            if ranks > 1:
                grad_load = _passed_on(grad_load, ctx.route.group)
        grad_k, grad_v = grad_load.to(key.dtype)
        return _whole(grad_q).to(query.dtype), grad_k, grad_v, None, None


def _travel(
    load: Tensor, group: dist.ProcessGroup
) -> Iterator[tuple[int, Float[Tensor, "2 kv_heads 1 width head_dim"]]]:
    """(rank it comes from, its keys and values), own first; the next load is on its way while one is used."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    for step in range(ranks):
        coming = _begin(load, group) if step + 1 < ranks else None
        yield (me - step) % ranks, load.to(_wide(load.dtype))[:, :, None]
        if coming is not None:
            # What is being sent has to stay until it is gone.
            arriving, works = coming
            for work in works:
                work.wait()
            load = arriving


def _begin(load: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[dist.Work]]:
    """Send a tensor to the next rank and take one of the same shape from the rank before."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    arriving = torch.empty_like(load)
    to, of = (dist.get_global_rank(group, (me + turn) % ranks) for turn in (1, -1))
    sending = dist.P2POp(dist.isend, load.contiguous(), to, group)
    return arriving, dist.batch_isend_irecv([sending, dist.P2POp(dist.irecv, arriving, of, group)])


def _passed_on(load: Tensor, group: dist.ProcessGroup) -> Tensor:
    arriving, works = _begin(load, group)
    for work in works:
        work.wait()
    return arriving


def _blocks(route: Route, source: int) -> Iterator[tuple[tuple[slice, slice, int], int, Tensor]]:
    """(index of the query chunk, key chunk, what sees what) of each pair of chunks that have anything to do."""
    for q in range(CHUNKS):
        for k in range(CHUNKS):
            if route.meets[source][q][k]:
                yield (slice(None), slice(None), q), k, route.visible(q, source, k)


def _visible(query: tuple[Tensor, Tensor], key: tuple[Tensor, Tensor]) -> Bool[Tensor, "queries keys"]:
    (of, at), (key_of, key_at) = query, key
    return (of[:, None] == key_of) & (at[:, None] >= key_at) & (of[:, None] != NOBODY)


def _scores(q: Tensor, k: Tensor, see: Tensor, scaling: float) -> Float[Tensor, "kv_heads group size keys"]:
    return (torch.matmul(q, k.transpose(-1, -2)) * scaling).masked_fill(~see, float("-inf"))


def _chunked(x: Tensor, kv_heads: int) -> Float[Tensor, "kv_heads group chunks size head_dim"]:
    wide = x.to(_wide(x.dtype))
    return wide.reshape(kv_heads, x.shape[0] // kv_heads, CHUNKS, x.shape[1] // CHUNKS, x.shape[2])


def _whole(x: Float[Tensor, "kv_heads group chunks size head_dim"]) -> Float[Tensor, "heads width head_dim"]:
    return x.flatten(0, 1).flatten(1, 2)


def _chunk(x: Float[Tensor, "*lead width head_dim"], index: int) -> Float[Tensor, "*lead size head_dim"]:
    size = x.shape[-2] // CHUNKS
    return x.narrow(-2, index * size, size)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
