"""Claim: replies go on while a version is staged, and stop for far less than a reload takes.

    python benchmarks/weights_engine.py [--model 135m|1b] [--density 0.03] [--repeats 5]

A LocalEngine in a process of its own draws replies all the time; this process holds the trainer's weights and publishes
versions to it by every transport, first while it draws, then while it is idle. A pause begins with the engine asked to
stop after its current token and ends when it goes on. The reload is what an engine without shadow would have to do
instead: read the safetensors file (which is in memory already), lay the weights out, digest them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from multiprocessing.managers import BaseManager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from weights import MODELS, Weights, moved, random_weights, table, write_config

from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode_and_digest, full_bytes
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.ops.weights.layout import Offer, Piece, specs, whole
from furlong.resources.engines.local import LocalEngine
from furlong.resources.weights.publisher import TRANSPORTS, publish
from furlong.resources.weights.send import send

DEADLINE = 120.0


class Engines(BaseManager):
    """Hosts engines in another process."""


Engines.register("engine", LocalEngine)


class Source:
    """A trainer of one rank, reduced to its weights."""

    def __init__(self, tensors: Weights, rows: list[dict]):
        self.tensors, self.specs = tensors, specs(rows)

    def holdings(self) -> list[list[Piece]]:
        return [[whole(spec) for spec in self.specs]]

    def send(self, offer: Offer) -> int:
        return send(offer, 0, {whole(spec): self.tensors[spec.name] for spec in offer.tensors})


@contextmanager
def drawing(engine: LocalEngine) -> Iterator[None]:
    """The engine draws replies, batch after batch."""
    stop = threading.Event()
    drawn: list[int] = []

    def go() -> None:
        while not stop.is_set():
            replies = engine.generate([GenerateRequest(f"r{i}", (1, 2, 3), i, 64, 1.0) for i in range(8)])
            drawn.append(sum(len(reply.tokens) for reply in replies))

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(go)
        try:
            time.sleep(0.5)
            yield
        finally:
            stop.set()
            engine.abort()
        running.result(DEADLINE)  # raises what ended it early: then nothing was drawn during what was measured
    print(f"{sum(drawn)} tokens were drawn meanwhile")


def measure(engine: LocalEngine, folder: str, density: float, repeats: int, fences: Iterator[int]) -> dict[str, dict]:
    """Medians by transport over versions that each change another random part of the weights."""
    found: dict[str, dict[str, list[float]]] = {name: {"wire": [], "stage": [], "pause": []} for name in TRANSPORTS}
    engine.load_anchor(folder, 0, [], next(fences))
    at = load_file(Path(folder, "model.safetensors"))
    for version in range(1, len(TRANSPORTS) * (repeats + 1) + 1):
        transport = TRANSPORTS[version % len(TRANSPORTS)]
        new = moved(at, density, seed=version)
        made = encode_and_digest(version, version - 1, "bench", at, new)
        rows = manifest(new)
        row = {"version": version, "parent": version - 1, "digest": weights_digest(made.digests), "tensors": rows}
        done = publish([engine], Source(new, rows), row, made.rows, transport, next(fences), DEADLINE)
        if version > len(TRANSPORTS):  # the first round of each transport is a warm-up
            found[transport]["wire"].append(done.wire_bytes)
            found[transport]["stage"].append(done.stage_seconds)
            found[transport]["pause"].append(done.pause_seconds)
        at = new
    return {transport: {k: statistics.median(v) for k, v in parts.items()} for transport, parts in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="135m")
    parser.add_argument("--density", type=float, default=0.03)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    fences = count(1)
    with tempfile.TemporaryDirectory() as folder, Engines(ctx=multiprocessing.get_context("spawn")) as far:
        tensors = random_weights(write_config(args.model, folder))
        full = full_bytes(tensors)
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        del tensors
        engine = far.engine(folder, 0, "bfloat16", 1, (0,))
        print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {args.model}, ", end="")
        print(f"{full / 1e6:.0f} MB; {args.density:.1%} of the weights change in each version\n")
        reloads = []
        for _ in range(3):
            begun = time.perf_counter()
            engine.load_anchor(folder, 0, [], next(fences))
            reloads.append(time.perf_counter() - begun)
        idle = measure(engine, folder, args.density, args.repeats, fences)
        with drawing(engine):
            busy = measure(engine, folder, args.density, args.repeats, fences)
    print(f"a full reload by the idle engine: {min(reloads):.2f} s\n")
    lines = []
    for transport in TRANSPORTS:
        one, two = idle[transport], busy[transport]
        lines.append({
            "transport": transport, "wire MB": f"{one['wire'] / 1e6:.1f}", "stage s, idle": f"{one['stage']:.2f}",
            "stage s, drawing": f"{two['stage']:.2f}", "pause ms, idle": f"{1e3 * one['pause']:.1f}",
            "of a reload": f"{one['pause'] / min(reloads):.1%}", "pause ms, drawing": f"{1e3 * two['pause']:.1f}",
        })  # fmt: skip
    print(table(lines))


if __name__ == "__main__":
    main()
