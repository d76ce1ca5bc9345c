"""A model beside the policy, with masters and an optimiser of its own: what is saved, restored and digested of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from furlong.ops.weights.layout import Piece
from furlong.resources.trainers.masters import Shapes


class Beside:
    """Every method is called on all ranks; the results are of all together. Subclasses set both attributes."""

    prefix: str
    """Before the name of everything that is saved of it, and digested."""
    masters: Any

    def bad_weight(self) -> str | None:
        """Name of the first master with a NaN or an infinity, on any rank."""
        bad = self.masters.bad_weight()
        return bad and self.prefix + bad

    def complete(self) -> Iterator[tuple[str, Tensor]]:
        """Every master by its name in a digest, whole, one at a time, on every rank."""
        for name, whole in self.masters.complete():
            yield self.prefix + name, whole

    def shapes(self) -> Shapes:
        """Shapes of the complete tensors that `state` is made of."""
        return {self.prefix + name: shape for name, shape in self.masters.shapes().items()}

    def state(self) -> dict[Piece, Tensor]:
        """What this rank writes of everything that a step reads and changes."""
        return {self.stored(piece): tensor for piece, tensor in self.masters.state().items()}

    def reads(self) -> dict[Piece, torch.dtype]:
        """The pieces that `load_state` asks for on this rank; the number of updates may be left out."""
        return {piece: tensor.dtype for piece, tensor in self.state().items()}

    def load_state(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Take over what `state` gave, under this or another layout."""
        self.masters.load_state(lambda piece: fetch(self.stored(piece)))

    def stored(self, piece: Piece) -> Piece:
        """Under which name a piece is saved."""
        return Piece(self.prefix + piece.name, piece.dim, piece.start, piece.stop)
