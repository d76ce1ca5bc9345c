"""The weights of one rank of an engine: all of a model, or its part of one that is split over several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import torch
from torch import Tensor

from furlong.ops.draft.block_drafter import BlockDrafter
from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.start import shape_of
from furlong.ops.draft.tensors import check_tensors, of_version
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.checkpoint import is_extra, read_tensors
from furlong.ops.policy.decoder import Decoder, WeightsError
from furlong.ops.policy.live import Live
from furlong.ops.policy.lora import SCALE, adapters_of, merge, names_of
from furlong.ops.policy.shard import WHOLE, Exchange, Shard, part_of, pieces
from furlong.ops.weights.delta import apply
from furlong.ops.weights.digest import tensor_digest
from furlong.ops.weights.layout import Offer, whole_piece


class Rank:
    """Makes weights versions; whoever asks for one keeps it, and gives it a serial number."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, rank: int = 0, size: int = 1,
        exchange: Exchange | None = None, draft: DraftSettings | None = None,
    ):  # fmt: skip
        """
        Args:
            architecture: of the whole model.
            dtype: of the policy's tensors.
            exchange: with the other ranks, for the thread that generates; None for a single one.
            draft: what versions that have a draft make of it; None to only hold it. Every rank has it whole.
        Raises:
            DraftError: there can be no such draft beside the model.
        """
        self._architecture, self._dtype = architecture, dtype
        self._number = rank
        self._part = part_of(architecture, rank, size)
        self._pieces = pieces(architecture, rank, size)
        self._shapes = architecture.shapes()
        self._share = WHOLE if exchange is None else Shard(architecture, rank, size, exchange)
        self._draft = None if draft is None else shape_of(draft, architecture)
        self._made: list[Live] = []
        self._spare: dict[str, Tensor] = {}

    def load(self, path: str, version: int, chain: Sequence[pa.Table], serial: int) -> Live:
        """The path's weights, changed by the chain, as in `Engine.load_anchor`."""
        self._spare = {}
        tensors = read_tensors(path, self._architecture, self._dtype, self._pieces)
        for deltas in chain:
            tensors |= self._apply(deltas, tensors)
        return self._make(version, tensors, None, serial)

    def stage(self, version: int, deltas: pa.Table, base: Live, serial: int) -> Live:
        """The base changed by the deltas, as in `Engine.stage`; unchanged tensors are shared."""
        into, self._spare = self._spare, {}
        return self._make(version, base.tensors | self._apply(deltas, base.tensors, into), base, serial)

    def keep(self, live: Live) -> None:
        """Every other version is forgotten, and read by nobody: the next one is written where it was, as fresh memory
        takes several times as long to get as the changes to apply."""
        mine = live.tensors
        self._spare = {}
        for other in self._made:
            self._spare |= {name: tensor for name, tensor in other.tensors.items() if tensor is not mine.get(name)}
        self._made = [live]

    def receive(self, offer: Offer, engine: int, base: Live, serial: int) -> Live:
        """The offered version, from a transfer in which this rank takes part; unchanged tensors are shared."""
        from furlong.resources.weights.receive import take

        self._spare = {}
        slabs = take(offer, engine, self._number, self._pieces, base.tensors)
        return self._make(offer.version, slabs, base, serial)

    def served(self, live: Live) -> dict[str, Tensor]:
        """All of `served_parts` at once."""
        return {name: tensor for part in self.served_parts(live) for name, tensor in part.items()}

    def served_parts(self, live: Live) -> Iterator[dict[str, Tensor]]:
        """This rank's piece of every tensor, read back from the memory that the forward pass reads, a layer at a time.

        Of a weight with an adapter, what was published, once the merged one is found to be what came of it.

        Raises:
            WeightsError: it is not.
        """
        for part in live.decoder.served_parts():
            for name in part.keys() & live.merged.keys():
                if tensor_digest(part[name]) != live.merged[name]:
                    raise WeightsError(
                        f"{name} of version {live.version} is not what it became when its adapter was merged, so memory "
                        "was overwritten; load the weights again"
                    )
            yield {name: live.base.get(name, tensor) for name, tensor in part.items()}
        yield live.extras

    def _apply(
        self, deltas: pa.Table, tensors: dict[str, Tensor], into: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        shapes = dict(zip(deltas["name"].to_pylist(), deltas["shape"].to_pylist(), strict=True))
        extras = {name: whole_piece(name, shape) for name, shape in shapes.items() if is_extra(name)}
        return apply(deltas, tensors, self._pieces | extras, into)

    def _make(self, version: int, tensors: dict[str, Tensor], base: Live | None, serial: int) -> Live:
        extras = {name: tensor for name, tensor in tensors.items() if is_extra(name)}
        policy = {name: tensor for name, tensor in tensors.items() if name not in extras}
        before = base.base | base.extras if base else {}
        published, merged, digests = {}, {}, {}
        for name, adapter in adapters_of(extras, self._shapes).items():
            published[name] = policy[name]
            if all(before.get(part) is tensors[part] for part in (name, *names_of(name), SCALE)):
                # Its digest too: what was overwritten since must not be taken for what it became.
                merged[name], digests[name] = base.decoder.tensors[name], base.merged[name]
                continue
            merged[name] = merge(policy[name], adapter.cut(self._pieces[name]))
            digests[name] = tensor_digest(merged[name])
        decoder = Decoder(self._part, policy | merged, base.decoder if base else None, self._share)
        drafter = self._drafter(version, extras, base)
        self._made.append(Live(version, decoder, extras, published, digests, serial, drafter))
        return self._made[-1]

    def _drafter(self, version: int, extras: dict[str, Tensor], base: Live | None) -> Drafter | BlockDrafter | None:
        """Of the version's draft, if it has one; the base's when it is the same."""
        tensors = of_version(extras)
        if self._draft is None or not tensors:
            return None
        before = base.drafter if base else None
        if before and all(before.tensors.get(name) is tensor for name, tensor in tensors.items()):
            return before
        check_tensors(tensors, self._draft, f"the draft of version {version}")
        return (BlockDrafter if self._draft.kind == "block" else Drafter)(self._draft, tensors, self._dtype)
