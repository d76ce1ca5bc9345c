"""A mixture of experts in the Hugging Face module, with a weight for each expert and with routing replay.

transformers holds the experts of a layer as one tensor; files, engines, adapters and optimiser states have a tensor for
each. Here the module has what the files have, so nothing needs to be taken apart or put together again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeMLP, Qwen3MoeSparseMoeBlock

from furlong.ops.policy.replay import Replay, route

REPLAY = "furlong_replay"
"""The decoder's argument that carries a micro-batch's Replay to its layers."""


class ExpertBlock(nn.Module):
    """Router and experts of one layer, under the names that the files have."""

    def __init__(self, layer: int, config: PretrainedConfig, fused: Qwen3MoeSparseMoeBlock) -> None:
        """`fused`: transformers' own block, whose weights are copied."""
        super().__init__()
        self.layer, self.top_k, self.renormalised = layer, config.num_experts_per_tok, config.norm_topk_prob
        self.gate = _linear(fused.gate.weight)
        self.experts = nn.ModuleList()
        for gate_up, down in zip(fused.experts.gate_up_proj, fused.experts.down_proj, strict=True):
            with torch.device("meta"):
                expert = Qwen3MoeMLP(config, intermediate_size=config.moe_intermediate_size)
            expert.gate_proj, expert.up_proj = map(_linear, gate_up.chunk(2))
            expert.down_proj = _linear(down)
            self.experts.append(expert)
        self.replay: Replay | None = None

    def forward(self, hidden: Float[Tensor, "rows width hidden"]) -> Float[Tensor, "rows width hidden"]:
        """Each token's experts, weighted by the router's shares and summed in float32 (float64 for float64).

        Raises:
            RoutingError: an expert got a token that was recorded elsewhere, or did not get one of its own.
        """
        x_TH = hidden.flatten(0, 1)
        recorded = None if self.replay is None else self.replay.recorded(self.layer)
        shares_TK, chosen_TK = route(self.gate(x_TH), self.top_k, self.renormalised, recorded)
        outputs_TKH, used = self._through_experts(x_TH, chosen_TK)
        if self.replay is not None:
            self.replay.check(self.layer, used)
        wide = torch.float64 if x_TH.dtype == torch.float64 else torch.float32
        total_TH = (outputs_TKH.to(wide) * shares_TK.to(wide)[:, :, None]).sum(1)
        return total_TH.to(hidden.dtype).view_as(hidden)

    def _through_experts(
        self, x_TH: Float[Tensor, "tokens hidden"], chosen_TK: Int[Tensor, "tokens top_k"]
    ) -> tuple[Float[Tensor, "tokens top_k hidden"], Bool[Tensor, "tokens experts"]]:
        """What the chosen experts make of each token, and which experts have computed it."""
        T, K = chosen_TK.shape
        order = torch.argsort(chosen_TK.flatten(), stable=True)
        counts = torch.bincount(chosen_TK.flatten(), minlength=len(self.experts)).tolist()
        # Only permutations are indexed: gathering a token K times would add its gradients in an order of the kernel's.
        rows = x_TH[:, None].expand(T, K, -1).flatten(0, 1).index_select(0, order)
        used = torch.zeros(T, len(self.experts), dtype=torch.bool, device=x_TH.device)
        outputs, tokens = [], (order // K).split(counts)
        for number, (expert, some) in enumerate(zip(self.experts, rows.split(counts), strict=True)):
            # One without tokens too: sharded over ranks, each weight must take part in the backward of every rank.
            outputs.append(expert(some))
            used[tokens[number], number] = True
        return torch.cat(outputs).index_select(0, torch.argsort(order)).view(T, K, -1), used


def split_experts(causal: nn.Module) -> None:
    """Replace each block that has experts, and have the decoder take REPLAY."""
    for layer, module in _blocks(causal, Qwen3MoeSparseMoeBlock):
        block = ExpertBlock(layer, causal.config, module.mlp)
        module.mlp = block
        # By way of attention, whose arguments are the same when activations are computed again: by then the trainer may
        # be at another micro-batch.
        module.self_attn.register_forward_pre_hook(_handing_to(block), with_kwargs=True)


def expert_shape(causal: nn.Module) -> tuple[tuple[int, ...], int, int]:
    """Index of each layer that has experts, experts per token, and experts to choose from; no layer, 0 and 0 without."""
    blocks = [module.mlp for _, module in _blocks(causal, ExpertBlock)]
    if not blocks:
        return (), 0, 0
    return tuple(block.layer for block in blocks), blocks[0].top_k, len(blocks[0].experts)


def _blocks(causal: nn.Module, kind: type[nn.Module]) -> Iterator[tuple[int, nn.Module]]:
    for layer, module in enumerate(causal.get_decoder().layers):
        if isinstance(module.mlp, kind):
            yield layer, module


def _handing_to(block: ExpertBlock) -> Any:
    def hand(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        block.replay = kwargs.get(REPLAY)
        return args, {name: value for name, value in kwargs.items() if name != REPLAY}

    return hand


def _linear(weight: Tensor) -> nn.Linear:
    outputs, inputs = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight = nn.Parameter(weight.detach().clone())
    return linear
