"""Masters cut into one piece per rank (PyTorch's `fully_shard`, Zhao et al. 2023), behind the interface of `masters.py`.

Between steps a rank holds its piece of masters and moments. Within a step it gathers every layer once, in the compute
format, and keeps it, and its gradient sums, until the last micro-batch: then the sums are added up over the ranks, each
of which takes its piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from furlong.ops.spec import AlgorithmSpec
from furlong.ops.weights.layout import Piece, cut
from furlong.resources.trainers.masters import (
    MOMENTS,
    UPDATES,
    Shapes,
    clipped_step,
    make_adamw,
    master_dtype,
    require_finite_gradients,
    require_weights,
    state_shapes,
)
from furlong.resources.trainers.module import PolicyModule
from furlong.resources.trainers.ranks import Ranks


class ShardedMasters:
    """This rank's pieces of masters, gradient sums and AdamW; `weights` maps Hugging Face names to pieces."""

    def __init__(self, module: PolicyModule, algorithm: AlgorithmSpec, compute: torch.dtype, ranks: Ranks) -> None:
        """Take over a float32 module that all ranks hold alike, leave this rank its pieces, and compute in `compute`."""
        self.algorithm, self.module, self.ranks = algorithm, module, ranks
        self._whole: Shapes = {name: tuple(parameter.shape) for name, parameter in module.named_weights().items()}
        shard(module, compute, ranks)
        self._sharded = module.named_weights()
        self.pieces: dict[str, Piece] = {}
        self.weights: dict[str, nn.Parameter] = {}
        for name, parameter in self._sharded.items():
            self.pieces[name] = piece_of(name, self._whole[name], ranks)
            self.weights[name] = nn.Parameter(parameter.detach().to_local())
        self.adamw = make_adamw(self.weights, algorithm)

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        for name, master in self.weights.items():
            self._sharded[name].grad = master.grad = None

    def expect(self, last: bool) -> None:
        """Say, before each backward pass of a step, whether it is the last: the ranks' gradients are added up in it."""
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)
        self.module.set_is_last_backward(last)

    def gradient_norm(self) -> float:
        """Global L2 norm of the summed gradients, the same on all ranks.

        Raises:
            NonFiniteError: on all ranks: a gradient with a NaN or an infinity, by the tensor's name.
        """
        for name, master in self.weights.items():
            total = self._sharded[name].grad
            master.grad = torch.zeros_like(master) if total is None else total.to_local()
        own = torch.stack([torch.linalg.vector_norm(master.grad).double() for master in self.weights.values()])
        squares = self.ranks.sum(own.square())
        require_finite_gradients(dict(zip(self.weights, squares.tolist(), strict=True)))
        return float(squares.sum().sqrt())

    def update(self, learning_rate: float, norm: float) -> None:
        """Clip to `max_grad_norm`, and move this rank's masters by AdamW."""
        clipped_step(self.adamw, self.weights, learning_rate, norm, self.algorithm.max_grad_norm)
        self.round()

    def round(self) -> None:
        """Drop what was gathered of the masters before; the next forward gathers, and rounds, them anew."""
        for part in self._parts():
            part.reshard()

    @contextmanager
    def placed(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Have the module compute with these complete weights; afterwards it is bitwise as it was.

        Raises:
            ValueError: weights of another model.
        """
        require_weights(weights, self._whole)
        before = {name: master.detach().clone() for name, master in self.weights.items()}
        try:
            self._fill(lambda name: cut(weights[name], self.pieces[name]))
            yield
        finally:
            self._fill(before.__getitem__)

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """On rank 0, masters rounded to `dtype` by Hugging Face name, whole, on the CPU; nothing on the others."""
        return {name: whole.to(dtype) for name, whole in self.complete() if self.ranks.first}

    def bad_weight(self) -> str | None:
        """Name of the first master with a NaN or an infinity, on any rank."""
        bad = torch.tensor([not torch.isfinite(master).all() for master in self.weights.values()], dtype=torch.int64)
        found = self.ranks.sum(bad).nonzero().flatten().tolist()
        return list(self.weights)[found[0]] if found else None

    def complete(self) -> Iterator[tuple[str, Tensor]]:
        """Every master by name, whole, on the CPU of every rank, one at a time."""
        for name, parameter in self._sharded.items():
            yield name, parameter.detach().full_tensor().cpu().contiguous()

    def shapes(self) -> Shapes:
        """Shapes of the complete tensors that `state` is made of."""
        return state_shapes(self._whole)

    def state(self) -> dict[Piece, Tensor]:
        """What this rank holds of everything a step reads and changes."""
        state = {piece: tensor.cpu() for piece, tensor in self._held().items()}
        if self.ranks.first:
            state[Piece(UPDATES, 0, 0, 1)] = self._updates()[0].cpu().reshape(1)
        return state

    @torch.no_grad()
    def load_state(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Take over this rank's pieces of what `state` gave, under this or another layout."""
        for piece, place in self._held().items():
            if place.numel():
                place.copy_(fetch(piece))
        updates = fetch(Piece(UPDATES, 0, 0, 1))[0]
        for count in self._updates():
            count.copy_(updates)
        self.round()

    @torch.no_grad()
    def _fill(self, source: Callable[[str], Tensor]) -> None:
        for name, master in self.weights.items():
            master.copy_(source(name))
        self.round()

    def _held(self) -> dict[Piece, Tensor]:
        held = {}
        for name, master in self.weights.items():
            tensors = {"master": master.detach(), **{kind: self.adamw.state[master][kind] for kind in MOMENTS}}
            at = self.pieces[name]
            held |= {Piece(f"{kind}/{name}", at.dim, at.start, at.stop): tensor for kind, tensor in tensors.items()}
        return held

    def _updates(self) -> list[Tensor]:
        return [self.adamw.state[master]["step"] for master in self.weights.values()]

    def _parts(self) -> list[FSDPModule]:
        return sharded_parts(self.module)


def shard(module: PolicyModule, compute: torch.dtype, ranks: Ranks) -> None:
    """Leave this rank its piece of every parameter, in the masters' format, which is gathered and rounded to `compute`."""
    wide = master_dtype(compute)
    parameters = module.named_weights()
    for parameter in parameters.values():
        parameter.data = parameter.data.to(wide)
    mesh = init_device_mesh(next(iter(parameters.values())).device.type, (ranks.world,))
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute == wide else compute, reduce_dtype=wide, cast_forward_inputs=False
    )
    for part in (*module.layers(), module):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for part in sharded_parts(module):
        # The loss is one sum over the whole step, so gradients add up; they are never averaged.
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    # A rank whose tokens missed an expert must still take part in adding up the expert's gradient.
    module.set_reduce_scatter_unused_params(True)


def sharded_parts(module: PolicyModule) -> list[FSDPModule]:
    """What was wrapped: each layer, and the module around them."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def piece_of(name: str, shape: tuple[int, ...], ranks: Ranks) -> Piece:
    """What `fully_shard` gives this rank of a tensor: rows in equal runs, the last ones shorter or empty."""
    run = -(-shape[0] // ranks.world)
    return Piece(name, 0, min(ranks.rank * run, shape[0]), min((ranks.rank + 1) * run, shape[0]))
