"""The float64 truth: one dense mask over all main keys and all branch entries, a plain softmax, autograd's gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from furlong.kernels.branches import BranchLayout
from furlong.kernels.layout import NOBODY, Rows


def dense_branch_attention(
    q: Float[Tensor, "branches queries heads head_dim"],
    k_main: Float[Tensor, "rows kv_heads head_dim"],
    v_main: Float[Tensor, "rows kv_heads head_dim"],
    k_branch: Float[Tensor, "branches entries kv_heads head_dim"],
    v_branch: Float[Tensor, "branches entries kv_heads head_dim"],
    *,
    rows: Rows,
    branches: BranchLayout,
    scale: float | None = None,
) -> Float[Tensor, "branches queries heads head_dim"]:
    """`branch_attention.branch_attention` by definition, in float64. Of quadratic size, entries of all branches included."""
    keys, values = (
        torch.cat([main, branch.flatten(0, 1)]) for main, branch in ((k_main, k_branch), (v_main, v_branch))
    )
    return dense_attention(q.flatten(0, 1), keys, values, dense_mask(rows, branches), scale).view(q.shape)


def dense_causal_attention(
    q: Float[Tensor, "rows heads head_dim"],
    k: Float[Tensor, "rows kv_heads head_dim"],
    v: Float[Tensor, "rows kv_heads head_dim"],
    *,
    rows: Rows,
    scale: float | None = None,
) -> Float[Tensor, "rows heads head_dim"]:
    """`branch_attention.causal_attention` by definition, in float64."""
    return dense_attention(q, k, v, _main_mask(rows, rows.document, rows.position + 1), scale)


def dense_mask(rows: Rows, branches: BranchLayout) -> Bool[Tensor, "branches*queries rows+branches*entries"]:
    """Which query sees which key, branch after branch: first the main keys, then the entries of every branch."""
    document, cutoff = branches.main_view()
    own = torch.eye(branches.branches, dtype=torch.bool, device=document.device)
    inside = (own[:, None, :, None] & branches.sees[None, :, None, :]).flatten(2, 3).flatten(0, 1)
    return torch.cat([_main_mask(rows, document, cutoff), inside & (document != NOBODY)[:, None]], dim=1)


def row_shifted_attention(
    q: Float[Tensor, "rows heads head_dim"],
    k_main: Float[Tensor, "rows kv_heads head_dim"],
    v_main: Float[Tensor, "rows kv_heads head_dim"],
    k_passes: Sequence[Float[Tensor, "rows kv_heads head_dim"]],
    v_passes: Sequence[Float[Tensor, "rows kv_heads head_dim"]],
    *,
    rows: Rows,
    scale: float | None = None,
) -> Float[Tensor, "rows heads head_dim"]:
    """Test-time training in the other convention, in float64: the state of depth p for anchor i lies in row i + p.

    The query in row r, of depth d = len(k_passes), belongs to anchor r - d: it sees main keys up to there, and of each
    depth p the entry in row r - (d - p). Rows whose anchor lies before their document see nothing and give 0.

    Args:
        q, k_passes, v_passes: of the last depth, and of depths 1 to d, shifted down by their depth.
    """
    depth = len(k_passes)
    anchor = rows.position - depth
    real = (rows.document != NOBODY) & (anchor >= 0)
    same = (rows.document[:, None] == rows.document) & real[:, None]
    seen = [same & (rows.position <= anchor[:, None])]
    seen += [same & (rows.position == anchor[:, None] + p) for p in range(1, depth + 1)]
    return dense_attention(q, torch.cat([k_main, *k_passes]), torch.cat([v_main, *v_passes]), torch.cat(seen, 1), scale)


def dense_attention(
    q: Float[Tensor, "queries heads head_dim"],
    k: Float[Tensor, "keys kv_heads head_dim"],
    v: Float[Tensor, "keys kv_heads head_dim"],
    mask: Bool[Tensor, "queries keys"],
    scale: float | None = None,
) -> Float[Tensor, "queries heads head_dim"]:
    """softmax(scale * q k) v in float64 over the keys that the mask shows; 0 for a query that sees none."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    # A row without keys would be a softmax over nothing, NaN; it keeps its scores, and its shares are then put to 0.
    hidden = ~mask & mask.any(1, keepdim=True)
    shares = scores.masked_fill(hidden, float("-inf")).softmax(-1) * mask
    return torch.einsum("hqk,khd->qhd", shares, values)


def _main_mask(rows: Rows, document: Tensor, cutoff: Tensor) -> Bool[Tensor, "queries rows"]:
    seen = (document[:, None] == rows.document) & (rows.position < cutoff[:, None])
    return seen & (document != NOBODY)[:, None]
