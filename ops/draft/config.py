"""A draft's config.json, as SGLang and SpecForge have it for EAGLE-3, and as the speculators library has it.

The two number tapped layers differently: SGLang's `eagle_aux_hidden_state_layer_ids` count layers from 0, as here;
those of speculators (vLLM's) count states, of which 0 is the embedding's output, so that layer 0 is 1.

Nothing else reads a block draft, whose slots have an embedding of their own and whose heads have no norms: its architecture
is named `FurlongBlockDraft` in both, so that no server takes it for DFlash, after which its tensors are named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from furlong.ops.draft.shape import DraftError, DraftShape
from furlong.ops.policy.architecture import architecture_of

Layout = Literal["sglang", "speculators"]
LAYOUTS: tuple[Layout, ...] = ("sglang", "speculators")
_EAGLE3, _BLOCK = "LlamaForCausalLMEagle3", "FurlongBlockDraft"
_SPECULATORS = {"eagle3": ("Eagle3Speculator", "eagle3"), "block": (_BLOCK, "furlong_block")}
_SPECULATORS_VERSION = "0.3.0"
_IDS = "eagle_aux_hidden_state_layer_ids"
_OFF = (
    "norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "bias", "embed_requires_grad",
)  # fmt: skip
"""Variants of EAGLE-3 that compute something else."""


def write_config(
    shape: DraftShape, layout: Layout, dtype: torch.dtype, verifier: str | None = None, proposals: int = 4
) -> dict[str, Any]:
    """What config.json holds.

    Args:
        dtype: of the parameters.
        verifier: name or folder of the policy, for the speculators layout; None when it has none elsewhere.
        proposals: tokens to propose by default, likewise.
    Raises:
        DraftError: an unknown layout, or one whose reader would compute something else.
    """
    if layout not in LAYOUTS:
        raise DraftError(f"a draft's layout {layout!r} is unknown; use {' or '.join(LAYOUTS)}")
    if layout == "sglang" and shape.kind == "eagle3" and len(shape.taps) == 1:
        # It tells features from the draft's own hidden states by their width.
        raise DraftError("SGLang leaves fc out for a draft with one tap; tap two layers or more, or use speculators")
    llama = {
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    # The name that old and new releases of transformers both read.
    common = {"torch_dtype": str(dtype).removeprefix("torch."), "draft_vocab_size": shape.draft_vocab}
    if shape.block:
        common["block_size"] = shape.block
    if layout == "sglang":
        taps = {"use_aux_hidden_state": True, _IDS: list(shape.taps)}
        return {**llama, **common, "architectures": [_BLOCK if shape.block else _EAGLE3], "eagle_config": taps}
    name, kind = _SPECULATORS[shape.kind]
    method = {"proposal_type": "greedy", "speculative_tokens": shape.block - 1 if shape.block else proposals}
    return {
        **common,
        "architectures": [name],
        "speculators_model_type": kind,
        "speculators_version": _SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": llama,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        _IDS: [tap + 1 for tap in shape.taps],
    }


def read_config(config: dict[str, Any], path: Path, policy_layers: int | None = None) -> tuple[DraftShape, Layout]:
    """The shape that config.json describes, and which of the layouts it is.

    Args:
        path: named in errors.
        policy_layers: of the policy, needed where the file names no tapped layers.
    Raises:
        ModelError: it is no draft's, lacks a size, contradicts itself, or asks for a variant that is not computed.
    """
    layout: Layout = "speculators" if "speculators_model_type" in config else "sglang"
    kind, layer = _kind(config, path, layout)
    inner = config.get("eagle_config") or {}
    if asked := [name for name in _OFF if config.get(name) or inner.get(name)]:
        raise DraftError(
            f"{path} asks for {', '.join(asked)}, which no draft here computes; use an EAGLE-3 draft without, or train one"
        )
    # Checks what a llama config can ask for; its own default where a draft's leaves the rotary base out.
    sizes = architecture_of({"rope_theta": 10000.0, **layer, "model_type": "llama"}, path)
    if config.get("target_hidden_size") not in (None, sizes.hidden):
        raise DraftError(
            f"{path}: the draft's hidden size is {sizes.hidden}, the policy's {config['target_hidden_size']}; it would "
            "need an embedding of its own: use a draft of the policy's hidden size"
        )
    if kind == "eagle3" and sizes.layers != 1:
        raise DraftError(
            f"{path}: an EAGLE-3 draft of {sizes.layers} layers is not computed here; use one of one layer"
        )
    shape = DraftShape(
        kind=kind,
        hidden=sizes.hidden,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        ffn=sizes.ffn,
        norm_eps=sizes.norm_eps,
        rope_theta=sizes.rope_theta,
        vocab=sizes.vocab,
        draft_vocab=config.get("draft_vocab_size") or sizes.vocab,
        taps=_taps(config, path, layout, policy_layers),
        context=sizes.context,
        block=config.get("block_size", 0) if kind == "block" else 0,
        layers=sizes.layers,
    )
    return shape, layout


def _kind(config: dict[str, Any], path: Path, layout: Layout) -> tuple[str, dict[str, Any]]:
    """Which draft it is, and the part of the config that describes its layer."""
    if layout == "speculators":
        found = config["speculators_model_type"]
        kind = next((kind for kind, (_, name) in _SPECULATORS.items() if name == found), None)
        layer = config.get("transformer_layer_config")
        if kind is None or not isinstance(layer, dict) or layer.get("model_type", "llama") != "llama":
            of_type = layer.get("model_type") if isinstance(layer, dict) else None
            raise DraftError(
                f"{path}: a speculator of type {found!r} with a layer of type {of_type!r} is not supported; use an "
                "eagle3 one with a llama layer"
            )
        return kind, layer
    names = config.get("architectures") or []
    if names == [_BLOCK]:
        return "block", config
    # Drafts of the authors' own release are named as the model they were trained for.
    if config.get("model_type") != "llama" or (_EAGLE3 not in names and "draft_vocab_size" not in config):
        raise DraftError(
            f"{path} describes {names or 'no architecture'} (model_type {config.get('model_type')!r}), which is no EAGLE-3 "
            f"draft; give a folder with a draft of architecture {_EAGLE3}, or one of the speculators library"
        )
    return "eagle3", config


def _taps(config: dict[str, Any], path: Path, layout: Layout, policy_layers: int | None) -> tuple[int, ...]:
    inner = config.get("eagle_config") or {}
    if inner.get("use_aux_hidden_state") is False:
        raise DraftError(
            f"{path}: use_aux_hidden_state is false; a draft here is fed with layers of the policy, use EAGLE-3"
        )
    ids = inner.get(_IDS) or config.get(_IDS)
    if ids is None:
        if policy_layers is None:
            raise DraftError(f"{path} names no tapped layers ({_IDS}); add them, or read it beside its policy")
        ids = [1, policy_layers // 2 - 1, policy_layers - 4]
    else:
        ids = [tap - 1 if layout == "speculators" else tap for tap in ids]
    if (count := config.get("num_aux_hidden_states")) not in (None, len(ids)):
        raise DraftError(f"{path}: num_aux_hidden_states={count}, but layers {ids} are tapped; correct one of the two")
    return tuple(ids)
