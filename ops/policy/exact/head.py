"""Log-probabilities as the engine records them, with a gradient."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from furlong.ops.policy import head
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.exact import gradients
from furlong.ops.policy.row_bits import threads_for_products
from furlong.ops.policy.sampling import chances_of, logprobs_of

ROWS = 64
"""Places whose logits are there at a time."""


class TokenLogprobs(torch.autograd.Function):
    """Log-probability (nat) of each target at its place, and the entropy at every place, which has no gradient.

    The former is what the engine records for a token that it draws at this temperature without cut-offs, rounded to
    float32 as the lake keeps it.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Float[Tensor, "places hidden"],
        norm: Float[Tensor, " hidden"],
        weight: Float[Tensor, "vocab hidden"],
        decoder: Decoder,
        place: Int[Tensor, " tokens"],
        target: Int[Tensor, " tokens"],
        temperature: float,
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:
        logprobs = torch.empty(place.shape)
        total, entropy = torch.empty(len(x)), torch.empty(len(x))
        for start in range(0, len(x), ROWS):
            rows = slice(start, min(start + ROWS, len(x)))
            with threads_for_products():
                logits = decoder.logits(x[rows]).float()
            chances = chances_of(logits, temperature)
            here = ((place >= rows.start) & (place < rows.stop)).nonzero().squeeze(1)
            logprobs[here] = logprobs_of(chances, target[here], place[here] - start).float()
            flat = chances.flatten(1)[:, : logits.shape[1]]
            total[rows] = logits.amax(dim=-1) / temperature - flat.amax(dim=-1).log()
            entropy[rows] = total[rows] - torch.linalg.vecdot(flat, logits) / temperature
        ctx.save_for_backward(x, norm, weight, place, target, total)
        ctx.decoder, ctx.temperature = decoder, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, norm, weight, place, target, total = ctx.saved_tensors
        eps = ctx.decoder.architecture.norm_eps
        hidden = gradients.normed(x, norm, eps)
        back, grad_weight = head.gradients(hidden, weight, place, target, total, grad, ctx.temperature)
        grad_x, grad_norm = gradients.rms_norm(x, norm, eps, back.float())
        return grad_x, grad_norm.to(norm.dtype), grad_weight, None, None, None, None
