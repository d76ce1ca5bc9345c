"""Tiny policies, batches for them, and the slow reference that fast training is compared with."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from furlong.ops.protocols import TrainBatch
from furlong.ops.spec import AlgorithmSpec, DataSpec, ModelSpec, RunSpec, SamplingSpec, TaskSpec, TrainerSpec

VOCABULARY = 61
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=12, tie_word_embeddings=False),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def make_folder(path: Path, architecture: str = "llama") -> str:
    """A saved random model; weights are wide enough that its distributions are far from uniform."""
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(CONFIGS[architecture]).save_pretrained(path)
    return str(path)


def make_tiny_moe(path: Path, **changes: object) -> str:
    """A saved random Qwen3-MoE model: layers 0 and 2 have experts, layer 1 has none.

    Args:
        changes: of its configuration.
    """
    shape = SHAPE | {"num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 12}
    torch.manual_seed(7)
    config = Qwen3MoeConfig(**{**shape, **EXPERTS, "tie_word_embeddings": False, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def experts_of(model: nn.Module, tokens: tuple[int, ...], cache: DynamicCache | None = None) -> np.ndarray:
    """Ids of each token's experts in ascending order, tokens x layers x top_k, as transformers chooses them.

    Args:
        cache: what the tokens come after; it is added to.
    """
    found: list[Tensor] = []
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    hooks = [gate.register_forward_hook(lambda module, args, out: found.append(out[2])) for gate in gates]
    try:
        with torch.no_grad():
            model(torch.tensor([tokens]), cache=cache, use_cache=cache is not None)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found, dim=1).sort(-1)[0].numpy()


def make_spec(folder: str, compute: str = "float32", budget: int = 512, **algorithm: object) -> RunSpec:
    learning = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "prompts_per_step": 2, "samples_per_prompt": 4}
    return RunSpec(
        name="tiny",
        steps=8,
        model=ModelSpec(source=folder),
        data=DataSpec(tasks=(TaskSpec(name="sort_digits"),), train_prompts=1, eval_prompts=1),
        sampling=SamplingSpec(max_new_tokens=8),
        algorithm=AlgorithmSpec(**{**learning, **algorithm}),
        trainer=TrainerSpec(compute_dtype=compute, micro_batch_tokens=budget),
    )


def make_batch(seed: int, sizes: tuple[int, ...] = (4, 1, 3), step: int = 1, letters: int = VOCABULARY) -> TrainBatch:
    """Groups of these sizes, replies of 1 to 7 tokens, some masked; few `letters` make replies share beginnings."""
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(letters) for _ in range(rng.randint(low, high)))

    group = tuple(g for g, size in enumerate(sizes) for _ in range(size))
    replies = tuple(tokens(1, 7) for _ in group)
    masks = [tuple(rng.random() < 0.8 for _ in reply) for reply in replies]
    masks[0] = (*masks[0][:-1], True)
    return TrainBatch(
        step=step,
        temperature=0.8,
        prompts=tuple(tokens(1, 9) for _ in sizes),
        group=group,
        replies=replies,
        logprobs=tuple(tuple(rng.uniform(-6, -1) for _ in reply) for reply in replies),
        masks=tuple(masks),
        sampled_by=tuple(tuple(0 for _ in reply) for reply in replies),
        version=0,
        advantages=tuple(rng.gauss(0, 1) for _ in group),
        rewards=tuple(rng.random() for _ in group),
        routing=tuple(None for _ in group),
        trajectory_ids=tuple(f"trajectory-{i}" for i in range(len(group))),
    )


def near_policy(batch: TrainBatch, logprobs: list[list[float]], spread: float = 0.2) -> TrainBatch:
    """The batch with engine log-probabilities scattered around the trainer's, so that some ratios are clipped."""
    rng = random.Random(3)
    return replace(batch, logprobs=tuple(tuple(v + rng.gauss(0, spread) for v in row) for row in logprobs))


def reference(
    folder: str,
    batch: TrainBatch,
    low: float,
    high: float,
    mean: str = "sequence",
    mend: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[float, list[list[float]], dict[str, Tensor]]:
    """Loss, log-probabilities and gradients, one unpacked sequence at a time in float64.

    transformers computes norms and rotary tables in float32 whatever the model's dtype: that alone limits agreement.
    `mend` may change the model first.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    mend(model)
    lengths = [sum(mask) for mask in batch.masks]
    sequences = sum(length > 0 for length in lengths)
    loss, logprobs = 0.0, []
    for index, reply in enumerate(batch.replies):
        prompt = batch.prompts[batch.group[index]]
        logits = model(torch.tensor([prompt + reply]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        row = torch.log_softmax(logits / batch.temperature, -1)[range(len(reply)), list(reply)]
        logprobs.append(row.tolist())
        count = sum(lengths) if mean == "token" else sequences * lengths[index]
        for t, on in enumerate(batch.masks[index]):
            if on:
                ratio, advantage = torch.exp(row[t] - batch.logprobs[index][t]), batch.advantages[index]
                clipped = min(max(ratio, 1 - low), 1 + high)
                loss = (
                    loss
                    - torch.minimum(ratio * advantage, torch.as_tensor(clipped * advantage, dtype=row.dtype)) / count
                )
    loss.backward()
    return float(loss.detach()), logprobs, {name: p.grad for name, p in model.named_parameters()}
