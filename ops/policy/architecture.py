"""The shape of a dense decoder-only model, read from a Hugging Face config.json; refuses what it would have to ignore."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.ops.policy.manifest import ModelError

KINDS = ("llama", "qwen2", "qwen3")
"""Model types the engine's decoder knows: qwen2 has biases on q, k and v, qwen3 a norm on each query and key head."""
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

    @property
    def qkv_bias(self) -> bool:
        return self.kind == "qwen2"

    @property
    def qk_norm(self) -> bool:
        return self.kind == "qwen3"

    def splits(self) -> list[int]:
        """Numbers of processes that the model can be split over: those that divide heads, key/value heads and ffn."""
        counts = (self.kv_heads, self.heads, self.ffn)
        sizes = range(1, min(self.kv_heads, self.vocab) + 1)
        return [size for size in sizes if not any(count % size for count in counts)]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name -> shape of every tensor of the model, tied tensors once."""
        H, F = self.hidden, self.ffn
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
            shapes |= {f"{at}mlp.{part}_proj.weight": (F, H) for part in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = (H, F)
            shapes |= {f"{at}{part}_layernorm.weight": (H,) for part in ("input", "post_attention")}
        return shapes


def read_architecture(folder: str) -> Architecture:
    """Read `<folder>/config.json`.

    Raises:
        ModelError: it is missing or unreadable, is of another model type, lacks a size, or asks for a feature (biases,
            sliding windows, scaled rotary embeddings, quantization) the decoder does not have.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as err:
        raise ModelError(f"{path} cannot be read ({err}); give a folder in Hugging Face layout") from err
    kind = config.get("model_type")
    if kind not in KINDS:
        raise ModelError(f"{path}: model_type {kind!r} is not supported; use a dense model of type {', '.join(KINDS)}")
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
    )


def read_stop_ids(folder: str) -> tuple[int, ...]:
    """End-of-text ids from generation_config.json, else from config.json; ModelError when neither names one."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    raise ModelError(f"{folder}: no eos_token_id in generation_config.json or config.json; add it, or pass stop_ids")


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
