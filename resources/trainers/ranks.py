"""The ranks of one trainer, as each of them talks to the others: sums and plain data, nothing when it is alone."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.ops.policy.parallel import Layout


@dataclass(frozen=True)
class Ranks:
    """This rank among all of `torch.distributed`'s default group; every method is called on all of them."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world} ranks; number them from 0")
        if self.world > 1 and not (dist.is_initialized() and dist.get_world_size() == self.world):
            raise RuntimeError(
                f"a trainer of {self.world} ranks needs torch.distributed's default group of that size; start it by "
                "resources/trainers/make.py"
            )

    @property
    def first(self) -> bool:
        """Whether this is rank 0, whose results count."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, on every rank."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, plain data, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agree(self, error: Exception | None) -> None:
        """Raise on every rank when any has an error: the lowest such rank's, so that all raise the same."""
        first = next((error for error in self.exchange(error) if error is not None), None)
        if first is not None:
            raise first


def device() -> torch.device:
    """Where a rank computes: its GPU when Ray gave it one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_data_parallel(layout: Layout) -> None:
    """Raise ValueError for a layout that splits more than micro-batches and masters."""
    odd = [f.name for f in fields(layout) if f.name not in ("dp", "recompute") and getattr(layout, f.name) != f.default]
    if odd:
        raise ValueError(
            f"trainer layout {layout}: the fsdp backend shares micro-batches and masters (dp), not {', '.join(odd)}; set "
            "trainer.backend=megatron, or FURLONG_TRAINER_LAYOUT to dp alone"
        )
