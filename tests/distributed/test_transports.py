"""Broadcast and p2p transfers between real processes: exact bytes, and what everybody hears when one of them fails."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
from transfer_samples import (
    SMALL,
    Cast,
    cast,
    engine_layout,
    rank_main,
    source_main,
    specs_of,
    tiny_weights,
    trainer_pieces,
)  # fmt: skip

from furlong.ops.weights import plan
from furlong.ops.weights.digest import tensor_digest
from furlong.ops.weights.layout import Offer, cut, whole
from furlong.resources.weights.group import open_store
from furlong.resources.weights.wires import TransportUnavailable, choose_wire

OLD, NEW, UNCHANGED = 1, 2, ("norm.weight", "layers.1.norm.weight")


def make_offer(
    address: str, transport: str, sources: int, tps: list[int], deadline: float = 20.0
) -> tuple[Offer, list]:
    """An offer of the new weights, without the tensors that a base could have, to engines of these sizes."""
    specs = specs_of(tiny_weights(NEW))
    holdings = trainer_pieces(specs, sources)
    names = [name for name in specs if name not in UNCHANGED]
    layouts = [[engine_layout(specs, rank, tp) for rank in range(tp)] for tp in tps]
    buckets = plan.broadcast_plan(holdings, specs, names) if transport == "broadcast" else ()
    routes = plan.p2p_plan(holdings, layouts, specs, names) if transport == "p2p" else ()
    offer = Offer(
        os.urandom(4).hex(), address, 2, 1, 1, tuple(specs.values()), tuple(tps), sources, buckets, routes, deadline
    )
    return offer, holdings


def start(parts: Cast, offer: Offer, holdings: list, tag: str = "", wire: str = "auto", **faults: str) -> None:
    """Every party of the offer; `faults` by part, e.g. `source0` or `engine1rank0`."""
    specs = {spec.name: spec for spec in offer.tensors}
    for source, pieces in enumerate(holdings):
        fault = faults.get(f"source{source}", "")
        parts.start(f"{tag}source {source}", source_main, offer, source, NEW, pieces, fault, wire)
    for engine, tp in enumerate(offer.engine_ranks):
        for rank in range(tp):
            fault = faults.get(f"engine{engine}rank{rank}", "")
            layout = engine_layout(specs, rank, tp)
            parts.start(f"{tag}engine {engine} rank {rank}", rank_main, offer, engine, rank, OLD, layout, fault)


def expected(offer: Offer, rank: int, tp: int) -> dict[str, str]:
    specs = {spec.name: spec for spec in offer.tensors}
    layout = engine_layout(specs, rank, tp)
    truth = tiny_weights(NEW) | {name: tiny_weights(OLD)[name] for name in UNCHANGED}
    return {name: tensor_digest(cut(truth[name], layout.get(name, whole(specs[name])))) for name in specs}


def check_arrived(offer: Offer, heard: dict[str, Any], tag: str = "") -> int:
    for engine, tp in enumerate(offer.engine_ranks):
        for rank in range(tp):
            state, found = heard[f"{tag}engine {engine} rank {rank}"]
            assert state == "ok", found
            assert found == (expected(offer, rank, tp), sorted(UNCHANGED))
    assert all(heard[f"{tag}source {source}"][0] == "ok" for source in range(offer.sources)), heard
    return sum(heard[f"{tag}source {source}"][1] for source in range(offer.sources))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "BUCKET_BYTES", SMALL)
    monkeypatch.setattr(plan, "PARCEL_BYTES", SMALL)


@pytest.mark.parametrize(("sources", "tps"), [(1, [1]), (1, [2, 1]), (4, [1]), (4, [2, 1])])
@pytest.mark.parametrize(("transport", "wire"), [("broadcast", "auto"), ("p2p", "auto"), ("p2p", "gloo")])
def test_bytes_arrive_exactly(transport: str, wire: str, sources: int, tps: list[int]) -> None:
    store, address = open_store()
    offer, holdings = make_offer(address, transport, sources, tps)
    with cast() as parts:
        start(parts, offer, holdings, wire=wire)
        check_arrived(offer, parts.answers(30))
    del store


WIRES = [("broadcast", "auto"), ("p2p", "auto"), ("p2p", "gloo")]


def all_but(heard: dict[str, Any], lost: str) -> dict[str, tuple[str, Any]]:
    return {name: said for name, said in heard.items() if name != lost}


@pytest.mark.parametrize("victim", ["source 1", "engine 0 rank 1"])
@pytest.mark.parametrize(("transport", "wire"), WIRES)
def test_a_killed_party_is_named_by_all_others_long_before_the_deadline(transport: str, wire: str, victim: str) -> None:
    store, address = open_store()
    offer, holdings = make_offer(address, transport, 4, [2, 1], deadline=60.0)
    with cast() as parts:
        began = time.monotonic()
        start(parts, offer, holdings, wire=wire, **{victim.replace(" ", ""): "kill"})
        heard = parts.answers(30)
        assert time.monotonic() - began < 15
    assert heard[victim] == ("dead", -9)
    for name, (state, message) in all_but(heard, victim).items():
        assert state == "TransferError", (name, message)
        assert f"no sign of life from {victim}:" in message, (name, message)
    del store


@pytest.mark.parametrize(
    ("transport", "wire", "victim"),
    [
        ("broadcast", "auto", "engine 0 rank 0"),
        ("p2p", "auto", "engine 0 rank 0"),
        pytest.param("p2p", "gloo", "engine 0 rank 0", marks=pytest.mark.slow),
        pytest.param("broadcast", "auto", "source 0", marks=pytest.mark.slow),
    ],
)
def test_a_party_slower_than_the_deadline_is_named_and_nobody_waits_longer(
    transport: str, wire: str, victim: str
) -> None:
    store, address = open_store()
    offer, holdings = make_offer(address, transport, 1, [2], deadline=2.5)
    with cast() as parts:
        began = time.monotonic()
        start(parts, offer, holdings, wire=wire, **{victim.replace(" ", ""): "stall"})
        heard = parts.answers(
            12, [name for name in ("source 0", "engine 0 rank 0", "engine 0 rank 1") if name != victim]
        )
        assert 2.4 < time.monotonic() - began < 10
    for name, (state, message) in heard.items():
        assert state == "TransferError", (name, message)
        assert f"no sign of life from {victim}:" in message, (name, message)
    del store


@pytest.mark.parametrize("transport", ["broadcast", "p2p"])
def test_differing_replicas_stop_everyone_and_are_named(transport: str) -> None:
    store, address = open_store()
    offer, holdings = make_offer(address, transport, 4, [1])
    assert holdings[1][1] == holdings[3][1]
    with cast() as parts:
        start(parts, offer, holdings, source1="flip")
        heard = parts.answers(20)
    for state, message in heard.values():
        assert state == "TransferError"
        assert "embed.weight" in message
        assert "source 1 differ from those of source 3" in message
    del store


def test_two_transfers_at_once_do_not_meet() -> None:
    store, address = open_store()
    made = [make_offer(address, transport, 4, [1]) for transport in ("p2p", "broadcast")]
    with cast() as parts:
        for number, (offer, holdings) in enumerate(made):
            start(parts, offer, holdings, f"{number} ")
        heard = parts.answers(30)
    for number, (offer, _) in enumerate(made):
        check_arrived(offer, heard, f"{number} ")
    del store


@pytest.mark.parametrize(("transport", "wire"), WIRES)
def test_closing_the_store_ends_everyone(transport: str, wire: str) -> None:
    store, address = open_store()
    offer, holdings = make_offer(address, transport, 1, [1], deadline=60.0)
    with cast() as parts:
        start(parts, offer, holdings, wire=wire, engine0rank0="stall")
        assert parts.answers(1, ["source 0"]) == {"source 0": ("silent", None)}
        del store
        state, message = parts.answers(5, ["source 0"])["source 0"]
    assert state == "TransferError"
    assert "store is gone" in message


def test_an_engine_that_never_comes_is_named() -> None:
    store, address = open_store()
    offer, holdings = make_offer(address, "broadcast", 1, [1, 1], deadline=2.0)
    with cast() as parts:
        layout = engine_layout(specs_of(tiny_weights(NEW)), 0, 1)
        parts.start("source 0", source_main, offer, 0, NEW, holdings[0], "", "auto")
        parts.start("engine 0 rank 0", rank_main, offer, 0, 0, OLD, layout, "")
        heard = parts.answers(12)
    for state, message in heard.values():
        assert state == "TransferError"
        assert "no sign of life from engine 1 rank 0:" in message
    del store


@pytest.mark.parametrize("wire", ["rdma", "nccl", "pigeon"])
def test_a_wire_that_is_not_there_is_refused_by_name(wire: str) -> None:
    store, address = open_store()
    offer, holdings = make_offer(address, "p2p", 1, [1])
    with cast() as parts:
        start(parts, offer, holdings, wire=wire)
        heard = parts.answers(20)
    assert all(state == "TransferError" and f"wire `{wire}`" in message for state, message in heard.values())
    del store


def test_two_hosts_get_sockets_and_refuse_shared_memory() -> None:
    here, there = ({"host": host, "pid": 1, "wire": "auto"} for host in ("a", "b"))
    assert (choose_wire(here, here), choose_wire(here, there)) == ("shm", "gloo")
    assert choose_wire(here | {"host": None}, there | {"host": None}) == "gloo"
    with pytest.raises(TransportUnavailable, match="one Linux host"):
        choose_wire(here | {"wire": "shm"}, there)
