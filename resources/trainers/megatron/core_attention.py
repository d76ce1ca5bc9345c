"""The core attention of every layer: rotation by each token's own position, then a packed tree or a ring of lines."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from furlong.kernels.context_parallel import ring_attention
from furlong.ops.policy.attention import prefix_tree_attention
from furlong.resources.trainers.megatron.feed import Feed

RING_BACKENDS = {"cpu": "cpu", "cuda": "flex"}
"""What computes the blocks of a ring, by the kind of device."""


class CoreAttention(nn.Module):
    """What megatron-core's layer calls with queries, keys and values; it reads everything else from the Feed."""

    def __init__(self, config, layer_number: int, **unused: object) -> None:
        super().__init__()
        self.theta = config.rotary_theta
        self.scaling = config.kv_channels**-0.5

    def forward(
        self,
        query: Float[Tensor, "width rows heads head_dim"],
        key: Float[Tensor, "width rows kv_heads head_dim"],
        value: Float[Tensor, "width rows kv_heads head_dim"],
        attention_mask: None,
        packed_seq_params: Feed,
        **unused: object,
    ) -> Float[Tensor, "width rows values"]:
        """Attention of one layer; with cp > 1 its ranks call it together."""
        feed = packed_seq_params
        turn = feed.once(
            f"turns-{query.dtype}", lambda: turns(feed.positions, self.theta, query.shape[-1], query.dtype)
        )
        query, key = rotate(query, turn), rotate(key, turn)
        if feed.layout is not None:
            out = ring_attention(
                query[:, 0],
                key[:, 0],
                value[:, 0],
                layout=feed.layout,
                ring=feed.ring,
                scale=self.scaling,
                backend=RING_BACKENDS[query.device.type],
            )
            return out.flatten(1)[:, None]
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        unseen = feed.once(f"unseen-{query.dtype}", lambda: _unseen(feed, query.dtype))
        out, _ = prefix_tree_attention(self, q, k.contiguous(), v.contiguous(), unseen, self.scaling)
        return out.transpose(0, 1).flatten(2)


def turns(
    positions: Int[Tensor, "rows width"], theta: float, head_dim: int, dtype: torch.dtype
) -> Float[Tensor, "2 width rows 1 head_dim"]:
    """Cosine and sine of position * theta^(-2i / head_dim), i = 0 .. head_dim / 2 - 1, twice over (Su et al. 2021).

    In float32 whatever the dtype, as transformers has it: published models were trained so.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device=positions.device).float() / head_dim
    angles = positions.t()[..., None].float() * (1.0 / theta**exponents)
    angles = torch.cat([angles, angles], -1)[:, :, None]
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def rotate(
    x: Float[Tensor, "width rows heads head_dim"], turn: Float[Tensor, "2 width rows 1 head_dim"]
) -> Float[Tensor, "width rows heads head_dim"]:
    """Each head's first half and second half turned as pairs, as transformers lays them out."""
    first, second = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat([-second, first], -1) * turn[1]


def _unseen(feed: Feed, dtype: torch.dtype) -> Float[Tensor, "rows 1 width width"]:
    return torch.zeros(feed.visible.shape, dtype=dtype, device=feed.visible.device).masked_fill_(
        ~feed.visible, float("-inf")
    )
