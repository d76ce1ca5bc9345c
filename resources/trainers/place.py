"""What of a run's placement a trainer is told. Imports nothing heavy, as drivers make it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """What a trainer is told of its placement."""

    logs: str
    """Folder for the logs of ranks beside the first."""
    threads: int
    """PyTorch threads of each rank; 0 for all cores."""
    layout: str = ""
    """As in `ops.policy.parallel`."""
    gpus: int = 0
    """GPUs of each rank."""
    deadline: float = 1800.0
    """Seconds that ranks wait for each other."""
