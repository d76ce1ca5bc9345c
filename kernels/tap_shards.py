"""Sharded taps: the group that each shard travels in, and putting shards together where the draft needs whole rows."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from furlong.kernels.tap_weights import wide


def tap_group(pipelines: Sequence[Sequence[int]], deadline: float) -> dist.ProcessGroup:
    """A process group for this rank's TapChannel, apart from every other.

    Each (tensor, context, data) coordinate has a pipeline of its own, so its shards of the taps stay what they are:
    shard i of a stage goes to shard i of the draft's stage, and nothing is gathered on the way.

    Args:
        pipelines: global ranks of every pipeline, each in the order of its stages; the same list on all ranks, which
            all call this at the same point.
        deadline: seconds for anything in the group.
    """
    ranks = [rank for pipeline in pipelines for rank in pipeline]
    if len(set(ranks)) != len(ranks) or dist.get_rank() not in ranks:
        raise ValueError(f"pipelines {[list(p) for p in pipelines]} must hold each rank once, {dist.get_rank()} too")
    own = None
    for pipeline in pipelines:
        # The group's ranks number the stages, so torch must not sort them.
        group = dist.new_group(
            list(pipeline), timedelta(seconds=deadline), backend="gloo", group_desc="taps", sort_ranks=False
        )
        own = group if dist.get_rank() in pipeline else own
    return own


def assemble(shard: Float[Tensor, "rows hidden"], group: dist.ProcessGroup | None) -> Float[Tensor, "all_rows hidden"]:
    """Whole rows from sequence-parallel shards of equal size, in the order of the group's ranks; differentiable.

    The gradient of a shard is the sum over the group's ranks of the gradient of its rows, as for a loss that is the sum
    of the ranks' losses. It is summed in the order of ranks, in wide precision.

    Args:
        group: the tensor-parallel group; None leaves the shard as it is.
    """
    if group is None or dist.get_world_size(group) == 1:
        return shard
    return _Assemble.apply(shard, group)


class _Assemble(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shard: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, shard.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        ranks = ctx.group.size()
        mine = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        dist.all_to_all_single(mine, gradient.contiguous(), group=ctx.group)
        total = torch.zeros(
            len(gradient) // ranks, *gradient.shape[1:], dtype=wide(gradient.dtype), device=gradient.device
        )
        for part in mine.chunk(ranks) if len(mine) else ():
            total += part
        return total.to(gradient.dtype), None
