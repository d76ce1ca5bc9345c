"""How far a draft's distributions are from the policy's, and the gradient of that, without ever holding all logits.

A *pair* is one distribution of the draft (an anchor at a depth, a slot of a block) with the policy's it should equal. Pairs
are sorted by teacher, whose logits are made once for all depths that learn from it, chunk by chunk; the gradient is made in
the same pass, for the loss is a weighted sum whose weights are known beforehand. So no logits are kept, and none are made
again: for K depths 3 K + 1 products with a head per row in place of the 6 K of a recomputed loss.

With p the policy's distribution at the rollout's temperature T, q = softmax(draft logits / T), and D the draft's vocabulary:

    ce = -sum over D of p_D log q, p_D = p restricted to D and renormalised    slope (q - p_D) / T
    tv = 1 - sum over D of min(p, q)                slope q (s - 1[q < p]) / T with s = sum q 1[q < p]

tv is the total variation of p and q, and one minus the chance that a proposal is accepted (Leviathan et al. 2023, "Fast
Inference from Transformers via Speculative Decoding", corollary 3.6). It vanishes for a draft that is far off, therefore
`mixed` begins with ce.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

LOGIT_BYTES = 32 * 2**20
"""At most this much for one block of logits, or one row if that is more."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Which distributions of the draft learn from which of the policy's."""

    student: Int[Tensor, " pairs"]
    """Row of the draft's normed states."""
    teacher: Int[Tensor, " pairs"]
    """Row of the policy's; ascending."""
    depth: Int[Tensor, " pairs"]
    """How far ahead, from 0."""


@dataclass(frozen=True, eq=False)
class Measured:
    """Of each pair; nothing here has a gradient."""

    ce: Float[Tensor, " pairs"]
    """Nats; with a reduced vocabulary, to the restricted teacher."""
    accepted: Float[Tensor, " pairs"]
    """Chance that a token proposed from q is accepted, sum min(p, q)."""
    agreed: Bool[Tensor, " pairs"]
    """Whether draft and policy have the same likeliest token."""
    lost: Float[Tensor, " pairs"]
    """The policy's probability of tokens outside the draft's vocabulary, by which acceptance is bounded."""


def tv_share(loss: str, progress: float) -> float:
    """Share of tv in the loss.

    Args:
        loss: of the settings: `ce`, `tv`, or `mixed`, which goes from the first to the second in proportion.
        progress: share of the run that is over, 0 to 1.
    """
    return {"ce": 0.0, "tv": 1.0, "mixed": min(1.0, max(0.0, progress))}[loss]


def draft_loss(
    student: Float[Tensor, "states hidden"],
    head: Float[Tensor, "draft_vocab hidden"],
    teacher: Float[Tensor, "rows hidden"],
    policy_head: Float[Tensor, "vocab hidden"],
    pairs: Pairs,
    weight: Float[Tensor, " pairs"],
    *,
    temperature: float,
    tv: float,
    ids: Int[Tensor, " draft_vocab"] | None = None,
    logit_bytes: int = LOGIT_BYTES,
) -> tuple[Float[Tensor, ""], Measured]:
    """Sum over pairs of weight * ((1 - tv) * ce + tv * total variation); without pairs 0, which still has a gradient.

    Products are in the inputs' dtypes, everything after them in float32 (float64 for float64 inputs).

    Args:
        student: the draft's states after its final norm.
        teacher: the policy's, after its final norm; with `policy_head` it gets no gradient.
        weight: of each pair in the loss, such as a depth's weight over its global count.
        temperature: of the rollout, above 0.
        tv: share of the total variation in the loss; see `tv_share`.
        ids: the policy's id of each of the draft's tokens; None where they are the same.
        logit_bytes: the most that one block of logits may take. Results depend on it by the order of addition alone.
    Returns:
        the loss, differentiable once in `student` and `head`, and what was measured of each pair.
    """
    made = _DraftLoss.apply(
        student, head, teacher.detach(), policy_head.detach(), pairs, weight, temperature, tv, ids, logit_bytes
    )
    return made[0], Measured(*made[1:])


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, student: Tensor, head: Tensor, teacher: Tensor, policy_head: Tensor, pairs: Pairs,
        weight: Tensor, temperature: float, tv: float, ids: Tensor | None, logit_bytes: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        wide = torch.float64 if student.dtype == torch.float64 else torch.float32
        count = len(pairs.student)
        ce, accepted, lost = student.new_zeros(3, count, dtype=wide)
        agreed = torch.zeros(count, dtype=torch.bool, device=student.device)
        grad_student, grad_head = torch.zeros(student.shape, dtype=wide, device=student.device), torch.zeros_like(head)
        weight = weight.to(wide)
        rows = max(1, logit_bytes // (policy_head.shape[0] * wide.itemsize))
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            of, place = torch.unique_consecutive(pairs.teacher[part], return_inverse=True)
            p, kept, top = _teacher(teacher[of], policy_head, temperature, ids, wide)
            states = student[pairs.student[part]]
            p, kept = p[place], kept[place]
            logits = (states @ head.t()).to(wide).div_(temperature)
            best = logits.argmax(1)
            agreed[part] = (best if ids is None else ids[best]) == top[place]
            lost[part] = 1 - kept
            ce[part], accepted[part], slope = _compared(logits, p, kept[:, None], tv)
            slope = slope.mul_(weight[part, None] / temperature).to(student.dtype)
            grad_student.index_add_(0, pairs.student[part], (slope @ head).to(wide))
            grad_head.addmm_(slope.t(), states)
        ctx.save_for_backward(grad_student.to(student.dtype), grad_head)
        ctx.mark_non_differentiable(ce, accepted, agreed, lost)
        loss = (weight * ((1 - tv) * ce + tv * (1 - accepted))).sum()
        return loss, ce, accepted, agreed, lost

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        of_student, of_head = ctx.saved_tensors
        return of_student * grad, of_head * grad, *(None,) * 8


def _teacher(
    states: Tensor, policy_head: Tensor, temperature: float, ids: Tensor | None, wide: torch.dtype
) -> tuple[Float[Tensor, "rows draft_vocab"], Float[Tensor, " rows"], Int[Tensor, " rows"]]:
    """The policy's distribution restricted to the draft's vocabulary, the share of it that is there, its likeliest id."""
    logits = (states @ policy_head.t()).to(wide).div_(temperature)
    top = logits.argmax(1)
    if ids is None:
        return logits.softmax(1), torch.ones_like(logits[:, 0]), top
    inside = logits[:, ids]
    kept = (inside.logsumexp(1) - logits.logsumexp(1)).exp_().clamp_(max=1)
    return inside.softmax(1), kept, top


def _compared(
    logits: Float[Tensor, "pairs draft_vocab"], p: Float[Tensor, "pairs draft_vocab"], kept: Float[Tensor, "pairs 1"],
    tv: float,
) -> tuple[Float[Tensor, " pairs"], Float[Tensor, " pairs"], Float[Tensor, "pairs draft_vocab"]]:  # fmt: skip
    """ce and acceptance, and the slope of the mixed loss in the logits; uses up what it is given."""
    log_q = logits.log_softmax(1)
    ce = -torch.linalg.vecdot(p, log_q)
    q = log_q.exp_()
    short = q < p * kept
    accepted = torch.minimum(q, p * kept).sum(1)
    # Towards each loss's own slope; where one has no share, its numbers are not made.
    slope = (q - p).mul_(1 - tv) if tv < 1 else torch.zeros_like(q)
    if tv > 0:
        below = (q * short).sum(1, keepdim=True)
        slope.add_(q * (below - short.to(q.dtype)), alpha=tv)
    return ce, accepted, slope
