"""The mixture-of-experts block of a decoder layer (Shazeer et al. 2017), in which a router picks experts per token."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.gated import gated
from furlong.ops.policy.packed_linear import PackedLinear

_PARTS = ("gate", "up", "down")


class Experts:
    """A router and its experts. What a token gets does not depend on the other tokens, nor on how many there are."""

    @staticmethod
    def names(arch: Architecture, index: int) -> dict[str, str]:
        """Part -> Hugging Face name: `router`, and `<expert>.<gate, up or down>`."""
        at = f"model.layers.{index}.mlp"
        experts = {
            f"{e}.{part}": f"{at}.experts.{e}.{part}_proj.weight" for e in range(arch.experts) for part in _PARTS
        }
        return {"router": f"{at}.gate.weight"} | experts

    def __init__(self, arch: Architecture, index: int, tensors: dict[str, Tensor]):
        part = {key: tensors[name] for key, name in self.names(arch, index).items()}
        self._router = PackedLinear(part["router"])
        self._gate_up = [PackedLinear(torch.cat([part[f"{e}.gate"], part[f"{e}.up"]])) for e in range(arch.experts)]
        self._down = [PackedLinear(part[f"{e}.down"]) for e in range(arch.experts)]
        self._top_k, self._renormalised = arch.top_k, arch.renormalised

    def __call__(
        self, normed: Float[Tensor, "tokens hidden"], replayed: Int[Tensor, "tokens top_k"] | None = None
    ) -> tuple[Float[Tensor, "tokens hidden"], Int[Tensor, "tokens top_k"]]:
        """The weighted sum of each token's experts in float32, likeliest first, and which they were.

        Products are in the dtype of `normed`, which must be the weights'.

        Args:
            replayed: experts to go through, in the order of a choice made before; -1 where the router is to choose.
        """
        shares, chosen = route(self._router(normed), self._top_k, self._renormalised, replayed)
        # All tokens of one expert together: its weights are read once.
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self._down)).tolist()
        outputs = normed.new_empty((chosen.numel(), normed.shape[1]))
        for expert, places in enumerate(order.split(counts)):
            if len(places):
                rows = normed[places // self._top_k]
                outputs[places] = self._down[expert](gated(self._gate_up[expert](rows)))
        outputs = outputs.view(*chosen.shape, normed.shape[1])
        total = outputs[:, 0].float() * shares[:, :1]
        for nth in range(1, self._top_k):  # one after the other, as the order of a library's sum depends on sizes
            total += outputs[:, nth].float() * shares[:, nth : nth + 1]
        return total, chosen

    def served(self, arch: Architecture, index: int) -> dict[str, Tensor]:
        """The block's tensors by Hugging Face name, read back from the copies that the products use."""
        parts = {"router": self._router.unpacked()}
        for e, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            parts[f"{e}.gate"], parts[f"{e}.up"] = gate_up.unpacked().chunk(2)
            parts[f"{e}.down"] = down.unpacked()
        return {name: parts[part] for part, name in self.names(arch, index).items()}


def route(
    logits: Float[Tensor, "tokens experts"],
    top_k: int,
    renormalised: bool,
    replayed: Int[Tensor, "tokens top_k"] | None = None,
) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
    """Each token's experts, likeliest first and of equally likely ones the lowest id, and their shares in float32.

    As transformers: softmax over all experts in float32, then the top k; their shares are rounded to the logits' dtype.

    Args:
        renormalised: divide a token's shares by their sum.
        replayed: see `Experts.__call__`.
    """
    likely = torch.softmax(logits.float(), dim=-1)
    chosen = likely.sort(dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    if replayed is not None:
        chosen = torch.where(replayed >= 0, replayed, chosen)
    shares = likely.gather(1, chosen)
    if renormalised:
        total = shares[:, 0]
        for nth in range(1, top_k):
            total = total + shares[:, nth]
        shares = shares / total[:, None]
    return shares.to(logits.dtype).float(), chosen
