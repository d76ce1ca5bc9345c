"""Triton kernels of the branch part: forward, backward from the joint log-sum-exp, and the merge with the trunk.

A branch has a handful of entries (test-time-training depths 1..8, block drafts of 8 or 16), so that the part is
bound by memory, not by arithmetic: there is nothing for a tensor core to do. Each program therefore holds a tile of
rows, one row per (branch, query, head), walks over the entries of their branches and keeps everything in registers.
Rows of one branch lie side by side, so that what they read twice comes from the cache. Nothing is added atomically:
the same input gives the same bits.

Mathematics: joint softmax over [trunk; branch] with online renormalisation (Milakov & Gimelshein, arXiv 1805.02867);
the backward of any subset of keys given the joint output and log-sum-exp (Dao et al., FlashAttention,
arXiv 2205.14135, appendix B.2).

Importing this module needs triton. On the CPU it runs through Triton's interpreter, which is chosen by the variable
TRITON_INTERPRET=1 when triton compiles a function for the first time: set it before the import.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float
from torch import Tensor

from furlong.kernels.backends import wide

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether the kernels below were built for the interpreter: fixed at import, as Triton fixes it."""

TILE = 8192
"""Bytes of one tile in the wide dtype, 64 a thread: up to five tiles live at once, and none may spill out of registers."""


@triton.jit
def _forward(
    q, k, v, sees, scale, trunk_out, trunk_lse, out, lse, rows, queries, entries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    MERGE: tl.constexpr, WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    query = (row // HEADS) % queries
    kv_row = row // HEADS // queries * entries * KV_HEADS + (row % HEADS) // (HEADS // KV_HEADS)
    col = tl.arange(0, BLOCK_DIM)
    inside = live[:, None] & (col < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + col[None, :]
    x = tl.load(q + at, mask=inside, other=0.0).to(WIDE)
    factor = tl.load(scale)
    if MERGE:
        # The trunk's part is the state of an online softmax whose sum, relative to its log-sum-exp, is one.
        top = tl.load(trunk_lse + row, mask=live, other=float("-inf")).to(WIDE)
        total = tl.where(top == float("-inf"), 0.0, 1.0).to(WIDE)
        acc = tl.load(trunk_out + at, mask=inside, other=0.0).to(WIDE)
        acc = tl.where((total == 0.0)[:, None], 0.0, acc)
    else:
        top = tl.full((BLOCK_ROWS,), float("-inf"), WIDE)
        total = tl.zeros((BLOCK_ROWS,), WIDE)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), WIDE)
    for entry in range(entries):
        seen = live & (tl.load(sees + query * entries + entry, mask=live, other=0) != 0)
        there = (kv_row + entry * KV_HEADS)[:, None] * HEAD_DIM + col[None, :]
        mask = seen[:, None] & inside
        key = tl.load(k + there, mask=mask, other=0.0).to(WIDE)
        score = tl.where(seen, tl.sum(x * key, axis=1) * factor, float("-inf"))
        higher = tl.maximum(top, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        keep = tl.exp(top - base)
        weight = tl.exp(score - base)
        value = tl.load(v + there, mask=mask, other=0.0).to(WIDE)
        acc = acc * keep[:, None] + weight[:, None] * value
        total = total * keep + weight
        top = higher
    nothing = total == 0.0  # not `total > 0`: a NaN must come out as one
    divisor = tl.where(nothing, 1.0, total)
    tl.store(out + at, acc / divisor[:, None], mask=inside)
    tl.store(lse + row, tl.where(nothing, float("-inf"), top + tl.log(divisor)), mask=live)


@triton.jit
def _backward_queries(
    grad, q, k, v, sees, scale, out, lse, delta, dq, rows, queries, entries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    query = (row // HEADS) % queries
    kv_row = row // HEADS // queries * entries * KV_HEADS + (row % HEADS) // (HEADS // KV_HEADS)
    col = tl.arange(0, BLOCK_DIM)
    inside = live[:, None] & (col < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + col[None, :]
    x = tl.load(q + at, mask=inside, other=0.0).to(WIDE)
    dout = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
    inner = tl.sum(dout * tl.load(out + at, mask=inside, other=0.0).to(WIDE), axis=1)
    tl.store(delta + row, inner, mask=live)
    joint = tl.load(lse + row, mask=live, other=0.0).to(WIDE)
    factor = tl.load(scale)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), WIDE)
    for entry in range(entries):
        seen = live & (tl.load(sees + query * entries + entry, mask=live, other=0) != 0)
        there = (kv_row + entry * KV_HEADS)[:, None] * HEAD_DIM + col[None, :]
        mask = seen[:, None] & inside
        key = tl.load(k + there, mask=mask, other=0.0).to(WIDE)
        value = tl.load(v + there, mask=mask, other=0.0).to(WIDE)
        weight = tl.where(seen, tl.exp(tl.where(seen, tl.sum(x * key, axis=1) * factor - joint, 0.0)), 0.0)
        slope = weight * (tl.sum(dout * value, axis=1) - inner) * factor
        acc += slope[:, None] * key
    tl.store(dq + at, acc, mask=inside)


@triton.jit
def _backward_entries(
    grad, q, k, v, sees, scale, lse, delta, dk, dv, rows, queries, entries,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # (branch, entry, kv head)
    live = row < rows
    entry = (row // KV_HEADS) % entries
    group: tl.constexpr = HEADS // KV_HEADS
    q_row = row // KV_HEADS // entries * queries * HEADS + (row % KV_HEADS) * group
    col = tl.arange(0, BLOCK_DIM)
    inside = live[:, None] & (col < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + col[None, :]
    key = tl.load(k + at, mask=inside, other=0.0).to(WIDE)
    value = tl.load(v + at, mask=inside, other=0.0).to(WIDE)
    factor = tl.load(scale)
    key_acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), WIDE)
    value_acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), WIDE)
    for step in range(queries * group):
        query = step // group
        seen = live & (tl.load(sees + query * entries + entry, mask=live, other=0) != 0)
        there = q_row + query * HEADS + step % group
        mask = seen[:, None] & inside
        x = tl.load(q + there[:, None] * HEAD_DIM + col[None, :], mask=mask, other=0.0).to(WIDE)
        dout = tl.load(grad + there[:, None] * HEAD_DIM + col[None, :], mask=mask, other=0.0).to(WIDE)
        joint = tl.load(lse + there, mask=seen, other=0.0).to(WIDE)
        inner = tl.load(delta + there, mask=seen, other=0.0).to(WIDE)
        weight = tl.where(seen, tl.exp(tl.where(seen, tl.sum(x * key, axis=1) * factor - joint, 0.0)), 0.0)
        # The entry was read whether seen or not: what it holds where nobody looks must not come out as 0 * NaN.
        slope = tl.where(seen, weight * (tl.sum(dout * value, axis=1) - inner) * factor, 0.0)
        value_acc += weight[:, None] * dout
        key_acc += slope[:, None] * x
    tl.store(dk + at, key_acc, mask=inside)
    tl.store(dv + at, value_acc, mask=inside)


@triton.jit
def _merge(
    out_a, lse_a, out_b, lse_b, out, lse, rows,
    HEAD_DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = row < rows
    col = tl.arange(0, BLOCK_DIM)
    inside = live[:, None] & (col < HEAD_DIM)[None, :]
    at = row[:, None] * HEAD_DIM + col[None, :]
    a = tl.load(lse_a + row, mask=live, other=float("-inf")).to(WIDE)
    b = tl.load(lse_b + row, mask=live, other=float("-inf")).to(WIDE)
    top = tl.maximum(a, b)
    base = tl.where(top == float("-inf"), 0.0, top)
    share_a, share_b = tl.exp(a - base), tl.exp(b - base)
    nothing = share_a + share_b == 0.0
    total = tl.where(nothing, 1.0, share_a + share_b)
    x = tl.load(out_a + at, mask=inside, other=0.0).to(WIDE)
    y = tl.load(out_b + at, mask=inside, other=0.0).to(WIDE)
    tl.store(out + at, x * (share_a / total)[:, None] + y * (share_b / total)[:, None], mask=inside)
    tl.store(lse + row, tl.where(nothing, float("-inf"), base + tl.log(total)), mask=live)


def _sizes(head_dim: int, dtype: torch.dtype) -> dict[str, object]:
    block = max(16, triton.next_power_of_2(head_dim))
    element = tl.float64 if dtype == torch.float64 else tl.float32
    rows = max(1, TILE // (block * dtype.itemsize))
    return {"HEAD_DIM": head_dim, "WIDE": element, "BLOCK_ROWS": rows, "BLOCK_DIM": block}


def _grid(rows: int, sizes: dict[str, object]) -> tuple[int]:
    return (triton.cdiv(rows, sizes["BLOCK_ROWS"]),)


def check_branch(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> None:
    """Raise ValueError where the shapes do not fit: a kernel would read past the end of a tensor instead."""
    branches, queries, heads, head_dim = q.shape
    entries, kv_heads = k.shape[1:3]
    fits = k.shape == v.shape == (branches, entries, kv_heads, head_dim) and sees.shape == (queries, entries)
    if not fits or kv_heads == 0 or heads % kv_heads:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v), ("sees", sees)))
        raise ValueError(
            f"branch attention got {shapes}: give q [branches queries heads head_dim], k and v [branches entries "
            "kv_heads head_dim] with heads a multiple of kv_heads, and sees [queries entries]"
        )
    if not q.device == k.device == v.device == sees.device:
        raise ValueError(f"branch attention got tensors on {q.device}, {k.device}, {v.device}, {sees.device}: use one")


def branch_forward(
    q: Float[Tensor, "branches queries heads head_dim"],
    k: Float[Tensor, "branches entries kv_heads head_dim"],
    v: Float[Tensor, "branches entries kv_heads head_dim"],
    sees: Bool[Tensor, "queries entries"],
    scale: float,
    trunk: tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]
    | None = None,
) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]:
    """Attention of every query to the entries of its own branch that `sees` allows: (out, lse), both wide.

    With `trunk`, the (out, lse) of the trunk's part, the two are merged in the same pass and (out, lse) are the joint
    ones: the branch's own part is never written to memory. `lse` is the natural log-sum-exp of scale * q.k; a query
    that sees nothing gets out 0 and lse -inf. Raises ValueError for shapes that do not fit.
    """
    check_branch(q, k, v, sees)
    dtype, (_, queries, heads, head_dim) = wide(q.dtype), q.shape
    if trunk is not None and (trunk[0].shape != q.shape or trunk[1].shape != q.shape[:3]):
        raise ValueError(
            f"the trunk's out {tuple(trunk[0].shape)} and lse {tuple(trunk[1].shape)} do not fit q {tuple(q.shape)}: "
            "give out of q's shape and lse [branches queries heads]"
        )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    rows, sizes = lse.numel(), _sizes(head_dim, dtype)
    if rows:
        # As a tensor: Triton passes a Python float as float32, and float64 would then carry a float32 scale.
        factor = torch.full((1,), scale, dtype=dtype, device=q.device)
        trunk_out, trunk_lse = (out, lse) if trunk is None else (trunk[0].contiguous(), trunk[1].contiguous())
        _forward[_grid(rows, sizes)](
            q.contiguous(), k.contiguous(), v.contiguous(), sees.contiguous(), factor, trunk_out, trunk_lse, out, lse,
            rows, queries, k.shape[1], HEADS=heads, KV_HEADS=k.shape[2], MERGE=trunk is not None, **sizes,
        )  # fmt: skip
    return out, lse


def branch_backward(
    grad: Float[Tensor, "branches queries heads head_dim"],
    q: Float[Tensor, "branches queries heads head_dim"],
    k: Float[Tensor, "branches entries kv_heads head_dim"],
    v: Float[Tensor, "branches entries kv_heads head_dim"],
    out: Float[Tensor, "branches queries heads head_dim"],
    lse: Float[Tensor, "branches queries heads"],
    sees: Bool[Tensor, "queries entries"],
    scale: float,
) -> tuple[
    Float[Tensor, "branches queries heads head_dim"],
    Float[Tensor, "branches entries kv_heads head_dim"],
    Float[Tensor, "branches entries kv_heads head_dim"],
]:
    """The branch entries' part of the joint gradient: (dq, dk, dv), wide.

    `out` and `lse` are the joint ones, of trunk and branch together; with those of one part alone the result is wrong.
    dq is to be added to the trunk's. Raises ValueError for shapes that do not fit.
    """
    check_branch(q, k, v, sees)
    if grad.shape != q.shape or out.shape != q.shape or lse.shape != q.shape[:3]:
        raise ValueError(
            f"grad {tuple(grad.shape)}, out {tuple(out.shape)} and lse {tuple(lse.shape)} do not fit q "
            f"{tuple(q.shape)}: give grad and out of q's shape and lse [branches queries heads]"
        )
    dtype, (branches, queries, heads, head_dim) = wide(q.dtype), q.shape
    entries, kv_heads = k.shape[1:3]
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in (q, k, v))
    delta = torch.empty(lse.shape, dtype=dtype, device=q.device)
    if entries and lse.numel():
        factor, sizes = torch.full((1,), scale, dtype=dtype, device=q.device), _sizes(head_dim, dtype)
        grad, q, k, v, sees, out, lse = (x.contiguous() for x in (grad, q, k, v, sees, out, lse))
        _backward_queries[_grid(lse.numel(), sizes)](
            grad, q, k, v, sees, factor, out, lse, delta, dq,
            lse.numel(), queries, entries, HEADS=heads, KV_HEADS=kv_heads, **sizes,
        )  # fmt: skip
        rows = branches * entries * kv_heads
        _backward_entries[_grid(rows, sizes)](
            grad, q, k, v, sees, factor, lse, delta, dk, dv,
            rows, queries, entries, HEADS=heads, KV_HEADS=kv_heads, **sizes,
        )  # fmt: skip
    return dq, dk, dv


def merge(
    out_a: Float[Tensor, "*rows head_dim"],
    lse_a: Float[Tensor, "*rows"],
    out_b: Float[Tensor, "*rows head_dim"],
    lse_b: Float[Tensor, "*rows"],
) -> tuple[Float[Tensor, "*rows head_dim"], Float[Tensor, "*rows"]]:
    """Two parts of one softmax joined: `furlong.kernels.merge.merge` as one kernel. Identity (0, -inf)."""
    if not out_a.shape == out_b.shape or not lse_a.shape == lse_b.shape == out_a.shape[:-1]:
        raise ValueError(
            f"parts of shapes {tuple(out_a.shape)}, {tuple(lse_a.shape)} and {tuple(out_b.shape)}, "
            f"{tuple(lse_b.shape)} cannot be merged: give two outs of one shape and their lse without head_dim"
        )
    out, lse = torch.empty_like(out_a).contiguous(), torch.empty_like(lse_a).contiguous()
    sizes = _sizes(out.shape[-1], out.dtype)
    if lse.numel():
        parts = (x.contiguous() for x in (out_a, lse_a, out_b, lse_b))
        _merge[_grid(lse.numel(), sizes)](*parts, out, lse, lse.numel(), **sizes)
    return out, lse
