"""Routing replay: a token is trained through the experts that it was sampled through, whatever the router prefers now.

An engine and a trainer round differently, so their routers choose differently where two experts are nearly equal, and
the token's whole future differs then. Replay takes the engine's choice and this router's shares of it (R3, "rollout
routing replay", Ma et al. 2025), so the router is trained all the same. It is checked in every layer, for every token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.ops.policy.packing import MicroBatch
from furlong.ops.policy.routing import RoutingError
from furlong.ops.protocols import TrainBatch


@dataclass
class Replay:
    """The recorded experts of what one rank routes of one micro-batch."""

    layers: tuple[int, ...]
    """Index in the model of each layer that has experts, ascending; not only of those that this rank has."""
    experts: Int[Tensor, "tokens layers top_k"]
    """In the order in which this rank routes its tokens; -1, all along a token, where none are recorded."""
    name: Callable[[int], str]
    """The n-th of these tokens in words, for errors."""
    checked: set[int] = field(default_factory=set)
    """Layers that have been checked."""

    def __post_init__(self) -> None:
        if self.experts.shape[1] != len(self.layers):
            raise RoutingError(
                f"experts of {self.experts.shape[1]} layers are recorded, the model has experts in {len(self.layers)} "
                "layers; train the model that sampled"
            )

    @staticmethod
    def of(micro: MicroBatch, layers: tuple[int, ...]) -> Replay | None:
        """For a rank that routes all tokens, row by row; None without a record."""
        return micro.experts if micro.experts is None else Replay(layers, micro.experts.flatten(0, 1), naming(micro))

    def recorded(self, layer: int) -> Int[Tensor, "tokens top_k"]:
        """The recorded experts in one layer."""
        return self.experts[:, self.layers.index(layer)]

    def check(self, layer: int, used: Bool[Tensor, "tokens experts"]) -> None:
        """Require that each token with a record went through exactly those experts in this layer.

        Args:
            used: which experts have computed each token.
        Raises:
            RoutingError: names the layer, and the first token that did not, by trajectory and position.
        """
        ids = self.recorded(layer)
        wanted = torch.zeros_like(used).scatter_(1, ids.clamp(min=0), True)
        wrong = (ids[:, 0] >= 0) & (wanted != used).any(1)
        if wrong.any():
            first = int(wrong.nonzero()[0])
            raise RoutingError(
                f"layer {layer}, {self.name(first)}: recorded with experts {wanted[first].nonzero().flatten().tolist()}, "
                f"went through {used[first].nonzero().flatten().tolist()} ({int(wrong.sum())} of {len(wrong)} tokens "
                "differ); the trainer's replay is at fault: report it, nothing was trained"
            )
        self.checked.add(layer)

    def require_checked(self, layers: tuple[int, ...]) -> None:
        """Raise RoutingError unless each of these layers has been checked."""
        if missing := sorted(set(layers) - self.checked):
            raise RoutingError(
                f"layers {missing} have not replayed the recorded experts; the trainer's replay is at fault: report it"
            )


def naming(micro: MicroBatch) -> Callable[[int], str]:
    """Names a token, given its flat index into rows * width, by the first trajectory of the batch that it is part of."""

    def name(token: int) -> str:
        width = micro.tokens.shape[1]
        row, at = divmod(token, width)
        sees = (micro.places // width == row) & micro.visible[row, 0, micro.places % width, at]
        owners = micro.trajectory.cpu()[sees[micro.place].cpu()]  # which token is whose may be kept on the CPU
        return f"trajectory number {int(owners.min())} of the batch, token {int(micro.positions[row, at])}"

    return name


def route(
    logits: Float[Tensor, "tokens experts"],
    top_k: int,
    renormalised: bool,
    recorded: Int[Tensor, "tokens top_k"] | None,
) -> tuple[Float[Tensor, "tokens top_k"], Int[Tensor, "tokens top_k"]]:
    """Each token's experts and their shares, which the router's gradient comes from.

    Shares are softmax(logits) over all experts at the token's own, in float32 (float64 for float64 logits), rounded to
    the logits' dtype; without a record the `top_k` likeliest, of equally likely ones the lowest id first.

    Args:
        renormalised: divide a token's shares by their sum.
        recorded: experts to take instead; -1, all along a token, for none. None for no token at all.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    likely = torch.softmax(logits, dim=-1, dtype=wide)
    chosen = likely.detach().sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    if recorded is not None:
        chosen = torch.where(recorded >= 0, recorded, chosen)
    shares = likely.gather(1, chosen)
    if renormalised:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return shares.to(logits.dtype), chosen


def check_records(batch: TrainBatch, layers: tuple[int, ...], top_k: int, experts: int) -> None:
    """Raise RoutingError unless each record of the batch is of a model with these experts.

    Args:
        layers: index of each layer that has experts; none for a model without.
        top_k: experts per token.
        experts: experts to choose from.
    """
    for name, record in zip(batch.trajectory_ids, batch.routing, strict=True):
        if record is not None and (record.layers, record.top_k, record.experts) != (layers, top_k, experts):
            raise RoutingError(
                f"trajectory {name}: its experts were recorded as {record.top_k} of {record.experts} in layers "
                f"{list(record.layers)}, this model has {top_k} of {experts} in {list(layers)}; train the model that sampled"
            )
