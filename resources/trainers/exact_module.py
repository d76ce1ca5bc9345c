"""The module of exact mode: the embedded engine's own arithmetic under autograd, so that nothing is left to mismatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from furlong.ops.policy.architecture import Architecture, architecture_of, read_architecture
from furlong.ops.policy.decoder import Decoder, same_bits
from furlong.ops.policy.exact.forward import See, exact_logprobs
from furlong.ops.policy.exact.gradients import normed
from furlong.ops.policy.packing import MicroBatch
from furlong.resources.trainers.module import FINAL, PolicyModule, load_module, module_of


class ExactModule(PolicyModule):
    """A `PolicyModule` whose log-probabilities are those that an engine records that holds the same weights in the same
    number format: bit for bit. Of the Hugging Face module only the weights are used, and the embedding."""

    def __init__(self, causal: nn.Module, architecture: Architecture) -> None:
        super().__init__(causal)
        self._architecture = architecture
        self._decoder: Decoder | None = None
        self._watch: tuple[tuple[int, ...], Callable[[int, Tensor], None]] | None = None

    def forward(
        self, micro: MicroBatch, temperature: float
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:
        """See `PolicyModule.forward`; log-probabilities are float32."""
        weights = self.named_weights()
        decoder = self._current(weights)
        watch = None if self._watch is None else self._shown(decoder, micro, *self._watch)
        return exact_logprobs(decoder, weights, self._embedded, micro, temperature, watch)

    @contextmanager
    def watched(self, layers: Sequence[int], see: Callable[[int, Tensor], None]) -> Iterator[None]:
        """See `PolicyModule.watched`; what no wanted token depends on is 0."""
        self._watch = tuple(layers), see
        try:
            yield
        finally:
            self._watch = None

    def layers(self) -> list[nn.Module]:
        """None to be wrapped: no layer is called by itself, and each is computed again in the backward pass anyway."""
        return []

    def _shown(
        self, decoder: Decoder, micro: MicroBatch, layers: tuple[int, ...], see: Callable[[int, Tensor], None]
    ) -> See:
        arch, norm = decoder.architecture, self.causal.get_decoder().norm.weight.detach()

        def show(layer: int, x: Float[Tensor, "nodes hidden"], flat: Int[Tensor, " nodes"]) -> None:
            if layer in layers:
                see(layer, placed(x, flat))
            if layer == arch.layers - 1:
                see(FINAL, placed(normed(x, norm, arch.norm_eps).to(norm.dtype), flat))

        def placed(x: Tensor, flat: Tensor) -> Float[Tensor, "rows width hidden"]:
            whole = x.new_zeros(micro.tokens.numel(), x.shape[1])
            return whole.index_copy_(0, flat, x).view(*micro.tokens.shape, -1)

        return show

    def _embedded(self, tokens: Int[Tensor, " nodes"]) -> Float[Tensor, "nodes hidden"]:
        self.trunk = self.causal.get_input_embeddings()(tokens)
        return self.trunk

    @torch.no_grad()
    def _current(self, weights: dict[str, nn.Parameter]) -> Decoder:
        """The decoder of the weights as they are now. They are compared, which takes a moment, because there is no other
        sign of change that every optimiser and every way of sharding gives."""
        if (where := next(iter(weights.values())).device).type != "cpu":
            raise ValueError(
                f"trainer.exact shares the arithmetic of an engine on the CPU, not {where}; set FURLONG_GPUS=0"
            )
        held = {} if self._decoder is None else self._decoder.tensors
        tensors = {}
        for name, weight in weights.items():
            old = held.get(name)
            same = old is not None and old.dtype == weight.dtype and same_bits(old, weight.detach())
            tensors[name] = old if same else weight.detach().clone()
        if self._decoder is None or any(tensors[name] is not held[name] for name in tensors):
            self._decoder = Decoder(self._architecture, tensors, self._decoder)
        return self._decoder


def load_exact(folder: str) -> ExactModule:
    """What `load_module` loads, as an exact module.

    Raises:
        ValueError: an architecture that trainer or engine does not know, or files that do not hold exactly its weights.
    """
    return ExactModule(load_module(folder).causal, read_architecture(folder))


def exact_of(architecture: dict[str, Any]) -> ExactModule:
    """What `module_of` makes of an architecture, as an exact module whose weights are still to be filled in."""
    return ExactModule(module_of(architecture).causal, architecture_of(architecture, Path("the saved architecture")))
