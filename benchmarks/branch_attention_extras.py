"""What saves messages: one halo for K rolls, one gradient ring for K, projected taps for raw ones; counted on 4 ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from branch_attention_meter import Meter
from branch_attention_ranks import DEADLINE, DEPTH, HEAD_DIM, HEADS, document, tensors
from branch_attention_tables import MIB, table
from torch import Tensor

from furlong.kernels.branches import test_time_training
from furlong.kernels.context_parallel import cp_branch_attention
from furlong.kernels.halo import halo
from furlong.kernels.layout import zigzag_layout
from furlong.kernels.ring import Ring
from furlong.kernels.shared_trunk import SharedTrunk
from furlong.kernels.tap_channel import TapChannel
from furlong.kernels.tap_protocol import TapKey, slots_per_stage

EXTRA_RANKS = 4
TOKENS, REPEATS = 4096, 3
HIDDEN, VOCABULARY = 64, 1024
"""Of the rolled rows; at 8 billion parameters a row of logits is 37 times a row of hidden states, here 16 times."""
TAPS, MICRO_BATCHES, ROWS = 3, 4, 512


def measure_extras(rank: int) -> dict[str, list]:
    """By name: [bytes sent, messages sent, ...] of this rank."""
    ring = Ring(dist.group.WORLD, DEADLINE)
    pair = dist.new_group([0, 1])
    found: dict[str, list] = {}
    _halos(ring, found)
    _trunks(ring, found)
    for project in (None, HIDDEN):
        if rank < 2:
            found["taps projected" if project else "taps raw"] = _taps(pair, rank, project)
    return found


def _halos(ring: Ring, found: dict[str, list]) -> None:
    """Depth K needs tokens, masks and the teacher's hidden states up to K rows on."""
    layout = zigzag_layout(torch.tensor([0, TOKENS]), ring.ranks, DEPTH + 1)
    rows = layout.source.shape[1]
    ids, hidden = torch.arange(rows), torch.randn(rows, HIDDEN)
    embedding, logits = torch.randn(rows, HIDDEN), torch.randn(rows, VOCABULARY)

    def once() -> None:
        tokens, teacher = halo(ids, layout, DEPTH + 1, ring), halo(hidden, layout, DEPTH, ring)
        for depth in range(1, DEPTH + 1):
            tokens.shift(depth)
            teacher.shift(depth)

    def rolled(*streams: Tensor) -> Callable[[], None]:
        def run() -> None:
            for x in streams:
                for _ in range(DEPTH):
                    x = halo(x, layout, 1, ring).shift(1)

        return run

    sides = {
        "one halo: ids, hidden states": once,
        "K rolls: ids, hidden states": rolled(ids, hidden),
        "K rolls: embeddings, logits": rolled(embedding, logits),
    }
    for name, side in sides.items():
        found[name] = _sent(ring, side, "halo")


def _sent(ring: Ring, side: Callable[[], None], *kinds: str) -> list[int]:
    """[bytes, headers aside, messages with them]; the dispatcher's count has to be the ring's."""
    ring.ledger.clear()
    with Meter() as meter:
        side()
    ours, seen = sum(ring.ledger.sent.values()), sum(meter.counts.sent.values())
    if ours != seen:
        raise ValueError(f"the ring says that it sent {ours} bytes, the dispatcher {seen}; one of them is wrong")
    return [sum(ring.ledger.sent[kind] for kind in kinds), sum(ring.ledger.messages.values())]


def _trunks(ring: Ring, found: dict[str, list]) -> None:
    """K passes over the same main keys and values, forward and backward: rings of their own, or one for the gradients."""
    layout = document(TOKENS, ring.ranks)
    rows = layout.rows(ring.rank)
    passes = [test_time_training(rows, depth) for depth in range(1, DEPTH + 1)]
    _, k, v, kb, vb = tensors(passes[-1], len(rows.position), ring.rank)
    queries = [torch.randn(len(rows.position), 1, HEADS, HEAD_DIM) for _ in passes]

    def each(attend: Callable) -> list[Tensor]:
        outs = [
            attend(q, kb[:, : at.entries].contiguous(), vb[:, : at.entries].contiguous(), at)
            for q, at in zip(queries, passes, strict=True)
        ]
        return list(torch.autograd.grad(sum(out.sum() for out in outs), (k, v, kb, vb)))

    def own() -> list[Tensor]:
        return each(lambda q, keys, values, at: cp_branch_attention(
            q, k, v, keys, values, layout=layout, branches=at, ring=ring, strategy="ring", backend="cpu"
        ))  # fmt: skip

    def shared(strategy: str) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            trunk = SharedTrunk(k, v, layout=layout, ring=ring, strategy=strategy, backend="cpu")
            return each(lambda q, keys, values, at: trunk.attend(q, keys, values, branches=at))

        return run

    sides = {"K rings": own, "one gradient ring": shared("ring"), "one gradient ring, gathered": shared("gather")}
    results = {}
    for name, side in sides.items():
        found[name] = _sent(ring, lambda name=name, side=side: results.__setitem__(name, side()), "kv", "gradient")
        found[name].append(ring.ledger.sent["gradient"])
    for grads in results.values():
        for a, b in zip(results["K rings"], grads, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(REPEATS):
        for name, side in sides.items():
            dist.barrier()
            began = time.perf_counter()
            side()
            taken[name].append(time.perf_counter() - began)
    for name, times in taken.items():
        found[name] += [sorted(t / base for t, base in zip(times, taken["K rings"], strict=True))]


def _taps(group: dist.ProcessGroup, stage: int, project: int | None) -> list[int]:
    """[bytes forward, bytes back] of one stage; three layers tapped on the first, the draft on the second."""
    channel = TapChannel(
        group, stage, 1, dict.fromkeys(range(TAPS), 0), ROWS, HIDDEN, torch.float32, slots_per_stage(2, 1, "1f1b"),
        DEADLINE, project=project,
    )  # fmt: skip
    try:
        if project:
            weights = {layer: torch.randn(project, HIDDEN) for layer in range(TAPS)}
            channel.load_projection(weights if stage == 1 else None)
        for micro_batch in range(MICRO_BATCHES):
            if stage == 0:
                for layer in range(TAPS):
                    channel.put(TapKey(0, micro_batch, layer), torch.randn(ROWS, HIDDEN))
            elif project:
                channel.return_gradient(0, micro_batch, channel.take_projected(0, micro_batch))
            else:
                channel.take(0, micro_batch)
                channel.release(0, micro_batch)
        if project:
            channel.projection_gradients()
        stats = channel.stats
    finally:
        channel.close()
    return [stats.payload_bytes, stats.gradient_bytes + stats.weight_bytes]


def extras_table(by_rank: list[dict[str, list]]) -> list[tuple[str, bool]]:
    """Sums over ranks."""

    def total(name: str, at: int) -> int:
        return sum(found[name][at] for found in by_rank if name in found)

    print(f"Sent by all {EXTRA_RANKS} ranks together, T = {TOKENS}, K = {DEPTH}")
    halos = [name for name in by_rank[0] if name.startswith(("one halo", "K rolls"))]
    trunks = [name for name in by_rank[0] if name in ("K rings",) or name.startswith("one gradient")]
    rows = [[name, f"{total(name, 0):,}", str(total(name, 1)), "", ""] for name in halos]
    for name in trunks:
        ratio = by_rank[0][name][3]
        rows.append([name, f"{total(name, 0):,}", str(total(name, 1)), f"{total(name, 2):,}",
                     f"{median(ratio):.2f} ({ratio[0]:.2f} to {ratio[-1]:.2f})"])  # fmt: skip
    table(["", "bytes", "messages, headers too", "of it gradients", "time by that of K rings"], rows)
    print(f"Taps of {TAPS} layers of one stage, {MICRO_BATCHES} micro-batches of {ROWS} rows of {HIDDEN}, float32")
    raw, projected = (sum(f[name][0] for f in by_rank if name in f) for name in ("taps raw", "taps projected"))
    back = sum(f["taps projected"][1] for f in by_rank if "taps projected" in f)
    table(["", "MiB to the draft", "MiB back and of weights"],
          [["raw", f"{raw / MIB:.3f}", "0.000"], ["projected", f"{projected / MIB:.3f}", f"{back / MIB:.3f}"]])  # fmt: skip
    own, deferred = total("K rings", 2), total("one gradient ring", 2)
    return [
        (f"halo: {total(halos[2], 0) / total(halos[0], 0):.1f}x fewer bytes than K rolls of embeddings and logits, "
         f"{total(halos[1], 1) / total(halos[0], 1):.1f}x fewer messages than K rolls of the same rows",
         total(halos[0], 0) <= total(halos[2], 0) and total(halos[0], 1) < total(halos[1], 1)),
        (f"deferred gradient ring: {own / deferred:.2f}x fewer gradient bytes than K rings (K = {DEPTH})",
         own == DEPTH * deferred),
        (f"projected taps: {raw / projected:.2f}x fewer bytes to the draft ({TAPS} layers)", raw == TAPS * projected),
    ]  # fmt: skip
