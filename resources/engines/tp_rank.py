"""A further rank of a split engine: run by `tp_process.RankProcess` as a process of its own, which ends with it."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import Batch
from furlong.ops.policy.checkpoint import DTYPES
from furlong.ops.policy.live import Live
from furlong.ops.policy.shard import part_of
from furlong.ops.weights.digest import raw_bytes, tensor_digest
from furlong.resources.engines.rank import Rank
from furlong.resources.engines.tp_channel import Channel, offer_from_json
from furlong.resources.engines.tp_steps import drawn_digest, turn_from_json
from furlong.resources.engines.turns import short_turns
from furlong.resources.weights.group import Group

SEND_DEADLINE = 120.0
"""Seconds the leader may take no bytes of an answer."""
LOOK_SECONDS = 0.5
"""How often a rank looks whether its parent is still the leader."""


class Follower:
    """Does to its part of the weights what the leader does to its own; keeps versions by serial number."""

    def __init__(self, weights: Channel, steps: Channel, setup: dict[str, Any]):
        self._weights, self._steps = weights, steps
        self._threads = setup["threads"]
        self._architecture = Architecture(**setup["architecture"])
        part = part_of(self._architecture, setup["rank"], setup["size"])
        draft = None if setup["draft"] is None else DraftSettings(**setup["draft"])
        self._batch = Batch(self._architecture, part, setup["invariant"], draft)
        place = (setup["rank"], setup["size"], setup["deadline"])
        torch.set_num_threads(self._threads)
        self._slabs = Group(setup["address"], "weights", *place)
        exchange = Group(setup["address"], "steps", *place)
        self._rank = Rank(self._architecture, DTYPES[setup["dtype"]], setup["rank"], setup["size"], exchange, draft)
        self._lives: dict[int, Live] = {}
        self._served: dict[str, Tensor] = {}

    @torch.inference_mode()
    def serve_weights(self) -> None:
        """Answer the leader's commands about weights, one after the other, for ever."""
        while True:
            message, tables = self._weights.receive(None)
            self._served = self._served if message["do"] == "send" else {}
            try:
                answer = getattr(self, f"_{message.pop('do')}")(tables, **message)
            except Exception as err:  # each is raised again by the leader
                traceback.print_exc()
                answer = {"error": type(err).__name__, "message": str(err)}
            self._weights.send(answer)

    @torch.inference_mode()
    def serve_batches(self) -> None:
        """Take part in the leader's turns, for ever."""
        torch.set_num_threads(self._threads)
        while True:
            # No deadline: a pause may be long, and the process ends with its leader.
            message, _ = self._steps.receive(None)
            live = None if message["serial"] is None else self._lives[message["serial"]]
            ended = self._batch.turn(turn_from_json(message["turn"]), live)
            if ended.replies or ended.broken:
                self._steps.send({"drawn": drawn_digest(ended)})

    def _load(self, tables: list[pa.Table], path: str, version: int, serial: int) -> dict[str, Any]:
        return self._hold(self._rank.load(path, version, tables, serial))

    def _stage(self, tables: list[pa.Table], version: int, base: int, serial: int) -> dict[str, Any]:
        return self._hold(self._rank.stage(version, tables[0], self._lives[base], serial))

    def _receive(self, _: list[pa.Table], offer: dict[str, Any], engine: int, base: int, serial: int) -> dict[str, Any]:
        return self._hold(self._rank.receive(offer_from_json(offer), engine, self._lives[base], serial))

    def _keep(self, _: list[pa.Table], serial: int) -> dict[str, Any]:
        self._lives = {serial: self._lives[serial]}
        self._rank.keep(self._lives[serial])
        return {}

    def _prove(self, _: list[pa.Table], serial: int, split: list[str]) -> dict[str, Any]:
        """Read the weights back; the digests of the tensors that every rank has whole."""
        self._served = self._rank.served(self._lives[serial])
        return {"digests": {name: tensor_digest(self._served[name]) for name in self._served.keys() - set(split)}}

    def _send(self, _: list[pa.Table], names: list[str]) -> dict[str, Any]:
        """Give the leader these pieces of what was read back last."""
        for name in names:
            try:
                self._slabs.send(torch.from_numpy(raw_bytes(self._served.pop(name))), 0)
            except Exception:
                # The leader waits for bytes, not for an answer; only the end of this process reaches it.
                _end_process()
        return {}

    def _hold(self, live: Live) -> dict[str, Any]:
        self._lives = {**self._lives, live.serial: live}
        return {}


def _end_process() -> None:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


def _or_end(work: Callable[[], None]) -> None:
    """A thread that fails ends the process: the leader notices that, and nothing else."""
    try:
        work()
    except BaseException:
        _end_process()


def _end_with_leader(leader: int) -> None:
    """End when the leader's process has, however it did: then the pipe closes, unless a child of its holds it open."""
    while os.getppid() == leader:
        if select.select([sys.stdin], [], [], LOOK_SECONDS)[0]:
            break
    os._exit(0)


def main(weights_end: int, steps_end: int) -> None:
    """Set up as the leader says, then serve both channels."""
    threading.Thread(target=_end_with_leader, args=(os.getppid(),), daemon=True).start()
    weights, steps = (Channel(socket.socket(fileno=end), SEND_DEADLINE) for end in (weights_end, steps_end))
    weights.send({"started": os.getpid()})
    follower = Follower(weights, steps, weights.receive(None)[0])
    threading.Thread(target=_or_end, args=(follower.serve_batches,), daemon=True).start()
    weights.send({})
    with short_turns():
        follower.serve_weights()


if __name__ == "__main__":
    _or_end(lambda: main(*map(int, sys.argv[1:3])))
