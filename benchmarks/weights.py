"""Claim: a new weights version travels as a few percent of its bytes, coded and applied at a good part of memory speed.

    python benchmarks/weights.py [--model 135m|1b] [--old OLD.safetensors --new NEW.safetensors] [--repeats 5]

Shapes are those of SmolLM2-135M or Llama-3.2-1B in bfloat16. An update moves weights at random places by a unit in the
last place either way; `--old` and `--new` (one after the other in a run) add a real one. Rates are bytes of all new
weights by CPU seconds of one thread, the best of the repeats, beside those of copying 256 MiB in the same run: other
programs on the machine then disturb little. Entropy is that of positions and moves together, N h(p) + pN H(moves).
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file, save_file
from torch import Tensor

from furlong.ops.policy.architecture import read_architecture
from furlong.ops.weights import delta
from furlong.ops.weights.codec import word_type
from furlong.ops.weights.digest import manifest, raw_bytes
from furlong.ops.weights.scan import scan
from furlong.resources.weights.group import Group, open_store

DENSITIES = (0.003, 0.01, 0.03, 0.05)
DEADLINE = 120.0
BLOCK = 2**20
Weights = dict[str, Tensor]


def _llama(vocab: int, width: int, layers: int, heads: int, kv_heads: int, inner: int) -> dict:
    return {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    }  # fmt: skip


MODELS = {"135m": _llama(49152, 576, 30, 9, 3, 1536), "1b": _llama(128256, 2048, 16, 32, 8, 8192)}
"""config.json of SmolLM2-135M and of Llama-3.2-1B, as far as shapes need it."""


def write_config(model: str, folder: str) -> dict[str, tuple[int, ...]]:
    """Make `folder` a model's, but for its weights; the shape of every tensor."""
    Path(folder, "config.json").write_text(json.dumps(MODELS[model]))
    return read_architecture(folder).shapes()


def random_weights(shapes: dict[str, tuple[int, ...]]) -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.empty(s, dtype=torch.bfloat16).normal_(0, 0.04, generator=generator) for n, s in shapes.items()}


def moved(old: Weights, density: float, seed: int = 1) -> Weights:
    """Each weight moves by one unit in the last place with this probability, up or down."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in old.items():
        new[name] = tensor.clone()
        bits = raw_bytes(new[name]).view(np.uint16)
        where = np.unique(rng.integers(0, bits.size, rng.poisson(-math.log1p(-density) * bits.size)))
        where = where[bits[where] & 0x7FFF > 1]  # one unit below zero would be a NaN
        bits[where] += rng.choice(np.array([1, 0xFFFF], np.uint16), len(where))
    return new


def best(work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.process_time) -> float:
    taken = []
    for _ in range(repeats):
        begun = clock()
        work()
        taken.append(clock() - begun)
    return min(taken)


def copy_rate(repeats: int) -> float:
    """Bytes copied in a CPU second of one thread, in buffers that were touched before."""
    source = torch.ones(2**28, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return source.nbytes / best(lambda: target.copy_(source), repeats)


def entropy_bytes(old: Weights, new: Weights) -> float:
    """Of which words changed and by how much, each taken as independent of the others."""
    moves, words = Counter(), 0
    for name, tensor in new.items():
        word = word_type(tensor.element_size())
        _, found = scan(raw_bytes(old[name]).view(word), raw_bytes(tensor).view(word))
        values, counts = np.unique(found, return_counts=True)
        moves.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        words += tensor.nbytes // word.itemsize
    changed = moves.total()
    places = sum(-n * math.log2(n / words) for n in (changed, words - changed) if n)
    return (places - sum(n * math.log2(n / changed) for n in moves.values())) / 8


def binary_diff(old: Weights, new: Weights) -> tuple[int, float]:
    """Bytes, and CPU seconds, of zstd on the new bytes with the old ones right before them in its window, in chunks as
    ours: what `zstd --patch-from` looks for, with a window in which it finds it. The old bytes' own cost does not count.
    """
    total, seconds = 0, 0.0
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27, enable_ldm=True)
    for name, tensor in new.items():
        before, after = raw_bytes(old[name]), raw_bytes(tensor)
        for lo in range(0, len(after), delta.CHUNK_BYTES):
            part = slice(lo, lo + delta.CHUNK_BYTES)
            coder = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
            coder.compress(before[part].data)
            coder.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
            begun = time.process_time()
            total += len(coder.compress(after[part].data)) + len(coder.flush())
            seconds += time.process_time() - begun
    return total, seconds


def parts(old: Weights, new: Weights, repeats: int, whole: dict[str, float]) -> dict[str, float]:
    """CPU seconds of what encode and apply are made of; what cannot be had alone is the rest."""
    pairs = [(raw_bytes(old[name]), raw_bytes(new[name])) for name in new]
    flags = np.empty(BLOCK // 8, np.bool_)
    target = np.empty(max(len(after) for _, after in pairs), np.uint8)

    def compare() -> None:
        for before, after in pairs:
            eights = len(after) // 8
            x, y = before[: 8 * eights].view(np.uint64), after[: 8 * eights].view(np.uint64)
            for lo in range(0, eights, len(flags)):
                part = x[lo : lo + len(flags)]
                np.not_equal(part, y[lo : lo + len(flags)], out=flags[: len(part)])

    def find() -> None:
        for name, tensor in new.items():
            word = word_type(tensor.element_size())
            scan(raw_bytes(old[name]).view(word), raw_bytes(tensor).view(word))

    def copy() -> None:
        for before, _ in pairs:
            for lo in range(0, len(before), BLOCK):
                target[lo : lo + BLOCK][: len(before) - lo] = before[lo : lo + BLOCK]

    digests = {row["name"]: row["digest"] for row in manifest(new)}
    compared, found, copied = (best(work, repeats) for work in (compare, find, copy))
    plain = best(lambda: delta.encode(1, 0, "r", old, new, digests), repeats)
    return {
        "compare": compared, "find and gather": found - compared, "code": plain - found,
        "digest, in encode": whole["encode"] - plain, "digest alone": best(lambda: manifest(new), repeats),
        "copy the base": copied,
    }  # fmt: skip


def ours(old: Weights, new: Weights, repeats: int) -> tuple[dict[str, float], delta.Encoded]:
    """CPU seconds of encode and apply, the latter into fresh memory and into that of a version no longer needed."""
    made = delta.encode_and_digest(1, 0, "r", old, new)
    seconds = {"encode": best(lambda: delta.encode_and_digest(1, 0, "r", old, new), repeats)}
    begun = time.process_time()
    shadow = delta.apply(made.rows, old)
    seconds["apply, fresh memory"] = time.process_time() - begun
    seconds["apply"] = best(lambda: delta.apply(made.rows, old, into=shadow), repeats)
    if {row["name"]: row["digest"] for row in manifest(old | shadow)} != made.digests:
        raise RuntimeError("the applied weights are not the new ones: nothing measured here counts")
    return seconds, made


def save_and_load(new: Weights) -> float:
    """Wall seconds of writing all weights to a safetensors file and reading each byte of it again."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "all.safetensors")
        begun = time.perf_counter()
        save_file(new, path)
        for tensor in load_file(path).values():
            tensor.clone()
        return time.perf_counter() - begun


def broadcast_all(new: Weights) -> float:
    """Wall seconds until another process has received all weights over gloo."""
    store, address = open_store()
    layout = {name: (list(tensor.shape), tensor.dtype) for name, tensor in new.items()}
    peer = multiprocessing.get_context("spawn").Process(target=_receive_all, args=(address, layout), daemon=True)
    peer.start()
    try:
        group = Group(address, "all", 0, 2, DEADLINE)
        done = torch.zeros(1)
        group.all_reduce(done)
        begun = time.perf_counter()
        for tensor in new.values():
            group.broadcast(tensor, 0)
        group.all_reduce(done)
        return time.perf_counter() - begun
    finally:
        peer.join(10)
        peer.kill()
        del store


def _receive_all(address: str, layout: dict[str, tuple[list[int], torch.dtype]]) -> None:
    torch.set_num_threads(1)
    group = Group(address, "all", 1, 2, DEADLINE)
    # Ones: memory that was never written would cost the system's time for each page.
    room = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in layout.items()}
    group.all_reduce(torch.zeros(1))
    for tensor in room.values():
        group.broadcast(tensor, 0)
    group.all_reduce(torch.zeros(1))


def table(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def report(label: str, old: Weights, new: Weights, repeats: int) -> tuple[dict[str, str], dict[str, str]]:
    """One line for the table of results and one for the table of parts."""
    delta.THREADS = 1
    rate, full = copy_rate(repeats), delta.full_bytes(new)
    seconds, made = ours(old, new, repeats)
    wire = sum(len(payload) for payload in made.rows["data"].to_pylist())
    piecewise = parts(old, new, repeats, seconds)
    delta.THREADS = 2
    wall = best(lambda: delta.encode_and_digest(1, 0, "r", old, new), repeats, time.perf_counter)
    diff, diff_seconds = binary_diff(old, new)

    def speed(key: str) -> str:
        return f"{full / seconds[key] / 1e9:.2f} ({full / seconds[key] / rate:.0%})"

    result = {
        "update": label, "changed": f"{made.changed_fraction:.2%}", "wire MB": f"{wire / 1e6:.2f}",
        "of full": f"{wire / full:.2%}", "x entropy": f"{wire / entropy_bytes(old, new):.3f}",
        "copy GB/s": f"{rate / 1e9:.1f}", "encode GB/s (of copy)": speed("encode"), "apply GB/s (of copy)": speed("apply"),
        "apply, fresh memory": speed("apply, fresh memory"), "encode, 2 threads, wall s": f"{wall:.3f}",
        "binary diff of full": f"{diff / full:.2%}", "binary diff GB/s": f"{full / diff_seconds / 1e9:.2f}",
    }  # fmt: skip
    shares = {"s per GB": label, "25 % of copy allows": f"{4e9 / rate:.3f}"}
    shares |= {name: f"{1e9 * taken / full:.3f}" for name, taken in piecewise.items()}
    return result, shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="135m")
    parser.add_argument("--old")
    parser.add_argument("--new")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        old = random_weights(write_config(args.model, folder))
    full = delta.full_bytes(old)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; ", end=""
    )
    print(
        f"torch {torch.__version__}, numpy {np.__version__}; {args.model}: {full / 1e6:.0f} MB in {len(old)} tensors\n"
    )
    lines = []
    for density in DENSITIES:
        new = moved(old, density)
        lines.append(report(f"random {density:.1%}", old, new, args.repeats))
    if args.old and args.new:
        lines.append(report("real step", load_file(args.old), load_file(args.new), args.repeats))
    print(table([result for result, _ in lines]))
    print(table([shares for _, shares in lines]))
    baselines = {"safetensors save + load": save_and_load(new), "broadcast of everything": broadcast_all(new)}
    lines = [
        {"all bytes": name, "wall s": f"{s:.2f}", "GB/s": f"{full / s / 1e9:.2f}"} for name, s in baselines.items()
    ]
    print(table(lines))


if __name__ == "__main__":
    main()
