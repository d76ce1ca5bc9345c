"""Matrix products in which the bits of a row do not depend on how many rows stand beside it.

Libraries choose a kernel by the sizes of a product, so the order in which a row's terms are added may change with the
number of rows. Here a row has the bits it has in a tile of `TILE` rows. Other counts of rows are used where a probe has
shown that they give those bits: then invariance costs no more than filling up to a few more rows. Elsewhere
the product is cut into tiles (He et al. 2025, "Defeating nondeterminism in LLM inference", which fixes one kernel).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

TILE = 16
STEP, FEW, MORE_STEP = 4, 64, 16
"""Rows are filled up to a multiple of STEP, of MORE_STEP above FEW: fewer counts to probe, and to compile kernels for."""
MOST = 512
"""Most rows of one product; more are cut, so that there are finitely many counts to probe."""
_ON: ContextVar[bool] = ContextVar("row_bits", default=True)
_THREADS: ContextVar[int] = ContextVar("threads", default=0)
_AGREES: dict[Hashable, bool] = {}

ALIGNED = 16
"""Multiple of which rows should be long, in numbers, so that all begin at the same place in a cache line: libraries
compute what stands before the first line's edge by itself."""

Product = Callable[[Tensor], Tensor]


@contextmanager
def row_bits(on: bool) -> Iterator[None]:
    """Whether products of this thread keep the bits of rows; they do unless told otherwise."""
    token = _ON.set(on)
    try:
        yield
    finally:
        _ON.reset(token)


@contextmanager
def threads_for_products() -> Iterator[None]:
    """Within, PyTorch's other threads take part in products only: to wake them takes longer than most of what is computed
    between two products."""
    threads = torch.get_num_threads()
    token = _THREADS.set(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _THREADS.reset(token)


def _with_threads(product: Product, x: Tensor) -> Tensor:
    if _THREADS.get() <= 1:
        return product(x)
    torch.set_num_threads(_THREADS.get())
    try:
        return product(x)
    finally:
        torch.set_num_threads(1)


def alone(compute: Callable[[], Tensor]) -> Tensor:
    """compute() on this thread only: what one thread's share leaves over of a vector, some functions compute in another
    way, so where shares end would be seen in the last bit."""
    threads = torch.get_num_threads()
    if threads == 1:
        return compute()
    torch.set_num_threads(1)
    try:
        return compute()
    finally:
        torch.set_num_threads(threads)


def by_rows(
    product: Product, x: Float[Tensor, "*batch rows n"], kind: Hashable, probe: Callable[[int], tuple[Product, Tensor]]
) -> Float[Tensor, "*batch rows m"]:
    """product(x), where product works on each row alone.

    Args:
        kind: everything but the number of rows that may decide how the product is computed.
        probe: for a number of rows, a product of that kind and rows for it whose results show the order of additions.
    """
    rows = x.shape[-2]
    if not _ON.get() or not rows:
        return _with_threads(product, x)
    if rows > MOST:
        return torch.cat([by_rows(product, some, kind, probe) for some in x.split(MOST, dim=-2)], dim=-2)
    count = rows + -rows % (STEP if rows <= FEW else MORE_STEP)
    if count != TILE and not _agrees(kind, count, probe):
        return _in_tiles(product, x)
    return _with_threads(product, _filled(x, count))[..., :rows, :]


def _agrees(kind: Hashable, count: int, probe: Callable[[int], tuple[Product, Tensor]]) -> bool:
    key = (kind, count, _THREADS.get() or torch.get_num_threads())
    if key not in _AGREES:
        product, x = probe(count)
        # Turned over, so that a row's place among the others is found to make no difference either.
        _AGREES[key] = torch.equal(_with_threads(product, x), _in_tiles(product, x.flip(-2)).flip(-2))
    return _AGREES[key]


def _in_tiles(product: Product, x: Tensor) -> Tensor:
    parts = [_with_threads(product, _filled(some, TILE))[..., : some.shape[-2], :] for some in x.split(TILE, dim=-2)]
    return torch.cat(parts, dim=-2)


def _filled(x: Tensor, rows: int) -> Tensor:
    return F.pad(x, (0, 0, 0, rows - x.shape[-2])) if rows != x.shape[-2] else x.contiguous()


def cancelling(
    rows: int, columns: int, terms: int, dtype: torch.dtype
) -> tuple[Float[Tensor, "rows terms"], Float[Tensor, "columns terms"]]:
    """Factors of a product whose terms cancel: x holds u and -u, and of an odd number of terms one triple u, u, -2u,
    where w holds the same numbers, all shuffled. Every exact sum of x_i w_i is 0, so what comes out is the rounding of
    partial sums. It tells orders of additions apart, where ordinary numbers would hide them in the rounding of the
    result to 16 bits."""
    generator = torch.Generator().manual_seed(terms)
    triple = terms % 2 * (terms > 1)
    pairs = terms // 2 - triple
    u = torch.randn(rows, pairs + terms % 2, generator=generator).to(dtype)
    v = torch.randn(min(columns, 64), u.shape[1], generator=generator).to(dtype)
    v = v.repeat(-(-columns // 64), 1)[:columns]
    a, b = u[:, :pairs], v[:, :pairs]
    last, same = u[:, pairs:], v[:, pairs:]
    x = torch.cat([a, -a, *([last, last, -2 * last] if triple else [last])], dim=1)
    w = torch.cat([b, b, *([same] * 3 if triple else [same])], dim=1)
    order = torch.randperm(terms, generator=generator)
    return x[:, order].contiguous(), w[:, order].contiguous()
