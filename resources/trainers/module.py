"""The Hugging Face module as the trainer calls it: a micro-batch in, log-probabilities out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from furlong.ops.policy.attention import NAME, prefix_tree_attention
from furlong.ops.policy.head import token_logprobs
from furlong.ops.policy.packing import MicroBatch

ARCHITECTURES = ("llama", "qwen3")
"""Model types tested against the float64 reference: decoder, final norm, then a plain linear head."""


class PolicyModule(nn.Module):
    """One forward of a packed micro-batch. Everything runs inside `forward`, so a sharding wrapper sees one call."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.causal = causal
        # transformers has torch drop the embedding gradient of a pad token that is fed; chat models pad with a token
        # that ends every turn, and a policy may sample it: to the loss it is a token like any other.
        causal.get_input_embeddings().padding_idx = None

    def forward(
        self, micro: MicroBatch, temperature: float
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:
        """Log-probabilities of the wanted tokens, and the entropy of the distribution at each place (nat)."""
        weight = self.causal.get_output_embeddings().weight
        unseen = torch.zeros(micro.visible.shape, dtype=weight.dtype, device=weight.device)
        hidden = self.causal.get_decoder()(
            input_ids=micro.tokens,
            position_ids=micro.positions,
            attention_mask=unseen.masked_fill_(~micro.visible, float("-inf")),
            use_cache=False,
        ).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, micro.places)
        return token_logprobs(hidden, weight, micro.place, micro.target, temperature)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Parameters by their Hugging Face names; of tied ones the first name only, as in a safetensors file."""
        return dict(self.causal.named_parameters())

    def architecture(self) -> dict[str, Any]:
        """The configuration as plain data, without where it came from; `module_of` takes it."""
        config = json.loads(self.causal.config.to_json_string(use_diff=False))
        return {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}


def load_module(folder: str) -> PolicyModule:
    """The model of a Hugging Face folder in float32, without dropout, with packed attention.

    Raises:
        ValueError: an architecture whose packed forward has no test, or files that do not hold exactly its weights.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        _require_known(config)
        causal = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation=_attention(), local_files_only=True
        )
        stored = {name for path in Path(folder).glob("*.safetensors") for name in _names(path)}
    except (OSError, RuntimeError, SafetensorError) as err:
        raise ValueError(f"{folder} cannot be loaded as a model ({err}); make or convert it again") from err
    odd = sorted((set(dict(causal.named_parameters())) - stored) | (stored - set(causal.state_dict())))
    if odd:
        raise ValueError(
            f"{folder}: its files and its config.json disagree on {len(odd)} tensors, first {odd[0]}; a missing one "
            "would start at random: make or convert the folder again"
        )
    return PolicyModule(causal.eval())


def module_of(architecture: dict[str, Any]) -> PolicyModule:
    """A module of that architecture whose weights are still to be filled in."""
    config = AutoConfig.for_model(**architecture)
    _require_known(config)
    causal = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=_attention())
    return PolicyModule(causal.eval())


def _require_known(config: PretrainedConfig) -> None:
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"a {config.model_type!r} model cannot be trained: the trainer packs {', '.join(ARCHITECTURES)}; choose one "
            "of these, or add the type to ARCHITECTURES together with a test against the unpacked reference"
        )


def _attention() -> str:
    AttentionInterface.register(NAME, prefix_tree_attention)
    return NAME


def _names(path: Path) -> list[str]:
    with safe_open(path, "pt") as file:
        return list(file.keys())
