"""The rows that follow a rank's rows: one exchange of a few rows per chunk, after which every shift is local.

Depth d of a draft reads, at the row of position i, the embedding of token i + d, the teacher's hidden state of row
i + d, and predicts token i + d + 1. In a zigzag layout some of these lie on a neighbouring rank, and one chunk's lie on
the rank itself, in its other chunk. Fetched depth by depth, that is a round of messages each; fetched once, K rows past
each chunk's end, it is one.

Which rows those are follows from the coordinates alone (`ContextLayout.rows`): a rank takes every token that lies at
most `width` positions behind one of its own, in the same document, and that it does not hold. Chunks shorter than the
width, two neighbours that are one rank, and the last rank's own second chunk need no rule of their own.

Send token ids, masks or hidden states; never logits, whose rows are as much larger as the vocabulary is than the hidden
size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.kernels.layout import NOBODY, ContextLayout, LayoutError
from furlong.kernels.ring import Ring


@dataclass(frozen=True, eq=False)
class HaloPlan:
    """What one rank gives and takes, and where a token that follows one of its rows is then to be found.

    The rows a rank takes come after its own: those of rank 0 first, and of each rank in the order of their tokens.
    With c >= width rows in every chunk, zigzag on C ranks moves, over all ranks,

        sum over documents, and over j = 1 ... 2C - 1 without j = C, of min(width, max(0, L - j * c))

    rows: what follows each chunk's end, but for the one where a rank's first chunk runs into its own second. For long
    documents that is width rows per document from the first and the last rank, and 2 * width from any other.
    """

    at: Int[Tensor, "rows width_plus_1"]
    """Index, among the own rows and those taken, of the token so many positions on; NOBODY outside the document."""
    gives: tuple[Int[Tensor, " rows_given"], ...]
    """Own rows that each rank takes."""
    takes: tuple[int, ...]
    """Rows that come from each rank."""


def plan_halo(layout: ContextLayout, width: int, rank: int) -> HaloPlan:
    """The plan of one rank, without a message.

    Raises:
        LayoutError: the width is negative, or there is no such rank.
    """
    if width < 0:
        raise LayoutError(f"a halo of {width} rows; its width is the largest offset of a shift, 0 or more")
    device = layout.document.device
    total = sum(layout.lengths)
    owner, row = (torch.full((total,), NOBODY, device=device) for _ in range(2))
    for other in range(layout.ranks):
        tokens = layout.tokens(other)
        owner[tokens[tokens != NOBODY]] = other
    tokens = layout.tokens(rank)
    mine = (tokens != NOBODY).nonzero().flatten()
    row[tokens[mine]] = mine
    wanted = [_wanted(layout, width, other) for other in range(layout.ranks)]
    gives = tuple(row[want[owner[want] == rank]] for want in wanted)
    takes = []
    for other in range(layout.ranks):
        coming = wanted[rank][owner[wanted[rank]] == other]
        row[coming] = torch.arange(len(coming), device=device) + len(tokens) + sum(takes)
        takes.append(len(coming))
    at = torch.full((len(tokens), width + 1), NOBODY, device=device)
    for offset in range(width + 1):
        inside = layout.gate(rank, offset)
        at[inside, offset] = row[tokens[inside] + offset]
    return HaloPlan(at, gives, tuple(takes))


def _wanted(layout: ContextLayout, width: int, rank: int) -> Int[Tensor, " wanted"]:
    """Tokens that follow one of a rank's within the width and that it does not hold, in order."""
    tokens = layout.tokens(rank)
    marked = torch.zeros(sum(layout.lengths), dtype=torch.bool, device=tokens.device)
    for offset in range(1, width + 1):
        marked[tokens[layout.gate(rank, offset)] + offset] = True
    marked[tokens[tokens != NOBODY]] = False
    return marked.nonzero().flatten()


@dataclass(frozen=True, eq=False)
class Halo:
    """A rank's rows with those that follow them."""

    held: Shaped[Tensor, "held ..."]
    """Own rows, then those taken from other ranks."""
    at: Int[Tensor, "rows width_plus_1"]
    """As in the plan."""

    @property
    def width(self) -> int:
        """Largest offset of a shift."""
        return self.at.shape[1] - 1

    def shift(self, offset: int, fill: float = 0) -> Shaped[Tensor, "rows ..."]:
        """At the row of (document, position), what lies at (document, position + offset); differentiable.

        Args:
            offset: 0 to the width.
            fill: where the document has no such position, and at padding.
        Raises:
            LayoutError: the offset is not within the width.
        """
        self._check(offset)
        return self._gathered(self.at[:, offset], fill)

    def windows(self, rows: Int[Tensor, " picked"], size: int, fill: float = 0) -> Shaped[Tensor, "picked size ..."]:
        """At some of the rows, what lies at offsets 0 to size - 1: a block and what it predicts; differentiable.

        Raises:
            LayoutError: size - 1 is not within the width.
        """
        self._check(size - 1)
        return self._gathered(self.at[rows.to(self.at.device), :size], fill)

    def _gathered(self, index: Tensor, fill: float) -> Tensor:
        nothing = (index == NOBODY).view(*index.shape, *[1] * (self.held.dim() - 1))
        return self.held[index.clamp(min=0)].masked_fill(nothing, fill)

    def _check(self, offset: int) -> None:
        if not 0 <= offset <= self.width:
            raise LayoutError(
                f"offset {offset} is outside this halo of width {self.width}; exchange one as wide as the largest "
                "offset (depths 1 to K read ids and masks up to K + 1 rows on, teachers up to K)"
            )


def halo(x: Shaped[Tensor, "rows ..."], layout: ContextLayout, width: int, ring: Ring) -> Halo:
    """Exchange the rows that follow; all ranks of the ring call it together, and again in the backward pass.

    Gradients of taken rows go back to their owners, who add them to their own in the order of the ranks, in float32
    (float64 for float64), and round once. So every rank's loss has to depend on what it shifts, if only by a sum over
    no rows.

    Args:
        x: token ids, masks or hidden states (never logits) of this rank's rows; of any dtype.
        width: largest offset that will be shifted by.
        ring: whose ledger counts the bytes as "halo" and, of gradients, "halo gradient".
    Raises:
        ContextParallelError: on all ranks, if one has a tensor of another shape, dtype, layout or width, or one that
            needs a gradient where others' do not, or is gone.
    """
    problem = _problem(x, layout, width, ring)
    plan = HaloPlan(torch.zeros(0, 1), (), ()) if problem else plan_halo(layout, width, ring.rank)
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    same = {
        "layout": layout.digest,
        "width": width,
        "row": tuple(x.shape[1:]),
        "dtype": x.dtype,
        "gradient": needs_gradient,
    }
    held = _Exchange.apply(x, plan, ring, same, problem)
    return Halo(held, plan.at.to(x.device))


def shifted_mask(mask: Halo, depth: int) -> Bool[Tensor, " rows"]:
    """Where a depth has a loss: at the row of position i, the mask of token i + depth + 1, which is what it predicts.

    False where the document ends before that token, and at padding. Depth 0 is the trunk's own next token.

    Args:
        mask: of a boolean tensor, true at tokens that are to be learnt; at least depth + 1 wide.
    Raises:
        LayoutError: the mask is not boolean, or too narrow.
    """
    if mask.held.dtype != torch.bool or mask.held.dim() != 1:
        raise LayoutError(
            f"a loss mask of dtype {mask.held.dtype} and shape {tuple(mask.held.shape)}; it has a boolean per row"
        )
    return mask.shift(depth + 1, fill=False)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, plan: HaloPlan, ring: Ring, same: dict[str, object], problem: str
    ) -> Tensor:
        ctx.plan, ctx.ring, ctx.same = plan, ring, same
        with ring.call("halo", same, problem):
            ctx.number = ring.number
            leaving = [x[rows.to(x.device)] for rows in plan.gives]
            return torch.cat([x, *_traded(ring, "halo", leaving, plan.takes)])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan, ring = ctx.plan, ctx.ring
        own, *leaving = grad.split([len(plan.at), *plan.takes])
        with ring.call(f"halo gradient of number {ctx.number}", ctx.same):
            home = _traded(ring, "halo gradient", leaving, [len(rows) for rows in plan.gives])
        total = own.to(torch.float64 if grad.dtype == torch.float64 else torch.float32, copy=True)
        for rows, part in zip(plan.gives, home, strict=True):
            # No row twice, so that nothing here is added in an order that could vary.
            total.index_add_(0, rows.to(grad.device), part.to(total.dtype))
        return total.to(grad.dtype), None, None, None, None


def _traded(ring: Ring, kind: str, leaving: list[Tensor], takes: tuple[int, ...] | list[int]) -> list[Tensor]:
    """What each rank has for this one, by rank, for what this one has for each; all at once."""
    arrived = [part[:0] for part in leaving]
    coming = {}
    for hop in range(1, ring.ranks):
        to, of = (ring.rank + hop) % ring.ranks, (ring.rank - hop) % ring.ranks
        like = torch.Size([takes[of], *leaving[to].shape[1:]])
        coming[of] = ring.swap(kind, [leaving[to]], to, of, [like])
    for of, pending in coming.items():
        (arrived[of],) = pending.wait()
    return arrived


def _problem(x: Tensor, layout: ContextLayout, width: int, ring: Ring) -> str:
    """Why this rank cannot take part, or nothing."""
    if layout.ranks != ring.ranks:
        return f"the layout is of {layout.ranks} ranks, the ring of {ring.ranks}; make both of one group"
    if x.shape[:1] != layout.source.shape[1:]:
        return f"a tensor of shape {tuple(x.shape)} where the layout has {layout.source.shape[1]} rows; split it first"
    return "" if width >= 0 else f"a halo of {width} rows; its width is the largest offset of a shift, 0 or more"
