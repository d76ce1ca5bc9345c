"""PyTorch held to algorithms that give the same bits every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic() -> Iterator[None]:
    """Only such algorithms, and torch as it was afterwards."""
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory guards against reading it, which nothing here does, and costs a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before)
