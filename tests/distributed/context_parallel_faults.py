"""What ranks of `test_context_parallel_faults.py` do: go wrong in one way each, and say what the others saw."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from furlong.kernels.branches import test_time_training as depth_of
from furlong.kernels.context_parallel import cp_branch_attention, ring_attention
from furlong.kernels.halo import halo
from furlong.kernels.layout import zigzag_layout
from furlong.kernels.ring import ContextParallelError, Ring
from furlong.kernels.shared_trunk import SharedTrunk


def seen(call: Callable[[], object]) -> tuple[str, float]:
    """(the ring's error, seconds it took); the error is "" if there was none."""
    start = time.monotonic()
    try:
        call()
    except ContextParallelError as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def travel(ring: Ring, step: Callable[[int], None] = lambda hop: None, rows: int = 3) -> list[float]:
    """Send a block round; what came, own first."""
    came = []
    with ring.call("travel", {"rows": 3}):
        for hop, (source, (block,)) in enumerate(ring.travel("kv", [torch.full((rows, 2), float(ring.rank))])):
            assert (block == source).all()
            came.append(float(block[0, 0]))
            step(hop)
    return came


def attention(ring: Ring, rank: int, **wrong: object) -> torch.Tensor:
    layout = zigzag_layout(torch.tensor([0, 9, 23]), ring.ranks)
    rows = layout.source.shape[1]
    dtype, extra, heads = wrong.get("dtype", torch.float64), wrong.get("extra", 0), wrong.get("heads", 4)
    branches = depth_of(layout.rows(rank), 2)
    gradient = wrong.get("gradient", True)
    q = torch.ones(rows, 1, heads, 8, dtype=dtype, requires_grad=gradient)
    kv_heads = wrong.get("kv_heads", 2)
    k = torch.ones(rows + extra, kv_heads, 8, dtype=dtype, requires_grad=gradient)
    kb = torch.ones(rows, 2 + wrong.get("entries", 0), kv_heads, 8, dtype=dtype)
    vb = list(kb.unbind(1)) if wrong.get("listed") else kb
    settings = {"strategy": "ring", "backend": "reference"} | wrong.get("settings", {})
    return cp_branch_attention(q, k, k, kb, vb, layout=layout, branches=branches, ring=ring, **settings)


WRONG = {
    "rows": {"extra": 1},
    "dtype": {"dtype": torch.float32},
    "heads": {"heads": 6},
    "entries": {"entries": 1},
    "values apart": {"listed": True},
    "gradient": {"gradient": False},
    "strategy": {"settings": {"strategy": "gather"}},
    "unknown strategy": {"settings": {"strategy": "fastest"}},
    "scale": {"settings": {"scale": 0.5}},
    "backend": {"settings": {"backend": "fastest"}},
    "long backend": {"settings": {"backend": "fastest" * 99}},
    "no scale": {"settings": {"scale": 0.0}},
}


def shared(ring: Ring, rank: int) -> torch.Tensor:
    layout = zigzag_layout(torch.tensor([0, 9, 23]), ring.ranks)
    x = torch.ones(layout.source.shape[1], 1, 2, 8, requires_grad=True)
    trunk = SharedTrunk(x[:, 0], x[:, 0], layout=layout, ring=ring, backend="reference")
    return trunk.attend(x, (), (), branches=depth_of(layout.rows(rank), 0))


def shifted(ring: Ring, rank: int) -> torch.Tensor:
    layout = zigzag_layout(torch.tensor([0, 9, 23]), ring.ranks)
    return halo(torch.ones(layout.source.shape[1], 2, requires_grad=True), layout, 1, ring).shift(1)


SWAPPED: dict[str, Callable[[Ring, int], torch.Tensor]] = {
    "attention": attention,
    "ulysses": lambda ring, rank: attention(ring, rank, kv_heads=4, settings={"strategy": "ulysses"}),
    "shared trunk": shared,
    "halo": shifted,
}


def backward_swapped(ring: Ring, rank: int, make: Callable[[Ring, int], torch.Tensor]) -> str:
    """Two calls alike, whose backward passes rank 2 makes in the other order: gradients of one must not meet the other's."""
    outs = [make(ring, rank) for _ in range(2)]
    return seen(outs[1 if rank == 2 else 0].sum().backward)[0]


def disagree(rank: int) -> dict[str, str]:
    """Rank 2 goes wrong in every way in turn; between two of them all is well."""
    ring = Ring(dist.group.WORLD, deadline=20)
    errors = {"right": seen(lambda: attention(ring, rank))[0]}
    for name, wrong in WRONG.items():
        errors[name] = seen(lambda wrong=wrong: attention(ring, rank, **(wrong if rank == 2 else {})))[0]
        errors[f"right after {name}"] = seen(lambda: attention(ring, rank))[0]
    other = zigzag_layout(torch.tensor([0, 10, 23]), ring.ranks)
    same = zigzag_layout(torch.tensor([0, 9, 23]), ring.ranks)
    q = torch.ones(same.source.shape[1], 2, 8)
    layout = other if rank == 2 else same
    assert other.source.shape == same.source.shape
    errors["layout"] = seen(lambda: ring_attention(q, q, q, layout=layout, ring=ring, backend="reference"))[0]
    out = attention(ring, rank)
    # Rank 2 takes the next forward pass for the backward pass that the others are in.
    errors["order"] = seen(lambda: attention(ring, rank) if rank == 2 else out.sum().backward())[0]
    errors |= {f"swapped {name}": backward_swapped(ring, rank, make) for name, make in SWAPPED.items()}
    errors["ulysses"] = seen(lambda: attention(ring, rank, settings={"strategy": "ulysses"}))[0]
    errors["right in the end"] = seen(lambda: attention(ring, rank).sum().backward())[0]
    return errors


def killed(rank: int, when: str, deadline: float) -> dict[str, tuple[str, float]]:
    """Rank 2 dies without a word: before a call, in the middle of it, or in the backward pass."""
    ring = Ring(dist.group.WORLD, deadline)

    def die(*_: object) -> None:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    travel(ring)
    if when == "before":
        die()
        first = seen(lambda: travel(ring))
    elif when == "between":
        # A rank that has all it needs of a call may miss it there, not in the next.
        first = seen(lambda: [travel(ring, lambda hop: die() if hop == 1 else None), travel(ring)])
    else:
        out = attention(ring, rank)
        out.register_hook(die)
        first = seen(out.sum().backward)
    return {"first": first, "again": seen(lambda: travel(ring))}


def slow(rank: int) -> list[list[float]]:
    """Rank 1 takes its time, within the deadline: in the middle of a call, and before one."""
    ring = Ring(dist.group.WORLD, deadline=20)
    during = travel(ring, lambda hop: time.sleep(0.7) if rank == 1 and hop < 2 else None)
    if rank == 1:
        time.sleep(0.7)
    return [during, travel(ring)]


def late(rank: int, own_error: bool) -> tuple[str, float]:
    """Rank 1 is alive and does not come, or stops with an error of its own; then it gives up too, and ends."""
    ring = Ring(dist.group.WORLD, deadline=1)

    def stop(hop: int) -> None:
        if rank == 1 and hop == 1:
            if own_error:
                raise ContextParallelError("out of memory, say")
            time.sleep(3)

    # A rank that has all it needs of a call may miss it there, not in the next.
    found = seen(lambda: [travel(ring, stop), travel(ring)])
    if rank == 1 and ("out of memory" if own_error else "died") in found[0]:
        time.sleep(3 if own_error else 0)
        os._exit(3)
    return found
