"""How far the draft has followed a reply."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(eq=False)
class DraftRows:
    """The draft's rows are computed when they are wanted: until then the features they need wait here.

    A draft that comes to replies under way, or one whose rows were let go, lacks the features of positions that were fed
    before. Such a reply is drawn without it, until it is computed again.
    """

    count: int = 0
    """Positions, from 0, whose keys and values of the draft the cache has."""
    waiting: list[Float[Tensor, "some hidden"]] = field(default_factory=list)
    """Features of the positions after them, in order."""

    @property
    def pending(self) -> int:
        return sum(map(len, self.waiting))

    @property
    def end(self) -> int:
        """The first position that nothing is known of."""
        return self.count + self.pending

    def forget(self) -> None:
        self.count, self.waiting = 0, []

    def add(self, first: int, features: Float[Tensor, "some hidden"]) -> None:
        """Positions from `first` on were fed; passed over when others before them are not known."""
        if first == self.end and len(features):
            self.waiting.append(features)

    def take(self, keep: int = 0) -> Float[Tensor, "taken hidden"]:
        """All that waits but the last `keep`; their rows are computed now."""
        waiting = self.waiting[0] if len(self.waiting) == 1 else torch.cat(self.waiting)
        taken = waiting[: len(waiting) - keep]
        self.count += len(taken)
        self.waiting = [waiting[len(taken) :]] if keep else []
        return taken

    def share(self, other: DraftRows, count: int) -> None:
        """The cache has a copy of another reply's first `count` positions: what the draft knows of them is known here."""
        self.count = min(other.count, count)
        more = count - self.count
        self.waiting = [torch.cat(other.waiting)[:more]] if more and other.waiting else []
