"""What the stages of test_tap_channel.py do, each in a process of its own."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.kernels.tap_channel import TapChannel
from furlong.kernels.tap_protocol import (
    DATA,
    EMBEDDING,
    FINAL,
    HEADER_BYTES,
    Header,
    TapError,
    TapKey,
    slots_per_stage,
)
from furlong.kernels.tap_shards import assemble, tap_group
from furlong.kernels.tap_source import DATA_TAG

STAGES, HIDDEN, ROWS, DEADLINE = 3, 8, 6, 20.0
TAPS = {EMBEDDING: 0, 2: 0, 5: 1, 9: 2, FINAL: 2}


def feature(step: int, micro_batch: int, layer: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a layer gives for a micro-batch: known on every stage, with as many rows as the micro-batch has."""
    rows = (step + 3 * micro_batch) % (ROWS + 1)
    seed = (step * 1009 + micro_batch) * 64 + layer % 61
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def channel(rank: int, **changes) -> TapChannel:
    """A channel over all ranks with a group of its own; `late` seconds pass before it exists on the draft's stage."""
    group = changes.pop("group", None) or tap_group([range(dist.get_world_size())], 60.0)
    if rank == STAGES - 1:
        time.sleep(changes.pop("late", 0.0))
    changes.pop("late", None)
    arguments = {
        "taps": TAPS, "rows": ROWS, "hidden": HIDDEN, "dtype": torch.float32,
        "slots": slots_per_stage(STAGES, 1, "1f1b"), "deadline": DEADLINE,
    }  # fmt: skip
    return TapChannel(group, rank, STAGES - 1, **arguments | changes)


@contextmanager
def problem(found: list) -> Iterator[None]:
    """Notes the error's kind, its text and the seconds to it."""
    begun = time.monotonic()
    try:
        yield
    except TapError as error:
        found.append((type(error).__name__, str(error), time.monotonic() - begun))
    else:
        found.append(("nothing", "", time.monotonic() - begun))


def put_all(taps: TapChannel, rank: int, step: int, micro_batch: int, dtype: torch.dtype = torch.float32) -> None:
    for layer, stage in TAPS.items():
        if stage == rank:
            taps.put(TapKey(step, micro_batch, layer), feature(step, micro_batch, layer, dtype))


def right(found: dict[int, Tensor], step: int, micro_batch: int, layers: list[int]) -> bool:
    return list(found) == sorted(layers) and all(
        torch.equal(tap, feature(step, micro_batch, layer, tap.dtype)) for layer, tap in found.items()
    )


def pipeline(
    rank: int,
    orders: list,
    virtual: int,
    chunks: dict[int, tuple[int, int]],
    taps: TapChannel,
    step: int,
    delay: Callable[[str], float],
) -> list[bool]:
    """Runs a schedule's operations with messages between stages as its only order; whether each take was right.

    `chunks` says of each layer (stage, chunk).
    """  # fmt: skip
    stages, good, sends = len(orders), [], []

    def away(to: int, kind: int, chunk: int, micro_batch: int) -> None:
        sends.append(dist.isend(torch.zeros(1), to, tag=10 + kind + 2 * (chunk + virtual * micro_batch)))

    def arrive(of: int, kind: int, chunk: int, micro_batch: int) -> None:
        dist.recv(torch.zeros(1), of, tag=10 + kind + 2 * (chunk + virtual * micro_batch))

    last = stages - 1
    for kind, chunk, micro_batch in orders[rank]:
        time.sleep(delay(kind))
        if kind == "F":
            if rank > 0 or chunk > 0:
                arrive((rank - 1) % stages, 0, chunk, micro_batch)
            for layer, where in chunks.items():
                if where == (rank, chunk):
                    taps.put(TapKey(step, micro_batch, layer), feature(step, micro_batch, layer))
            if rank == last and chunk == virtual - 1:
                good.append(right(taps.take(step, micro_batch), step, micro_batch, list(chunks)))
            else:
                away((rank + 1) % stages, 0, chunk + (rank == last), micro_batch)
        else:
            if rank < last or chunk < virtual - 1:
                arrive((rank + 1) % stages, 1, chunk, micro_batch)
            if rank == last and chunk == virtual - 1:
                taps.release(step, micro_batch)
            if rank > 0 or chunk > 0:
                away((rank - 1) % stages, 1, chunk - (rank == 0), micro_batch)
    for send in sends:
        send.wait()
    return good


def schedule(rank: int, orders: list, virtual: int, chunks: dict[int, tuple[int, int]], slow: int | None) -> dict:
    """Two steps of a schedule with delays at random, or one stage slow."""
    taps = channel(
        rank, taps={layer: stage for layer, (stage, _) in chunks.items()},
        slots=slots_per_stage(STAGES, virtual, "1f1b" if virtual == 1 else "interleaved"), verify=slow is None,
    )  # fmt: skip
    before, draw = taps.stats, random.Random(rank)

    def delay(kind: str) -> float:
        return draw.choice([0.0, 0.0, 0.001, 0.004]) if slow is None else 0.01 * (slow == rank)

    good = [one for step in (3, 4) for one in pipeline(rank, orders, virtual, chunks, taps, step, delay)]
    after = taps.stats
    taps.close()
    return {"good": good, "before": before, "after": after}


def waiting(rank: int, fewer: int) -> float:
    """The longest wait of as many puts as a stage's schedule makes before it needs the draft, which sleeps."""
    slots = [count - fewer for count in slots_per_stage(STAGES, 1, "1f1b")[:-1]] + [1]
    taps = channel(rank, slots=slots, late=1.2)
    for micro_batch in range(3 - rank if rank < 2 else 0):
        put_all(taps, rank, 0, micro_batch)
    longest = taps.stats.longest_put_wait_s
    taps.close()
    return longest


def cancelling(rank: int) -> dict:
    """Every way to give up a micro-batch, 24 of them, with good ones between."""
    taps, good, kinds = channel(rank, late=0.0), [], []
    size = taps.stats.allocated_bytes
    for micro_batch in range(24):
        way = micro_batch % 4
        # Stage 0 fails between its two taps; stage 1 before its only one.
        if rank == 0 and way == 0:
            taps.put(TapKey(0, micro_batch, 2), feature(0, micro_batch, 2))
        elif not (rank == 1 and way == 1):
            put_all(taps, rank, 0, micro_batch)
        if rank < 2 and way < 2:
            taps.cancel(0, micro_batch)
            taps.cancel(0, micro_batch)
        if rank < 2:
            continue
        if way < 2:
            found: list = []
            with problem(found):
                taps.take(0, micro_batch)
            kinds.append(found[0][0])
            taps.cancel(0, micro_batch)
        elif way == 2:
            taps.cancel(0, micro_batch)
        else:
            good.append(right(taps.take(0, micro_batch), 0, micro_batch, list(TAPS)))
            # Held by the draft when its own stage fails.
            taps.cancel(0, micro_batch) if micro_batch % 8 == 3 else taps.release(0, micro_batch)
    late: list = []
    with problem(late):
        put_all(taps, rank, 0, 1)
    # Of a step that is over: there is nothing to give up.
    put_all(taps, rank, 1, 0)
    taps.cancel(0, 3)
    if rank == 2:
        good.append(right(taps.take(1, 0), 1, 0, list(TAPS)))
    taps.close()
    return {"good": good, "kinds": kinds, "late": late, "grew": taps.stats.allocated_bytes - size}


def mistakes(rank: int) -> list:
    """Wrong calls, none of which harms the channel."""
    taps, found = channel(rank), []
    own = {0: 2, 1: 5, 2: 9}[rank]
    for key, tap in (
        (TapKey(0, 0, own), torch.zeros(2, HIDDEN + 1)),
        (TapKey(0, 0, own), torch.zeros(2, HIDDEN, dtype=torch.float64)),
        (TapKey(0, 0, own), torch.zeros(HIDDEN)),
        (TapKey(0, 0, own), torch.zeros(ROWS + 1, HIDDEN)),
        (TapKey(0, 0, 77), torch.zeros(2, HIDDEN)),
    ):
        with problem(found):
            taps.put(key, tap)
    put_all(taps, rank, 0, 0)
    with problem(found):
        put_all(taps, rank, 0, 0)
    if rank < 2:
        with problem(found):
            taps.take(0, 0)
    else:
        with problem(found):
            taps.release(0, 0)
        found.append(right(taps.take(0, 0), 0, 0, list(TAPS)))
        for wrong in (lambda: taps.take(0, 0), lambda: taps.take(0, 1), lambda: taps.take_projected(0, 0)):
            with problem(found):
                wrong()
        taps.release(0, 0)
        with problem(found):
            taps.put(TapKey(0, 0, 9), feature(0, 0, 9))
            taps.take(0, 0)
    taps.close()
    with problem(found):
        put_all(taps, rank, 0, 5)
    return found


def in_vain(rank: int) -> list:
    """Takes that nothing will answer."""
    found: list = []
    taps = channel(rank, deadline=0.5, taps={2: 0, 5: 1})
    if rank == 0:
        for micro_batch in range(3):
            taps.put(TapKey(0, micro_batch, 2), feature(0, micro_batch, 2))
    dist.barrier()
    if rank == 2:
        with problem(found):
            taps.take(0, 2)
    dist.barrier()
    silent = channel(rank, deadline=0.5, taps={2: 0})
    if rank == 2:
        with problem(found):
            silent.take(0, 99)
        with problem(found):
            silent.take(0, 0)
    dist.barrier()
    if rank == 0:
        # Who gives up closes its connections: the others need not wait as long again.
        with problem(found):
            silent.put(TapKey(0, 0, 2), feature(0, 0, 2))
        silent.close()
    return found


def distrusted(rank: int) -> list:
    """Messages that are not what they should be: one byte flipped on the way, and strangers."""
    found: list = []
    taps = channel(rank, dtype=torch.bfloat16, verify=True)
    if rank == 0:
        send = taps._wire.send

        def flip(message: Tensor, to: int, tag: int, what: str):
            message[HEADER_BYTES + 3] ^= 16
            return send(message, to, tag, what)

        taps._wire.send = flip
    put_all(taps, rank, 0, 1, torch.bfloat16)
    if rank == 2:
        with problem(found):
            taps.take(0, 1)
        with problem(found):
            taps.release(0, 1)
    good = Header(DATA, 0, 0, 0, 1, HIDDEN, torch.float32, (2,))
    changes: list[dict] = [
        {"layers": (3,)}, {"width": HIDDEN - 1}, {"dtype": torch.bfloat16}, {"rows": ROWS + 1}, {"rows": -1},
        {"stage": 1}, {"kind": 3}, {}, {"step": -5},
    ]  # fmt: skip
    for change in [None, *changes]:
        group = tap_group([range(STAGES)], 60.0)
        works = []
        if rank == 0:
            message = torch.zeros(HEADER_BYTES + ROWS * HIDDEN * 4, dtype=torch.uint8)
            if change is not None:
                Header(**vars(good) | change).write(message)
            # The same message twice: a key that comes again.
            works = [dist.isend(message, group=group, group_dst=2, tag=DATA_TAG) for _ in range(1 + (change == {}))]
        elif rank == 2:
            taps = channel(rank, group=group, taps={2: 0}, deadline=5.0)
            if change == {}:
                taps.take(0, 0)
            with problem(found):
                taps.take(0, 1)
        dist.barrier()
        for work in works:
            work.wait()
    return found


def projecting(rank: int) -> dict:
    """Two steps of projected taps in float64, against the same with all features in one place and autograd."""
    out, draw = 4, torch.Generator().manual_seed(5)
    taps = channel(rank, dtype=torch.float64, project=out, slots=(3, 2, 3), verify=True)
    found, worst = [], {"sum": 0.0, "gradient": 0.0}
    with problem(found):
        put_all(taps, rank, 0, 0, torch.float64) if rank < 2 else taps.take_projected(0, 0)
    for step in (1, 2):
        weights = {layer: torch.randn(out, HIDDEN, generator=draw, dtype=torch.float64) for layer in TAPS}
        leaves = {layer: w.clone().requires_grad_() for layer, w in weights.items()}
        taps.load_projection(weights if rank == 2 else None)
        for micro_batch in range(9):
            target = torch.randn(ROWS, out, generator=draw, dtype=torch.float64)
            if not (micro_batch == 5 and rank == 1):
                put_all(taps, rank, step, micro_batch, torch.float64)
            if micro_batch == 5:
                # Failed on stage 1, arrived from stage 0, held on stage 2.
                taps.cancel(step, micro_batch)
            if rank < 2 or micro_batch == 5:
                continue
            if micro_batch == 7:
                taps.cancel(step, micro_batch)
                continue
            got = taps.take_projected(step, micro_batch).requires_grad_()
            if micro_batch == 3:
                taps.release(step, micro_batch)
                continue
            whole = sum(feature(step, micro_batch, layer, torch.float64) @ leaves[layer].T for layer in sorted(TAPS))
            worst["sum"] = max(worst["sum"], (got - whole).abs().sum().item())
            (got * target[: len(got)]).tanh().sum().backward()
            (whole * target[: len(got)]).tanh().sum().backward()
            taps.return_gradient(step, micro_batch, got.grad)
        gradients = taps.projection_gradients()
        if rank == 2:
            assert list(gradients) == sorted(TAPS)
            for layer, gradient in gradients.items():
                scale = leaves[layer].grad.abs().max()
                worst["gradient"] = max(worst["gradient"], float((gradient - leaves[layer].grad).abs().max() / scale))
    taps.close()
    return {"found": found, "worst": worst, "stats": taps.stats}


def settling(rank: int) -> dict:
    """Micro-batches that the draft's stage cancels before they come: sources hold each until it is answered."""
    taps = channel(rank, dtype=torch.float64, project=1, slots=(2, 2, 2), deadline=5.0)
    weights = {layer: torch.ones(1, HIDDEN, dtype=torch.float64) for layer in TAPS}
    taps.load_projection(weights if rank == 2 else None)
    for micro_batch in (0, 1) if rank < 2 else ():
        put_all(taps, rank, 0, micro_batch, torch.float64)
    if rank == 2:
        for micro_batch in (0, 1, 3):
            taps.cancel(0, micro_batch)
    # As in a pipeline: the draft's stage does not read on before the sources have run on.
    for micro_batch in (2, 3) if rank < 2 else (2,):
        put_all(taps, rank, 0, micro_batch, torch.float64)
    dist.barrier()
    if rank == 2:
        got = taps.take_projected(0, 2)
        taps.return_gradient(0, 2, torch.ones_like(got))
    # More in a row than all slots together hold, none of which the draft's stage takes.
    for micro_batch in range(4, 12):
        put_all(taps, rank, 0, micro_batch, torch.float64) if rank < 2 else taps.cancel(0, micro_batch)
    gradients = taps.projection_gradients()
    worst = max(
        float((gradient[0] - feature(0, 2, layer, torch.float64).sum(0)).abs().max())
        for layer, gradient in gradients.items()
    )
    taps.load_projection(weights if rank == 2 else None)
    # Once more; this time the draft's stage answers nothing, and nobody has to wait to hear of it.
    found: list = []
    put_all(taps, rank, 1, 0, torch.float64)
    if rank == 2:
        taps.take_projected(1, 0)
    with problem(found):
        taps.projection_gradients()
    return {"layers": len(gradients), "worst": worst, "found": found}


def closing(rank: int) -> dict:
    """Messages that nobody took; then a close that the draft's stage does not join in time."""
    found: list = []
    taps = channel(rank)
    if rank < 2:
        for micro_batch in range(3):
            if rank == 0 or micro_batch < 2:
                put_all(taps, rank, 0, micro_batch)
        if rank == 0:
            taps.put(TapKey(0, 3, 2), feature(0, 3, 2))
    begun = time.monotonic()
    taps.close(10.0)
    taps.close()
    took = time.monotonic() - begun
    late = channel(rank)
    if rank < 2:
        for micro_batch in range(2):
            put_all(late, rank, 0, micro_batch)
        with problem(found):
            late.close(0.4)
    dist.barrier()
    if rank == 2:
        with problem(found):
            late.close(3.0)
    return {"took": took, "found": found}


def all_cases(rank: int, plans: dict[str, tuple]) -> dict:
    """Everything that three living stages do, one after another."""
    cases: dict[str, Callable[[], object]] = {
        name: (lambda plan=plan: schedule(rank, *plan)) for name, plan in plans.items()
    }
    cases |= {
        "enough slots": lambda: waiting(rank, 0),
        "one slot fewer": lambda: waiting(rank, 1),
        "cancelling": lambda: cancelling(rank),
        "mistakes": lambda: mistakes(rank),
        "projecting": lambda: projecting(rank),
        "settling": lambda: settling(rank),
        "closing": lambda: closing(rank),
        "in vain": lambda: in_vain(rank),
        "distrusted": lambda: distrusted(rank),
    }
    found = {}
    for name, case in cases.items():
        print("case", name, flush=True)
        dist.barrier()
        found[name] = case()
    return found


def dying(rank: int, dead: int) -> list:
    """One stage is killed in the middle of a step; what the others see and when."""
    taps = channel(rank, deadline=4.0)
    found: list = []
    dist.barrier()
    with problem(found):
        for micro_batch in range(64):
            if rank == dead and micro_batch == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            put_all(taps, rank, 0, micro_batch)
            time.sleep(0.02)
            if rank == 2:
                taps.take(0, micro_batch)
                taps.release(0, micro_batch)
        taps.close()
    with problem(found):
        put_all(taps, rank, 0, 70)
    taps.close()
    return found


def shards(rank: int) -> dict:
    """PP 2 x TP 2: shards travel between equal coordinates, and become whole rows on the draft's stage."""
    stage, coordinate = divmod(rank, 2)
    group = tap_group([(0, 2), (1, 3)], 30.0)
    tensor_parallel = [dist.new_group([0, 1]), dist.new_group([2, 3])][stage]
    taps = TapChannel(group, stage, 1, {4: 0}, 8, HIDDEN, torch.float64, (2, 1), 10.0)
    whole = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = {}
    if stage == 0:
        # [sequence batch hidden], as Megatron has it.
        taps.put(TapKey(0, 0, 4), whole[3 * coordinate : 3 * coordinate + 3].view(3, 1, HIDDEN))
        found["bytes"] = taps.stats.payload_bytes
    else:
        shard = taps.take(0, 0)[4].clone().requires_grad_()
        got = assemble(shard, tensor_parallel)
        weights = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        (got * weights[coordinate]).sum().backward()
        expected = weights.sum(0)[3 * coordinate : 3 * coordinate + 3]
        found = {"whole": torch.equal(got, whole), "gradient": torch.equal(shard.grad, expected)}
        found["alone"] = assemble(shard, None) is shard
        taps.release(0, 0)
    taps.close()
    return found
