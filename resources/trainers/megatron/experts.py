"""Layers with experts: our own router, which follows recorded experts where there are any (`ops/policy/replay.py`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from furlong.ops.policy.replay import route
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.replay import replay_of

GATED = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
"""The matrices of a feed-forward block, an expert or not."""


class Layer(TransformerLayer):
    """megatron-core's layer, which hands the micro-batch on to its feed-forward block too."""

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """See `TransformerLayer.forward`; `padding_mask` is the one argument that reaches the feed-forward block."""
        kwargs["padding_mask"] = kwargs.get("packed_seq_params")
        return super().forward(*args, **kwargs)


class Router(nn.Module):
    """Scores every expert; each token goes to its top k, or to those that it was recorded with."""

    def __init__(self, config, pg_collection) -> None:
        super().__init__()
        self.top_k, self.renormalised = config.moe_router_topk, config.renormalised
        self.weight = nn.Parameter(torch.empty(config.num_moe_experts, config.hidden_size, dtype=config.params_dtype))
        # Read by megatron-core: each rank routed other positions, so that gradients are sums over the tp ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def set_layer_number(self, number: int) -> None:
        """Called by megatron-core; nothing here depends on it."""

    def forward(
        self, hidden: Float[Tensor, "width rows hidden"], recorded: Int[Tensor, "tokens top_k"] | None
    ) -> tuple[Float[Tensor, "tokens experts"], Bool[Tensor, "tokens experts"]]:
        """Each token's share of every expert, and which it goes to.

        Args:
            recorded: positions first, then rows, as `hidden` is flattened; see `ops.policy.replay.route`.
        """
        logits = F.linear(hidden.flatten(0, 1), self.weight)
        shares, chosen = route(logits, self.top_k, self.renormalised, recorded)
        goes = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device).scatter_(1, chosen, True)
        return torch.zeros_like(logits).scatter(1, chosen, shares), goes


class Experts(MoELayer):
    """megatron-core's layer of experts under our router: dispatch, sequential experts and combination are its own."""

    def __init__(self, config) -> None:
        experts = ModuleSpec(module=SequentialMLP, submodules=GATED)
        super().__init__(config, MoESubmodules(experts=experts, router=Router))

    def forward(
        self,
        hidden_states: Float[Tensor, "width rows hidden"],
        intermediate_tensors: None = None,
        padding_mask: Feed | None = None,
    ) -> tuple[Float[Tensor, "width rows hidden"], None]:
        """Each token's sum of its experts' outputs, by its shares. `padding_mask` is the micro-batch (see `Layer`).

        Raises:
            RoutingError: tokens are about to be sent to other experts than recorded.
        """
        layer, config = self.layer_number - 1, self.config
        replay = replay_of(padding_mask, config.expert_layers, config.sequence_parallel)
        probs, goes = self.router(hidden_states, None if replay is None else replay.recorded(layer))
        if replay is not None:
            replay.check(layer, goes)
        hidden, probs = self.preprocess(hidden_states, probs, goes)
        hidden, probs = self.dispatch(hidden, probs)
        out, _ = self.routed_experts_compute(hidden, probs)
        return self.postprocess(self.combine(out), None), None
