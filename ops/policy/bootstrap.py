"""A policy from nothing: random weights, a character tokenizer, and fine-tuning on noisy demonstrations.

The demonstrations are wrong on purpose, so the policy understands the task but errs when it samples; what RL then
removes is that learnt noise. It shows the machinery at work, not a new ability.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.ops.identity import counter_seed
from furlong.ops.policy.bootstrap_tools import (
    AFTER_CALL,
    ALPHABET,
    BEFORE_CALL,
    ROLES,
    Turn,
    check_tools,
    converse,
)
from furlong.ops.policy.bootstrap_tools import TEMPLATE as TOOLS_TEMPLATE
from furlong.ops.spec import DataSpec, ScratchSpec
from furlong.ops.tasks.prompts import prompt_rows

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor

    Labelled = tuple[Int64[Tensor, "rows tokens"], Int64[Tensor, "rows tokens"]]
    """Inputs, and for each the next token or IGNORED."""

    Batch = Callable[[random.Random], Labelled]
    """Draws one batch of demonstrations."""

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
    course = _conversations if data.env.name == "tools" else _pairs
    vocabulary, context, batch = course(spec, data, rows, train)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed("scratch", seed))
        model = _build(spec, len(vocabulary), context)
        _finetune(model, spec, batch, random.Random(counter_seed("demos", seed)))
    model.to(getattr(torch, dtype)).save_pretrained(target)
    _save_tokenizer(vocabulary, target, TOOLS_TEMPLATE if course is _conversations else TEMPLATE)


def _pairs(
    spec: ScratchSpec, data: DataSpec, rows: list[dict[str, Any]], train: list[dict[str, Any]]
) -> tuple[dict[str, int], int, Batch]:
    """Vocabulary, context length and demonstrations of one reply to one question."""
    alphabet = sorted(set("".join(data.system + row["question"] + row["answer"] for row in rows)))
    vocabulary = _numbered([PAD, END, *alphabet])
    longest = max(len(data.system + row["question"]) for row in rows)
    letters = "".join(sorted(set("".join(row["answer"] for row in train))))

    def batch(rng: random.Random) -> Labelled:
        pairs = []
        for row in rng.choices(train, k=spec.sft_batch):
            pairs.append((data.system + row["question"], demonstrate(row["answer"], letters, spec.demo_noise, rng)))
        return encode_pairs(pairs, vocabulary)

    return vocabulary, max(64, 4 * longest), batch


def _conversations(
    spec: ScratchSpec, data: DataSpec, rows: list[dict[str, Any]], train: list[dict[str, Any]]
) -> tuple[dict[str, int], int, Batch]:
    """Vocabulary, context length and demonstrations of conversations with a calculator."""
    check_tools(data, rows)
    vocabulary = _numbered([PAD, END, *ROLES, BEFORE_CALL, AFTER_CALL, *ALPHABET])
    longest = max(len(data.system + row["question"] + 3 * row["answer"]) for row in rows)

    def batch(rng: random.Random) -> Labelled:
        chosen = rng.choices(train, k=spec.sft_batch)
        return encode_turns([converse(data.system, row, spec.demo_noise, rng) for row in chosen], vocabulary)

    return vocabulary, max(256, 4 * longest), batch


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


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


def _finetune(model: Any, spec: ScratchSpec, batch: Batch, rng: random.Random) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    optimiser = torch.optim.AdamW(model.parameters(), lr=spec.sft_learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(spec.sft_steps):
        for group in optimiser.param_groups:
            group["lr"] = spec.sft_learning_rate * (1 - step / spec.sft_steps)
        inputs_BT, labels_BT = batch(rng)
        logits_BTV = model(input_ids=inputs_BT, use_cache=False).logits
        loss = cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORED)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def encode_pairs(pairs: list[tuple[str, str]], vocabulary: dict[str, int]) -> Labelled:
    """Inputs and next-token labels of (prompt, reply) pairs; see `encode_turns`."""
    return encode_turns([[(list(prompt), list(reply))] for prompt, reply in pairs], vocabulary)


def encode_turns(conversations: list[list[Turn]], vocabulary: dict[str, int]) -> Labelled:
    """Inputs and next-token labels of conversations, padded on the right; only replies and their ends carry loss.

    A causal model needs no attention mask for padding that comes after all that has a label.
    """
    import torch

    rows = []
    for turns in conversations:
        tokens, learnt = [], []
        for given, reply in turns:
            tokens += [*given, *reply, END]
            learnt += [False] * len(given) + [True] * (len(reply) + 1)
        rows.append(([vocabulary[token] for token in tokens], learnt))
    width = max(len(ids) for ids, _ in rows) - 1
    inputs_BT = torch.full((len(rows), width), vocabulary[PAD])
    labels_BT = torch.full((len(rows), width), IGNORED)
    for row, (ids, learnt) in enumerate(rows):
        inputs_BT[row, : len(ids) - 1] = torch.tensor(ids[:-1])
        labels = [token if on else IGNORED for token, on in zip(ids[1:], learnt[1:], strict=True)]
        labels_BT[row, : len(ids) - 1] = torch.tensor(labels)
    return inputs_BT, labels_BT


def _save_tokenizer(vocabulary: dict[str, int], target: Path, template: str) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    encoder = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
    encoder.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    encoder.decoder = decoders.Fuse()
    encoder.add_special_tokens([PAD, END, *(role for role in ROLES if role in vocabulary)])
    calls = [AddedToken(mark, normalized=False) for mark in (BEFORE_CALL, AFTER_CALL) if mark in vocabulary]
    encoder.add_tokens(calls)
    fast = PreTrainedTokenizerFast(tokenizer_object=encoder, pad_token=PAD, eos_token=END)
    fast.chat_template = template
    fast.save_pretrained(target)
