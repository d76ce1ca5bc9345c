"""What ranks of `test_draft_cp.py` compute: their part of a packed batch's draft gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from draft_cases import LENGTHS, Case, make, picked
from torch import Tensor

from furlong.kernels.layout import NOBODY, ContextLayout, contiguous_layout, line_layout, zigzag_layout
from furlong.kernels.ring import Ring
from furlong.ops.draft.gradients import draft_gradients
from furlong.ops.draft.inputs import local_counts
from furlong.ops.draft.module import draft_module

DEADLINE = 60


@dataclass(frozen=True)
class Shared:
    """One micro-batch that lies on several ranks."""

    kind: str = "eagle3"
    loss: str = "ce"
    reduced: bool = False
    lengths: tuple[int, ...] = LENGTHS
    layout: str = "zigzag"
    trained: str = "some"
    """Of the packed batch: "some" rows, or the "last" document alone."""
    backend: str = "reference"

    def whole(self) -> Case:
        case = make(self.kind, self.loss, self.reduced, self.lengths)
        if self.trained == "last":
            last = case.inputs.rows.document == len(self.lengths) - 1
            case = replace(case, inputs=replace(case.inputs, trained=last))
        return case


def layout_of(shared: Shared, ranks: int) -> ContextLayout:
    edges = torch.tensor([0, *shared.lengths]).cumsum(0)
    if shared.layout != "line":
        return {"zigzag": zigzag_layout, "contiguous": contiguous_layout}[shared.layout](edges, ranks)
    rows = shared.whole().inputs.rows
    width = -(-len(rows.document) // 8) * 8
    line = torch.nn.functional.pad(rows.document, (0, width - len(rows.document)), value=NOBODY)
    return line_layout(line, torch.nn.functional.pad(rows.position, (0, width - len(rows.position))), ranks)


def solve(rank: int, cases: list[Shared]) -> list[tuple[float, Tensor, dict[str, Tensor], Tensor, dict[str, int]]]:
    """Of each case this rank's loss, sums, gradients and counts, and the bytes it sent by kind."""
    return [part_of(shared, Ring(dist.group.WORLD, DEADLINE)) for shared in cases]


def part_of(shared: Shared, ring: Ring) -> tuple[float, Tensor, dict[str, Tensor], Tensor, dict[str, int]]:
    """One rank's share of one case."""
    case = shared.whole()
    layout = layout_of(shared, ring.ranks)
    # A line numbers its padding like any other row.
    rows = torch.where(layout.document[ring.rank] == NOBODY, NOBODY, layout.source[ring.rank])
    part = picked(case.inputs, rows)
    module = draft_module(case.shape, case.tensors)
    own = local_counts(part, case.shape, case.settings.depths)
    counts = own.clone()
    if ring.group is not None:
        dist.all_reduce(counts, group=ring.group)
    found = draft_gradients(
        module, part, case.settings, counts, case.embedding, case.head, ring, layout, progress=0.4,
        backend=shared.backend,
    )  # fmt: skip
    grads = {name: p.grad for name, p in module.named_parameters()}
    return found.loss, found.sums, grads, own, dict(ring.ledger.sent)
