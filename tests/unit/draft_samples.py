"""Drafts beside tiny policies, and the plainest forward pass of an EAGLE-3 draft."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from tiny_policy import make_folder, make_tiny_moe
from torch import Tensor

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.shape import DraftShape
from furlong.ops.draft.start import start_draft
from furlong.ops.policy.architecture import Architecture, read_architecture
from furlong.ops.policy.checkpoint import read_tensors

POLICIES = ("llama", "qwen2", "qwen3", "moe", "all_moe")


@functools.cache
def policy(kind: str) -> tuple[Architecture, dict[str, Tensor]]:
    """A tiny policy's architecture and tensors."""
    with tempfile.TemporaryDirectory() as folder:
        if kind.endswith("moe"):
            make_tiny_moe(Path(folder), mlp_only_layers=[1] if kind == "moe" else [])
        else:
            make_folder(Path(folder), kind)
        architecture = read_architecture(folder)
        return architecture, read_tensors(folder, architecture, torch.float32)


def draft(of: str = "llama", **settings: object) -> tuple[dict[str, Tensor], DraftShape]:
    """The draft that starts beside a tiny policy, its norms made unlike each other."""
    tensors, shape = start_draft(DraftSettings(**settings), *policy(of), seed=3)
    draw = torch.Generator().manual_seed(1)
    return {
        n: t + torch.randn(t.shape, generator=draw) if t.is_floating_point() else t for n, t in tensors.items()
    }, shape


def hidden_of(tensors: dict[str, Tensor], shape: DraftShape, embedding: Tensor, feature: Tensor) -> Tensor:
    """EAGLE-3's layer at depth 1 for one document, row by row in float64: hidden states before the final norm.

    Args:
        embedding: of the next token of each row [rows, hidden].
        feature: fc of the taps [rows, hidden].
    """
    t = {name.removeprefix("midlayer."): tensor.double() for name, tensor in tensors.items()}
    rows, D = len(feature), shape.head_dim
    x = torch.cat(
        [_norm(embedding, t["input_layernorm.weight"], shape), _norm(feature, t["hidden_norm.weight"], shape)], 1
    )
    q, k, v = ((x @ t[f"self_attn.{part}_proj.weight"].T).view(rows, -1, D) for part in "qkv")
    position = torch.arange(rows, dtype=torch.float64)
    angle = position[:, None] / shape.rope_theta ** (torch.arange(0, D, 2, dtype=torch.float64) / D)
    q, k = (_turned(heads, angle[:, None]) for heads in (q, k))
    k, v = (heads.repeat_interleave(shape.heads // shape.kv_heads, 1) for heads in (k, v))
    out = torch.empty(rows, shape.heads * D, dtype=torch.float64)
    for row in range(rows):
        weights = torch.einsum("hd,shd->hs", q[row], k[: row + 1]).div(D**0.5).softmax(1)
        out[row] = torch.einsum("hs,shd->hd", weights, v[: row + 1]).flatten()
    h = feature + out @ t["self_attn.o_proj.weight"].T
    y = _norm(h, t["post_attention_layernorm.weight"], shape)
    gated = torch.nn.functional.silu(y @ t["mlp.gate_proj.weight"].T) * (y @ t["mlp.up_proj.weight"].T)
    return h + gated @ t["mlp.down_proj.weight"].T


def _norm(x: Tensor, weight: Tensor, shape: DraftShape) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + shape.norm_eps).rsqrt() * weight


def _turned(heads: Tensor, angle: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
