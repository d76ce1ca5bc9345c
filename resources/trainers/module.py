"""The Hugging Face module as the trainer calls it: a micro-batch in, log-probabilities out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PretrainedConfig

from furlong.ops.policy.attention import NAME, prefix_tree_attention
from furlong.ops.policy.head import token_logprobs
from furlong.ops.policy.packing import MicroBatch
from furlong.ops.policy.replay import Replay
from furlong.resources.trainers.experts import REPLAY, expert_shape, split_experts

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types tested against the float64 reference: decoder, final norm, then a plain linear head."""
FINAL = -1
"""In place of a layer's number: what the head reads."""


class PolicyModule(nn.Module):
    """One forward of a packed micro-batch. Everything runs inside `forward`, so a sharding wrapper sees one call."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.causal = causal
        # transformers has torch drop the embedding gradient of a pad token that is fed; chat models pad with a token
        # that ends every turn, and a policy may sample it: to the loss it is a token like any other.
        causal.get_input_embeddings().padding_idx = None
        split_experts(causal)
        self.trunk: Tensor | None = None
        """The embedding's output in the last forward: a gradient that reaches it went through the whole network."""
        self.expert_shape = expert_shape(causal)
        """Index of each layer that has experts, experts per token, and experts to choose from."""

    def forward(
        self, micro: MicroBatch, temperature: float
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:
        """Log-probabilities of the wanted tokens, and the entropy of the distribution at each place (nat).

        Recorded experts are replayed; RoutingError when a token went through others.
        """
        replay = Replay.of(micro, self.expert_shape[0])
        hidden = self._hidden(micro, replay)
        if replay is not None:
            replay.require_checked(self.expert_shape[0])
        weight = self.causal.get_output_embeddings().weight
        return token_logprobs(hidden, weight, micro.place, micro.target, temperature)

    def _hidden(self, micro: MicroBatch, replay: Replay | None) -> Float[Tensor, "places hidden"]:
        """The final hidden states where a next token is wanted."""
        self.trunk = self.causal.get_input_embeddings()(micro.tokens)
        unseen = torch.zeros(micro.visible.shape, dtype=self.trunk.dtype, device=self.trunk.device)
        hidden = self.causal.get_decoder()(
            inputs_embeds=self.trunk,
            position_ids=micro.positions,
            attention_mask=unseen.masked_fill_(~micro.visible, float("-inf")),
            use_cache=False,
            **({} if replay is None else {REPLAY: replay}),
        ).last_hidden_state
        return hidden.flatten(0, 1).index_select(0, micro.places)

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Parameters by their Hugging Face names; of tied ones the first name only, as in a safetensors file."""
        return dict(self.causal.named_parameters())

    def layers(self) -> list[nn.Module]:
        """The decoder's layers, in order."""
        return list(self.causal.get_decoder().layers)

    @contextmanager
    def watched(self, layers: Sequence[int], see: Callable[[int, Tensor], None]) -> Iterator[None]:
        """For as long, `see` is shown of every forward pass what leaves these layers, and as FINAL what the head reads:
        rows x width x hidden, without a gradient. It must leave them as they are; nothing else is changed by it."""
        watched = {layer: self.layers()[layer] for layer in layers} | {FINAL: self.causal.get_decoder().norm}
        hooks = [part.register_forward_hook(_shown(place, see)) for place, part in watched.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def ends(self) -> tuple[Float[Tensor, "vocab hidden"], Float[Tensor, "vocab hidden"]]:
        """Embedding and head, as the module computes with them."""
        ends = self.causal.get_input_embeddings(), self.causal.get_output_embeddings()
        return tuple(part.weight.detach() for part in ends)

    def recompute(self) -> None:
        """From now on keep only the input of each layer, and compute the layer again in the backward pass."""
        for layer in self.layers():
            # Without the layer's own hooks, so that a sharding wrapper gathers once.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    def widen(self) -> None:
        """From now on compute norms in the number format of their input; transformers does in float32, whatever it is."""
        for norm in self.modules():
            if type(norm).__name__.endswith("RMSNorm"):
                norm.forward = partial(_rms_norm, norm)

    def architecture(self) -> dict[str, Any]:
        """The configuration as plain data, without where it came from; `module_of` takes it."""
        config = json.loads(self.causal.config.to_json_string(use_diff=False))
        return {key: value for key, value in config.items() if key not in ("_name_or_path", "transformers_version")}


class ValueModule(PolicyModule):
    """The policy's decoder with one output, the value, in place of its vocabulary's; it begins at 0 everywhere.

    Experts that the policy went through are not replayed: they say nothing about this model's own.
    """

    def __init__(self, policy: PolicyModule) -> None:
        """Takes over a module, which is no policy any more."""
        super().__init__(policy.causal)
        head = nn.Linear(self.causal.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(head.weight)
        self.causal.set_output_embeddings(head)

    def forward(self, micro: MicroBatch) -> Float[Tensor, " tokens"]:
        """The value before each wanted token, in float32 (float64 for float64)."""
        hidden = self._hidden(micro, None)
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        weight = self.causal.get_output_embeddings().weight
        return (hidden.to(wide) @ weight[0].to(wide))[micro.place]


def _shown(place: int, see: Callable[[int, Tensor], None]) -> Callable[[nn.Module, Any, Tensor], None]:
    def show(module: nn.Module, args: Any, output: Tensor) -> None:
        see(place, output.detach())

    return show


def _rms_norm(norm: nn.Module, hidden: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places hidden"]:
    variance = hidden.square().mean(-1, keepdim=True)
    return norm.weight * (hidden * torch.rsqrt(variance + norm.variance_epsilon))


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
    module = PolicyModule(causal.eval())
    odd = sorted((set(module.named_weights()) - stored) | (stored - set(causal.state_dict())))
    if odd:
        raise ValueError(
            f"{folder}: its files and its config.json disagree on {len(odd)} tensors, first {odd[0]}; a missing one "
            "would start at random: make or convert the folder again"
        )
    return module


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
