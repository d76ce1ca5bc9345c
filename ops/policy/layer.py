"""One decoder layer of the engine: its packed weights and the two halves of its arithmetic around attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.experts import Experts
from furlong.ops.policy.feed_forward import FeedForward
from furlong.ops.policy.packed_linear import PackedLinear
from furlong.ops.policy.shard import Shard, Whole

_QKV = ("q", "k", "v")
_PARTS = {
    **{part: f"self_attn.{part}_proj.weight" for part in (*_QKV, "o")},
    "norm1": "input_layernorm.weight",
    "norm2": "post_attention_layernorm.weight",
}


class NormWeight:
    """An RMSNorm's weight, widened once to float32, in which the norm is computed."""

    def __init__(self, weight: Float[Tensor, " size"]):
        self.wide = weight.float()
        self._weight = weight

    def published(self) -> Float[Tensor, " size"]:
        """The weight in its published dtype, as the norm's own copy has it."""
        if torch.equal(self.wide.view(torch.int32), self._weight.float().view(torch.int32)):
            return self._weight  # narrowing would lose the payload of a NaN
        return self.wide.to(self._weight.dtype)


class Layer:
    """Attention, whose projections q, k and v are one product, then a feed-forward block or experts.

    Rows of q and k are reordered so that the two numbers a rotation mixes lie side by side and rotate as one complex
    number; attention only takes products of q with k, which one common order leaves as they are.
    """

    @staticmethod
    def names(arch: Architecture, index: int) -> dict[str, str]:
        """Part -> Hugging Face name of every tensor of this layer."""
        parts = dict(_PARTS)
        if arch.qkv_bias:
            parts |= {f"{part}_bias": f"self_attn.{part}_proj.bias" for part in _QKV}
        if arch.qk_norm:
            parts |= {f"{part}_norm": f"self_attn.{part}_norm.weight" for part in ("q", "k")}
        mine = {part: f"model.layers.{index}.{name}" for part, name in parts.items()}
        return mine | _block(arch, index).names(arch, index)

    def __init__(self, arch: Architecture, index: int, tensors: dict[str, Tensor]):
        part = {key: tensors[name] for key, name in self.names(arch, index).items()}
        rows = _pair_order(arch)
        bias = torch.cat([part[f"{p}_bias"] for p in _QKV])[rows] if arch.qkv_bias else None
        self._qkv = PackedLinear(torch.cat([part[p] for p in _QKV])[rows], bias)
        self._out = PackedLinear(part["o"])
        self._block = _block(arch, index)(arch, index, tensors)
        self._norm1, self._norm2 = NormWeight(part["norm1"]), NormWeight(part["norm2"])
        self._head_norms = [NormWeight(part[f"{p}_norm"][in_pairs(arch.head_dim)]) for p in ("q", "k") if arch.qk_norm]
        self._dtype = part["o"].dtype

    def project(
        self,
        x: Float[Tensor, "tokens hidden"],
        arch: Architecture,
        turn: Complex[Tensor, "tokens rotated_heads pairs"],
    ) -> Float[Tensor, "tokens all_heads d"]:
        """Normed queries, keys and values side by side; queries and keys rotated."""
        N, K, D = arch.heads, arch.kv_heads, arch.head_dim
        normed = F.rms_norm(x, x.shape[-1:], self._norm1.wide, arch.norm_eps).to(self._dtype)
        heads = self._qkv(normed).float().view(len(x), N + 2 * K, D)
        for norm, some in zip(self._head_norms, heads[:, : N + K].split([N, K], dim=1), strict=False):
            some.copy_(F.rms_norm(some, (D,), norm.wide, arch.norm_eps))
        torch.view_as_complex(heads.view(len(x), N + 2 * K, D // 2, 2))[:, : N + K].mul_(turn)
        return heads

    def add_attention(
        self, x: Float[Tensor, "tokens hidden"], seen: Float[Tensor, "tokens heads_d"], share: Whole | Shard
    ) -> None:
        """Add the attention output to the residual stream, in place."""
        x += share.total(self._out(seen.to(self._dtype)))

    def add_block(
        self,
        x: Float[Tensor, "tokens hidden"],
        arch: Architecture,
        share: Whole | Shard,
        replayed: Int[Tensor, "tokens top_k"] | None = None,
    ) -> Int[Tensor, "tokens top_k"] | None:
        """Add the feed-forward block or the experts to the residual stream, in place.

        Args:
            replayed: see `Experts.__call__`.
        Returns:
            the experts that each token went through, likeliest first; None when the layer has none.
        """
        normed = F.rms_norm(x, x.shape[-1:], self._norm2.wide, arch.norm_eps).to(self._dtype)
        out, chosen = self._block(normed, replayed)
        x += share.total(out)
        return chosen

    def served(self, arch: Architecture, index: int) -> dict[str, Tensor]:
        """This layer's tensors by Hugging Face name, read back from the copies that the products use."""
        name = self.names(arch, index)
        widths = [arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.kv_heads * arch.head_dim]
        back = torch.argsort(_pair_order(arch))
        parts = dict(zip(_QKV, self._qkv.unpacked()[back].split(widths), strict=True))
        parts |= {"o": self._out.unpacked()}
        parts |= {"norm1": self._norm1.published(), "norm2": self._norm2.published()}
        if self._qkv.bias is not None:
            pieces = self._qkv.bias[back].split(widths)
            parts |= {f"{p}_bias": piece for p, piece in zip(_QKV, pieces, strict=True)}
        pairs_back = torch.argsort(in_pairs(arch.head_dim))
        for p, norm in zip(("q", "k"), self._head_norms, strict=False):
            parts[f"{p}_norm"] = norm.published()[pairs_back]
        return {name[part]: tensor for part, tensor in parts.items()} | self._block.served(arch, index)


def _block(arch: Architecture, index: int) -> type[FeedForward | Experts]:
    return Experts if index in arch.expert_layers else FeedForward


def in_pairs(head_dim: int) -> Int[Tensor, " d"]:
    """0, d/2, 1, d/2 + 1, ...: Hugging Face weights rotate element i with element i + d/2."""
    return torch.arange(head_dim).view(2, head_dim // 2).T.reshape(-1)


def _pair_order(arch: Architecture) -> Int[Tensor, " qkv_rows"]:
    """Row order of the joint projection: pairs side by side in each query and key head, values as they were."""
    turned = arch.heads + arch.kv_heads
    starts = torch.arange(turned)[:, None] * arch.head_dim
    values = torch.arange(turned * arch.head_dim, (turned + arch.kv_heads) * arch.head_dim)
    return torch.cat([(starts + in_pairs(arch.head_dim)).reshape(-1), values])
