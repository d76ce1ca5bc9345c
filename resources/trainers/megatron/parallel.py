"""The process groups of one layout, made once in each rank's process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch.distributed as dist

from furlong.kernels.ring import Ring
from furlong.kernels.tap_shards import tap_group
from furlong.ops.policy.parallel import Layout
from furlong.ops.spec import SpecError
from furlong.resources.trainers.megatron import shims


@dataclass(frozen=True)
class Place:
    """Where one rank stands in its layout. Ranks are numbered tp first, then cp, dp and pp (megatron-core's order)."""

    layout: Layout
    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    deadline: float = 600.0
    """Seconds that any wait for another rank may take."""

    @property
    def first_stage(self) -> bool:
        """Whether it holds the embedding."""
        return self.pp == 0

    @property
    def last_stage(self) -> bool:
        """Whether it holds the head, and so has the log-probabilities."""
        return self.pp == self.layout.pp - 1

    @property
    def tp_group(self) -> dist.ProcessGroup:
        return _state().get_tensor_model_parallel_group()

    @property
    def ring(self) -> Ring | None:
        """Of the ranks that share a line; None where one has it whole."""
        return _ring(_state().get_context_parallel_group(), self.deadline) if self.layout.cp > 1 else None

    @property
    def taps(self) -> dist.ProcessGroup | None:
        """Of the stages with its other coordinates, for what a draft reads of them and nothing else; None for one stage."""
        return _taps.get("group")

    @property
    def expert_sum_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same experts, over which their gradients are summed."""
        return _state().get_expert_data_parallel_group()


_taps: dict[str, dist.ProcessGroup] = {}
"""Like megatron-core's own groups: those of the layout initialised last, which another trainer of this process may share."""


def initialise(layout: Layout, rank: int, world: int, deadline: float = 600.0) -> Place:
    """Make the groups of `layout`. Called by every rank, in the default group of torch.distributed, which a single rank
    need not have made.

    Args:
        rank: of this process, in [0, world).
        deadline: seconds that any collective in these groups may take.
    Raises:
        ShimError: megatron-core is missing or untested.
        SpecError: the layout is for another number of ranks.
    """
    shims.install()
    if layout.world != world:
        raise SpecError(
            f"trainer layout {layout} is for {layout.world} ranks, but there are {world}; give placement and layout the same"
        )
    if not dist.is_initialized() and world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_rank() != rank or dist.get_world_size() != world:
        raise SpecError(
            f"rank {rank} of {world} is rank {dist.get_rank()} of {dist.get_world_size()} in torch.distributed; make the "
            "default group with the trainer's own numbers"
        )
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    state = _state()
    _forget()
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        # An expert is never split: experts are divided over the ranks that tensor parallelism would split them over.
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, round(deadline / 60)),
        create_gloo_process_groups=False,
    )
    # The trainer draws no random numbers; megatron-core wants its generators seeded all the same.
    model_parallel_cuda_manual_seed(1)
    if layout.pp > 1:
        apart = world // layout.pp
        _taps["group"] = tap_group([range(first, world, apart) for first in range(apart)], deadline)
        state._global_process_group_list.append(_taps["group"])
    return Place(
        layout,
        rank,
        tp=state.get_tensor_model_parallel_rank(),
        cp=state.get_context_parallel_rank(),
        dp=state.get_data_parallel_rank(),
        pp=state.get_pipeline_model_parallel_rank(),
        ep=state.get_expert_model_parallel_rank(),
        deadline=deadline,
    )


def teardown() -> None:
    """Undo `initialise`; the default group of several ranks stays, for whoever made it."""
    _forget()
    if dist.is_initialized() and dist.get_world_size() == 1:
        dist.destroy_process_group()


@lru_cache(maxsize=1)
def _ring(group: dist.ProcessGroup, deadline: float) -> Ring:
    """One for all that call in a group: its ranks count their calls, and groups end with the next layout's."""
    return Ring(group, deadline)


def _forget() -> None:
    """Have megatron-core forget its groups, and end them: each has a thread that would go on waking up for nothing."""
    state = _state()
    _taps.clear()
    for group in state._global_process_group_list or ():
        # Groups that a lost rank took with it ended with torch.distributed's default group of then.
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    state.destroy_model_parallel()


def _state() -> ModuleType:
    from megatron.core import parallel_state

    return parallel_state
