"""A draft before its first training step: from a folder, or made of the policy's own tensors.

Made of the policy, an `eagle3` draft goes on where its latest tap ends: fc passes that tap on, the layer is the policy's
next one (its columns for the token's embedding are 0), norm and head are the policy's. So its hidden states are the
policy's own one layer later, exactly, but for three things the draft's layer does not have: biases of q, k and v (left
out), norms of query and key heads (folded into the weights, as if inputs were isotropic) and experts (see `_feed_forward`).
Its proposals are what the policy would have said one token earlier, which training moves on within some steps.
A `block` draft has the policy's last layers in the same way, fed with the latest tap; its mask embedding is the mean of
the policy's embedding plus noise of its spread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.draft.layouts import read_draft, read_shape
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.shape import DraftError, DraftShape
from furlong.ops.draft.tensors import check_tensors
from furlong.ops.draft.vocabulary import maps_of, most_frequent
from furlong.ops.identity import counter_seed
from furlong.ops.policy.architecture import Architecture

_EMBEDDING = "model.embed_tokens.weight"


def shape_of(settings: DraftSettings, architecture: Architecture) -> DraftShape:
    """The shape of the draft that a run trains and draws with; reads the start folder's config.json if there is one.

    Raises:
        DraftError: the draft does not fit the policy, or the folder's contradicts the settings.
    """
    if not settings.start:
        return DraftShape.of_policy(architecture, settings)
    shape = read_shape(settings.start, architecture.layers)
    shape.check_policy(architecture)
    asked = {"kind": settings.kind, "taps": settings.tap_layers() or shape.taps}
    asked["draft_vocab"] = settings.vocabulary or shape.draft_vocab
    for name, value in asked.items():
        if value != (found := getattr(shape, name)):
            raise DraftError(
                f"{settings.start}: the draft's {name} is {found}, the spec asks for {value}; leave draft.taps and "
                "draft.vocabulary out, set draft.kind to the folder's, or start from another draft"
            )
    if shape.block and settings.proposals >= shape.block:
        raise DraftError(
            f"{settings.start}: a block of {shape.block} slots proposes {shape.block - 1} tokens, draft.proposals asks for "
            f"{settings.proposals}; lower it"
        )
    return shape


def start_draft(
    settings: DraftSettings,
    architecture: Architecture,
    policy: Mapping[str, Tensor],
    seed: int,
    counts: Int[Tensor, " vocab"] | None = None,
    keep: Iterable[int] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, Tensor], DraftShape]:
    """The tensors of the first draft, by name without prefix, and its shape: a function of the arguments alone.

    Args:
        policy: the policy's whole tensors by Hugging Face name.
        counts: how often each token occurs in what the draft will see, for a reduced vocabulary; by id when None.
        keep: tokens that a reduced vocabulary must have, such as those that end a reply.
        dtype: of the parameters.
    Raises:
        DraftError: the draft does not fit the policy, or the folder to start from cannot be used.
    """
    shape = shape_of(settings, architecture)
    if settings.start:
        tensors, _ = read_draft(settings.start, architecture.layers)
    else:
        counts = torch.zeros(shape.vocab, dtype=torch.int64) if counts is None else counts
        if len(counts) != shape.vocab:
            raise DraftError(
                f"counts are of {len(counts)} tokens, the policy has {shape.vocab}; count with its tokenizer"
            )
        ids = most_frequent(counts, shape.draft_vocab, keep) if shape.reduced else torch.arange(shape.vocab)
        tensors = _of_policy(shape, architecture, policy, seed, ids)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    check_tensors(tensors, shape, settings.start or "the draft made of the policy")
    return tensors, shape


def _of_policy(
    shape: DraftShape,
    architecture: Architecture,
    policy: Mapping[str, Tensor],
    seed: int,
    ids: Int[Tensor, " draft_vocab"],
) -> dict[str, Tensor]:
    A, H = architecture, shape.hidden
    head = policy[_EMBEDDING if A.tied else "lm_head.weight"]
    fc = torch.zeros(H, len(shape.taps) * H)
    fc[:, -H:] = torch.eye(H)
    tensors = {"fc.weight": fc, "norm.weight": _copy(policy["model.norm.weight"]), "lm_head.weight": _copy(head[ids])}
    # A block's slots begin at the embedding, not at a tap: for them no layer is the next one.
    first = shape.taps[-1] + 1 if shape.kind == "eagle3" else max(0, A.layers - shape.layers)
    for place, at in enumerate(shape.layer_names()):
        layer = min(first + place, A.layers - 1)
        taken = _layer(shape, A, policy, layer)
        if shape.kind == "eagle3" and first == A.layers:
            # Nothing follows the last layer: the draft's begins by passing its input on.
            for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                taken[name].zero_()
        tensors |= {at + name: tensor for name, tensor in taken.items()}
    if shape.kind == "block":
        layer = min(first, A.layers - 1)
        tensors["hidden_norm.weight"] = _copy(policy[f"model.layers.{layer}.input_layernorm.weight"])
        tensors["mask_embedding.weight"] = _mask_embedding(policy[_EMBEDDING], seed)
    if shape.reduced:
        tensors |= maps_of(ids, shape.vocab)
    return tensors


def _layer(shape: DraftShape, A: Architecture, policy: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The draft's layer from one of the policy's, by name within the layer."""
    at = f"model.layers.{layer}."
    norm = _copy(policy[f"{at}input_layernorm.weight"])
    taken = {"post_attention_layernorm.weight": _copy(policy[f"{at}post_attention_layernorm.weight"])}
    if shape.kind == "eagle3":
        taken["input_layernorm.weight"] = _copy(policy["model.layers.0.input_layernorm.weight"])
        taken["hidden_norm.weight"] = norm
    else:
        taken["input_layernorm.weight"] = norm
    for part in ("q", "k", "v"):
        weight = _copy(policy[f"{at}self_attn.{part}_proj.weight"])
        if A.qk_norm and part != "v":
            weight = _fold_norm(weight, policy[f"{at}self_attn.{part}_norm.weight"].float(), norm)
        if shape.kind == "eagle3":
            weight = torch.cat([torch.zeros_like(weight), weight], 1)
        taken[f"self_attn.{part}_proj.weight"] = weight
    taken["self_attn.o_proj.weight"] = _copy(policy[f"{at}self_attn.o_proj.weight"])
    return taken | {f"mlp.{part}_proj.weight": weight for part, weight in _feed_forward(A, policy, layer).items()}


def _copy(tensor: Tensor) -> Tensor:
    """In float32 and memory of its own: the draft is trained, the policy's tensors stay."""
    return tensor.detach().to(torch.float32, copy=True)


def _fold_norm(
    weight: Float[Tensor, "width hidden"], norm: Float[Tensor, " head_dim"], inputs: Float[Tensor, " hidden"]
) -> Float[Tensor, "width hidden"]:
    """A projection whose outputs have, per head, the scale that a norm would give them.

    For inputs x = g * u with u isotropic of mean square 1, output j has mean square |W_j g|^2; each head is divided by the
    root of the mean of these over its outputs, and multiplied by the norm's weight.
    """
    heads = weight.view(-1, len(norm), weight.shape[1])
    scale = (heads * inputs).pow(2).sum(-1).mean(-1).clamp_min(torch.finfo(torch.float32).tiny).rsqrt()
    return (heads * scale[:, None, None] * norm[:, None]).reshape(weight.shape)


def _feed_forward(A: Architecture, policy: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
    """gate, up and down: of this layer, or of the dense one nearest below it (else above), or of experts side by side.

    A token's output is the mean of its experts' by their shares; without a router the draft has the first top_k experts
    with equal shares.
    """
    dense = [index for index in range(A.layers) if index not in A.expert_layers]
    if dense:
        nearest = max((index for index in dense if index <= layer), default=dense[0])
        at = f"model.layers.{nearest}.mlp."
        return {part: _copy(policy[f"{at}{part}_proj.weight"]) for part in ("gate", "up", "down")}
    at = f"model.layers.{layer}.mlp.experts."
    experts = range(A.top_k)
    side = {part: [policy[f"{at}{e}.{part}_proj.weight"].float() for e in experts] for part in ("gate", "up", "down")}
    return {
        "gate": torch.cat(side["gate"]),
        "up": torch.cat(side["up"]),
        "down": torch.cat(side["down"], 1) / A.top_k,
    }


def _mask_embedding(embedding: Float[Tensor, "vocab hidden"], seed: int) -> Float[Tensor, "1 hidden"]:
    draw = np.random.Generator(np.random.Philox(key=counter_seed("draft", seed, "mask_embedding")))
    noise = torch.from_numpy(draw.standard_normal((1, embedding.shape[1]), dtype=np.float32))
    wide = embedding.float()
    return wide.mean(0, keepdim=True) + noise * wide.std(0, correction=0)
