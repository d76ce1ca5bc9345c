"""One source rank's side of a broadcast or p2p transfer."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial

import torch
from torch import Tensor

from furlong.ops.weights.digest import tensor_digest
from furlong.ops.weights.layout import Offer, Piece, offsets, sent_names
from furlong.ops.weights.plan import in_turn, parcels
from furlong.resources.weights.parcel import by_name, pack
from furlong.resources.weights.session import Session, parties, source_name
from furlong.resources.weights.wires import outlet


class ReplicaMismatch(RuntimeError):
    """Sources that hold the same piece hold different bytes: sending either would be a guess."""


def send(offer: Offer, source: int, held: dict[Piece, Tensor], wire: str = "auto") -> int:
    """Send what the plan asks of this source; returns once every engine rank has everything.

    Args:
        source: which source rank of the offer this is.
        held: its pieces of the new version, all of them: replicas are compared with the other sources'.
        wire: for p2p, `auto`, `shm` or `gloo`.
    Returns:
        Bytes that this source put on the wire; a broadcast counts once, however many receive it.
    Raises:
        TransferError: a party failed, ended or was too slow (it names which), replicas differ, or the plan asks for
            a piece that this source does not hold.
    """
    specs = {spec.name: spec for spec in offer.tensors}
    with Session(offer, source_name(source), wire) as session:
        sent = sent_names(offer)
        held = {piece: slab for piece, slab in held.items() if piece.name in sent}
        slabs = by_name(held, specs)
        session.meet()
        _agree(session, held)
        session.all_at("ready")
        moved = _send_buckets(session, source, slabs) if offer.buckets else 0
        for route in in_turn(offer.routes, offer.engine_ranks):
            if route.source == source:
                with outlet(session, route) as end:
                    for run in parcels(route.pieces, specs):
                        size = offsets(run, specs)[1]
                        pack(run, slabs, specs, end.room(size))
                        end.push()
                        moved += size
        session.all_at("received")
        return moved


def _agree(session: Session, held: dict[Piece, Tensor]) -> None:
    """Compare the digests of every piece that several sources hold."""
    everyone = [source_name(source) for source in range(session.offer.sources)]
    if len(everyone) == 1:
        return
    session.set(f"holds/{session.me}", json.dumps([_line(piece) for piece in sorted(held)]).encode())
    holders: dict[str, list[str]] = defaultdict(list)
    for name in everyone:
        for line in json.loads(session.wait(f"holds/{name}", name, "listing its pieces")):
            holders[line].append(name)
    mine = {_line(p): tensor_digest(held[p]) for p in sorted(held) if len(holders[_line(p)]) > 1}
    session.set(f"digests/{session.me}", json.dumps(mine).encode())
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in everyone:
        for line, digest in json.loads(session.wait(f"digests/{name}", name, "digesting its replicas")).items():
            found[line][digest].append(name)
    for line, digests in sorted(found.items()):
        if len(digests) > 1:
            camps = " differ from those of ".join(", ".join(names) for names in digests.values())
            raise ReplicaMismatch(f"{line}: the bytes of {camps}; nothing is sent; restore the trainer from the lake")


def _line(piece: Piece) -> str:
    return f"{piece.name} [{piece.start}:{piece.stop} of dimension {piece.dim}]"


def _send_buckets(session: Session, source: int, slabs: dict[str, list[tuple[Piece, Tensor]]]) -> int:
    offer, everyone, moved = session.offer, parties(session.offer), 0
    specs = {spec.name: spec for spec in offer.tensors}
    buffer = torch.empty(max(offsets(b.pieces, specs)[1] for b in offer.buckets), dtype=torch.uint8)
    with session.group(offer.session, everyone) as group:
        for bucket in offer.buckets:
            run = buffer[: offsets(bucket.pieces, specs)[1]]
            if bucket.source == source:
                pack(bucket.pieces, slabs, specs, run)
                moved += len(run)
            session.watched("in a broadcast", partial(group.broadcast, run, bucket.source))
        session.all_at("received")
    return moved
