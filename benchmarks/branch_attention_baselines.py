"""What branch attention is measured against: one softmax over main keys and branch entries, by kernels that exist.

Each takes the tensors of `branch_attention`, [branches 1 heads head_dim] queries that hang off main rows in order, and
returns the same output. They are written to be as good as they can be: the block mask is made from coordinates at the
granularity of blocks (never a matrix of all pairs), and its making is neither timed nor counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


@dataclass(frozen=True)
class Coordinates:
    """Of one rank's queries and of all keys that it sees: main keys first, then its branches' entries."""

    document: Tensor
    cutoff: Tensor
    key_document: Tensor
    key_position: Tensor
    entries: int
    """Per branch; branch i hangs off query i."""


@cache
def compiled():
    return torch.compile(flex_attention, dynamic=False)


def dense_mask(at: Coordinates) -> Tensor:
    """Bool [queries, main keys + branches * entries]."""
    rows = torch.arange(len(at.document))
    main = (at.document[:, None] == at.key_document) & (at.key_position < at.cutoff[:, None])
    own = rows[:, None] == rows.repeat_interleave(at.entries)
    return torch.cat([main, own], 1)


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """SDPA with a mask of all pairs. Keys are repeated over the query heads, as its fused CPU kernel wants them."""
    groups = q.shape[2] // keys.shape[1]
    keys, values = (_heads_first(x[:, None]).repeat_interleave(groups, 1) for x in (keys, values))
    return _rows_last(F.scaled_dot_product_attention(_heads_first(q), keys, values, attn_mask=mask[None, None]))


def block_mask(at: Coordinates) -> BlockMask:
    """Which blocks of keys each block of queries needs, and which of those wholly."""
    main, entries = len(at.key_document), at.entries
    low, high = _range(at.cutoff)
    first, last = _range(at.document)
    key_low, key_high = _range(at.key_position)
    key_first, key_last = _range(at.key_document)
    some = (key_first <= last[:, None]) & (first[:, None] <= key_last) & (key_low < high[:, None])
    one = (first == last)[:, None] & (key_first == key_last) & (first[:, None] == key_first)
    whole = one & (key_high < low[:, None])
    rows = torch.arange(len(at.document))
    row_low, row_high = _range(rows)
    anchor_low, anchor_high = _range(rows.repeat_interleave(entries))
    own = (anchor_low <= row_high[:, None]) & (row_low[:, None] <= anchor_high)
    some, whole = torch.cat([some, own], 1), torch.cat([whole, torch.zeros_like(own)], 1)
    document, cutoff = at.document, at.cutoff
    key_document = torch.cat([at.key_document, at.key_document.new_full((len(rows) * entries,), -2)])
    key_position = torch.cat([at.key_position, rows.repeat_interleave(entries)])

    def visible(b, h, query, key):
        seen = (document[query] == key_document[key]) & (key_position[key] < cutoff[query])
        return torch.where(key < main, seen, key_position[key] == query)

    return _made(some, whole, visible, (len(rows), main + len(rows) * entries))


def causal_block_mask(rows: int, entries: int) -> BlockMask:
    """The same for one document whose rows lie in order: a mask without look-ups, the fastest form there is."""
    queries, keys = torch.arange(0, rows, BLOCK), torch.arange(0, rows, BLOCK)
    whole, some = keys + BLOCK - 1 <= queries[:, None], keys <= queries[:, None] + BLOCK - 1
    anchors = torch.arange(0, rows * entries, BLOCK)
    last = (anchors + BLOCK - 1) // entries
    own = (anchors // entries <= queries[:, None] + BLOCK - 1) & (queries[:, None] <= last)
    some, whole = torch.cat([some, own], 1), torch.cat([whole, torch.zeros_like(own)], 1)

    def visible(b, h, query, key):
        return torch.where(key < rows, key <= query, (key - rows) // entries == query)

    return _made(some, whole, visible, (rows, rows * (1 + entries)))


def flex(q: Tensor, keys: Tensor, values: Tensor, mask: BlockMask) -> Tensor:
    """Compiled FlexAttention; on the CPU it has no backward pass and gives no log-sum-exp (torch 2.13)."""
    keys, values = (_heads_first(x[:, None]) for x in (keys, values))
    return _rows_last(compiled()(_heads_first(q), keys, values, block_mask=mask, enable_gqa=True))


class Joined(torch.autograd.Function):
    """All ranks' main rows, one rank after the other, then this rank's entries, in one buffer; gradients go home."""

    @staticmethod
    def forward(ctx, main: Tensor, branch: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, ctx.rows, ctx.entries = group, len(main), branch.shape
        ctx.ranks = 1 if group is None else dist.get_world_size(group)
        out = main.new_empty((ctx.ranks * len(main) + branch.shape[0] * branch.shape[1], *main.shape[1:]))
        gathered = out[: ctx.ranks * len(main)]
        if group is None:
            gathered.copy_(main)
        else:
            dist.all_gather_single(gathered, main.contiguous(), group=group)
        out[len(gathered) :] = branch.flatten(0, 1)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        main, branch = grad[: ctx.ranks * ctx.rows], grad[ctx.ranks * ctx.rows :].view(ctx.entries)
        if ctx.group is None:
            return main, branch, None
        out = grad.new_empty((ctx.rows, *grad.shape[1:]))
        dist.reduce_scatter_single(out, main.contiguous(), group=ctx.group)
        return out, branch, None


def computed_by_blocks(mask: BlockMask) -> int:
    """Pairs per head in the blocks that FlexAttention multiplies."""
    blocks = int(mask.kv_num_blocks.sum())
    blocks += 0 if mask.full_kv_num_blocks is None else int(mask.full_kv_num_blocks.sum())
    return blocks * BLOCK * BLOCK


def _made(some: Tensor, whole: Tensor, visible, lengths: tuple[int, int]) -> BlockMask:
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=lengths,
        compute_q_blocks=False,
    )  # fmt: skip


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    order = chosen.to(torch.int8).argsort(stable=True, dim=1, descending=True).int()
    return chosen.sum(1, dtype=torch.int32)[None, None], order[None, None].contiguous()


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest of each block."""
    ends = F.pad(x, (0, -len(x) % BLOCK), value=int(x[-1])).view(-1, BLOCK)
    return ends.amin(1), ends.amax(1)


def _heads_first(x: Tensor) -> Tensor:
    return x.flatten(0, 1).transpose(0, 1)[None]


def _rows_last(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)[:, None]
