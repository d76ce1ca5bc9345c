"""A `block` draft at work in an engine: its layers on packed weights, their keys and values in the engine's own pages.

Keys and values of position i are made of the policy's feature there, for every layer at once and without its attention. A
block begins at the reply's last token, which the policy has not been fed yet: slot s has the next position but s - 1, sees
all earlier positions and its whole block, and says what the token at its own position may be. So one pass proposes
as many tokens as the block has masks, each without knowing the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.draft.shape import DraftShape
from furlong.ops.draft.vocabulary import target_ids
from furlong.ops.policy.gated import gated
from furlong.ops.policy.layer import NormWeight, in_pairs
from furlong.ops.policy.packed_linear import PackedLinear
from furlong.ops.policy.paged_attention import Plan
from furlong.ops.policy.rotation import Rotation
from furlong.ops.policy.row_bits import threads_for_products


class BlockDrafter:
    """The draft of one weights version, in the policy's dtype. Immutable; the published tensors stay beside it."""

    def __init__(self, shape: DraftShape, tensors: Mapping[str, Tensor], dtype: torch.dtype):
        """
        Args:
            shape: of kind `block`.
            tensors: by name, without prefix; they passed `check_tensors`.
            dtype: of the policy's projections, to which the draft's are rounded: proposals change no reply's law.
        """
        self.shape = shape
        self.tensors = tensors
        self._dtype = dtype
        part = {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
        self._fc = PackedLinear(part["fc.weight"])
        self._head = PackedLinear(part["lm_head.weight"])
        self._norm, self._hidden_norm = NormWeight(part["norm.weight"]), NormWeight(part["hidden_norm.weight"])
        self._mask = part["mask_embedding.weight"].float()
        self._layers = [
            _Layer(shape, {name.removeprefix(at): tensor for name, tensor in part.items() if name.startswith(at)})
            for at in shape.layer_names()
        ]
        self._rotation = Rotation(shape.heads, shape.kv_heads, shape.head_dim, shape.rope_theta)
        self.ids: Int[Tensor, " draft_vocab"] = target_ids(tensors, shape)
        """The policy's id of each token that the draft can propose, ascending."""

    def features(self, taps: list[Float[Tensor, "tokens hidden"]]) -> Float[Tensor, "tokens hidden"]:
        """What the draft gets to know of positions that the policy has computed.

        Args:
            taps: the residual stream after each of the shape's layers.
        """
        with threads_for_products():
            return self._fc(torch.cat(taps, dim=1).to(self._dtype)).float()

    def keys(
        self, features: Float[Tensor, "rows hidden"], positions: Int[Tensor, " rows"]
    ) -> list[Float[Tensor, "rows two_kv_heads head_dim"]]:
        """Rotated keys, then values, of known positions in each layer."""
        N, K, D = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        with threads_for_products():
            x = self._normed(self._hidden_norm, features)
            turn = self._rotation.turns(positions)[:, N:]
            found = [layer.keys(x).float().view(len(x), 2 * K, D) for layer in self._layers]
            for heads in found:
                torch.view_as_complex(heads.view(len(x), 2 * K, D // 2, 2))[:, :K].mul_(turn)
            return found

    def run(
        self, anchors: Float[Tensor, "blocks hidden"], plan: Plan, layer: int
    ) -> Float[Tensor, "blocks proposals hidden"]:
        """The hidden states of each block's masks before the final norm; the slots' keys and values are stored.

        Args:
            anchors: embeddings of the replies' last tokens.
            plan: where the blocks' slots go: spans of them that see each other.
            layer: the draft's first in the cache.
        """
        slots, H = self.shape.block, self.shape.hidden
        masks = self._mask.expand(len(anchors), slots - 1, H)
        hidden = torch.cat([anchors[:, None], masks], dim=1).flatten(0, 1)
        with threads_for_products():
            turn = self._rotation.turns(plan.positions)
            for at, each in enumerate(self._layers):
                hidden = self._attended(each, hidden, turn, plan, layer + at)
        return hidden.view(len(anchors), slots, H)[:, 1:]

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft_vocab"]:
        """Over the tokens `ids`."""
        with threads_for_products():
            return self._head(self._normed(self._norm, hidden))

    def _attended(self, layer: _Layer, hidden: Tensor, turn: Tensor, plan: Plan, at: int) -> Tensor:
        N, K, D = self.shape.heads, self.shape.kv_heads, self.shape.head_dim
        x = self._normed(layer.input_norm, hidden)
        heads = torch.cat([layer.queries(x), layer.keys(x)], dim=1).float().view(len(x), N + 2 * K, D)
        torch.view_as_complex(heads.view(len(x), N + 2 * K, D // 2, 2))[:, : N + K].mul_(turn)
        hidden = hidden + layer.out(plan.attend(at, heads[:, :N], heads[:, N:]).to(self._dtype))
        return hidden + layer.down(gated(layer.gate_up(self._normed(layer.post_norm, hidden))))

    def _normed(self, norm: NormWeight, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        return F.rms_norm(x, x.shape[-1:], norm.wide, self.shape.norm_eps).to(self._dtype)


class _Layer:
    """Queries apart from keys and values, which features have without them."""

    def __init__(self, shape: DraftShape, part: Mapping[str, Tensor]):
        K, D = shape.kv_heads, shape.head_dim
        pairs = in_pairs(D)
        turned = [(torch.arange(heads)[:, None] * D + pairs).reshape(-1) for heads in (shape.heads, K)]
        self.queries = PackedLinear(part["self_attn.q_proj.weight"][turned[0]])
        both = [part["self_attn.k_proj.weight"][turned[1]], part["self_attn.v_proj.weight"]]
        self.keys = PackedLinear(torch.cat(both))
        self.out = PackedLinear(part["self_attn.o_proj.weight"])
        self.gate_up = PackedLinear(torch.cat([part[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]))
        self.down = PackedLinear(part["mlp.down_proj.weight"])
        self.input_norm = NormWeight(part["input_layernorm.weight"])
        self.post_norm = NormWeight(part["post_attention_layernorm.weight"])
