"""How a packed batch lies on the ranks of a context-parallel group, and the coordinates of every row.

A row's coordinates are its document and its position there. `ContextLayout.rows` is the only place they come from:
rotary embeddings, masks, losses and shifts all read it, so that none can disagree with another about a chunk's edge.
Everything here is known to every rank without a message.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

NOBODY = -1
"""Document of a padding row, which sees nothing and which nothing sees."""


class LayoutError(ValueError):
    """A batch cannot lie as asked, or a tensor is not of the layout it is given with."""


@dataclass(frozen=True)
class Rows:
    """Coordinates of some rows: those of one rank, in the order that the rank holds them."""

    document: Int[Tensor, " rows"]
    """NOBODY at padding."""
    position: Int[Tensor, " rows"]
    """Distance from the document's first token; 0 at padding."""


# Compared by identity: tensors have no truth value.
@dataclass(frozen=True, eq=False)
class ContextLayout:
    """Which rank holds which token. Every token has one place; all ranks have as many rows, made up with padding.

    Attention and halos are right for any such assignment; `zigzag_layout` is the one that shares causal work evenly.
    """

    lengths: tuple[int, ...]
    """Tokens of each document, padding not counted; 0 is legal."""
    source: Int[Tensor, "ranks rows"]
    """Row of the packed batch that is held there; NOBODY where the layout added a row."""
    document: Int[Tensor, "ranks rows"]
    """NOBODY at padding, added or already in the batch."""
    position: Int[Tensor, "ranks rows"]
    """0 at padding."""

    @property
    def ranks(self) -> int:
        return self.source.shape[0]

    @cached_property
    def packed(self) -> int:
        """Rows of the packed batch, its own padding included."""
        return int((self.source != NOBODY).sum())

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks if, and all but surely only if, they have the same layout: for the header of a call."""
        found = hashlib.blake2b(repr((self.lengths, tuple(self.source.shape))).encode(), digest_size=8)
        for table in (self.source, self.document, self.position):
            found.update(table.cpu().contiguous().numpy())
        return found.hexdigest()

    def rows(self, rank: int) -> Rows:
        """The coordinates of a rank's rows.

        Raises:
            LayoutError: there is no such rank.
        """
        self._check_rank(rank)
        return Rows(self.document[rank], self.position[rank])

    def gate(self, rank: int, offset: int) -> Bool[Tensor, " rows"]:
        """Whether the row `offset` positions on is still a token of the row's document; padding has none.

        With offset d, the rows that have a teacher at depth d; with d + 1, those that have a token to predict.
        """
        rows, lengths = self.rows(rank), torch.tensor(self.lengths, device=self.document.device)
        if not self.lengths:
            return torch.zeros_like(rows.document, dtype=torch.bool)
        ahead = rows.position + offset
        return (rows.document != NOBODY) & (ahead >= 0) & (ahead < lengths[rows.document.clamp(min=0)])

    def tokens(self, rank: int) -> Int[Tensor, " rows"]:
        """Number of each row's token, counted through all documents in turn; NOBODY at padding."""
        rows = self.rows(rank)
        starts = torch.tensor([0, *self.lengths], device=rows.document.device).cumsum(0)
        return torch.where(rows.document == NOBODY, NOBODY, starts[rows.document.clamp(min=0)] + rows.position)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise LayoutError(
                f"rank {rank} is none of the layout's {self.ranks}; pass the rank within the context-parallel group"
            )


def zigzag_layout(cu_seqlens: Int[Tensor, " documents_plus_1"], ranks: int, least_chunk: int = 1) -> ContextLayout:
    """Each document in 2 * ranks chunks, of which rank r holds the r-th and the r-th from the end, in this order.

    Later queries see more keys; so paired, every rank computes the same number of query-key pairs of each document
    (Llama 3, arXiv 2407.21783, section 3.3.2). A rank's rows are its two chunks of the first document, then its two of
    the second, and so on.

    Padding rule: a document of L > 0 tokens is padded at its end to 2 * ranks chunks of
    max(ceil(L / (2 * ranks)), least_chunk) rows. A document of no tokens has no rows. So a document shorter than
    2 * ranks leaves some ranks nothing but padding of it, and a batch without documents has no rows on any rank.

    Args:
        cu_seqlens: where each document begins in the packed batch, and where the last ends. The layout's tensors are
            on its device.
        ranks: of the context-parallel group.
        least_chunk: rows of a chunk at least; with a halo's width here, a halo comes from the neighbouring ranks alone.
    Raises:
        LayoutError: cu_seqlens does not begin with 0 or decreases, or ranks or least_chunk is below 1.
    """
    lengths = _lengths(cu_seqlens, ranks)
    if least_chunk < 1:
        raise LayoutError(f"least_chunk is {least_chunk}; a chunk has at least 1 row, which is the default")
    device = cu_seqlens.device
    chunks = 2 * ranks
    size = torch.tensor([max(-(-n // chunks), least_chunk) if n else 0 for n in lengths], device=device).long()
    document = torch.arange(len(lengths), device=device).repeat_interleave(2 * size)
    begins = (2 * size).cumsum(0) - 2 * size
    size = size[document]
    within = torch.arange(len(document), device=device) - begins[document]
    rank = torch.arange(ranks, device=device)[:, None]
    late = chunks - 2 - rank
    position = torch.where(within < size, rank * size, late * size) + within
    return _placed(lengths, document.expand(ranks, -1), position)


def contiguous_layout(cu_seqlens: Int[Tensor, " documents_plus_1"], ranks: int) -> ContextLayout:
    """The packed batch cut into `ranks` equal stretches, the last padded at its end: the baseline without balance.

    Raises:
        LayoutError: cu_seqlens does not begin with 0 or decreases, or ranks is below 1.
    """
    lengths = _lengths(cu_seqlens, ranks)
    device = cu_seqlens.device
    total = sum(lengths)
    width = -(-total // ranks) * ranks
    sizes = torch.tensor(lengths, device=device).long()
    document = torch.arange(len(lengths), device=device).repeat_interleave(sizes)
    position = torch.arange(total, device=device) - (sizes.cumsum(0) - sizes)[document]
    document, position = (
        torch.nn.functional.pad(x, (0, width - total), value=pad).view(ranks, width // ranks)
        for x, pad in ((document, NOBODY), (position, 0))
    )
    return _placed(lengths, document, position)


def line_layout(document: Int[Tensor, " width"], position: Int[Tensor, " width"], ranks: int) -> ContextLayout:
    """Zigzag over a whole line of documents, rather than over each: 2 * ranks chunks of width / (2 * ranks) rows.

    No row is added: padding is what the line says it is, wherever it lies, and `source` numbers it like any other row.

    Args:
        document, position: of each place of the line, whose padding is of document NOBODY; a document's positions are
            0, 1, 2, ..., each once, in any order.
    Raises:
        LayoutError: the width is no multiple of 2 * ranks, or a document lacks a position or has it twice.
    """
    width, chunks = len(document), 2 * ranks
    if ranks < 1 or width % chunks or position.shape != document.shape:
        raise LayoutError(
            f"{width} documents and {len(position)} positions on {ranks} ranks: a line is cut into 2 * ranks equal "
            "chunks; give both for every place, and pad the line to a multiple"
        )
    real = document != NOBODY
    lengths = torch.bincount(document[real]) if real.any() else document.new_zeros(0)
    token = (lengths.cumsum(0) - lengths)[document[real]] + position[real]
    wrong = (position[real] < 0) | (position[real] >= lengths[document[real]])
    if wrong.any() or len(token.unique()) != len(token):
        raise LayoutError(
            "a document of the line lacks a position or has one twice; a document of L tokens has positions 0 to L-1"
        )
    pieces = torch.arange(width, device=document.device).view(chunks, -1)
    source = torch.cat([pieces[:ranks], pieces[ranks:].flip(0)], dim=1)
    return ContextLayout(tuple(lengths.tolist()), source, document[source], torch.where(real, position, 0)[source])


def zigzag_split(
    x: Shaped[Tensor, "packed ..."], layout: ContextLayout, rank: int, fill: float = 0
) -> Shaped[Tensor, "rows ..."]:
    """What a rank holds of a packed tensor, with `fill` in the rows that the layout added; differentiable.

    Raises:
        LayoutError: the tensor has another number of rows than the packed batch, or there is no such rank.
    """
    layout._check_rank(rank)
    if x.shape[:1] != (layout.packed,):
        raise LayoutError(
            f"a tensor of shape {tuple(x.shape)} is no packed batch of {layout.packed} rows; its first dimension is "
            "the batch's rows, one for each token that cu_seqlens counts"
        )
    source = layout.source[rank].to(x.device)
    added = (source == NOBODY).view(-1, *[1] * (x.dim() - 1))
    return x[source.clamp(min=0)].masked_fill(added, fill)


def zigzag_merge(parts: Sequence[Shaped[Tensor, "rows ..."]], layout: ContextLayout) -> Shaped[Tensor, "packed ..."]:
    """The packed tensor of which each rank holds a part: the inverse of `zigzag_split`, exactly; differentiable.

    Args:
        parts: by rank.
    Raises:
        LayoutError: not one part for each rank, of one shape, dtype and device, with the layout's rows.
    """
    rows = layout.source.shape[1]
    kinds = {(part.shape, part.dtype, part.device) for part in parts}
    if len(parts) != layout.ranks or len(kinds) != 1 or parts[0].shape[:1] != (rows,):
        raise LayoutError(
            f"{len(parts)} parts of shapes {[tuple(part.shape) for part in parts]} are not the {layout.ranks} parts of "
            f"{rows} rows each that this layout has; pass what every rank holds, by rank, alike in dtype and device"
        )
    source = layout.source.flatten().to(parts[0].device)
    # Sorting brings the added rows, which are all NOBODY, to the front.
    return torch.cat(list(parts))[source.argsort()[len(source) - layout.packed :]]


def _lengths(cu_seqlens: Int[Tensor, " documents_plus_1"], ranks: int) -> tuple[int, ...]:
    if ranks < 1:
        raise LayoutError(f"{ranks} ranks cannot hold a batch; pass the size of the context-parallel group")
    edges = cu_seqlens.tolist() if cu_seqlens.dim() == 1 and not cu_seqlens.is_floating_point() else []
    lengths = tuple(end - begin for begin, end in itertools.pairwise(edges))
    if edges[:1] != [0] or any(length < 0 for length in lengths):
        raise LayoutError(
            f"cu_seqlens {cu_seqlens} is not where documents begin; it is one row of integers, begins with 0, never "
            "decreases, and ends with the number of tokens"
        )
    return lengths


def _placed(
    lengths: tuple[int, ...], document: Int[Tensor, "ranks rows"], position: Int[Tensor, "ranks rows"]
) -> ContextLayout:
    """A layout of a batch packed without gaps; rows past their document's end are padding."""
    sizes = torch.tensor([*lengths, 0], device=document.device)
    start = sizes.cumsum(0) - sizes
    # At NOBODY, the last entry: a document of no tokens.
    real = position < sizes[document]
    return ContextLayout(
        lengths,
        torch.where(real, start[document] + position, NOBODY),
        torch.where(real, document, NOBODY),
        torch.where(real, position, 0),
    )
