"""Adapters on the Hugging Face module: whole in one process, or sharded over several."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from furlong.ops.policy.lora import Adapter, is_adapted
from furlong.ops.spec import RunSpec
from furlong.ops.weights.layout import Piece, cut, whole_piece
from furlong.resources.trainers.lora import LoraWeights, Part
from furlong.resources.trainers.module import PolicyModule
from furlong.resources.trainers.ranks import Ranks
from furlong.resources.trainers.sharded import piece_of, shard, sharded_parts


def lora_of(module: PolicyModule, spec: RunSpec, compute: torch.dtype, ranks: Ranks) -> LoraWeights:
    """Adapters on a float32 module, whose weights become the base, and which computes in `compute` from now on."""
    return WholeLora(module, spec, compute) if ranks.world == 1 else ShardedLora(module, spec, compute, ranks)


class WholeLora(LoraWeights):
    """In one process. Each micro-batch's gradient is taken as it comes, so no sum as large as the model is kept."""

    def __init__(self, module: PolicyModule, spec: RunSpec, compute: torch.dtype) -> None:
        """See `lora_of`."""
        found = _frozen_rest(module)
        weights = {whole_piece(name, parameter.shape): parameter.detach() for name, parameter in found.items()}
        parts = []
        for piece, parameter in zip(weights, found.values(), strict=True):
            parameter.data = torch.empty_like(parameter, dtype=compute, memory_format=torch.contiguous_format)
            parts.append(Part(piece, parameter.data.copy_))
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._collector(piece))
        super().__init__(parts, _sizes(found), spec, compute, Ranks(), next(iter(found.values())).device)
        self.load_weights(weights.__getitem__)

    def _collector(self, piece: Piece) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            self.add(piece, parameter.grad)
            parameter.grad = None

        return collect


class ShardedLora(LoraWeights):
    """Over several processes: base and merged weights lie as `sharded.ShardedMasters` lays masters."""

    def __init__(self, module: PolicyModule, spec: RunSpec, compute: torch.dtype, ranks: Ranks) -> None:
        """See `lora_of`; all ranks hold the module alike."""
        whole = {name: parameter.detach().clone() for name, parameter in _frozen_rest(module).items()}
        shard(module, compute, ranks)
        self._module = module
        self._sharded = {
            piece_of(name, tuple(whole[name].shape), ranks): p for name, p in module.named_weights().items()
        }
        parts = [Part(piece, p.detach().to_local().copy_) for piece, p in self._sharded.items()]
        super().__init__(parts, _sizes(whole), spec, compute, ranks, next(iter(whole.values())).device)
        self.load_weights(lambda piece: cut(whole[piece.name], piece))

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        super().begin()
        for parameter in self._sharded.values():
            parameter.grad = None

    def expect(self, last: bool) -> None:
        """See `sharded.ShardedMasters.expect`."""
        self._module.set_requires_gradient_sync(last)
        self._module.set_reshard_after_backward(last)
        self._module.set_is_last_backward(last)

    def gradient_norm(self) -> float:
        """See `LoraWeights.gradient_norm`."""
        for piece, parameter in self._sharded.items():
            if parameter.grad is not None and piece.start < piece.stop:
                self.add(piece, parameter.grad.to_local())
        return super().gradient_norm()

    def _write(
        self, values: Callable[[Piece], Tensor], adapters: dict[str, Adapter], dtype: torch.dtype | None
    ) -> None:
        super()._write(values, adapters, dtype)
        for part in sharded_parts(self._module):
            part.reshard()


def _frozen_rest(module: PolicyModule) -> dict[str, nn.Parameter]:
    """The module's weights by name; those that no adapter changes get no gradient from now on."""
    found = module.named_weights()
    for name, parameter in found.items():
        parameter.requires_grad_(is_adapted(name))
    # The gradient goes as far as ever, as the witness looks for it there.
    module.causal.get_input_embeddings().register_forward_hook(_asking_for_gradient)
    return found


def _asking_for_gradient(embedding: nn.Module, tokens: tuple[Tensor, ...], output: Tensor) -> None:
    if torch.is_grad_enabled():
        output.requires_grad_()


def _sizes(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}
