"""Where the words of a piece lie in the flat words of its whole tensor, by integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, UInt

from furlong.ops.weights.layout import Piece


@dataclass(frozen=True)
class Slab:
    """Words `start` to `start` + `width` of each of `rows` rows of `full` words; the slab's rows lie end to end."""

    rows: int
    full: int
    start: int
    width: int

    @classmethod
    def of(cls, piece: Piece | None, shape: Sequence[int], words: int) -> Slab:
        """The slab of `piece`, or of the whole tensor for None.

        Args:
            shape: of the whole tensor; words: machine words per element.
        Raises:
            ValueError: the piece has a dimension or indices that the tensor lacks.
        """
        if piece is None:
            size = math.prod(shape) * words
            return cls(1, size, 0, size)
        sizes = list(shape) or [1]
        if not 0 <= piece.dim < len(sizes) or not 0 <= piece.start <= piece.stop <= sizes[piece.dim]:
            raise ValueError(
                f"piece {piece.start} to {piece.stop} of dimension {piece.dim} does not lie in shape {list(shape)}; "
                "take the pieces from the layout of this version's model"
            )
        inner = math.prod(sizes[piece.dim + 1 :]) * words
        rows, full = math.prod(sizes[: piece.dim]), sizes[piece.dim] * inner
        if piece.stop - piece.start == sizes[piece.dim]:
            return cls(1, rows * full, 0, rows * full)
        return cls(rows, full, piece.start * inner, (piece.stop - piece.start) * inner)

    @property
    def whole(self) -> bool:
        """True when the slab is the complete tensor."""
        return self.width == self.full

    @property
    def size(self) -> int:
        """Words in the slab."""
        return self.rows * self.width

    def locate(
        self, flat: Int[np.ndarray, " k"], values: UInt[np.ndarray, " k"]
    ) -> tuple[Int[np.ndarray, " j"], UInt[np.ndarray, " j"]]:
        """Of changes at positions `flat` of the whole tensor those in the slab, with positions in the slab."""
        if self.whole:
            return flat, values
        row = flat // max(1, self.full)
        column = flat - row * self.full - self.start
        inside = (column >= 0) & (column < self.width)
        return row[inside] * self.width + column[inside], values[inside]

    def cuts(self, lo: int, hi: int) -> Iterator[tuple[slice, slice, tuple[int, int], slice]]:
        """How words `lo` to `hi` of the whole tensor fall into the slab: a partial row, whole rows, a partial row.

        Yields:
            The slab's words, the words counted from `lo`, the shape in which to see the latter, and its columns.
        """
        at = lo
        while at < hi:
            row, column = divmod(at, self.full)
            rows = (hi - at) // self.full if column == 0 else 0
            end = at + rows * self.full if rows else min(hi, (row + 1) * self.full)
            first = max(self.start, column)
            last = min(self.start + self.width, end - row * self.full if not rows else self.full)
            if last > first:
                begin = row * self.width + first - self.start
                shape = (max(1, rows), self.full if rows else end - at)
                columns = slice(first - column, last - column)
                yield slice(begin, begin + shape[0] * (last - first)), slice(at - lo, end - lo), shape, columns
            at = end
