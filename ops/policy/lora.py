"""Low-rank adapters (Hu et al. 2021) in weight space: every linear layer computes with W = W0 + scale B A, written out.

So forward passes, packing, splits and exact arithmetic know nothing of adapters: whoever computes, trainer, engine or an
exported folder, calls `merge` first, and gets the same bits. A version with adapters is the base weights as they were
and, per adapted weight `<layer>.weight`, the tensors `adapter.<layer>.lora_A.weight` and `adapter.<layer>.lora_B.weight`
in float32; `adapter.scale` goes with all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from furlong.ops.identity import counter_seed
from furlong.ops.policy.checkpoint import is_extra
from furlong.ops.policy.manifest import ModelError
from furlong.ops.weights.layout import Piece, cut

PREFIX = "adapter."
SCALE = "adapter.scale"
_A, _B = ".lora_A.weight", ".lora_B.weight"
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BLOCK = 2**17
"""Elements merged at a time, so that what is summed stays in a core's cache: a quarter of a second per 100 million
weights and 16 ranks on one core."""


@dataclass(frozen=True)
class Adapter:
    """What is added to one weight, or to a piece of it: scale B A."""

    a: Float[Tensor, "rank inputs"]
    b: Float[Tensor, "outputs rank"]
    scale: float

    def cut(self, piece: Piece) -> Adapter:
        """The adapter of a piece of the weight: rows of B, or columns of A."""
        if piece.dim == 0:
            return Adapter(self.a, cut(self.b, piece), self.scale)
        return Adapter(cut(self.a, piece), self.b, self.scale)


def is_adapted(name: str) -> bool:
    """Whether a tensor of the policy gets an adapter: the matrices of attention and feed-forward blocks and experts."""
    return name.endswith(".weight") and name.split(".")[-2] in _ADAPTED


def names_of(weight: str) -> tuple[str, str]:
    """The names of A and B of a weight."""
    layer = PREFIX + weight.removesuffix(".weight")
    return layer + _A, layer + _B


def start(
    seed: int, weight: str, shape: tuple[int, int], rank: int
) -> tuple[Float[Tensor, "rank inputs"], Float[Tensor, "outputs rank"]]:
    """A and B before the first step, a function of the arguments alone: B is 0, so that the merged weight is the base.

    A is uniform in +-1/sqrt(inputs), as Kaiming's rule with slope sqrt(5) has it (the usual start of adapters, and of
    linear layers in PyTorch).
    """
    outputs, inputs = shape
    draw = np.random.Generator(np.random.Philox(key=counter_seed("adapter", seed, weight)))
    uniform = draw.random((rank, inputs), dtype=np.float32)
    return torch.from_numpy((2 * uniform - 1) / np.float32(inputs**0.5)), torch.zeros(outputs, rank)


def merge(
    base: Float[Tensor, "outputs inputs"], adapter: Adapter, dtype: torch.dtype | None = None
) -> Float[Tensor, "outputs inputs"]:
    """W0 + scale B A, computed in the adapter's format and rounded to `dtype` (the base's when None).

    Each element is ((b_1 a_1 + b_2 a_2) + ...) scale + w, every operation rounded on its own. A library's matrix product
    promises no such order and fuses operations as shapes have it; this one gives a piece the bits of the whole, on any
    number of threads and on any device.
    """
    a, b = adapter.a, adapter.b
    merged = torch.empty(base.shape, dtype=dtype or base.dtype, device=base.device)
    rows = max(1, _BLOCK // max(1, base.shape[1]))
    sums, terms = (a.new_empty((min(rows, len(base)), base.shape[1])) for _ in range(2))
    for lo in range(0, len(base), rows):
        hi = min(lo + rows, len(base))
        total, term = sums[: hi - lo], terms[: hi - lo]
        torch.mul(b[lo:hi, :1], a[0], out=total)
        for rank in range(1, len(a)):
            # Never addmul and the like, which may or may not round between the two operations.
            torch.mul(b[lo:hi, rank : rank + 1], a[rank], out=term)
            total.add_(term)
        total.mul_(adapter.scale).add_(base[lo:hi])
        merged[lo:hi] = total
    return merged


def gradients(
    weight: Float[Tensor, "outputs inputs"], adapter: Adapter
) -> tuple[Float[Tensor, "rank inputs"], Float[Tensor, "outputs rank"]]:
    """Gradients of A and B from that of the merged weight: scale B^T dW and scale dW A^T.

    For a piece of the weight they are the piece's share: a part of B's rows and a summand of A's gradient, or the other
    way round.
    """
    return (adapter.b.T @ weight).mul_(adapter.scale), (weight @ adapter.a.T).mul_(adapter.scale)


def adapters_of(tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]]) -> dict[str, Adapter]:
    """The adapters among the tensors of a version, by the weight that each is added to; whole, views of the tensors.

    Args:
        tensors: by name; those of the policy are passed over.
        shapes: of the policy's complete tensors.
    Raises:
        ModelError: one that adapts no weight of the model, lacks its counterpart or the scale, or does not fit.
    """
    found = {name for name in tensors if name.startswith(PREFIX)}
    made = {}
    for weight in sorted(weights_of(found - {SCALE})):
        names = names_of(weight)
        if lacking := sorted({SCALE, *names} - found):
            raise ModelError(
                f"{names[0]} and {names[1]} belong together, and {SCALE} with them; {lacking[0]} is missing"
            )
        a, b = (tensors[name] for name in names)
        shape = shapes.get(weight)
        if a.dim() != 2 or not len(a) or shape != (*b.shape[:1], *a.shape[1:]) or b.shape[1:] != a.shape[:1]:
            raise ModelError(
                f"{names[0]} {tuple(a.shape)} and {names[1]} {tuple(b.shape)} adapt no weight {weight} {shape} of the "
                "model; train adapters on the model that is served"
            )
        if {a.dtype, b.dtype} != {torch.float32}:
            raise ModelError(f"{names[0]} and {names[1]} are {a.dtype} and {b.dtype}; publish adapters in float32")
        made[weight] = Adapter(a, b, float(tensors[SCALE]))
    return made


def weights_of(names: Iterable[str]) -> set[str]:
    """The weights that tensors of these names adapt.

    Raises:
        ModelError: a name that is none of an adapter's tensors.
    """
    found = set()
    for name in names:
        if not name.startswith(PREFIX) or not name.endswith((_A, _B)):
            raise ModelError(
                f"tensor {name} is of no adapter: names are adapter.<layer>{_A}, adapter.<layer>{_B} and {SCALE}; "
                "publish what nothing computes with as draft.*"
            )
        found.add(name.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B) + ".weight")
    return found


def policy_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a whole version computes with: the policy's, adapted ones merged and rounded to their dtype.

    Raises:
        ModelError: see `adapters_of`.
    """
    policy = {name: tensor for name, tensor in tensors.items() if not is_extra(name)}
    adapters = adapters_of(tensors, {name: tuple(tensor.shape) for name, tensor in policy.items()})
    return policy | {name: merge(policy[name], adapter) for name, adapter in adapters.items()}
