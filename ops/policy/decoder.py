"""Forward pass of a dense Llama, Qwen2 or Qwen3 model for inference on CPU: no autograd, no module tree.

The residual stream, norms, rotation and attention are float32; projections run in the published dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.kv_cache import KVCache
from furlong.ops.policy.layer import Layer, NormWeight
from furlong.ops.policy.packed_linear import PackedLinear
from furlong.ops.policy.shard import WHOLE, Shard, Whole

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class WeightsError(RuntimeError):
    """Weights in memory that contradict themselves."""


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
        self._layers: list[Layer] = []
        for index in range(architecture.layers):
            names = Layer.names(architecture, index)
            kept = before is not None and set(names.values()) <= same
            self._layers.append(before._layers[index] if kept else Layer(architecture, index, tensors))
        D = architecture.head_dim
        # As transformers computes them: float32 throughout.
        self._frequencies = 1.0 / architecture.rope_theta ** (torch.arange(0, D, 2, dtype=torch.int64).float() / D)
        query = torch.full((architecture.heads, 1), D**-0.5)
        self._head_scale = torch.cat([query, torch.ones(architecture.kv_heads, 1)])

    def served(self) -> dict[str, Tensor]:
        """Every tensor by Hugging Face name, read back from the memory that the forward pass reads.

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
        for index, layer in enumerate(self._layers):
            names |= layer.served(self.architecture, index)
        return names

    def prefill(
        self, prompts: Int[Tensor, "prompts length"], cache: KVCache, at: slice
    ) -> Float[Tensor, "prompts vocab"]:
        """Run prompts of one length, cache them as the prompts of index `at`, and return the logits after each."""
        U, P = prompts.shape
        arch, N = self.architecture, self.architecture.heads
        x_TH = self._share.embed(prompts.reshape(-1), self.tensors[EMBEDDING])
        turn = self._rotation(torch.arange(P)).repeat(U, 1, 1)
        for index, layer in enumerate(self._layers):
            heads = layer.project(x_TH, arch, turn).view(U, P, N + 2 * arch.kv_heads, arch.head_dim)
            q, k, v = heads.split([N, arch.kv_heads, arch.kv_heads], dim=2)
            cache.fill(index, at, k, v)
            seen = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=1.0, enable_gqa=True
            )
            layer.finish(x_TH, seen.transpose(1, 2).reshape(U * P, N * arch.head_dim), arch, self._share)
        return self._logits(x_TH.view(U, P, -1)[:, -1])

    def decode(
        self, tokens: Int[Tensor, " rows"], positions: Int[Tensor, " rows"], cache: KVCache, slot: int
    ) -> Float[Tensor, "rows vocab"]:
        """Feed each row its reply token number `slot`, counted from 0, and return the logits after it."""
        arch, N = self.architecture, self.architecture.heads
        x_BH = self._share.embed(tokens, self.tensors[EMBEDDING])
        turn = self._rotation(positions)
        for index, layer in enumerate(self._layers):
            heads = layer.project(x_BH, arch, turn)
            layer.finish(x_BH, cache.attend(index, slot, heads[:, :N], heads[:, N:]), arch, self._share)
        return self._logits(x_BH)

    def _rotation(self, positions: Int[Tensor, " tokens"]) -> Tensor:
        """exp(i position frequency) per rotated head, the query heads' times 1/sqrt(head_dim) (Su et al. 2021)."""
        angles = positions.float()[:, None, None] * self._frequencies
        return torch.complex(angles.cos(), angles.sin()) * self._head_scale

    def _logits(self, x: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        normed = F.rms_norm(x, (x.shape[-1],), self._final_norm.wide, self.architecture.norm_eps)
        return self._share.complete(self._head(normed.to(self.dtype)))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two dense tensors of one dtype and shape hold the same bits (NaN equals itself, 0 differs from -0)."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
