"""What hangs off the main sequence: branches of entries and queries, each off one anchor, none seeing another.

One structure describes the depths of test-time training (EAGLE-3) and the blocks of block drafters (DFlash, DSpark).
Everything is indexed by anchor: the state of depth d for the anchor in row i is entry d of branch i, so a branch lies on
the rank that owns its anchor, whatever the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from furlong.kernels.layout import ContextLayout, Rows


@dataclass(frozen=True)
class BranchLayout:
    """The branches of one rank. A query sees main keys of its document before its cutoff, and entries of its branch."""

    document: Int[Tensor, " branches"]
    """NOBODY: a branch off a padding row, which sees nothing at all, whose output and gradients are 0."""
    cutoff: Int[Tensor, "branches queries"]
    """Leading positions of the document whose main keys the query sees; 0: none."""
    sees: Bool[Tensor, "queries entries"]
    """Which query sees which entry of its own branch; the same for all branches."""

    def __post_init__(self) -> None:
        if self.document.ndim != 1 or self.cutoff.ndim != 2 or self.sees.ndim != 2:
            raise ValueError(
                f"BranchLayout: document, cutoff, sees have {self.document.ndim}, {self.cutoff.ndim}, {self.sees.ndim} "
                "dimensions, not 1, 2, 2; give [branches], [branches queries], [queries entries]"
            )
        if self.cutoff.shape != (len(self.document), self.sees.shape[0]):
            raise ValueError(
                f"BranchLayout: cutoff is {list(self.cutoff.shape)} where document and sees say "
                f"[{len(self.document)}, {self.sees.shape[0]}] ([branches queries]); give one cutoff per query"
            )
        if self.sees.dtype != torch.bool:
            raise ValueError(f"BranchLayout: sees is {self.sees.dtype}, not bool; compare before you pass it")
        for name, x in (("document", self.document), ("cutoff", self.cutoff)):
            if x.is_floating_point() or x.dtype == torch.bool:
                raise ValueError(f"BranchLayout: {name} is {x.dtype}, not an integer; count positions in whole tokens")
        if self.cutoff.numel() and int(self.cutoff.min()) < 0:
            raise ValueError("BranchLayout: a cutoff is negative; 0 already means that a query sees no main key")

    @property
    def branches(self) -> int:
        return len(self.document)

    @property
    def queries(self) -> int:
        """Per branch."""
        return self.sees.shape[0]

    @property
    def entries(self) -> int:
        """Per branch."""
        return self.sees.shape[1]

    def main_view(self) -> tuple[Int[Tensor, " branches*queries"], Int[Tensor, " branches*queries"]]:
        """(document, cutoff) of each query, branch after branch: what `trunk.plan_trunk` takes."""
        return self.document.repeat_interleave(self.queries), self.cutoff.reshape(-1)


def test_time_training(rows: Rows, depth: int) -> BranchLayout:
    """One pass of EAGLE-3's test-time training: at every row one query, of `depth`, over the entries of depths 1..depth.

    The query of depth d at position i sees main keys 0..i, which have depth 0, and its branch up to itself: what a
    decoder's cache holds after d drafted tokens. Depth 0 has no entries and is plain causal attention.

    Raises:
        ValueError: a negative depth.
    """
    if depth < 0:
        raise ValueError(f"test_time_training: depth {depth} is negative; 0 is the main sequence itself")
    sees = torch.ones(1, depth, dtype=torch.bool, device=rows.position.device)
    return BranchLayout(rows.document, rows.position[:, None] + 1, sees)


# A test that imports this by name would otherwise have it collected as a test.
test_time_training.__test__ = False


def unrolled(rows: Rows, depths: int) -> BranchLayout:
    """Depths 1..`depths` of every row at once (P-EAGLE): `test_time_training`'s passes side by side.

    Raises:
        ValueError: a negative number of depths.
    """
    if depths < 0:
        raise ValueError(f"unrolled: {depths} depths; give 0 or more")
    sees = torch.ones(depths, depths, dtype=torch.bool, device=rows.position.device).tril()
    return BranchLayout(rows.document, rows.position[:, None].expand(-1, depths) + 1, sees)


def block_draft(rows: Rows, anchors: Int[Tensor, " branches"], size: int, causal: bool) -> BranchLayout:
    """Blocks of `size` slots (DFlash, DSpark): each slot is a query and an entry, and sees main keys before its anchor.

    Args:
        anchors: rows of this rank; the anchor's own token is the block's first slot, so its main key is not seen twice.
        causal: a slot sees the slots before it and itself; else all of its block.
    Raises:
        ValueError: an anchor that is no row of this rank, or a block without slots.
    """
    if size < 1:
        raise ValueError(f"block_draft: a block of {size} slots; give 1 or more")
    if anchors.numel() and not 0 <= int(anchors.min()) <= int(anchors.max()) < len(rows.position):
        raise ValueError(
            f"block_draft: anchors go from {int(anchors.min())} to {int(anchors.max())}, of {len(rows.position)} rows; "
            "anchors are rows of this rank, not positions in documents"
        )
    sees = torch.ones(size, size, dtype=torch.bool, device=rows.position.device)
    cutoff = rows.position[anchors][:, None].expand(-1, size)
    return BranchLayout(rows.document[anchors], cutoff, sees.tril() if causal else sees)


def stratified_anchors(
    layout: ContextLayout, rank: int, per_chunk: int, generator: torch.Generator
) -> Int[Tensor, " branches"]:
    """Rows of this rank to hang blocks off: `per_chunk` in each of a document's 2 * ranks chunks.

    A block's work grows with its anchor's position, so free draws load ranks unequally. Here the same offsets are drawn
    for all chunks of a document: every token is as likely to be drawn, and under `zigzag_layout` a document whose length
    is a multiple of 2 * ranks gives every rank the same number of anchors and the same sum of positions. A chunk is
    ceil(length / (2 * ranks)) positions whatever the layout; one with fewer tokens than `per_chunk` gives all it has.

    Args:
        generator: on the CPU and in the same state on all ranks, which all draw the same and each keep what they hold.
    Raises:
        ValueError: a negative number per chunk.
    """
    if per_chunk < 0:
        raise ValueError(f"stratified_anchors: {per_chunk} anchors per chunk; give 0 or more")
    rows = layout.rows(rank)
    drawn = torch.zeros(len(rows.position), dtype=torch.bool, device=rows.position.device)
    for document, length in enumerate(layout.lengths):
        size = -(-length // (2 * layout.ranks))
        offsets = torch.randperm(size, generator=generator)[:per_chunk].to(rows.position.device)
        own = rows.document == document
        drawn |= own & torch.isin(rows.position % max(size, 1), offsets)
    return drawn.nonzero()[:, 0]
