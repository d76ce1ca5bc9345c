"""The backend `triton`: Triton kernels for the branch part and the merge; another backend, by name, for the trunk."""

from __future__ import annotations

from importlib.util import find_spec

from jaxtyping import Bool, Float
from torch import Tensor

from furlong.kernels.backends import Backend
from furlong.kernels.trunk import TrunkPlan

TRUNKS = ("flex", "flash", "cpu", "reference")


class TritonBackend:
    """Branches and merge by Triton, the trunk by `trunk`; `name` records both ("triton+flex").

    On CUDA the kernels are compiled; tensors on the CPU go through Triton's interpreter, which is slow and for tests.

    Args:
        trunk: the backend of the trunk. It is never exchanged for another one: where it cannot compute, it raises.
    Raises:
        ImportError: triton is not installed.
    """

    def __init__(self, trunk: Backend) -> None:
        if find_spec("triton") is None:
            raise ImportError(
                "the backend triton needs the package triton, which is not installed: install triton==3.9.0 (Linux), "
                "or choose the backend cpu, flex or reference"
            )
        self.trunk = trunk
        self.name = f"triton+{trunk.name}"

    def trunk_forward(self, q, k, v, plan: TrunkPlan, scale: float) -> tuple[Tensor, Tensor]:
        """`Backend.trunk_forward`, by the trunk's backend."""
        return self.trunk.trunk_forward(q, k, v, plan, scale)

    def trunk_backward(self, grad, q, k, v, out, lse, plan: TrunkPlan, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """`Backend.trunk_backward`, by the trunk's backend."""
        return self.trunk.trunk_backward(grad, q, k, v, out, lse, plan, scale)

    def branch_forward(self, q, k, v, sees: Bool[Tensor, "queries entries"], scale: float) -> tuple[Tensor, Tensor]:
        """`Backend.branch_forward`."""
        return _kernels(q).branch_forward(q, k, v, sees, scale)

    def merged_branch_forward(
        self,
        trunk_out: Float[Tensor, "branches queries heads head_dim"],
        trunk_lse: Float[Tensor, "branches queries heads"],
        q: Float[Tensor, "branches queries heads head_dim"],
        k: Float[Tensor, "branches entries kv_heads head_dim"],
        v: Float[Tensor, "branches entries kv_heads head_dim"],
        sees: Bool[Tensor, "queries entries"],
        scale: float,
    ) -> tuple[Float[Tensor, "branches queries heads head_dim"], Float[Tensor, "branches queries heads"]]:
        """`branch_forward` and the merge with the trunk's (out, lse) in one pass: the joint (out, lse), wide."""
        return _kernels(q).branch_forward(q, k, v, sees, scale, (trunk_out, trunk_lse))

    def branch_backward(self, grad, q, k, v, out, lse, sees, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """`Backend.branch_backward`, from the joint out and lse."""
        return _kernels(q).branch_backward(grad, q, k, v, out, lse, sees, scale)


def triton_backend(trunk: str = "flex") -> TritonBackend:
    """The backend `triton`, or `triton+<trunk>`.

    Raises:
        ValueError: a trunk that is no backend of its own.
        ImportError: what either part needs is not installed.
    """
    from furlong.kernels.backends import backend_of

    if trunk not in TRUNKS:
        raise ValueError(f"the backend triton+{trunk} does not exist: choose the trunk from {', '.join(TRUNKS)}")
    return TritonBackend(backend_of(trunk))


def _kernels(q: Tensor):
    """The module of the kernels, imported only now: it needs triton.

    Raises:
        RuntimeError: tensors on the CPU, and kernels that were compiled for a GPU.
    """
    from furlong.kernels import triton_branch

    if not q.is_cuda and not triton_branch.INTERPRETED:
        raise RuntimeError(
            f"the backend triton got tensors on {q.device.type}: its kernels run on CUDA, and on the CPU only through "
            "Triton's interpreter; set TRITON_INTERPRET=1 before the process starts, or choose the backend cpu"
        )
    return triton_branch
