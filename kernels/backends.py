"""What computes attention: the protocol of a backend, and the backend of a name."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from furlong.kernels.trunk import TrunkPlan

NAMES = ("reference", "cpu", "flex", "flash", "triton")


class Backend(Protocol):
    """Attention over the trunk (main keys, by a plan) and inside branches, forward and backward, without autograd.

    "wide" is float64 for float64 inputs and float32 otherwise. Every backend computes from its inputs in wide, and
    rounds nothing: outputs, log-sum-exps and gradients are wide. A query that sees nothing has output 0 and
    log-sum-exp -inf. Both backwards take the JOINT output and log-sum-exp, over all keys that a query sees anywhere
    (trunk, other ranks, branch); they then return exactly their own keys' part of the joint gradient. The joint output
    may be wide or rounded to the inputs' dtype; the joint log-sum-exp is wide.

    Inputs lie in rows, with any strides whose last is 1. Plans say how to order queries and keys (`sorted_queries`,
    `unsorted_queries`, ...); results are in the order of the arguments.
    """

    name: str

    def trunk_forward(
        self,
        q: Float[Tensor, "queries heads head_dim"],
        k: Float[Tensor, "keys kv_heads head_dim"],
        v: Float[Tensor, "keys kv_heads head_dim"],
        plan: TrunkPlan,
        scale: float,
    ) -> tuple[Float[Tensor, "queries heads head_dim"], Float[Tensor, "queries heads"]]: ...

    def trunk_backward(
        self,
        grad: Float[Tensor, "queries heads head_dim"],
        q: Float[Tensor, "queries heads head_dim"],
        k: Float[Tensor, "keys kv_heads head_dim"],
        v: Float[Tensor, "keys kv_heads head_dim"],
        out: Float[Tensor, "queries heads head_dim"],
        lse: Float[Tensor, "queries heads"],
        plan: TrunkPlan,
        scale: float,
    ) -> tuple[
        Float[Tensor, "queries heads head_dim"],
        Float[Tensor, "keys kv_heads head_dim"],
        Float[Tensor, "keys kv_heads head_dim"],
    ]: ...

    def branch_forward(
        self,
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]: ...

    def branch_backward(
        self,
        grad: Float[Tensor, "branches queries heads head_dim"],
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        out: Float[Tensor, "branches queries heads head_dim"],
        lse: Float[Tensor, "branches queries heads"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[
        Float[Tensor, "branches queries heads head_dim"],
        Float[Tensor, "branches entries kv_heads head_dim"],
        Float[Tensor, "branches entries kv_heads head_dim"],
    ]: ...


@runtime_checkable
class MergingBackend(Protocol):
    """A backend that also computes `branch_forward` and its merge with the trunk in one pass."""

    def merged_branch_forward(
        self,
        trunk_out: Float[Tensor, "branches queries heads head_dim"],
        trunk_lse: Float[Tensor, "branches queries heads"],
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]: ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that attention over inputs of `dtype` is accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def backend_of(name: str) -> Backend:
    """The backend of a name, always that one. "triton" computes branches and merge alone: "triton+cpu" names its trunk.

    Raises:
        ValueError: no such name.
        ImportError: what it needs is not installed (the message names it).
    """
    if name == "reference":
        from furlong.kernels.reference_backend import ReferenceBackend

        return ReferenceBackend()
    if name == "cpu":
        from furlong.kernels.cpu_backend import CpuBackend

        return CpuBackend()
    if name == "flex":
        from furlong.kernels.flex_backend import FlexBackend

        return FlexBackend()
    if name == "flash":
        from furlong.kernels.flash_backend import FlashBackend

        return FlashBackend()
    if name == "triton" or name.startswith("triton+"):
        from furlong.kernels.triton_backend import triton_backend

        return triton_backend(name.removeprefix("triton").removeprefix("+") or "flex")
    raise ValueError(f"backend_of: no backend is called {name!r}; choose one of {', '.join(NAMES)}")
