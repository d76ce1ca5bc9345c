"""What one rank of context parallelism did: pairs looked at, FLOPs, bytes sent, and which strategy and backend did it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

FORWARD_PRODUCTS = 2
BACKWARD_PRODUCTS = 5
"""Matrix products per pair: Q K^T and P V; again Q K^T, and those for dP, dV, dQ, dK (Dao 2023, section 3.1)."""


@dataclass(frozen=True)
class Decision:
    """What was asked for and what was done; the same on every rank."""

    call: str
    asked: str | int
    strategy: str
    backend: str
    gathered_bytes: int
    """What all keys and values would take on one rank, the figure that a byte budget is compared with."""


@dataclass
class Ledger:
    """Sums since the start or the last `clear`, of this rank alone."""

    sent: Counter[str] = field(default_factory=Counter)
    """Bytes handed to the process group, by kind: "kv", "gradient", "heads" and "coordinates" (Ulysses), "halo",
    "halo gradient", "header"."""
    messages: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    """Visible (query, key) pairs of forward passes, by part: "trunk", "branch". The number of heads does not count."""
    computed: Counter[str] = field(default_factory=Counter)
    """Pairs that the backend went through to get them, masked ones included."""
    flops: Counter[str] = field(default_factory=Counter)
    """Of visible pairs, in this rank's query heads, by pass: "forward", "backward"."""
    decisions: Counter[Decision] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget everything counted so far."""
        for counter in vars(self).values():
            counter.clear()

    def work(self, step: str, part: str, pairs: int, computed: int, heads: int, head_dim: int) -> None:
        """Count pairs (in the forward pass) and FLOPs (in either) of one call to a backend."""
        if step == "forward":
            self.pairs[part] += pairs
            self.computed[part] += computed
        products = FORWARD_PRODUCTS if step == "forward" else BACKWARD_PRODUCTS
        self.flops[step] += products * 2 * head_dim * heads * pairs
