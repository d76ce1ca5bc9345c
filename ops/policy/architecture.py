"""The shape of a decoder-only model, read from a Hugging Face config.json; refuses what it would have to ignore."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.ops.policy.manifest import ModelError

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Model types the engine's decoder knows: qwen2 has biases on q, k and v, qwen3 a norm on each query and key head, and
qwen3_moe besides a mixture of experts in place of some or all feed-forward blocks."""
MOST_EXPERTS = 2**16
"""As many as two bytes can name, in which the experts of tokens are recorded."""
_OFF = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")


@dataclass(frozen=True)
class Architecture:
    """Sizes and constants of one model; equal exactly when the same code path computes it."""

    kind: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope_theta: float
    context: int
    """Most positions, prompt and reply together."""
    tied: bool
    """The output head is the embedding."""
    experts: int = 0
    """Experts of each layer that has any."""
    top_k: int = 0
    """Experts that a token goes through in each such layer."""
    expert_ffn: int = 0
    renormalised: bool = False
    """The shares of a token's experts are divided by their sum."""
    expert_layers: tuple[int, ...] = ()
    """Index of each layer with experts, ascending; the others have a feed-forward block of size `ffn`."""

    def __post_init__(self) -> None:
        # JSON, in which the processes of a split engine are told the architecture, has no tuples.
        object.__setattr__(self, "expert_layers", tuple(self.expert_layers))

    @property
    def qkv_bias(self) -> bool:
        return self.kind == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.kind in ("qwen3", "qwen3_moe")

    def splits(self) -> list[int]:
        """Numbers of processes that the model can be split over: those that divide heads, key/value heads and each ffn."""
        counts = [self.kv_heads, self.heads]
        if len(self.expert_layers) < self.layers:
            counts.append(self.ffn)
        if self.expert_layers:
            counts.append(self.expert_ffn)
        sizes = range(1, min(self.kv_heads, self.vocab) + 1)
        return [size for size in sizes if not any(count % size for count in counts)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor of the model, tied tensors once."""
        H = self.hidden
        widths = {
            "q": self.heads * self.head_dim,
            "k": self.kv_heads * self.head_dim,
            "v": self.kv_heads * self.head_dim,
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, H), "model.norm.weight": (H,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, H)
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            for part, width in widths.items():
                shapes[f"{at}self_attn.{part}_proj.weight"] = (width, H)
                if self.qkv_bias:
                    shapes[f"{at}self_attn.{part}_proj.bias"] = (width,)
            if self.qk_norm:
                shapes |= {f"{at}self_attn.{part}_norm.weight": (self.head_dim,) for part in ("q", "k")}
            shapes[f"{at}self_attn.o_proj.weight"] = (H, widths["q"])
            shapes |= self._experts_of(at) if layer in self.expert_layers else _feed_forward(f"{at}mlp.", H, self.ffn)
            shapes |= {f"{at}{part}_layernorm.weight": (H,) for part in ("input", "post_attention")}
        return shapes

    def _experts_of(self, at: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{at}mlp.gate.weight": (self.experts, self.hidden)}
        for expert in range(self.experts):
            shapes |= _feed_forward(f"{at}mlp.experts.{expert}.", self.hidden, self.expert_ffn)
        return shapes


def read_architecture(folder: str) -> Architecture:
    """Read `<folder>/config.json`.

    Raises:
        ModelError: it is missing or unreadable, is of another model type, lacks a size, contradicts itself, or asks for
            a feature (biases, sliding windows, scaled rotary embeddings, quantization) the decoder does not have.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise ModelError(f"{path} cannot be read ({err}); give a folder in Hugging Face layout") from err
    return architecture_of(config, path)


def architecture_of(config: dict[str, Any], path: Path) -> Architecture:
    """The same from what the file holds; `path` is named in errors."""
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ModelError(f"{path}: model_type {kind!r} is not supported; use one of type {', '.join(KINDS)}")
    _refuse_unknown_features(path, config)

    def need(name: str, *default: Any) -> Any:
        value = config.get(name)
        if value is None and not default:
            raise ModelError(f"{path}: {name} is missing; add it from the model's original config")
        return default[0] if value is None else value

    heads, hidden = need("num_attention_heads"), need("hidden_size")
    return Architecture(
        kind=kind,
        vocab=need("vocab_size"),
        hidden=hidden,
        layers=need("num_hidden_layers"),
        heads=heads,
        kv_heads=need("num_key_value_heads", heads),
        # transformers' own defaults where a config leaves the head size out
        head_dim=need("head_dim", 128 if kind == "qwen3" else hidden // heads),
        ffn=need("intermediate_size"),
        norm_eps=need("rms_norm_eps"),
        rope_theta=_rope_theta(path, config),
        context=need("max_position_embeddings"),
        tied=need("tie_word_embeddings", False),
        **(_read_experts(path, config) if kind == "qwen3_moe" else {}),
    )


def read_stop_ids(folder: str) -> tuple[int, ...]:
    """End-of-text ids from generation_config.json, else from config.json; ModelError when neither names one."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    raise ModelError(f"{folder}: no eos_token_id in generation_config.json or config.json; add it, or pass stop_ids")


def _read_experts(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The part of an Architecture that is about experts, with transformers' defaults where it has any.

    transformers 5 writes `num_local_experts`, older releases `num_experts`.
    """
    found = {config[name] for name in ("num_experts", "num_local_experts") if config.get(name) is not None}
    if len(found) != 1:
        raise ModelError(f"{path}: num_experts is {sorted(found) or 'missing'}; give one number, the model's own")
    experts = found.pop()
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if experts < 0 or experts > MOST_EXPERTS or step < 1:
        raise ModelError(
            f"{path}: num_experts={experts} and decoder_sparse_step={step}; give at most {MOST_EXPERTS} and at least 1"
        )
    layers = tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    if not experts or not layers:
        return {}
    top_k, ffn = config.get("num_experts_per_tok"), config.get("moe_intermediate_size")
    if top_k is None or ffn is None or not 1 <= top_k <= experts:
        raise ModelError(
            f"{path}: num_experts_per_tok={top_k} and moe_intermediate_size={ffn} with {experts} experts; add them from "
            "the model's original config"
        )
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn": ffn,
        "renormalised": bool(config.get("norm_topk_prob", False)),
        "expert_layers": layers,
    }


def _feed_forward(at: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}gate_proj.weight": (ffn, hidden),
        f"{at}up_proj.weight": (ffn, hidden),
        f"{at}down_proj.weight": (hidden, ffn),
    }


def _refuse_unknown_features(path: Path, config: dict[str, Any]) -> None:
    asked = [name for name in _OFF if config.get(name)]
    if config.get("hidden_act", "silu") != "silu":
        asked.append("hidden_act")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        asked.append("layer_types")
    if asked:
        values = ", ".join(f"{name}={config[name]!r:.60}" for name in asked)
        raise ModelError(f"{path} asks for {values}, which the engine does not compute; use a model without it")


def _rope_theta(path: Path, config: dict[str, Any]) -> float:
    """transformers 5 writes `rope_parameters`; older releases `rope_theta` and, for scaled ones, `rope_scaling`."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    theta = rope.get("rope_theta", config.get("rope_theta"))
    if kind != "default" or partial not in (None, 1.0):
        raise ModelError(
            f"{path}: rotary embedding {kind!r} with partial_rotary_factor={partial} is not supported; use a model with "
            "rope_type 'default' over the whole head"
        )
    if theta is None:
        raise ModelError(f"{path}: rope_theta is missing; add it, at top level or in rope_parameters")
    return float(theta)
