"""Keys and values of a batch of replies that grow in step: each distinct prompt's once, each reply's own beside them.

Prompts end where replies begin, so unequal ones leave a gap at their left, which a mask hides. All is float32: at the
sizes of a decode step the batched products are faster so, and nothing is rounded between projection and attention.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture


class CachePool:
    """Owns the memory between calls, because fresh pages cost about as much time as filling them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def take(self, *shapes: tuple[int, ...]) -> list[Float[Tensor, ...]]:
        """Blocks of these shapes, with whatever an earlier batch wrote there."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        if sum(sizes) > self._memory.numel():
            self._memory = torch.empty(0)  # freed before the larger one is asked for
            self._memory = torch.empty(sum(sizes))
        blocks = self._memory[: sum(sizes)].split(sizes)
        return [block.view(shape) for block, shape in zip(blocks, shapes, strict=True)]


class KVCache:
    """The cache of one batch. Attention to a prompt is one matrix product for all replies to it."""

    def __init__(self, pool: CachePool, arch: Architecture, lengths: list[int], owner: list[int], new_tokens: int):
        """
        Args:
            lengths: of each distinct prompt.
            owner: for each row, its prompt's index; every prompt has at least one row.
            new_tokens: most tokens of a reply.
        """
        self._width = max(lengths)
        self._group = arch.heads // arch.kv_heads
        head = (arch.kv_heads, arch.head_dim)
        self._prompts, self._replies = pool.take(
            (arch.layers, 2, len(lengths), head[0], self._width, head[1]),
            (arch.layers, 2, len(owner), head[0], new_tokens, head[1]),
        )
        gap = torch.arange(self._width) < self._width - torch.tensor(lengths)[:, None]
        self._mask = torch.zeros(gap.shape).masked_fill_(gap, float("-inf"))[:, None] if gap.any() else None
        self._owner = np.array(owner)
        self._arrange()

    def fill(
        self,
        layer: int,
        at: slice,
        keys: Float[Tensor, "prompts length kv_heads d"],
        values: Float[Tensor, "prompts length kv_heads d"],
    ) -> None:
        """Store the prompts of index `at`, which have one length."""
        start = self._width - keys.shape[1]
        for side, rows in enumerate((keys, values)):
            self._prompts[layer, side, at, :, start:] = rows.transpose(1, 2)
            # Old memory may hold NaN, which a probability of 0 does not hide.
            self._prompts[layer, side, at, :, :start] = 0.0

    def attend(
        self,
        layer: int,
        slot: int,
        queries: Float[Tensor, "rows heads d"],
        keys_values: Float[Tensor, "rows two_kv_heads d"],
    ) -> Float[Tensor, "rows heads_d"]:
        """Write each reply's `slot`-th keys and values, then attend to its prompt and to the reply up to there.

        Queries come scaled. Those that share keys, by head (grouped-query attention, Ainslie et al. 2023) or by prompt
        (Hydragen, Juravsky et al. 2024), form one matrix; the softmax runs over both parts together.
        """
        B, N, D = queries.shape
        K, U, P, T = N // self._group, self._live_prompts, self._width, slot + 1
        replies = self._replies[layer, :, :B]
        replies[:, :, :, slot] = keys_values.view(B, 2, K, D).transpose(0, 1)
        own_keys, own_values = replies[:, :, :, :T].view(2, B * K, T, D)
        keys, values = self._prompts[layer, :, :U].view(2, U * K, P, D)
        folded = queries.contiguous().view(B, K, self._group, D)
        shared = torch.bmm(self._by_prompt(folded), keys.transpose(1, 2))
        if self._mask is not None:
            shared.view(U, -1, P).add_(self._mask[:U])
        own = torch.bmm(folded.view(B * K, -1, D), own_keys.transpose(1, 2))
        shares = torch.softmax(torch.cat([self._by_row(shared), own], dim=-1), dim=-1)
        seen = torch.bmm(self._by_prompt(shares[..., :P].view(B, K, -1, P)), values)
        return torch.baddbmm(self._by_row(seen), shares[..., P:], own_values).view(B, N * D)

    def keep(self, rows: Int[np.ndarray, " kept"], used: int) -> None:
        """Row i becomes what row rows[i] was; the first `used` slots count. Prompts that nobody is left for go."""
        self._move(self._replies[..., :used, :], rows)
        self._owner = self._owner[rows]
        order = close_gaps(np.isin(np.arange(self._live_prompts), self._owner))
        self._move(self._prompts, order)
        if self._mask is not None:
            self._mask = self._mask[torch.from_numpy(order)]
        place = np.zeros(self._live_prompts, dtype=np.int64)
        place[order] = np.arange(len(order))
        self._owner = place[self._owner]
        self._arrange()

    @staticmethod
    def _move(block: Tensor, order: Int[np.ndarray, " kept"]) -> None:
        """Only what changes place is copied."""
        moved = np.flatnonzero(order != np.arange(len(order)))
        if len(moved):
            block[:, :, torch.from_numpy(moved)] = block[:, :, torch.from_numpy(order[moved])]

    def _arrange(self) -> None:
        """Lay the rows out as a table of prompts by replies, short lines filled with any row."""
        counts = np.bincount(self._owner)
        self._live_prompts, most = len(counts), int(counts.max(initial=0))
        by_prompt = np.argsort(self._owner, kind="stable")
        nth = np.arange(len(by_prompt)) - np.repeat(np.cumsum(counts) - counts, counts)
        table = np.zeros((self._live_prompts, most), dtype=np.int64)
        table[self._owner[by_prompt], nth] = by_prompt
        place = np.empty_like(self._owner)
        place[by_prompt] = self._owner[by_prompt] * most + nth
        in_order = np.array_equal(place, np.arange(table.size))
        self._table = None if in_order else torch.from_numpy(table.reshape(-1))
        self._place = None if in_order else torch.from_numpy(place)

    def _by_prompt(
        self, x: Float[Tensor, "rows kv_heads group n"]
    ) -> Float[Tensor, "prompts_kv_heads replies_group n"]:
        _, K, G, n = x.shape
        table = x if self._table is None else x[self._table]
        U = self._live_prompts
        return table.reshape(U, -1, K, G, n).transpose(1, 2).reshape(U * K, -1, n)

    def _by_row(self, x: Float[Tensor, "prompts_kv_heads replies_group n"]) -> Float[Tensor, "rows_kv_heads group n"]:
        U, G, n = self._live_prompts, self._group, x.shape[2]
        table = x.view(U, len(x) // U, -1, G, n).transpose(1, 2).reshape(-1, len(x) // U, G, n)
        return (table if self._place is None else table[self._place]).reshape(-1, G, n)


def close_gaps(alive: Bool[np.ndarray, " n"]) -> Int[np.ndarray, " kept"]:
    """Which old index each new one takes, when those at the end fill the places of those that are not alive."""
    kept = int(alive.sum())
    order = np.arange(kept)
    order[~alive[:kept]] = kept + np.flatnonzero(alive[kept:])
    return order
