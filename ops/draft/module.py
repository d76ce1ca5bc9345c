"""Drafts as modules to train: parameters under their names in a folder, and the arithmetic between attentions.

Attention itself is left to whoever calls, who knows where the rows lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from furlong.ops.draft.shape import MAPS, DraftShape
from furlong.ops.draft.tensors import check_tensors

Attend = Callable[[Tensor], Tensor]
"""Rotated queries [... heads head_dim] -> what they see, of the same shape."""


class DraftModule(nn.Module):
    """A draft of either kind. `state_dict` has the names of `DraftShape.shapes`, without prefix; maps are buffers.

    Args:
        shape: of the draft.
        tensors: all of them, by name without prefix; copied.
        dtype: of the parameters; as given if None.
    Raises:
        DraftError: the tensors are not those of the shape.
    """

    def __init__(self, shape: DraftShape, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> None:
        super().__init__()
        check_tensors(tensors, shape, "the draft to train")
        self.shape = shape
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            holder: nn.Module = self
            for part in path:
                if part not in dict(holder.named_children()):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            if name in MAPS:
                holder.register_buffer(leaf, tensor.detach().clone())
            else:
                holder.register_parameter(leaf, nn.Parameter(tensor.detach().to(dtype or tensor.dtype, copy=True)))

    @property
    def head(self) -> nn.Parameter:
        """Of the draft's vocabulary."""
        return self.get_parameter("lm_head.weight")

    def target_ids(self) -> Int[Tensor, " draft_vocab"] | None:
        """The policy's id of each of the draft's tokens; None where they are the same."""
        if not self.shape.reduced:
            return None
        d2t = self.get_buffer("d2t")
        return torch.arange(len(d2t), device=d2t.device) + d2t

    def feature(self, taps: Float[Tensor, "rows taps_hidden"]) -> Float[Tensor, "rows hidden"]:
        """The policy's states at a position as one: fc of the taps, which get no gradient."""
        return self._linear("fc", taps.detach())

    def normed(self, hidden: Float[Tensor, "... hidden"]) -> Float[Tensor, "... hidden"]:
        """What the head reads."""
        return self._norm("norm", hidden)

    def attended(
        self, at: str, x: Float[Tensor, "... inputs"], hidden: Float[Tensor, "... hidden"],
        position: Int[Tensor, " ..."], attend: Attend,
    ) -> Float[Tensor, "... hidden"]:  # fmt: skip
        """The residual stream after a layer.

        Args:
            at: how the names of the layer's tensors begin.
            x: what queries are made of; `keys` makes the others.
            hidden: the residual stream before.
            position: by which queries are rotated.
        """
        seen = attend(rotated(self._heads(f"{at}self_attn.q_proj", x), position, self.shape.rope_theta))
        hidden = hidden + self._linear(f"{at}self_attn.o_proj", seen.flatten(-2))
        y = self._norm(f"{at}post_attention_layernorm", hidden)
        gated = F.silu(self._linear(f"{at}mlp.gate_proj", y)) * self._linear(f"{at}mlp.up_proj", y)
        return hidden + self._linear(f"{at}mlp.down_proj", gated)

    def keys(
        self, at: str, x: Float[Tensor, "... inputs"], position: Int[Tensor, " ..."]
    ) -> tuple[Float[Tensor, "... kv_heads head_dim"], Float[Tensor, "... kv_heads head_dim"]]:
        """Rotated keys, and values."""
        k, v = (self._heads(f"{at}self_attn.{part}_proj", x) for part in ("k", "v"))
        return rotated(k, position, self.shape.rope_theta), v

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name, x).unflatten(-1, (-1, self.shape.head_dim))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        weight = self.get_parameter(f"{name}.weight")
        return F.linear(x.to(weight.dtype), weight)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self.get_parameter(f"{name}.weight")
        return F.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, self.shape.norm_eps)


class Eagle3Module(DraftModule):
    """EAGLE-3's head (Li et al. 2025): one layer over [embedding; feature or the draft's own last state]."""

    LAYER = "midlayer."

    def inputs(
        self, embedded: Float[Tensor, "rows hidden"], hidden: Float[Tensor, "rows hidden"]
    ) -> Float[Tensor, "rows two_hidden"]:
        """What q, k and v are made of.

        Args:
            embedded: the policy's embedding of the token after the state's, which gets no gradient.
            hidden: the feature at depth 1, then the state of the depth before, with its gradient.
        """
        token = self._norm(f"{self.LAYER}input_layernorm", embedded.detach())
        return torch.cat([token, self._norm(f"{self.LAYER}hidden_norm", hidden)], -1)


def rotated(
    x: Float[Tensor, "... heads head_dim"], position: Int[Tensor, " ..."], theta: float
) -> Float[Tensor, "... heads head_dim"]:
    """Rotary embedding (Su et al. 2021) as Hugging Face has it: element i turns with element i + head_dim / 2."""
    half = x.shape[-1] // 2
    # Angles in float64: at positions of 10^5, float32 has an error of 0.01.
    rate = theta ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (position[..., None].to(torch.float64) * rate)[..., None, :]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def draft_module(shape: DraftShape, tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> DraftModule:
    """A module of the shape's kind; see `DraftModule`."""
    from furlong.ops.draft.block import BlockModule  # which is made of what is above

    return (Eagle3Module if shape.kind == "eagle3" else BlockModule)(shape, tensors, dtype)
