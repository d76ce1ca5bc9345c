"""The slow reference of routing replay: transformers' own model, one unpacked sequence at a time, in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from expert_records import EXPERTS, LAYERS, TOP_K
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from furlong.ops.policy.packing import pack
from furlong.ops.policy.replay import route
from furlong.ops.policy.routing import decode, encode
from furlong.ops.protocols import TrainBatch
from furlong.resources.trainers.module import PolicyModule


class ForcedRouter(nn.Module):
    """transformers' router, save that it takes `forced` where that is not -1, and computes in float64."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.weight, self.top_k, self.renormalised = router.weight, router.top_k, router.norm_topk_prob
        self.forced: Tensor | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        likely = torch.softmax(logits, -1)
        chosen = likely.topk(self.top_k).indices
        for token, ids in enumerate(self.forced.tolist()):
            if ids[0] >= 0:
                chosen[token] = torch.tensor(ids)
        shares = likely.gather(1, chosen)
        return logits, shares / shares.sum(-1, keepdim=True) if self.renormalised else shares, chosen


def forced_model(folder: str) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
    for layer in LAYERS:
        block = model.model.layers[layer].mlp
        block.gate = ForcedRouter(block.gate)
    for norm in model.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = partial(_wide_norm, norm)  # transformers' is in float32 whatever the model's dtype
    return model


def _wide_norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    return norm.weight * hidden / (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def forced_logprobs(model: nn.Module, batch: TrainBatch) -> list[Tensor]:
    """Log-probabilities of each trajectory's reply tokens, by its recorded experts and, where there are none, the model's
    own."""
    rows = []
    for index, reply in enumerate(batch.replies):
        prompt, record = batch.prompts[batch.group[index]], batch.routing[index]
        for nth, layer in enumerate(LAYERS):
            router = model.model.layers[layer].mlp.gate
            router.forced = torch.full((len(prompt + reply), router.top_k), -1)
            if record is not None:
                ids = torch.from_numpy(decode(record).astype("int64"))[:, nth]
                router.forced[record.first : record.first + record.rows] = ids
        logits = model(torch.tensor([prompt + reply]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        rows.append(torch.log_softmax(logits / batch.temperature, -1)[range(len(reply)), list(reply)])
    return rows


def own_choice(module: PolicyModule, batch: TrainBatch) -> TrainBatch:
    """The batch with records of what this module chooses by itself, a trajectory at a time."""
    blocks = [module.causal.model.layers[layer].mlp for layer in LAYERS]
    seen: dict[int, Tensor] = {}
    hooks = [
        block.gate.register_forward_hook(lambda gate, args, out, layer=block.layer: seen.update({layer: out}))
        for block in blocks
    ]
    records = []
    for index, reply in enumerate(batch.replies):
        alone = tuple((i == index,) * len(mask) for i, mask in enumerate(batch.masks))
        (micro,) = pack(replace(batch, masks=alone, routing=(None,) * len(batch.group)), alone, 512)
        assert micro.tokens.shape == (1, len(batch.prompts[batch.group[index]] + reply) - 1)
        module(micro, 1.0)
        chosen = [route(seen[block.layer], TOP_K, block.renormalised, None)[1] for block in blocks]
        records.append(encode(0, torch.stack(chosen, 1).numpy(), LAYERS, EXPERTS))
    for hook in hooks:
        hook.remove()
    return replace(batch, routing=tuple(records))


def file_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names that files have: transformers holds a layer's experts as one tensor."""
    grads = {}
    for name, weight in model.named_parameters():
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        at, _, part = name.rpartition(".")
        if not at.endswith(".experts"):
            grads[name] = grad
        for expert, one in enumerate(grad if at.endswith(".experts") else []):
            halves = (
                zip(("gate_proj", "up_proj"), one.chunk(2), strict=True) if part == "gate_up_proj" else [(part, one)]
            )
            grads |= {f"{at}.{expert}.{which}.weight": tensor for which, tensor in halves}
    return grads
