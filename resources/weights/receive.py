"""One engine rank's side of a broadcast or p2p transfer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from furlong.ops.weights.layout import (
    LayoutError,
    Offer,
    Piece,
    check_tiling,
    nbytes,
    offsets,
    sent_names,
    slab_shape,
    whole,
)
from furlong.ops.weights.plan import in_turn, parcels
from furlong.resources.weights.parcel import check_slab, unpack
from furlong.resources.weights.session import Session, parties, rank_name
from furlong.resources.weights.wires import inlet


def take(offer: Offer, engine: int, rank: int, layout: dict[str, Piece], base: dict[str, Tensor]) -> dict[str, Tensor]:
    """This rank's slab of every tensor of the new version, by name.

    Args:
        engine, rank: which engine of the offer, and which of its ranks, this is.
        layout: the piece that the rank holds of each tensor; tensors not named (`draft.*`, `adapter.*`) are whole.
        base: the rank's slabs of live version `offer.base_version`; they are not written to.
    Returns:
        Received tensors in contiguous memory of their own; unchanged ones are `base`'s own objects.
    Raises:
        TransferError: a party failed, ended or was too slow (it names which), or the offer does not fit this rank.
            Nothing that was received may be used.
    """
    specs = {spec.name: spec for spec in offer.tensors}
    with Session(offer, rank_name(engine, rank)) as session:
        pieces = {name: layout.get(name, whole(spec)) for name, spec in specs.items()}
        sent = sent_names(offer)
        kept = {}
        for name in sorted(specs.keys() - sent):
            if name not in base:
                raise LayoutError(f"{name}: it is not sent, and live version {offer.base_version} has no such tensor")
            check_slab(pieces[name], base[name], specs[name])
            kept[name] = base[name]
        _check_arrivals(offer, engine, rank, pieces, sent)
        slabs = {
            name: (
                pieces[name],
                torch.empty(slab_shape(pieces[name], specs[name]), dtype=getattr(torch, specs[name].dtype)),
            )
            for name in sorted(sent)
        }
        session.meet()
        session.all_at("ready")
        if offer.buckets:
            _take_buckets(session, slabs)
        for route in in_turn(offer.routes, offer.engine_ranks):
            if (route.engine, route.rank) == (engine, rank):
                with inlet(session, route) as wire:
                    for run in parcels(route.pieces, specs):
                        unpack(run, slabs, specs, wire.pull(offsets(run, specs)[1]))
        session.all_at("received")
        return {name: slabs[name][1] if name in slabs else kept[name] for name in sorted(specs)}


def _check_arrivals(offer: Offer, engine: int, rank: int, pieces: dict[str, Piece], sent: set[str]) -> None:
    """Every sent tensor of this rank must arrive completely, exactly once: else some bytes would be left unset."""
    specs = {spec.name: spec for spec in offer.tensors}
    mine = [route.pieces for route in offer.routes if (route.engine, route.rank) == (engine, rank)]
    arriving: dict[str, list[Piece]] = {name: [] for name in sent}
    for run in mine or [bucket.pieces for bucket in offer.buckets]:
        for piece in run:
            arriving[piece.name].append(piece)
    for name, parts in sorted(arriving.items()):
        target = pieces[name] if mine else whole(specs[name])
        if nbytes(target, specs[name]):
            check_tiling(parts, target, specs[name])


def _take_buckets(session: Session, slabs: dict[str, tuple[Piece, Tensor]]) -> None:
    offer, everyone = session.offer, parties(session.offer)
    specs = {spec.name: spec for spec in offer.tensors}
    buffer = torch.empty(max(offsets(b.pieces, specs)[1] for b in offer.buckets), dtype=torch.uint8)
    with session.group(offer.session, everyone) as group:
        for bucket in offer.buckets:
            run = buffer[: offsets(bucket.pieces, specs)[1]]
            session.watched("in a broadcast", partial(group.broadcast, run, bucket.source))
            unpack(bucket.pieces, slabs, specs, run)
        session.all_at("received")
