"""One trunk for several passes, whose gradients go home together: one ring for all depths instead of one each.

Every depth of test-time training looks at the same main keys and values. Their gradients are summed here over the
passes, block by block, and travel once, when the last pass's backward is done: (ranks - 1) hops in place of passes *
(ranks - 1). The price is memory: a rank keeps the sums for every rank's block, 2 * ranks * rows * kv_heads * head_dim
wide elements, which do not shrink as ranks are added. (Recomputing each block's probabilities on the one ring would
keep memory flat at 7 matrix products per pair instead of 5; long sequences are bound by those.) Gathered, the keys and
values also come only once, for all forward and backward passes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.kernels.backends import wide
from furlong.kernels.branch_attention import Entries
from furlong.kernels.branches import BranchLayout
from furlong.kernels.context_parallel import Travelling, each, plan_call
from furlong.kernels.gathered import CARRIERS, Block
from furlong.kernels.layout import ContextLayout
from furlong.kernels.ring import ContextParallelError, Ring


class SharedTrunk:
    """Main keys and values of one batch, for all passes over them. Make one per batch; all ranks do.

    Args:
        k_main, v_main: at this rank's rows.
        strategy: as for `cp_branch_attention`, "ulysses" excepted.
        scale, backend: as there, for all passes.
    Raises:
        ContextParallelError: ulysses, which has no blocks to sum for; set "ring", "gather" or bytes.
    """

    def __init__(
        self,
        k_main: Float[Tensor, "rows kv_heads head_dim"],
        v_main: Float[Tensor, "rows kv_heads head_dim"],
        *,
        layout: ContextLayout,
        ring: Ring,
        strategy: str | int = "ring",
        scale: float | None = None,
        backend: str,
    ) -> None:
        if strategy == "ulysses":
            raise ContextParallelError('SharedTrunk has no use for "ulysses"; set strategy "ring", "gather" or bytes')
        self._layout, self._ring, self._strategy, self._scale, self._backend = layout, ring, strategy, scale, backend
        self._sums = Sums(ring)
        self.k_main, self.v_main = _Share.apply(k_main, v_main, self._sums)

    def attend(
        self,
        q: Float[Tensor, "branches queries heads head_dim"],
        k_branch: Entries,
        v_branch: Entries,
        *,
        branches: BranchLayout,
    ) -> Float[Tensor, "branches queries heads head_dim"]:
        """One pass; the same as `cp_branch_attention` over these main keys and values.

        Raises:
            ContextParallelError: as there.
        """
        k, v = self.k_main, self.v_main
        job = plan_call(
            q, k, v, k_branch, v_branch, self._layout, branches, self._ring, self._strategy, self._scale,
            self._backend, self._sums,
        )  # fmt: skip
        return Travelling.apply(job, q, k, v, *each(k_branch), *each(v_branch))


class Sums:
    """What the passes share: gradients until they go home, and blocks once they are all here.

    Without a way back to the tensors of autograd's graph, which holds it: the two would keep each other for ever.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._sums: dict[int, Block] = {}
        self._kept: list[tuple[int, Block]] = []
        self._first = 0
        """Number of the first pass's call: ranks that make several trunks agree by it on which one they mean."""

    def blocks(self, strategy: str, key: Tensor, value: Tensor) -> Iterator[tuple[int, Block]]:
        """The trunk's blocks as `gathered.CARRIERS` gives them; gathered ones are kept for the next pass."""
        self._first = self._first or self._ring.number
        if self._kept:
            yield from self._kept
            return
        come, _ = CARRIERS[strategy]
        seen = []
        for source, block in come(self._ring, key.detach(), value.detach()):
            if strategy == "gather":
                seen.append((source, block))
            yield source, block
        self._kept = seen

    def add(self, source: int, part: Block) -> None:
        """Keep a pass's part of the gradients of rank `source`'s block."""
        if source in self._sums:
            for mine, more in zip(self._sums[source], part, strict=True):
                mine.add_(more)
        else:
            self._sums[source] = part

    def home(self, like: Tensor) -> Block:
        """Gradients of this rank's own keys and values, from all ranks and passes; all ranks make this call together."""
        ring = self._ring
        with ring.call(f"gradients of the shared trunk of number {self._first}", {"key": tuple(like.shape)}):
            homeward = CARRIERS["gather" if self._kept else "ring"][1](ring)
            for hop in range(ring.ranks):
                source = (ring.rank - hop) % ring.ranks
                part = self._sums.pop(source, None)
                homeward.add(source, _nothing(like) if part is None else part)
            return homeward.home()


def _nothing(like: Tensor) -> Block:
    return tuple(torch.zeros(like.shape, dtype=wide(like.dtype), device=like.device) for _ in range(2))


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, key: Tensor, value: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        ctx.sums = sums
        return key.view_as(key), value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, key_grad: Tensor, value_grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dk, dv = ctx.sums.home(key_grad)
        # Whoever else reads the shared tensors gives them an ordinary gradient; from the passes it is 0.
        return dk.to(key_grad.dtype) + key_grad, dv.to(value_grad.dtype) + value_grad, None
