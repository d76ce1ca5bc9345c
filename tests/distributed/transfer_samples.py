"""Sources and engine ranks for the transfer tests, each to be run in a process of its own."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from furlong.ops.weights import plan
from furlong.ops.weights.digest import manifest, tensor_digest
from furlong.ops.weights.layout import Piece, TensorSpec, cut, slab_shape, whole

HIDDEN, LAYERS, EXPERTS, VOCAB = 16, 4, 4, 50
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
ROW = ("o_proj", "down_proj")
PRELOAD = ["publish_samples", "furlong.resources.engines.local", "furlong.resources.weights.receive"]
"""Of every process of these tests: one server forks them all, so the modules are loaded once."""
SMALL = 1024
"""Bucket bytes in these tests: many buckets and parcels from few bytes."""


def tiny_weights(seed: int) -> dict[str, Tensor]:
    """A model's shapes in small: split both ways, replicated, experts, a 0-d and an empty tensor, two dtypes."""
    draw = torch.Generator().manual_seed(seed)

    def made(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    tensors = {"embed.weight": made(VOCAB, HIDDEN), "norm.weight": made(HIDDEN), "draft.head.weight": made(6, HIDDEN)}
    for layer in range(LAYERS):
        head = f"layers.{layer}."
        for name in COLUMN:
            tensors[f"{head}{name}.weight"] = made(12, HIDDEN)
        for name in ROW:
            tensors[f"{head}{name}.weight"] = made(HIDDEN, 12)
        for expert in range(EXPERTS):
            tensors[f"{head}experts.{expert}.down_proj.weight"] = made(HIDDEN, 8)
        tensors[f"{head}norm.weight"] = made(HIDDEN, dtype=torch.float32)
    return tensors | {"scale": made(dtype=torch.float32), "nothing": made(0, 3)}


def specs_of(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    rows = manifest(tensors)
    return {r["name"]: TensorSpec(r["name"], r["dtype"], tuple(r["shape"]), r["digest"]) for r in rows}


def split(spec: TensorSpec, rank: int, ranks: int) -> Piece:
    """The tensor-parallel piece of one rank: columns, rows, the vocabulary, or whole. Uneven where it does not divide."""
    parts = spec.name.split(".")
    split_here = len(parts) > 1 and "experts" not in parts and parts[0] != "draft"
    if ranks == 1 or not split_here or parts[-2] not in (*COLUMN, *ROW, "embed"):
        return whole(spec)
    dim = 1 if parts[-2] in ROW else 0
    size = spec.shape[dim]
    return Piece(spec.name, dim, size * rank // ranks, size * (rank + 1) // ranks)


def engine_layout(specs: dict[str, TensorSpec], rank: int, ranks: int) -> dict[str, Piece]:
    """As an engine gives it: `draft.*` is not named."""
    return {name: split(spec, rank, ranks) for name, spec in specs.items() if not name.startswith("draft.")}


def trainer_pieces(specs: dict[str, TensorSpec], sources: int) -> list[list[Piece]]:
    """One source holds everything; four are tensor parallel 2 x pipeline parallel 2, experts split by tensor rank."""
    if sources == 1:
        return [[whole(spec) for spec in specs.values()]]
    held: list[list[Piece]] = []
    for source in range(4):
        stage, tensor_rank = divmod(source, 2)
        mine = []
        for name, spec in specs.items():
            parts = name.split(".")
            here = int(parts[1]) // (LAYERS // 2) == stage if parts[0] == "layers" else True
            expert = int(parts[3]) % 2 if "experts" in parts else tensor_rank
            if here and expert == tensor_rank:
                mine.append(split(spec, tensor_rank, 2))
        held.append(mine)
    return held


def hold(tensors: dict[str, Tensor], pieces: list[Piece]) -> dict[Piece, Tensor]:
    return {piece: cut(tensors[piece.name], piece).clone() for piece in pieces}


def source_main(pipe: Any, offer: Any, source: int, seed: int, pieces: list[Piece], fault: str, wire: str) -> None:
    """Send; `fault` is `` or `flip` or `kill` or `stall`, the last two in the middle of the bytes."""
    from furlong.resources.weights import send as module

    torch.set_num_threads(1)
    plan.BUCKET_BYTES = plan.PARCEL_BYTES = SMALL
    held = hold(tiny_weights(seed), pieces)
    if fault == "flip":
        held[pieces[1]].view(torch.uint8).reshape(-1)[0] ^= 1
    _break_at_second_call(module, "pack", fault)
    _tell(pipe, lambda: module.send(offer, source, held, wire))


def rank_main(pipe: Any, offer: Any, engine: int, rank: int, base_seed: int, layout: dict, fault: str) -> None:
    """Take; answers with the digest of each slab, and of those that are the base's own objects the names."""
    from furlong.resources.weights import receive as module

    torch.set_num_threads(1)
    plan.BUCKET_BYTES = plan.PARCEL_BYTES = SMALL
    specs = {spec.name: spec for spec in offer.tensors}
    old = tiny_weights(base_seed)
    base = {n: cut(old[n], layout.get(n, whole(spec))).contiguous() for n, spec in specs.items()}
    _break_at_second_call(module, "unpack", fault)

    def work() -> tuple[dict[str, str], list[str]]:
        got = module.take(offer, engine, rank, layout, base)
        for name, tensor in got.items():
            assert tensor.is_contiguous(), name
            assert tensor.data_ptr() % 16 == 0, name
            assert tuple(tensor.shape) == slab_shape(layout.get(name, whole(specs[name])), specs[name]), name
        return {n: tensor_digest(t) for n, t in got.items()}, sorted(n for n in got if got[n] is base[n])

    _tell(pipe, work)


def _tell(pipe: Any, work: Any) -> None:
    try:
        pipe.send(("ok", work()))
    except Exception as err:
        pipe.send((type(err).__name__, str(err)))


def _break_at_second_call(module: Any, name: str, fault: str) -> None:
    """Some bytes have gone by then, and more are to come."""
    if fault not in ("kill", "stall"):
        return
    real, calls = getattr(module, name), []

    def broken(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        return real(*args)

    setattr(module, name, broken)


class Cast:
    """Processes of one transfer, by the name of their part."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)
        self.processes: dict[str, Any] = {}
        self._pipes: dict[str, Any] = {}

    def start(self, name: str, main: Any, *args: Any) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=main, args=(theirs, *args), daemon=True)
        process.start()
        theirs.close()
        self.processes[name], self._pipes[name] = process, mine

    def answers(self, seconds: float, of: list[str] | None = None) -> dict[str, tuple[str, Any]]:
        """What each said; `("dead", exit code)` for one that ended without a word, `("silent", None)` past the time."""
        until, heard = time.monotonic() + seconds, {}
        for name in of or list(self._pipes):
            if not self._pipes[name].poll(max(0.0, until - time.monotonic())):
                heard[name] = ("silent", None)
                continue
            try:
                heard[name] = self._pipes[name].recv()
            except EOFError:
                self.processes[name].join(5)
                heard[name] = ("dead", self.processes[name].exitcode)
        return heard

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join(10)


@contextlib.contextmanager
def cast() -> Iterator[Cast]:
    made = Cast()
    try:
        yield made
    finally:
        made.end()
