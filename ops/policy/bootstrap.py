"""A policy from nothing: random weights, a character tokenizer, and fine-tuning on noisy demonstrations.

The demonstrations are wrong on purpose, so the policy understands the task but errs when it samples; what RL then
removes is that learnt noise. It shows the machinery at work, not a new ability.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.ops.identity import counter_seed
from furlong.ops.options import chosen
from furlong.ops.policy.architecture import KINDS
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
from furlong.ops.spec import DataSpec, ScratchSpec, SpecError
from furlong.ops.tasks.prompts import prompt_rows

if TYPE_CHECKING:
    from jaxtyping import Int64
    from torch import Tensor

    Labelled = tuple[Int64[Tensor, "rows tokens"], Int64[Tensor, "rows tokens"]]
    """Inputs, and for each the next token or IGNORED."""

    Batch = Callable[[random.Random], Labelled]
    """Draws one batch of demonstrations."""

BOOTSTRAP_VERSION = 2
"""Raised when the same settings and seed give other weights; part of the cache's key."""

SIZES: dict[str, int | float] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""What `model.scratch.config` may set, besides EXPERTS, and its defaults: transformers' own names."""

EXPERTS: dict[str, int | float] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
    "initializer_range": 0.02,
}
"""What it may set besides for `qwen3_moe`."""

PAD, END = "<pad>", "<end>"
IGNORED = -100
"""Label of a position without loss, as cross_entropy has it."""

TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Sft:
    """What `model.scratch.sft` may set: supervised fine-tuning on demonstrations, before RL."""

    steps: int = 150
    """Optimiser steps."""
    batch: int = 128
    """Demonstrations per step."""
    learning_rate: float = 2e-3
    """Peak, decayed linearly to zero."""
    demo_noise: float = 0.75
    """Probability that a demonstration has one wrong digit."""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch < 1 or self.learning_rate <= 0 or not 0 <= self.demo_noise <= 1:
            raise SpecError(f"model.scratch.sft: {self} has a number out of range; see Sft in ops/policy/bootstrap.py")


def check_scratch(spec: ScratchSpec) -> Sft:
    """The fine-tuning's settings; SpecError on unknown names and on sizes that no model can have."""
    moe = _kind(spec) == "qwen3_moe"
    sizes = _sizes(spec)
    heads, kv, hidden = (sizes[k] for k in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if heads % kv or hidden % heads or min(sizes.values()) < 0:
        raise SpecError(
            f"model.scratch.config: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv} and divide "
            f"hidden_size={hidden}; change one of the three"
        )
    if moe and not 1 <= sizes["num_experts_per_tok"] <= sizes["num_experts"]:
        raise SpecError(
            "model.scratch.config: num_experts_per_tok must be from 1 to num_experts; change one of the two"
        )
    return chosen("model.scratch.sft", Sft, spec.sft)


def _kind(spec: ScratchSpec) -> str:
    kind = spec.config.get("model_type", "llama")
    if kind not in KINDS:
        raise SpecError(f"model.scratch.config: model_type={kind!r} cannot be made; use one of {', '.join(KINDS)}")
    return kind


def _sizes(spec: ScratchSpec) -> dict[str, Any]:
    kind = _kind(spec)
    known = SIZES | (EXPERTS if kind == "qwen3_moe" else {})
    if odd := sorted(set(spec.config) - set(known) - {"model_type"}):
        raise SpecError(f"model.scratch.config: {odd[0]!r} is not a size of {kind}; use {', '.join(known)}")
    return known | {name: size for name, size in spec.config.items() if name != "model_type"}


def make_scratch(spec: ScratchSpec, data: DataSpec, seed: int, target: Path, dtype: str) -> None:
    """Write the fine-tuned policy into the existing folder `target`; the bytes depend on the arguments alone.

    Demonstrations come from training questions only. Run it in a process with one thread: sums in another order
    would give other last bits.

    Args:
        dtype: `bfloat16` or `float32`, of the weights written; fine-tuning itself is in float32.
    """
    import torch

    sft = check_scratch(spec)
    rows = prompt_rows(data, seed)
    train = [row for row in rows if row["split"] == "train"]
    course = _conversations if data.env.name == "tools" else _pairs
    vocabulary, context, batch = course(sft, data, rows, train)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(counter_seed("scratch", seed))
        model = _build(spec, len(vocabulary), context)
        _finetune(model, sft, batch, random.Random(counter_seed("demos", seed)))
    model.to(getattr(torch, dtype)).save_pretrained(target)
    _save_tokenizer(vocabulary, target, TOOLS_TEMPLATE if course is _conversations else TEMPLATE)


def _pairs(
    sft: Sft, data: DataSpec, rows: list[dict[str, Any]], train: list[dict[str, Any]]
) -> tuple[dict[str, int], int, Batch]:
    """Vocabulary, context length and demonstrations of one reply to one question."""
    alphabet = sorted(set("".join(data.system + row["question"] + row["answer"] for row in rows)))
    vocabulary = _numbered([PAD, END, *alphabet])
    longest = max(len(data.system + row["question"]) for row in rows)
    letters = "".join(sorted(set("".join(row["answer"] for row in train))))

    def batch(rng: random.Random) -> Labelled:
        pairs = []
        for row in rng.choices(train, k=sft.batch):
            pairs.append((data.system + row["question"], demonstrate(row["answer"], letters, sft.demo_noise, rng)))
        return encode_pairs(pairs, vocabulary)

    return vocabulary, max(64, 4 * longest), batch


def _conversations(
    sft: Sft, data: DataSpec, rows: list[dict[str, Any]], train: list[dict[str, Any]]
) -> tuple[dict[str, int], int, Batch]:
    """Vocabulary, context length and demonstrations of conversations with a calculator."""
    check_tools(data, rows)
    vocabulary = _numbered([PAD, END, *ROLES, BEFORE_CALL, AFTER_CALL, *ALPHABET])
    longest = max(len(data.system + row["question"] + 3 * row["answer"]) for row in rows)

    def batch(rng: random.Random) -> Labelled:
        chosen = rng.choices(train, k=sft.batch)
        return encode_turns([converse(data.system, row, sft.demo_noise, rng) for row in chosen], vocabulary)

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
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = _sizes(spec)
    config = AutoConfig.for_model(
        _kind(spec),
        vocab_size=vocabulary_size,
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **sizes,
    )
    return AutoModelForCausalLM.from_config(config)


def _finetune(model: Any, sft: Sft, batch: Batch, rng: random.Random) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    optimiser = torch.optim.AdamW(model.parameters(), lr=sft.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(sft.steps):
        for group in optimiser.param_groups:
            group["lr"] = sft.learning_rate * (1 - step / sft.steps)
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
