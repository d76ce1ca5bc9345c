"""How one source's bytes reach one engine rank in a p2p transfer: a pair of ends, a parcel at a time.

`shm`: the engine rank registers memory, the source maps it and writes there by itself, and both signal through the
store. `gloo`: sends over sockets, for two hosts. Both ends derive the choice from the same two cards.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from jaxtyping import UInt8
from torch import Tensor

from furlong.ops.weights.layout import Route, offsets
from furlong.ops.weights.plan import parcels
from furlong.resources.weights.group import Group, PeerLost
from furlong.resources.weights.session import Session, rank_name, source_name

_SLOTS = 2
"""Parcels on the way at once: one is written while the one before is read."""


class TransportUnavailable(RuntimeError):
    """A wire that this machine cannot serve; the message says what is missing and what to use."""


class Inlet(Protocol):
    """The engine rank's end."""

    def pull(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """The next parcel; valid until the next call."""


class Outlet(Protocol):
    """The source's end."""

    def room(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """Memory for the next parcel, to be filled before `push`."""

    def push(self) -> None:
        """Hand over the parcel that was filled."""


def choose_wire(source: dict, engine: dict) -> str:
    """`shm` or `gloo` for two parties' cards: what the source insists on, else shared memory wherever both can map it.

    Raises:
        TransportUnavailable: a wire that the two cannot use.
    """
    wanted, one_host = source["wire"], source["host"] is not None and source["host"] == engine["host"]
    if wanted == "shm" and not one_host:
        raise TransportUnavailable(
            "wire `shm` needs source and engine rank on one Linux host, in one process namespace, under one user; "
            "they are not: use `auto` or `gloo`"
        )
    if wanted not in ("auto", "shm", "gloo"):
        missing = {
            "rdma": "needs an RDMA library and registered network memory, and none is built in",
            "nccl": "moves device memory only, and these weights are in host memory",
        }.get(wanted, "is unknown")
        raise TransportUnavailable(f"wire `{wanted}` {missing}; use `auto`, `shm` or `gloo`, or transport broadcast")
    return ("shm" if one_host else "gloo") if wanted == "auto" else wanted


@contextmanager
def inlet(session: Session, route: Route) -> Iterator[Inlet]:
    """The engine rank's end of a route; ends the source's waiting with PeerLost when left by an exception."""
    if choose_wire(session.cards[source_name(route.source)], session.cards[session.me]) == "shm":
        fd = _register(session, route)
        try:
            yield _SharedInlet(session, route, fd)
        finally:
            os.close(fd)
    else:
        with session.group(f"{session.offer.session}/{_key(route)}", _ends(route)) as group:
            yield _SocketEnd(session, group, _largest(session, route))
            session.set(f"read/{_key(route)}", b"1")


@contextmanager
def outlet(session: Session, route: Route) -> Iterator[Outlet]:
    """The source's end of a route."""
    rank = rank_name(route.engine, route.rank)
    if choose_wire(session.cards[session.me], session.cards[rank]) == "shm":
        yield _SharedOutlet(session, route)
    else:
        with session.group(f"{session.offer.session}/{_key(route)}", _ends(route)) as group:
            yield _SocketEnd(session, group, _largest(session, route))
            # Closing a socket under unread bytes would take them away from the reader.
            session.wait(f"read/{_key(route)}", rank, "reading the last parcel")


def _ends(route: Route) -> list[str]:
    return [source_name(route.source), rank_name(route.engine, route.rank)]


def _key(route: Route) -> str:
    return f"{route.source}-{route.engine}.{route.rank}"


def _largest(session: Session, route: Route) -> int:
    specs = {spec.name: spec for spec in session.offer.tensors}
    return max([1, *(offsets(run, specs)[1] for run in parcels(route.pieces, specs))])


def _file_name(session: Session, route: Route) -> str:
    return f"furlong-{session.offer.session}-{_key(route)}"


def _register(session: Session, route: Route) -> int:
    """An anonymous memory file: it has no name in any folder, so nothing is left behind however its users end."""
    size = _SLOTS * _largest(session, route)
    fd = os.memfd_create(_file_name(session, route))
    try:
        # Without this, memory that is not there shows as a fatal signal on the first write.
        os.posix_fallocate(fd, 0, size)
    except OSError as err:
        os.close(fd)
        raise TransportUnavailable(f"cannot register {size} bytes of shared memory ({err}); use wire `gloo`") from err
    return fd


class _SharedInlet:
    def __init__(self, session: Session, route: Route, fd: int):
        self._session, self._route, self._pulled = session, route, 0
        self._memory = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
        self._slot = len(self._memory) // _SLOTS
        session.set(f"window/{_key(route)}", json.dumps({"pid": os.getpid(), "fd": fd}).encode())

    def pull(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        if self._pulled:
            self._session.set(f"free/{_key(self._route)}/{self._pulled - 1}", b"1")
        turn, self._pulled = self._pulled, self._pulled + 1
        source = source_name(self._route.source)
        self._session.wait(f"full/{_key(self._route)}/{turn}", source, f"sending parcel {turn}")
        begin = self._slot * (turn % _SLOTS)
        return self._memory[begin : begin + nbytes]


class _SharedOutlet:
    def __init__(self, session: Session, route: Route):
        self._session, self._route, self._pushed = session, route, 0
        self._rank = rank_name(route.engine, route.rank)
        window = json.loads(session.wait(f"window/{_key(route)}", self._rank, "registering memory"))
        path = f"/proc/{window['pid']}/fd/{window['fd']}"
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as err:
            if not os.path.exists(f"/proc/{window['pid']}/stat"):
                raise PeerLost(f"{self._rank} (process {window['pid']}) ended after registering memory") from err
            raise TransportUnavailable(f"cannot map the memory of {self._rank} ({err}); use wire `gloo`") from err
        try:
            # The process id could have been used anew since: only memory registered for this route is written to.
            if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{_file_name(session, route)}"):
                raise PeerLost(f"{self._rank} (process {window['pid']}) ended after registering memory")
            self._memory = torch.frombuffer(mmap.mmap(fd, os.fstat(fd).st_size), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._slot = len(self._memory) // _SLOTS

    def room(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        before = self._pushed - _SLOTS
        if before >= 0:
            self._session.wait(f"free/{_key(self._route)}/{before}", self._rank, f"reading parcel {before}")
        begin = self._slot * (self._pushed % _SLOTS)
        return self._memory[begin : begin + nbytes]

    def push(self) -> None:
        self._session.set(f"full/{_key(self._route)}/{self._pushed}", b"1")
        self._pushed += 1


class _SocketEnd:
    """Either end over sockets; one buffer serves every parcel."""

    def __init__(self, session: Session, group: Group, largest: int):
        self._session, self._group, self._buffer = session, group, torch.empty(largest, dtype=torch.uint8)
        self._filled = self._buffer

    def pull(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        part = self._buffer[:nbytes]
        if nbytes:
            self._session.watched("receiving a parcel", partial(self._group.receive, part, 0))
        return part

    def room(self, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        self._filled = self._buffer[:nbytes]
        return self._filled

    def push(self) -> None:
        if len(self._filled):
            self._session.watched("sending a parcel", partial(self._group.send, self._filled, 1))
