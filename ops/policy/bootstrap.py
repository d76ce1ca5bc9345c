"""A policy from nothing: random weights, a character tokenizer, and fine-tuning on noisy demonstrations.

The demonstrations are wrong on purpose, so the policy understands the task but errs when it samples; what RL then
removes is that learnt noise. It shows the machinery at work, not a new ability.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.ops.identity import counter_seed
from furlong.ops.spec import DataSpec, ScratchSpec
from furlong.ops.tasks.prompts import prompt_rows

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor

BOOTSTRAP_VERSION = 1
"""Raised when the same settings and seed give other weights; part of the cache's key."""

PAD, END = "<pad>", "<end>"
IGNORED = -100
"""Label of a position without loss, as cross_entropy has it."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_scratch(spec: ScratchSpec, data: DataSpec, seed: int, target: Path, dtype: str) -> None:
    """Write the fine-tuned policy into the existing folder `target`; the bytes depend on the arguments alone.

    Demonstrations come from training questions only. Run it in a process with one thread: sums in another order
    would give other last bits.

    Args:
        dtype: `bfloat16` or `float32`, of the weights written; fine-tuning itself is in float32.
    """
    import torch

    rows = prompt_rows(data, seed)
    train = [row for row in rows if row["split"] == "train"]
    alphabet = sorted(set("".join(data.system + row["question"] + row["answer"] for row in rows)))
    vocabulary = {token: index for index, token in enumerate([PAD, END, *alphabet])}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed("scratch", seed))
        longest = max(len(data.system + row["question"]) for row in rows)
        model = _build(spec, len(vocabulary), context=max(64, 4 * longest))
        _finetune(model, spec, train, data.system, vocabulary, random.Random(counter_seed("demos", seed)))
    model.to(getattr(torch, dtype)).save_pretrained(target)
    _save_tokenizer(vocabulary, target)


def demonstrate(answer: str, letters: str, noise: float, rng: random.Random) -> str:
    """`answer`, with probability `noise` with one of its characters replaced by another one of `letters`."""
    if rng.random() >= noise:
        return answer
    place = rng.randrange(len(answer))
    other = rng.choice([letter for letter in letters if letter != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


def _build(spec: ScratchSpec, vocabulary_size: int, context: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = kinds[spec.architecture]
    config = config_class(
        vocab_size=vocabulary_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_size,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.hidden_size // spec.heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    return model_class(config)


def _finetune(
    model: Any,
    spec: ScratchSpec,
    rows: list[dict[str, Any]],
    system: str,
    vocabulary: dict[str, int],
    rng: random.Random,
) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    letters = "".join(sorted(set("".join(row["answer"] for row in rows))))
    optimiser = torch.optim.AdamW(model.parameters(), lr=spec.sft_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(spec.sft_steps):
        for group in optimiser.param_groups:
            group["lr"] = spec.sft_learning_rate * (1 - step / spec.sft_steps)
        pairs = []
        for row in rng.choices(rows, k=spec.sft_batch):
            pairs.append((system + row["question"], demonstrate(row["answer"], letters, spec.demo_noise, rng)))
        inputs_BT, labels_BT = encode_pairs(pairs, vocabulary)
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        loss = cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORED)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def encode_pairs(
    pairs: list[tuple[str, str]], vocabulary: dict[str, int]
) -> tuple[Int64[Tensor, "rows tokens"], Int64[Tensor, "rows tokens"]]:
    """Inputs and next-token labels of (prompt, reply) pairs, padded on the right; only reply and end carry loss.

    A causal model needs no attention mask for padding that comes after all that has a label.
    """
    import torch

    width = max(len(prompt) + len(reply) for prompt, reply in pairs)
    inputs_BT = torch.full((len(pairs), width), vocabulary[PAD])
    labels_BT = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, reply) in enumerate(pairs):
        ids = torch.tensor([vocabulary[c] for c in prompt + reply] + [vocabulary[END]])
        inputs_BT[row, : len(ids) - 1] = ids[:-1]
        labels_BT[row, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return inputs_BT, labels_BT


def _save_tokenizer(vocabulary: dict[str, int], target: Path) -> None:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    encoder = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    encoder.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    encoder.decoder = decoders.Fuse()
    encoder.add_special_tokens([PAD, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=encoder, pad_token=PAD, eos_token=END)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(target)
