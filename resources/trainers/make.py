"""The trainer of a run: in this process, or spread over several."""

from __future__ import annotations

from pathlib import Path

from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import Trainer
from furlong.ops.spec import RunSpec


def make_trainer(spec: RunSpec, threads: int, layout: Layout, gpus: int, deadline: float, logs: Path) -> Trainer:
    """One rank of `layout` here, or all of them as a group that ends with this process.

    Args:
        threads: CPU threads of each rank; 0 to share out all cores.
        gpus: GPUs asked of Ray for each further rank.
        deadline: seconds that any wait for another rank may take.
        logs: folder that further ranks write their logs to.
    Raises:
        ValueError: a layout that the spec's backend cannot do.
    """
    if layout.world == 1:
        return make_rank(spec, threads, layout, 0, deadline)
    from furlong.resources.trainers.group import TrainerGroup
    from furlong.resources.trainers.ranks import require_data_parallel

    if spec.trainer.backend == "fsdp":
        require_data_parallel(layout)  # before any process is started
    return TrainerGroup(spec, threads, layout, gpus, deadline, logs)


def make_rank(spec: RunSpec, threads: int, layout: Layout, rank: int, deadline: float) -> Trainer:
    """This process's rank of a trainer; with several, torch.distributed's default group must be there."""
    if spec.trainer.backend == "megatron":
        from furlong.resources.trainers.megatron import shims

        shims.require()
        from furlong.resources.trainers.megatron.trainer import MegatronTrainer

        return MegatronTrainer(spec, threads, layout, rank, deadline)
    from furlong.resources.trainers.fsdp import FSDPTrainer

    return FSDPTrainer(spec, threads, layout, rank)
