"""A small world to publish in: engines and a trainer in processes that outlive publishers and can be killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch import Tensor
from transfer_samples import PRELOAD

from furlong.ops.protocols import Attestation
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.ops.weights.layout import Offer, Piece, cut, specs, whole
from furlong.resources.weights import send as sending
from furlong.resources.weights.publisher import PublishError, publish
from furlong.resources.weights.send import send
from furlong.resources.weights.together import together

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 7, "tie_word_embeddings": False,
}  # fmt: skip
DRAFT_SINCE = 2
"""The version in which a draft's tensor, which no version before has, comes along."""
ADAPTERS_SINCE = 4
"""The version from which on nothing but adapters comes and changes."""


def make_model(folder: Path) -> str:
    from transformers import AutoModelForCausalLM, LlamaConfig  # seconds, which the other processes need not spend

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


@cache
def weights(folder: str, version: int) -> dict[str, Tensor]:
    """Version 0 is the model; each later one moves most elements of most tensors, and from some on only adapters."""
    if version == 0:
        return load_file(f"{folder}/model.safetensors")
    if version >= ADAPTERS_SINCE:
        from lora_samples import adapted

        return adapted(weights(folder, ADAPTERS_SINCE - 1), 1, 0.1 * (version - ADAPTERS_SINCE + 1))
    draw = torch.Generator().manual_seed(version)
    found = dict(weights(folder, version - 1))
    for name in sorted(found):
        if not name.endswith("model.norm.weight"):
            found[name] = (found[name].float() + 0.01 * torch.randn(found[name].shape, generator=draw)).bfloat16()
    if version == DRAFT_SINCE:
        found["draft.head.weight"] = torch.randn(6, 32, generator=draw).bfloat16()
    return found


@cache
def update(folder: str, version: int) -> tuple[dict[str, Any], pa.Table]:
    """The row of `weight_versions`, as far as publishing reads it, and the rows of `weight_deltas`."""
    new = weights(folder, version)
    tensors = manifest(new)
    digests = {row["name"]: row["digest"] for row in tensors}
    deltas = encode(version, version - 1, "sample", weights(folder, version - 1), new, digests)
    row = {"version": version, "parent": version - 1, "digest": weights_digest(digests), "tensors": tensors}
    return row, deltas


class Trainer:
    """A `WeightSource` of two ranks under tensor parallelism; what is not split both hold."""

    def __init__(self, folder: str):
        self.folder, self.ranks = folder, 2

    def hold(self, version: int) -> None:
        """Stand where the optimiser has made this version."""
        self.version = version
        self.specs = {spec.name: spec for spec in specs(update(self.folder, version)[0]["tensors"])}

    def kill_at_second_parcel(self, pid: int) -> None:
        """In the next transfer, when some bytes have gone by and more are to come."""
        real, calls = sending.pack, []

        def pack(*args: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                sending.pack = real
                os.kill(pid, signal.SIGKILL)
            real(*args)

        sending.pack = pack

    def holdings(self) -> list[list[Piece]]:
        return [[self._piece(name, rank) for name in self.specs] for rank in range(self.ranks)]

    def send(self, offer: Offer) -> int:
        full = weights(self.folder, self.version)
        calls = {}
        for rank in range(self.ranks):
            held = {
                self._piece(name, rank): cut(full[name], self._piece(name, rank)).contiguous() for name in self.specs
            }
            calls[f"source {rank}"] = partial(send, offer, rank, held)
        moved, failures = together(calls, 2 * offer.deadline)
        if failures:
            raise RuntimeError("; ".join(str(err) for err in failures.values()))
        return sum(moved.values())

    def _piece(self, name: str, rank: int) -> Piece:
        if not name.endswith("_proj.weight"):
            return whole(self.specs[name])
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        size = self.specs[name].shape[dim]
        return Piece(name, dim, size * rank // self.ranks, size * (rank + 1) // self.ranks)


def make_engine(folder: str, tp: int) -> Any:
    from furlong.resources.engines.local import LocalEngine

    return LocalEngine(folder, 0, "bfloat16", 1, [7], tp=tp)


def make_trainer(folder: str) -> Trainer:
    return Trainer(folder)


def served(address: str, make: Callable[..., Any], *args: Any) -> None:
    """Host an object: every connection to the address is one call of one of its methods."""
    os.setpgrp()
    torch.set_num_threads(1)
    target = make(*args)
    with Listener(f"{address}.new", backlog=16) as listener:
        # Its final name only now: for a moment the socket is there and nobody listens.
        os.rename(f"{address}.new", address)
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), target), daemon=True).start()


def _answer(connection: Connection, target: Any) -> None:
    method, args = connection.recv()
    try:
        answer = ("ok", getattr(target, method)(*args))
    except Exception as err:
        answer = ("error", err)
        try:
            pickle.loads(pickle.dumps(err))
        except Exception:
            answer = ("error", RuntimeError(f"{type(err).__name__}: {err}"))
    # A publisher that was killed does not hear it.
    with contextlib.suppress(BrokenPipeError):
        connection.send(answer)
    connection.close()


class Remote:
    """Calls an object that another process serves; any process may hold one."""

    def __init__(self, address: str):
        self.address = address

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*args: Any) -> Any:
            try:
                with Client(self.address) as connection:
                    connection.send((method, args))
                    state, answer = connection.recv()
            except (EOFError, OSError) as err:
                raise ConnectionError(f"the process behind {self.address} ended ({type(err).__name__})") from err
            if state == "error":
                raise answer
            return answer

        return call


class World:
    """Engines of given sizes and a trainer. A killed one can be started again."""

    def __init__(self, folder: str, tps: list[int]):
        self.folder, self.tps = folder, tps
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self._sockets = tempfile.TemporaryDirectory(prefix="fl")
        self.processes: dict[str, Any] = {}
        self._starts = 0
        self.remotes: dict[str, Remote] = {}
        for number in range(len(tps)):
            self.start(f"engine {number}")
        self.start("source")
        self.fence = 0

    @property
    def engines(self) -> list[Remote]:
        return [self.remotes[f"engine {number}"] for number in range(len(self.tps))]

    def start(self, name: str) -> None:
        """Start this party, and wait until it answers."""
        self._starts += 1
        address = f"{self._sockets.name}/{self._starts}"
        what = (make_trainer, self.folder) if name == "source" else (make_engine, self.folder, self.tps[int(name[7:])])
        self.processes[name] = self._context.Process(target=served, args=(address, *what))
        self.processes[name].start()
        self.remotes[name] = Remote(address)
        until = time.monotonic() + 60
        while not os.path.exists(address):
            assert self.processes[name].is_alive(), f"{name} did not start"
            assert time.monotonic() < until, f"{name} did not start"
            time.sleep(0.01)

    def kill(self, name: str) -> None:
        """SIGKILL, its ranks too, wherever it is."""
        kill_group(self.processes[name].pid)
        self.processes[name].join(10)

    def next_fence(self) -> int:
        self.fence += 1
        return self.fence

    def pid(self, name: str) -> int:
        """Of `source`, `engine 0`, or one rank of an engine, such as `engine 1 rank 1`."""
        party, _, rank = name.partition(" rank ")
        pid = self.processes[party].pid
        return psutil.Process(pid).children()[0].pid if rank == "1" else pid

    def serves(self, name: str) -> bool:
        """Whether an engine is there with all its ranks."""
        if not self.processes[name].is_alive():
            return False
        try:
            return bool(self.remotes[name].health())
        except (RuntimeError, ConnectionError):
            return False

    def heal(self, version: int) -> None:
        """Start what is dead or broken, engines at the parent of `version`."""
        for name, process in list(self.processes.items()):
            if not (process.is_alive() if name == "source" else self.serves(name)):
                self.kill(name)
                self.start(name)
                if name != "source":
                    self.load(name, version - 1)

    def load(self, name: str, version: int) -> Attestation:
        chain = [update(self.folder, later)[1] for later in range(1, version + 1)]
        return self.remotes[name].load_anchor(self.folder, version, chain, self.next_fence())

    def publish(self, version: int, transport: str, deadline: float = 20.0, **options: Any) -> Any:
        """From this process."""
        row, deltas = update(self.folder, version)
        self.remotes["source"].hold(version)
        fence = options.pop("fence", None) or self.next_fence()
        return publish(self.engines, self.remotes["source"], row, deltas, transport, fence, deadline, **options)

    def publisher(
        self, version: int, transport: str, phase: str, victims: list[str], deadline: float
    ) -> tuple[str, str]:
        """From a process of its own, which at the start of a phase kills these parties, in this order.

        Args:
            victims: whole engines or the source, by name, `engine 1 rank 0` for one process of an engine, or
                `publisher` for itself, or `publisher, by the source` for the middle of the next transfer.

        Returns:
            `("ok", "")`, `("PublishError", message)`, or `("dead", "")`.
        """
        self.remotes["source"].hold(version)
        mine, theirs = self._context.Pipe()
        args = (theirs, self.folder, [e.address for e in self.engines], self.remotes["source"].address)
        kill = [(name, 0 if name.startswith("publisher") else self.pid(name)) for name in victims]
        process = self._context.Process(
            target=publisher_main, args=(*args, version, transport, self.next_fence(), deadline, phase, kill)
        )
        process.start()
        theirs.close()
        try:
            return mine.recv() if mine.poll(60) else ("silent", "")
        except EOFError:
            return "dead", ""
        finally:
            process.kill()
            process.join(10)

    def close(self) -> None:
        for name in self.processes:
            self.kill(name)
        self._sockets.cleanup()


def kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def publisher_main(
    pipe: Connection, folder: str, engines: list[str], source: str, version: int, transport: str, fence: int,
    deadline: float, phase: str, kill: list[tuple[str, int]],
) -> None:  # fmt: skip
    def watch(entered: str) -> None:
        for name, pid in kill if entered == phase else ():
            if name == "publisher, by the source":
                Remote(source).kill_at_second_parcel(os.getpid())
            elif name == "publisher":
                os.kill(os.getpid(), signal.SIGKILL)
            elif " rank " in name:
                os.kill(pid, signal.SIGKILL)
            else:
                kill_group(pid)

    torch.set_num_threads(1)
    row, deltas = update(folder, version)
    try:
        publish([Remote(a) for a in engines], Remote(source), row, deltas, transport, fence, deadline, watch)
        pipe.send(("ok", ""))
    except PublishError as err:
        pipe.send(("PublishError", str(err)))


@contextlib.contextmanager
def world(folder: str, tps: list[int]) -> Iterator[World]:
    made = World(folder, tps)
    try:
        yield made
    finally:
        made.close()
