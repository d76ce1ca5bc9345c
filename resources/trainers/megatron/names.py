"""Where each Hugging Face tensor, or a rank's piece of it, lies in megatron-core's parameters.

megatron-core keeps q, k and v of one key/value group side by side, gate and up in one matrix, and rows of padding behind
the vocabulary. One map serves weights, gradients and optimiser moments: anything in the shape of a parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor, nn

from furlong.ops.policy.manifest import ModelError
from furlong.ops.weights.layout import Piece
from furlong.resources.trainers.megatron.model import Chunk
from furlong.resources.trainers.megatron.vocab_head import span


@dataclass(frozen=True)
class Held:
    """One rank's piece of one Hugging Face tensor, and where in which parameter it is."""

    piece: Piece
    shape: tuple[int, ...]
    """Of the piece."""
    parameter: nn.Parameter
    window: Callable[[Tensor], Tensor]
    """A view of the piece's elements, in their order, in any tensor of the parameter's shape."""
    owner: bool
    """Whether this rank is the first of all that hold the same piece: each piece has one owner."""

    def get(self, tensor: Shaped[Tensor, ...]) -> Shaped[Tensor, ...]:
        """The piece out of a tensor in the parameter's shape; a view of it where the layout allows."""
        return self.window(tensor).reshape(self.shape)

    def put(self, tensor: Shaped[Tensor, ...], value: Shaped[Tensor, ...]) -> None:
        """Write the piece into a tensor in the parameter's shape, rounding to its dtype."""
        if tuple(value.shape) != self.shape:
            raise ModelError(
                f"{self.piece.name}: a value of shape {tuple(value.shape)} for the piece {self.piece} of shape "
                f"{self.shape}; read exactly that piece"
            )
        window = self.window(tensor)
        with torch.no_grad():
            window.copy_(value.reshape(window.shape))


def pieces(chunks: list[Chunk]) -> dict[str, Held]:
    """Everything this rank holds, by Hugging Face name, in the order of its layers.

    Every element of every parameter is in exactly one of them, except rows that pad the vocabulary. A tied head on another
    stage than the embedding holds the embedding's tensor a second time, and does not own it.
    """
    found = [held for chunk in chunks for held in _Map(chunk).all()]
    return {held.piece.name: held for held in found}


_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


class _Map:
    """The pieces of one chunk."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk, self.architecture, self.place = chunk, chunk.architecture, chunk.place
        self.parameters = dict(chunk.named_parameters())
        self.first = chunk.place.cp == 0 and chunk.place.dp == 0

    def all(self) -> Iterator[Held]:
        chunk, architecture = self.chunk, self.architecture
        if chunk.pre_process:
            yield self._vocabulary("model.embed_tokens.weight", _VOCABULARY[0])
        for index, layer in enumerate(chunk.decoder.layers):
            yield from self._layer(layer.layer_number - 1, f"decoder.layers.{index}.")
        if chunk.post_process:
            yield self._whole("model.norm.weight", "decoder.final_layernorm.weight")
            if not architecture.tied:
                yield self._vocabulary("lm_head.weight", _VOCABULARY[1])
            elif not chunk.pre_process:
                yield replace(self._vocabulary("model.embed_tokens.weight", _VOCABULARY[1]), owner=False)

    def _layer(self, layer: int, here: str) -> Iterator[Held]:
        there = f"model.layers.{layer}."
        yield self._whole(f"{there}input_layernorm.weight", f"{here}input_layernorm.weight")
        for part in "qkv":
            for kind in ("weight", "bias") if self.architecture.qkv_bias else ("weight",):
                yield self._heads(
                    f"{there}self_attn.{part}_proj.{kind}", f"{here}self_attention.linear_qkv.{kind}", part
                )
        if self.architecture.qk_norm:
            for part in "qk":
                yield self._whole(
                    f"{there}self_attn.{part}_norm.weight", f"{here}self_attention.{part}_layernorm.weight"
                )
        yield self._columns(
            f"{there}self_attn.o_proj.weight", f"{here}self_attention.linear_proj.weight", self.place.tp
        )
        yield self._whole(f"{there}post_attention_layernorm.weight", f"{here}pre_mlp_layernorm.weight")
        if layer in self.architecture.expert_layers:
            yield self._whole(f"{there}mlp.gate.weight", f"{here}mlp.router.weight")
            yield from self._experts(f"{there}mlp.experts.", f"{here}mlp.experts.local_experts.")
        else:
            yield from self._gated(f"{there}mlp.", f"{here}mlp.", self.place.tp)

    def _experts(self, there: str, here: str) -> Iterator[Held]:
        count = self.architecture.experts // self.place.layout.ep
        for index in range(count):
            # Whole on their rank, whatever tp is, and the same on other ranks than everything else.
            for held in self._gated(f"{there}{self.place.ep * count + index}.", f"{here}{index}.", 0):
                yield replace(held, owner=dist.get_rank(self.place.expert_sum_group) == 0)

    def _gated(self, there: str, here: str, part: int) -> Iterator[Held]:
        """The `part`-th share of gate and up, stacked, and of down."""
        both = self.parameters[f"{here}linear_fc1.weight"]
        rows, hidden = both.shape[0] // 2, both.shape[1]
        for half, name in enumerate(("gate_proj", "up_proj")):
            piece = Piece(f"{there}{name}.weight", 0, part * rows, (part + 1) * rows)
            yield self._held(piece, (rows, hidden), f"{here}linear_fc1.weight", _rows(half * rows, rows))
        yield self._columns(f"{there}down_proj.weight", f"{here}linear_fc2.weight", part)

    def _whole(self, there: str, here: str) -> Held:
        shape = tuple(self.parameters[here].shape)
        whole = self._held(Piece(there, 0, 0, shape[0]), shape, here, _everything)
        return replace(whole, owner=self.first and self.place.tp == 0)

    def _columns(self, there: str, here: str, part: int) -> Held:
        shape = tuple(self.parameters[here].shape)
        return self._held(Piece(there, 1, part * shape[1], (part + 1) * shape[1]), shape, here, _everything)

    def _vocabulary(self, there: str, here: str) -> Held:
        start, stop = span(self.architecture.vocab, self.place)
        shape = (stop - start, self.parameters[here].shape[1])
        return self._held(Piece(there, 0, start, stop), shape, here, _rows(0, stop - start))

    def _heads(self, there: str, here: str, part: str) -> Held:
        """Rows of each key/value group on this rank: its queries' heads, its key's, its value's."""
        a = self.architecture
        groups, queries, size = a.kv_heads // self.place.layout.tp, a.heads // a.kv_heads, a.head_dim
        first, count = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[part]
        inner = tuple(self.parameters[here].shape[1:])

        def window(tensor: Tensor) -> Tensor:
            return tensor.view(groups, queries + 2, size, *inner).narrow(1, first, count)

        rows = groups * count * size
        piece = Piece(there, 0, self.place.tp * rows, (self.place.tp + 1) * rows)
        return self._held(piece, (rows, *inner), here, window)

    def _held(self, piece: Piece, shape: tuple[int, ...], here: str, window: Callable[[Tensor], Tensor]) -> Held:
        return Held(piece, shape, self.parameters[here], window, self.first)


def _everything(tensor: Tensor) -> Tensor:
    return tensor


def _rows(start: int, count: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.narrow(0, start, count)
