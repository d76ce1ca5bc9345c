"""What a stretch of torch code holds, sends and multiplies, counted where its operators are dispatched.

A `Meter` sees every operator below autograd: each new storage until nothing refers to it (tensors that autograd saved
count as long as it keeps them), each message that goes to `torch.distributed`, each call of ATen's CPU flash attention.
It asks no allocator and none of the code under test, so it can check what that code says of itself. It does not see a
kernel's own scratch space (flash attention on the CPU: about 1.5 MB per thread) nor what compiled code allocates inside.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ELSEWHERE = "elsewhere"


@dataclass
class Counts:
    """Of one rank."""

    peak: int = 0
    """Most bytes alive at once, inputs included."""
    at_peak: Counter = field(default_factory=Counter)
    """Of these, by who allocated them: the file of the innermost frame of kernels or benchmarks."""
    most: Counter = field(default_factory=Counter)
    """Each owner's own peak."""
    saved: int = 0
    """Bytes of storages that autograd kept for the backward pass."""
    sent: Counter = field(default_factory=Counter)
    """Bytes by operator; a gathered tensor counts once for each rank that takes it."""
    messages: int = 0
    pairs: Counter = field(default_factory=Counter)
    """Query-key pairs of flash attention calls, "forward" and "backward", summed over query heads, as asked for."""
    blocks: Counter = field(default_factory=Counter)
    """The same, as the kernel's blocks multiply them."""

    def plain(self) -> dict[str, int | dict]:
        return {name: dict(x) if isinstance(x, Counter) else x for name, x in vars(self).items()}


class Meter(TorchDispatchMode):
    """Counts while entered.

    Args:
        arithmetic: whether flash attention computes. Without, it hands out zeros of the same shapes; all else happens
            as it would, so bytes and calls are the same and a quarter of a million rows fit into seconds.
    """

    supports_higher_order_operators = True

    def __init__(self, *inputs: Tensor | None, arithmetic: bool = True) -> None:
        super().__init__()
        self.counts, self.arithmetic = Counts(), arithmetic
        self._live: Counter = Counter()
        self._total = 0
        self._known: dict[int, weakref.finalize] = {}
        self._saved: set[int] = set()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda x: x)
        self._inputs = [x for x in inputs if x is not None]

    def __enter__(self) -> Meter:
        for x in self._inputs:
            self.note(x, "inputs")
        self._inputs = []
        self._hooks.__enter__()
        return super().__enter__()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self._hooks.__exit__(kind, error, trace)
        for ending in self._known.values():
            ending.detach()
        self._known.clear()

    def phase(self) -> Counts:
        """What was counted since the last phase; peaks begin anew from what is alive now."""
        done = self.counts
        self.counts = Counts(peak=self._total, at_peak=+self._live, most=+self._live)
        return done

    def note(self, x: Tensor, owner: str) -> None:
        """Counts a tensor that no operator showed."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or size == 0:
            return
        self._known[key] = weakref.finalize(storage, self._gone, key, owner, size)
        self._live[owner] += size
        self._total += size
        self.counts.most[owner] = max(self.counts.most[owner], self._live[owner])
        if self._total > self.counts.peak:
            self.counts.peak, self.counts.at_peak = self._total, +self._live

    def _gone(self, key: int, owner: str, size: int) -> None:
        self._known.pop(key, None)
        self._live[owner] -= size
        self._total -= size

    def _pack(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in self._saved:
            self._saved.add(storage._cdata)
            self.counts.saved += storage.nbytes()
        return x

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            self._message(func, args)
        if func is FLASH or func is FLASH_BACKWARD:
            self._flash(func, args, kwargs)
        skip = not self.arithmetic and (func is FLASH or func is FLASH_BACKWARD)
        out = _zeros(func, args) if skip else func(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and not x._is_view() and x.untyped_storage()._cdata not in self._known:
                self.note(x, _owner())
        return out

    def _message(self, func, args: tuple) -> None:
        name = func.__name__.split(".")[0].rstrip("_")
        if name.startswith(("recv", "barrier", "monitored")):
            return
        # First argument: the tensors to send, or, of a collective, those to fill and then the input.
        source = args[1] if name in ("allgather", "_allgather_base", "alltoall", "alltoall_base", "reduce_scatter",
                                     "_reduce_scatter_base") else args[0]  # fmt: skip
        group = next(dist.ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
        size = sum(x.numel() * x.element_size() for x in tree_leaves(source) if isinstance(x, Tensor))
        ranks = group.size()
        share = {"send": 1.0, "allgather": ranks - 1, "_allgather_base": ranks - 1}.get(name, (ranks - 1) / ranks)
        if name == "allreduce":
            share = 2 * (ranks - 1) / ranks
        self.counts.sent[name.strip("_")] += round(size * share)
        self.counts.messages += 1

    def _flash(self, func, args: tuple, kwargs: dict) -> None:
        backward = func is FLASH_BACKWARD
        q, k = args[1:3] if backward else args[:2]
        causal = bool(args[7] if backward else (args[4] if len(args) > 4 else kwargs.get("is_causal", False)))
        queries, keys, heads = q.shape[2], k.shape[2], q.shape[0] * q.shape[1]
        asked = sum(min(i + 1, keys) for i in range(queries)) if causal else queries * keys
        kind = "backward" if backward else "forward"
        self.counts.pairs[kind] += heads * asked
        self.counts.blocks[kind] += heads * _blocks(queries, keys, causal)


def _blocks(queries: int, keys: int, causal: bool) -> int:
    """Pairs in the blocks that ATen's kernel multiplies: 32 to 256 queries by 512 keys, up to the diagonal's block."""
    height = 256 if queries >= 768 else 64 if queries >= 192 else 32
    if not causal:
        return queries * keys
    done = 0
    for first in range(0, queries, height):
        rows = min(height, queries - first)
        done += rows * min(keys, -(-min(first + rows, keys) // 512) * 512)
    return done


def _zeros(func, args: tuple) -> tuple[Tensor, ...]:
    if func is FLASH_BACKWARD:
        return tuple(_like(x) for x in args[1:4])
    q = args[0]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _like(q), q.new_zeros((q.shape[0], q.shape[2], q.shape[1]), dtype=wide).transpose(1, 2)


def _like(x: Tensor) -> Tensor:
    """Laid out as the kernel lays its results out: rows before heads."""
    return x.new_zeros((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


def _owner() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "kernels" or (path.parent.name == "benchmarks" and "meter" not in path.stem):
            return path.stem
        frame = frame.f_back
    return ELSEWHERE
