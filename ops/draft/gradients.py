"""One micro-batch of a draft's training: states of all depths, loss, and gradients into the draft's parameters.

A step's loss is the weighted mean over depths of the mean over the tokens that the depth learns anywhere:

    sum over d of w_d / N_d * (sum of the depth's losses),   w_d = decay^(d-1) / sum of decay^(d'-1) over d' with N_d' > 0

with N_d counted over all micro-batches, DP and CP ranks before the first backward pass. So gradients are added up, over
micro-batches and over ranks, and never averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.kernels.layout import ContextLayout
from furlong.kernels.ring import Ring
from furlong.ops.draft.draft_loss import LOGIT_BYTES, Measured, Pairs, draft_loss, tv_share
from furlong.ops.draft.inputs import DraftInputError, DraftInputs, depths_of, one_rank
from furlong.ops.draft.module import DraftModule
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.unroll import Place, unroll

MEASURES = ("tokens", "ce", "accepted", "agreed", "lost")
"""Rows of `DraftLoss.sums`: how many tokens, and the sums of `Measured` over them."""


@dataclass(frozen=True, eq=False)
class DraftLoss:
    """Of one micro-batch on one rank, or of several added up."""

    loss: float
    """Its share of the step's loss: shares add up to it."""
    sums: Float[Tensor, "measures depths"]
    """See MEASURES; by depth, in float64 on the CPU."""
    reason: str = ""
    """Why nothing was learnt; empty if something was."""

    def __add__(self, other: DraftLoss) -> DraftLoss:
        return DraftLoss(self.loss + other.loss, self.sums + other.sums, self.reason and other.reason)

    def means(self) -> dict[str, list[float]]:
        """ce (nats), accepted (the expected acceptance), agreed and lost, by depth, as far as any depth learnt."""
        learnt = self.sums[0] > 0
        return {
            name: (values[learnt] / self.sums[0][learnt]).tolist()
            for name, values in zip(MEASURES[1:], self.sums[1:], strict=True)
        }


def depth_weights(counts: Int[Tensor, " depths"], decay: float) -> Float[Tensor, " depths"]:
    """w_d / N_d, 0 for a depth that learns nothing."""
    share = decay ** torch.arange(len(counts), dtype=torch.float64) * (counts > 0)
    return torch.where(counts > 0, share / share.sum() / counts, 0.0)


def draft_gradients(
    module: DraftModule,
    inputs: DraftInputs,
    settings: DraftSettings,
    counts: Int[Tensor, " depths"],
    embedding: Float[Tensor, "vocab hidden"],
    head: Float[Tensor, "vocab hidden"],
    ring: Ring | None = None,
    layout: ContextLayout | None = None,
    *,
    progress: float = 0.0,
    backend: str = "cpu",
    logit_bytes: int = LOGIT_BYTES,
) -> DraftLoss:
    """Add a micro-batch's gradients to the module's parameters. Nothing else gets one, and no random state is used.

    Under context parallelism all ranks of the ring call this together, also those that have padding alone. A loss that
    is not finite is returned as it is, for ranks to agree on what to do.

    Args:
        inputs: this rank's rows.
        counts: N_d of the whole step: `local_counts` added up over micro-batches, DP and CP. Without any, nothing is
            computed and the result says why, on all ranks alike.
        embedding, head: the policy's, whole.
        ring, layout: of the context-parallel group and how the micro-batch lies on it; None for one rank.
        progress: share of the run that is over, for settings.loss `mixed`.
        backend: of attention, a name that `kernels.backends.backend_of` knows.
    Raises:
        DraftInputError: inputs that do not fit, or more tokens to learn than were counted.
        ContextParallelError: on all ranks, if one is gone or disagrees.
    """
    depths = depths_of(module.shape, settings.depths)
    inputs.check(module.shape)
    if len(counts) != depths:
        raise DraftInputError(f"draft: counts of {len(counts)} depths where {depths} are trained; use local_counts")
    if (ring is None) != (layout is None):
        raise DraftInputError("draft: ring and layout belong together; give both, or neither for one rank")
    if not bool(counts.any()):
        return DraftLoss(0.0, torch.zeros(len(MEASURES), depths, dtype=torch.float64), "no token to learn in this step")
    place = Place(layout or one_rank(inputs.rows), ring or Ring(None, deadline=60.0), backend)
    # A depth that nobody learns needs no pass; later ones learn no more than earlier ones.
    reached = depths if module.shape.kind == "block" else int(counts.nonzero().max()) + 1
    made = unroll(module, inputs, reached, embedding, place)
    weight = depth_weights(counts.cpu(), settings.depth_decay)
    found = torch.bincount(made.pairs.depth.cpu(), minlength=depths)
    if bool((found > counts.cpu()).any()):
        raise DraftInputError(
            f"draft: depths learn {found.tolist()} tokens here, {counts.tolist()} were counted in the whole step; add "
            "local_counts up over all micro-batches and ranks"
        )
    loss, measured = draft_loss(
        made.states, module.head, made.teacher, head, made.pairs, weight.to(made.states.device)[made.pairs.depth],
        temperature=inputs.temperature, tv=tv_share(settings.loss, progress), ids=module.target_ids(),
        logit_bytes=logit_bytes,
    )  # fmt: skip
    loss.backward()
    return DraftLoss(float(loss.detach()), _sums(measured, made.pairs, depths))


def _sums(measured: Measured, pairs: Pairs, depths: int) -> Float[Tensor, "measures depths"]:
    values = [torch.ones_like(measured.ce), measured.ce, measured.accepted, measured.agreed, measured.lost]
    stacked = torch.stack([value.to("cpu", torch.float64) for value in values])
    return stacked.new_zeros(len(MEASURES), depths).index_add_(1, pairs.depth.cpu(), stacked)
