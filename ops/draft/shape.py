"""The shape of a draft: which tensors it has, of which sizes, and which of the policy's layers feed it.

Names are those that SpecForge writes and SGLang reads for EAGLE-3. In a weights version they begin with `draft.`.

`eagle3` (Li et al. 2025):
  fc.weight (H, taps H), midlayer.input_layernorm.weight (of the token's embedding), midlayer.hidden_norm.weight (of the
  feature), midlayer.self_attn.{q,k,v}_proj.weight (.., 2H: the embedding's columns first), midlayer.self_attn.o_proj.weight,
  midlayer.post_attention_layernorm.weight, midlayer.mlp.{gate,up,down}_proj.weight, norm.weight, lm_head.weight
`block` (after DFlash):
  fc.weight (H, taps H), hidden_norm.weight (of fc's output: the features that keys and values of every layer are made of),
  mask_embedding.weight (1, H: the input of every slot but the anchor's), layers.N.input_layernorm.weight,
  layers.N.self_attn.{q,k,v,o}_proj.weight (k and v are applied to features and slots alike),
  layers.N.post_attention_layernorm.weight, layers.N.mlp.{gate,up,down}_proj.weight, norm.weight, lm_head.weight
Both, where the draft's vocabulary is a part of the policy's: d2t (int64, target id - draft id), t2d (bool per target id).
The embedding is the policy's and never stored.
"""

from __future__ import annotations

from dataclasses import dataclass

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.manifest import ModelError

PREFIX = "draft."
"""How a draft's tensors begin in a weights version."""
MAPS = ("d2t", "t2d")
"""Tensors that are no parameters."""


class DraftError(ModelError):
    """A draft that cannot be used; the message says why and what to do."""


@dataclass(frozen=True)
class DraftShape:
    """Sizes and constants of one draft; equal exactly when the same code path computes it."""

    kind: str
    """`eagle3` or `block`."""
    hidden: int
    """Of draft and policy alike: the draft reads the policy's embedding."""
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    norm_eps: float
    rope_theta: float
    vocab: int
    """Of the policy."""
    draft_vocab: int
    """Rows of the draft's head; `vocab` when it can propose every token."""
    taps: tuple[int, ...]
    """Layers of the policy after which the residual stream is taken, from 0, ascending; fc's columns in this order."""
    context: int
    """Most positions."""
    block: int = 0
    """Slots of a block: the anchor, the last known token, and as many masks as there are proposals. 0 for `eagle3`."""
    layers: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "taps", tuple(self.taps))
        _check(self)

    @classmethod
    def of_policy(cls, architecture: Architecture, settings: DraftSettings) -> DraftShape:
        """The draft that `settings` asks for beside this policy: a layer of its sizes, dense even where it has experts.

        Raises:
            DraftError: taps beyond the policy's layers, or a vocabulary larger than the policy's.
        """
        A = architecture
        shape = cls(
            kind=settings.kind,
            hidden=A.hidden,
            heads=A.heads,
            kv_heads=A.kv_heads,
            head_dim=A.head_dim,
            ffn=_ffn(A),
            norm_eps=A.norm_eps,
            rope_theta=A.rope_theta,
            vocab=A.vocab,
            draft_vocab=settings.vocabulary or A.vocab,
            taps=settings.tap_layers() or default_taps(A.layers),
            context=A.context,
            block=settings.proposals + 1 if settings.kind == "block" else 0,
            layers=settings.layers,
        )
        shape.check_policy(A)
        return shape

    @property
    def reduced(self) -> bool:
        """Whether the draft's vocabulary is a part of the policy's, so that it has d2t and t2d."""
        return self.draft_vocab < self.vocab

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every trained tensor, without prefix."""
        H, inputs = self.hidden, 2 * self.hidden if self.kind == "eagle3" else self.hidden
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, len(self.taps) * H)}
        if self.kind == "block":
            shapes |= {"hidden_norm.weight": (H,), "mask_embedding.weight": (1, H)}
        for at in self.layer_names():
            shapes[f"{at}input_layernorm.weight"] = (H,)
            if self.kind == "eagle3":
                shapes[f"{at}hidden_norm.weight"] = (H,)
            for part, width in (("q", query), ("k", key), ("v", key)):
                shapes[f"{at}self_attn.{part}_proj.weight"] = (width, inputs)
            shapes[f"{at}self_attn.o_proj.weight"] = (H, query)
            shapes[f"{at}post_attention_layernorm.weight"] = (H,)
            shapes |= {f"{at}mlp.{part}_proj.weight": (self.ffn, H) for part in ("gate", "up")}
            shapes[f"{at}mlp.down_proj.weight"] = (H, self.ffn)
        return shapes | {"norm.weight": (H,), "lm_head.weight": (self.draft_vocab, H)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor, without prefix: the parameters, and the maps of a reduced vocabulary."""
        maps = {"d2t": (self.draft_vocab,), "t2d": (self.vocab,)} if self.reduced else {}
        return self.parameters() | maps

    def layer_names(self) -> list[str]:
        """How the names of each layer's tensors begin: `midlayer.`, or `layers.0.` and so on."""
        return ["midlayer."] if self.kind == "eagle3" else [f"layers.{layer}." for layer in range(self.layers)]

    def check_policy(self, architecture: Architecture) -> None:
        """DraftError unless the draft can sit beside this policy."""
        if self.hidden != architecture.hidden:
            raise DraftError(
                f"the draft's hidden size is {self.hidden}, the policy's {architecture.hidden}; a draft reads the "
                "policy's embedding and hidden states: start from a draft that was made for this policy"
            )
        if self.vocab != architecture.vocab:
            raise DraftError(
                f"the draft is for a vocabulary of {self.vocab} tokens, the policy has {architecture.vocab}; start from a "
                "draft that was made for this policy"
            )
        if beyond := [tap for tap in self.taps if tap >= architecture.layers]:
            raise DraftError(
                f"the draft taps layers {list(self.taps)}; {beyond} are none of the policy's {architecture.layers}: "
                f"set draft.taps to layers from 0 to {architecture.layers - 1}, e.g. "
                f"{','.join(map(str, default_taps(architecture.layers)))!r}"
            )


def default_taps(layers: int) -> tuple[int, ...]:
    """An early, a middle and a late layer of a policy of so many.

    1, n // 2 - 1 and n - 4, as SGLang and speculators choose where a draft names none. Below seven layers these three
    would coincide or stay near the embedding: there the first, the middle and the last one.
    """
    late = (1, layers // 2 - 1, layers - 4) if layers >= 7 else (0, (layers - 1) // 2, layers - 1)
    return tuple(sorted(set(late)))


def _ffn(architecture: Architecture) -> int:
    """Inner size of the dense feed-forward block: the policy's own, or as wide as the experts of one token together."""
    A = architecture
    return A.ffn if len(A.expert_layers) < A.layers else A.top_k * A.expert_ffn


def _check(shape: DraftShape) -> None:
    sizes = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "draft_vocab", "context", "layers")
    if odd := [name for name in sizes if type(getattr(shape, name)) is not int or getattr(shape, name) < 1]:
        raise DraftError(f"a draft with {odd[0]}={getattr(shape, odd[0])!r} is none; give a positive whole number")
    if shape.heads % shape.kv_heads:
        raise DraftError(
            f"the draft has {shape.heads} heads for {shape.kv_heads} key/value heads; make the one a multiple of the other"
        )
    if shape.draft_vocab > shape.vocab:
        raise DraftError(
            f"the draft's vocabulary of {shape.draft_vocab} is larger than the policy's {shape.vocab}; set draft.vocabulary "
            "to at most that, or to 0 for all of it"
        )
    if any(type(tap) is not int or tap < 0 for tap in shape.taps) or list(shape.taps) != sorted(set(shape.taps)):
        raise DraftError(f"the draft taps layers {list(shape.taps)}; name one or more from 0, each once, ascending")
    if not shape.taps:
        raise DraftError("the draft taps no layer; name one or more from 0")
    if shape.kind == "eagle3" and (shape.block or shape.layers != 1):
        raise DraftError(
            f"an eagle3 draft has one layer and no block, not {shape.layers} and {shape.block}; leave both out"
        )
    if shape.kind == "block" and shape.block < 2:
        raise DraftError(f"a block of {shape.block} slots proposes nothing; give it two or more")
    if shape.kind not in ("eagle3", "block"):
        raise DraftError(f"a draft of kind {shape.kind!r} is unknown; use eagle3 or block")
