"""One micro-batch as one rank sees it.

It travels through megatron-core as `packed_seq_params`, which every layer hands on untouched and which activation
recomputation keeps with the layer's other arguments. So a layer that runs again in the backward pass, while other
micro-batches are in flight, has its own micro-batch and nobody has to remember which is current.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from furlong.kernels.layout import ContextLayout, line_layout
from furlong.kernels.ring import Ring
from furlong.ops.policy.lines import Line
from furlong.ops.policy.packing import MicroBatch, PackingError
from furlong.ops.policy.parallel import Layout
from furlong.resources.trainers.megatron.parallel import Place

Made = TypeVar("Made")


@dataclass
class Feed(PackedSeqParams):
    """`width` is the rank's own part of a line under context parallelism. Sequence parallelism does not show here: it cuts
    activations, after the embedding, not tokens."""

    qkv_format: str = "sbhd"
    tokens: Int[Tensor, "rows width"] | None = None
    positions: Int[Tensor, "rows width"] | None = None
    visible: Bool[Tensor, "rows 1 width width"] | None = None
    """As in MicroBatch; None under context parallelism."""
    layout: ContextLayout | None = None
    """How the line lies on the ranks of context parallelism; on the CPU, wherever the rest is. None without."""
    ring: Ring | None = None
    """Of these ranks, the same for all micro-batches."""
    documents: Int[Tensor, "1 width"] | None = None
    """As in Line; None without context parallelism."""
    owners: Int[Tensor, " documents"] | None = None
    """Trajectory of each document of the line, on whichever rank it is; for errors. None without context parallelism."""
    places: Int[Tensor, " places"] | None = None
    """Flat indices into this rank's rows * width."""
    place: Int[Tensor, " tokens"] | None = None
    target: Int[Tensor, " tokens"] | None = None
    trajectory: Int[Tensor, " tokens"] | None = None
    """The wanted tokens of this rank: under context parallelism, those predicted at its own positions."""
    offset: Int[Tensor, " tokens"] | None = None
    experts: Int[Tensor, "rows width layers top_k"] | None = None
    """As in MicroBatch: recorded experts, which the routers follow."""
    _made: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` gives, made by the first of the layers that asks for it."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]


def multiple(layout: Layout) -> int:
    """What the width of a micro-batch must be a multiple of: chunks of the ring, times parts of sequence parallelism."""
    return (2 * layout.cp if layout.cp > 1 else 1) * (layout.tp if layout.sp else 1)


def feed(micro: MicroBatch | Line, place: Place) -> Feed:
    """What `place` computes of a micro-batch, padded to the layout's multiple.

    Args:
        micro: by `pack_lines(..., multiple(layout))` when cp > 1, by `pack` otherwise.
    Raises:
        PackingError: a prefix tree under context parallelism, or a line without.
    """
    layout = place.layout
    if isinstance(micro, Line) != (layout.cp > 1):
        raise PackingError(
            f"layout {layout} got a {type(micro).__name__}; pack with pack_lines when cp > 1 and with pack otherwise"
        )
    if isinstance(micro, Line):
        return _slice(micro, place)
    width = micro.tokens.shape[1]
    extra = -width % multiple(layout)
    visible = micro.visible
    if extra:
        visible = F.pad(visible, (0, extra, 0, extra))
        visible[:, 0, range(width, width + extra), range(width, width + extra)] = True
    return Feed(
        tokens=F.pad(micro.tokens, (0, extra)),
        positions=F.pad(micro.positions, (0, extra)),
        visible=visible,
        places=micro.places + micro.places // width * extra,
        place=micro.place,
        target=micro.target,
        trajectory=micro.trajectory,
        offset=micro.offset,
        experts=None if micro.experts is None else F.pad(micro.experts, (0, 0, 0, 0, 0, extra), value=-1),
    )


def _slice(line: Line, place: Place) -> Feed:
    width = line.tokens.shape[1]
    layout = line_layout(line.documents[0], line.positions[0], place.layout.cp)
    mine = layout.source[place.cp]
    if len(mine) % (place.layout.tp if place.layout.sp else 1):
        raise PackingError(
            f"a line of {width} tokens does not fit layout {place.layout}; pack with multiple {multiple(place.layout)}"
        )
    local = torch.full((width,), -1)
    local[mine] = torch.arange(len(mine))
    at = local[line.places[line.place]]
    here = at >= 0
    places, of = torch.unique(at[here], return_inverse=True)
    owners = torch.zeros(max(0, int(line.documents.max()) + 1), dtype=torch.int64)
    owners[line.documents[0, line.places[line.place]]] = line.trajectory
    return Feed(
        tokens=line.tokens[:, mine],
        positions=line.positions[:, mine],
        layout=layout,
        ring=place.ring,
        documents=line.documents[:, mine],
        owners=owners,
        places=places,
        place=of,
        target=line.target[here],
        trajectory=line.trajectory[here],
        offset=line.offset[here],
        experts=None if line.experts is None else line.experts[:, mine],
    )


def on(feed: Feed, device: torch.device) -> Feed:
    """The same with its tensors on `device`."""
    moved = {name: value.to(device) for name, value in vars(feed).items() if isinstance(value, Tensor)}
    return replace(feed, **moved, _made={})
