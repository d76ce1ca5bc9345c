"""A draft at work in an engine: the `eagle3` layer on packed weights, its keys and values in the engine's own pages.

Row i has the embedding of token i + 1 and the feature of position i, and says what token i + 2 may be (Li et al. 2025). A
row further ahead has the embedding of a proposal and the hidden state of the row before, in the feature's place.
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

_AT = "midlayer."


class Drafter:
    """The draft of one weights version, in the policy's dtype. Immutable; the published tensors stay beside it."""

    def __init__(self, shape: DraftShape, tensors: Mapping[str, Tensor], dtype: torch.dtype):
        """
        Args:
            shape: of kind `eagle3`.
            tensors: by name, without prefix; they passed `check_tensors`.
            dtype: of the policy's projections, to which the draft's are rounded: proposals change no reply's law.
        """
        self.shape = shape
        self.tensors = tensors
        self._dtype = dtype
        part = {name: tensor.to(dtype) for name, tensor in tensors.items() if tensor.is_floating_point()}
        attention = f"{_AT}self_attn."
        heads = torch.cat([part[f"{attention}{p}_proj.weight"] for p in ("q", "k", "v")])
        self._fc = PackedLinear(part["fc.weight"])
        self._qkv = PackedLinear(heads[_pair_order(shape)])
        self._out = PackedLinear(part[f"{attention}o_proj.weight"])
        self._gate_up = PackedLinear(torch.cat([part[f"{_AT}mlp.{p}_proj.weight"] for p in ("gate", "up")]))
        self._down = PackedLinear(part[f"{_AT}mlp.down_proj.weight"])
        self._head = PackedLinear(part["lm_head.weight"])
        self._norms = {
            name: NormWeight(part[f"{_AT}{name}.weight"])
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        } | {"norm": NormWeight(part["norm.weight"])}
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

    def run(
        self,
        embedded: Float[Tensor, "rows hidden"],
        hidden: Float[Tensor, "rows hidden"],
        plan: Plan,
        layer: int,
    ) -> Float[Tensor, "rows hidden"]:
        """The rows' hidden states before the final norm; their keys and values are stored.

        Args:
            embedded: of the token after each row's position.
            hidden: its feature, or the hidden state of the row before.
            plan: where rows go and what they see.
            layer: the draft's in the cache.
        """
        with threads_for_products():
            return self._run(embedded, hidden, plan, layer)

    def _run(self, embedded: Tensor, hidden: Tensor, plan: Plan, layer: int) -> Tensor:
        shape, rows = self.shape, len(hidden)
        N, K, D = shape.heads, shape.kv_heads, shape.head_dim
        both = torch.cat([self._normed("input_layernorm", embedded), self._normed("hidden_norm", hidden)], dim=1)
        heads = self._qkv(both).float().view(rows, N + 2 * K, D)
        turn = self._rotation.turns(plan.positions)
        torch.view_as_complex(heads.view(rows, N + 2 * K, D // 2, 2))[:, : N + K].mul_(turn)
        x = hidden + self._out(plan.attend(layer, heads[:, :N], heads[:, N:]).to(self._dtype))
        return x + self._down(gated(self._gate_up(self._normed("post_attention_layernorm", x))))

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows draft_vocab"]:
        """Over the tokens `ids`."""
        with threads_for_products():
            return self._head(self._normed("norm", hidden))

    def _normed(self, name: str, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows hidden"]:
        return F.rms_norm(x, x.shape[-1:], self._norms[name].wide, self.shape.norm_eps).to(self._dtype)


def _pair_order(shape: DraftShape) -> Int[Tensor, " qkv_rows"]:
    """As `layer._pair_order` has it for the policy's heads."""
    D, turned = shape.head_dim, shape.heads + shape.kv_heads
    starts = torch.arange(turned)[:, None] * D
    values = torch.arange(turned * D, (turned + shape.kv_heads) * D)
    return torch.cat([(starts + in_pairs(D)).reshape(-1), values])
