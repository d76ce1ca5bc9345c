"""Forward pass of a Llama, Qwen2, Qwen3 or Qwen3-MoE model for inference on CPU: no autograd, no module tree.

The residual stream, norms, rotation and attention are float32; projections run in the published dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.layer import Layer, NormWeight
from furlong.ops.policy.packed_linear import PackedLinear
from furlong.ops.policy.paged_attention import Plan
from furlong.ops.policy.rotation import Rotation
from furlong.ops.policy.row_bits import threads_for_products
from furlong.ops.policy.shard import WHOLE, Shard, Whole

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class WeightsError(RuntimeError):
    """Weights in memory that contradict themselves."""


@dataclass(frozen=True)
class Taps:
    """Takes the residual stream of a step's tokens after some layers, before later layers change it."""

    layers: tuple[int, ...]
    """From 0, ascending."""
    seen: list[Float[Tensor, "tokens hidden"]] = field(default_factory=list)
    """For each of them, in order, once the step is over."""

    def after(self, layer: int, x: Float[Tensor, "tokens hidden"]) -> None:
        if layer in self.layers:
            self.seen.append(x.clone())


class Decoder:
    """One weights version, ready to run. Immutable: new weights make a new Decoder, sharing what did not change."""

    def __init__(
        self,
        architecture: Architecture,
        tensors: dict[str, Tensor],
        before: Decoder | None = None,
        share: Whole | Shard = WHOLE,
    ):
        """
        Args:
            architecture: the model's shape, or that of the part this rank has of it.
            tensors: every tensor of `architecture.shapes()`, in one dtype; read, never written.
            before: an older version; layers whose tensors are the very same objects are taken over from it.
            share: what the rank's part is made one with the others' by.
        """
        self.architecture = architecture
        self._share = share
        self.tensors = tensors
        self.dtype = tensors[EMBEDDING].dtype
        same = {name for name, tensor in tensors.items() if before and before.tensors[name] is tensor}
        head = EMBEDDING if architecture.tied else HEAD
        self._head = before._head if head in same else PackedLinear(tensors[head])
        self._final_norm = before._final_norm if FINAL_NORM in same else NormWeight(tensors[FINAL_NORM])
        self.layers: list[Layer] = []
        for index in range(architecture.layers):
            names = Layer.names(architecture, index)
            kept = before is not None and set(names.values()) <= same
            self.layers.append(before.layers[index] if kept else Layer(architecture, index, tensors))
        self._rotation = Rotation(
            architecture.heads, architecture.kv_heads, architecture.head_dim, architecture.rope_theta
        )

    def served(self) -> dict[str, Tensor]:
        """All of `served_parts` at once."""
        return {name: tensor for part in self.served_parts() for name, tensor in part.items()}

    def served_parts(self) -> Iterator[dict[str, Tensor]]:
        """Every tensor by Hugging Face name, read back from the memory that the forward pass reads, a layer at a time:
        who needs each for a moment only spares the system the memory of all.

        Raises:
            WeightsError: the two copies of a tied embedding differ.
        """
        names = {FINAL_NORM: self._final_norm.published()}
        names[EMBEDDING] = self.tensors[EMBEDDING]
        if not self.architecture.tied:
            names[HEAD] = self._head.unpacked()
        elif not same_bits(self._head.unpacked(), self.tensors[EMBEDDING]):
            raise WeightsError(
                f"the copies of {EMBEDDING} that tokens are looked up in and logits are computed with differ, so memory "
                "was overwritten; load the weights again"
            )
        yield names
        for index, layer in enumerate(self.layers):
            yield layer.served(self.architecture, index)

    def step(
        self, tokens: Int[Tensor, " tokens"], plan: Plan, wanted: Int[Tensor, " wanted"], taps: Taps | None = None
    ) -> tuple[Float[Tensor, "wanted vocab"], Int[Tensor, "tokens expert_layers top_k"] | None]:
        """Feed tokens of any number of replies, and return the logits after those `wanted` (indices into `tokens`).

        What a token gets depends on its reply's earlier tokens only, bit for bit, unless `row_bits` is off: not on the
        other replies, nor on whether the earlier tokens were fed with it or before.

        Args:
            plan: whose tokens these are; stores their keys and values.
            taps: see `Taps`.
        Returns:
            logits, and the experts that each token went through, None when the model has none.
        """
        with threads_for_products():
            return self._step(tokens, plan, wanted, taps)

    def _step(self, tokens: Tensor, plan: Plan, wanted: Tensor, taps: Taps | None) -> tuple[Tensor, Tensor | None]:
        arch, N = self.architecture, self.architecture.heads
        x = self.embed(tokens)
        turn = self.turns(plan.positions)
        chosen = []
        for index, layer in enumerate(self.layers):
            heads = layer.project(x, arch, turn)
            layer.add_attention(x, plan.attend(index, heads[:, :N], heads[:, N:]), self._share)
            picked = layer.add_block(x, arch, self._share)
            if picked is not None:
                chosen.append(picked)
            if taps is not None:
                taps.after(index, x)
        logits = self.logits(x[wanted]) if len(wanted) else torch.empty((0, arch.vocab))
        return logits, torch.stack(chosen, dim=1) if chosen else None

    def embed(self, tokens: Int[Tensor, " tokens"]) -> Float[Tensor, "tokens hidden"]:
        """Each token's row of the embedding, in float32."""
        return self._share.embed(tokens, self.tensors[EMBEDDING])

    def turns(self, positions: Int[Tensor, " tokens"]) -> Complex[Tensor, "tokens rotated_heads pairs"]:
        """See `Rotation.turns`."""
        return self._rotation.turns(positions)

    def logits(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        normed = F.rms_norm(x, (x.shape[-1],), self._final_norm.wide, self.architecture.norm_eps)
        return self._share.complete(self._head(normed.to(self.dtype)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one dtype and shape hold the same bits (NaN equals itself, 0 differs from -0)."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
