"""Commands and answers between the ranks of a split engine: JSON, and Arrow tables beside it, over a local socket."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from furlong.ops.weights.layout import Bucket, Offer, Piece, Route, TensorSpec

_SIZE = struct.Struct("<Q")


class ChannelLost(RuntimeError):
    """The process at the other end is gone, or did not answer within the deadline."""


class Channel:
    """One end; for one thread at a time."""

    def __init__(self, end: socket.socket, deadline: float):
        """
        Args:
            deadline: seconds that the other end may take no bytes of a message.
        """
        self._end, self._deadline = end, deadline

    def send(self, message: dict[str, Any], tables: Sequence[pa.Table] = ()) -> None:
        """Raises ChannelLost when the other end is gone, or does not take it within the deadline."""
        bodies = [_to_bytes(table) for table in tables]
        head = json.dumps({"message": message, "tables": [len(body) for body in bodies]}).encode()
        try:
            self._end.settimeout(self._deadline)
            self._end.sendall(_SIZE.pack(len(head)) + head)
            for body in bodies:
                self._end.sendall(body)
        except OSError as err:
            raise ChannelLost(f"the other rank takes no message ({err}); see what it wrote last") from err

    def receive(self, deadline: float | None) -> tuple[dict[str, Any], list[pa.Table]]:
        """The next message.

        Args:
            deadline: seconds until it must be there; None for a rank that waits for work, which ends with its leader.
        Raises:
            ChannelLost: the other end is gone, or the deadline passed.
        """
        try:
            self._end.settimeout(deadline)
            head = json.loads(self._exactly(_SIZE.unpack(self._exactly(_SIZE.size))[0]))
            tables = [pa.ipc.open_stream(self._exactly(size)).read_all() for size in head["tables"]]
        except TimeoutError as err:
            raise ChannelLost(f"the other rank did not answer within {deadline:g} s; it hangs or is too slow") from err
        except OSError as err:
            raise ChannelLost(f"the other rank is gone ({err}); see what it wrote last") from err
        return head["message"], tables

    def _exactly(self, size: int) -> bytes:
        buffer = bytearray(size)
        view, got = memoryview(buffer), 0
        while got < size:
            count = self._end.recv_into(view[got:])
            if not count:
                raise ChannelLost("the other rank closed its end: its process is ending; see what it wrote last")
            got += count
        return bytes(buffer)


def offer_to_json(offer: Offer) -> dict[str, Any]:
    """Plain lists and dictionaries; `offer_from_json` gives an equal offer."""
    return {
        **{field.name: getattr(offer, field.name) for field in fields(offer)},
        "tensors": [[t.name, t.dtype, list(t.shape), t.digest] for t in offer.tensors],
        "buckets": [[b.source, _pieces_to_json(b.pieces)] for b in offer.buckets],
        "routes": [[r.source, r.engine, r.rank, _pieces_to_json(r.pieces)] for r in offer.routes],
    }


def offer_from_json(body: dict[str, Any]) -> Offer:
    """What `offer_to_json` was given."""
    return Offer(
        **{
            **body,
            "engine_ranks": tuple(body["engine_ranks"]),
            "tensors": tuple(TensorSpec(name, dtype, tuple(shape), d) for name, dtype, shape, d in body["tensors"]),
            "buckets": tuple(Bucket(source, _pieces(parts)) for source, parts in body["buckets"]),
            "routes": tuple(Route(s, engine, rank, _pieces(parts)) for s, engine, rank, parts in body["routes"]),
        }
    )


def _pieces_to_json(pieces: Sequence[Piece]) -> list[list[Any]]:
    return [[piece.name, piece.dim, piece.start, piece.stop] for piece in pieces]


def _pieces(parts: list[list[Any]]) -> tuple[Piece, ...]:
    return tuple(Piece(*part) for part in parts)


def _to_bytes(table: pa.Table) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
