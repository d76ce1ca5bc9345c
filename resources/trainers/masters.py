"""Master weights behind a module that computes in another number format, and the interface that trainers know.

`MasterWeights` holds everything in one process. The module's gradients are added up in the masters' format, AdamW moves
the masters, and the module gets a rounded copy. Compared on a 135M-parameter model on CPU, bfloat16, one thread:
autocast over float32 weights costs 1.06 to 1.16 times as much a step, `fully_shard` over one process 1.16 to 1.21 times.

A trainer uses nothing but these members, so other masters (`sharded.ShardedMasters`, adapters) take its place:

- `weights`: what AdamW moves, by name, each with its summed gradient in `.grad`; the rank's part of it.
- `begin()`, then for each micro-batch `expect(last)` before its backward pass, then `gradient_norm()`, `update(rate, norm)`.
- `round()`: brings the module up to date with the masters; `bad_weight()`: the first tensor that is not finite.
- `placed(weights)`: computes with published weights for a while; `export(dtype)`: what is published.
- `complete()`: every master, whole, one at a time, on rank 0 at least: what a digest is taken of.
- `shapes()`, `state()`, `load_state(fetch)`: everything a step reads and changes, in pieces of complete tensors.

With several ranks each method but `weights`, `shapes` and `state` is called on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.spec import AlgorithmSpec
from furlong.ops.weights.layout import Piece, whole_piece

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's own state per weight."""
KINDS = ("master", *MOMENTS)
"""What is kept per weight."""
UPDATES = "updates"
"""Name, in a state, of the number of updates AdamW has made."""
Shapes = dict[str, tuple[int, ...]]


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """Number format of masters and moments: float32, or float64 for a module that computes in float64."""
    return torch.float64 if compute == torch.float64 else torch.float32


def state_shapes(weights: Shapes) -> Shapes:
    """Shapes of a state's complete tensors, given those of the weights."""
    return {f"{kind}/{name}": shape for name, shape in weights.items() for kind in KINDS} | {UPDATES: (1,)}


def make_adamw(weights: dict[str, nn.Parameter], algorithm: AlgorithmSpec) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) whose state is there before the first step, so that it can be restored into."""
    adamw = torch.optim.AdamW(
        weights.values(),
        lr=algorithm.learning_rate,
        betas=algorithm.betas,
        weight_decay=algorithm.weight_decay,
        fused=True,
    )
    for master in weights.values():
        moments = {kind: torch.zeros_like(master) for kind in MOMENTS}
        adamw.state[master] = {"step": torch.zeros((), device=master.device), **moments}
    return adamw


def require_weights(given: dict[str, Tensor], wanted: Shapes) -> None:
    """Raise ValueError unless `given` are exactly the tensors of this model."""
    odd = sorted(
        name for name in given.keys() | wanted if name not in given or wanted.get(name) != tuple(given[name].shape)
    )
    if odd:
        raise ValueError(
            f"the weights given differ from the model in {len(odd)} tensors, first {odd[0]}; give those of this run"
        )


def require_finite_gradients(norms: dict[str, float]) -> None:
    """Raise NonFiniteError naming the first tensor whose gradient has no finite norm."""
    bad = [name for name, norm in norms.items() if not norm < float("inf")]
    if bad:
        raise NonFiniteError(
            f"gradient of {bad[0]} is not finite ({len(bad)} of {len(norms)} tensors are bad); nothing was changed: "
            "lower the learning rate or restore an earlier save"
        )


def clipped_step(
    adamw: torch.optim.AdamW, weights: dict[str, nn.Parameter], learning_rate: float, norm: float, most: float
) -> None:
    """Scale the gradients of `weights`, whose global norm is `norm`, to a norm of `most` at most, and take AdamW's step
    (Loshchilov & Hutter 2019)."""
    if norm > most:
        torch._foreach_mul_([master.grad for master in weights.values()], most / norm)
    adamw.param_groups[0]["lr"] = learning_rate
    adamw.step()


class MasterWeights:
    """Masters, gradient sums and AdamW of one module, whole; `weights` maps Hugging Face names to masters."""

    def __init__(self, parameters: dict[str, nn.Parameter], algorithm: AlgorithmSpec, compute: torch.dtype) -> None:
        """Take over a module's float32 `parameters`, by Hugging Face name, and have it compute in `compute`."""
        self.algorithm = algorithm
        self.computing = parameters
        self.weights: dict[str, nn.Parameter] = {}
        self._counted: set[str] = set()
        for name, parameter in parameters.items():
            # A fresh, aligned copy: what a file was mapped to could round otherwise than what `restore` allocates.
            copy = parameter.detach().to(master_dtype(compute), copy=True, memory_format=torch.contiguous_format)
            master = nn.Parameter(copy)
            master.grad = torch.zeros_like(master)
            self.weights[name] = master
            # Only parameters are rounded (a rotary table in bfloat16 would misplace tokens); an equal dtype shares
            # memory.
            parameter.data = master.detach().to(compute)
            parameter.register_post_accumulate_grad_hook(self._collector(name))
        self.adamw = make_adamw(self.weights, algorithm)

    def begin(self) -> None:
        """Forget the gradients of the step before."""
        self._counted.clear()

    def expect(self, last: bool) -> None:
        """Say, before each backward pass of a step, whether it is the last; here nothing depends on it."""

    def gradient_norm(self) -> float:
        """Global L2 norm of the summed gradients.

        Raises:
            NonFiniteError: a gradient with a NaN or an infinity (or too large to square), by the tensor's name.
        """
        for name, master in self.weights.items():
            if name not in self._counted:
                master.grad.zero_()
        norms = torch.stack(torch._foreach_norm([master.grad for master in self.weights.values()]))
        require_finite_gradients(dict(zip(self.weights, norms.tolist(), strict=True)))
        return float(torch.linalg.vector_norm(norms.double()))

    def update(self, learning_rate: float, norm: float) -> None:
        """Clip to `max_grad_norm`, move the masters by AdamW, round into the module."""
        clipped_step(self.adamw, self.weights, learning_rate, norm, self.algorithm.max_grad_norm)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Copy the masters into the module."""
        torch._foreach_copy_(list(self.computing.values()), list(self.weights.values()))

    @contextmanager
    def placed(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Have the module compute with these weights, by Hugging Face name; afterwards it is bitwise as it was.

        Raises:
            ValueError: weights of another model.
        """
        require_weights(weights, self._sizes())
        before = {name: parameter.data for name, parameter in self.computing.items()}
        try:
            for name, parameter in self.computing.items():
                # Not a view of what was given: how memory is aligned could show in the last bits.
                parameter.data = torch.empty_like(before[name], memory_format=torch.contiguous_format)
                parameter.data.copy_(weights[name])
            yield
        finally:
            for name, parameter in self.computing.items():
                parameter.data = before[name]

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Masters rounded to `dtype`, by Hugging Face name, as CPU tensors of their own."""
        return {name: w.detach().to("cpu", dtype, copy=True).contiguous() for name, w in self.weights.items()}

    def bad_weight(self) -> str | None:
        """Name of the first master with a NaN or an infinity."""
        return next((name for name, master in self.weights.items() if not torch.isfinite(master).all()), None)

    def complete(self) -> Iterator[tuple[str, Tensor]]:
        """Every master by name, whole, on the CPU."""
        for name, master in self.weights.items():
            yield name, master.detach().cpu()

    def shapes(self) -> Shapes:
        """Shapes of the complete tensors that `state` is made of."""
        return state_shapes(self._sizes())

    def state(self) -> dict[Piece, Tensor]:
        """Everything a step reads and changes; on the CPU the tensors themselves, not copies."""
        return {whole_piece(name, tensor.shape): tensor.cpu() for name, tensor in self._held().items()}

    @torch.no_grad()
    def load_state(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Take over what `state` gave, asked for piece by piece; shapes must be this module's."""
        for name, place in self._held().items():
            place.copy_(fetch(whole_piece(name, place.shape)))
        updates = fetch(whole_piece(UPDATES, (1,)))[0]
        for master in self.weights.values():
            self.adamw.state[master]["step"].copy_(updates)
        self.round()

    def _sizes(self) -> Shapes:
        return {name: tuple(master.shape) for name, master in self.weights.items()}

    def _held(self) -> dict[str, Tensor]:
        held = {}
        for name, master in self.weights.items():
            held[f"master/{name}"] = master.detach()
            for kind in MOMENTS:
                held[f"{kind}/{name}"] = self.adamw.state[master][kind]
        return held | {UPDATES: self.adamw.state[next(iter(self.weights.values()))]["step"].reshape(1)}

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            total = self.weights[name].grad
            if name in self._counted:
                total.add_(parameter.grad)
            else:
                total.copy_(parameter.grad)
                self._counted.add(name)
            parameter.grad = None

        return collect
