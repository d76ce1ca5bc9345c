"""Log-probability and entropy of chosen tokens without ever holding all logits.

The vocabulary is cut into blocks: each block's logits are made, used and dropped, in forward and again in backward.
Cutting the vocabulary rather than the rows means that each block of the head's gradient is complete at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

LOGIT_BYTES = 8 * 2**20
"""At most this much for one block of float32 logits (or one block of 64 vocabulary entries, if that is more)."""

Merge = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(logsumexp of the logits at each place, their mean under the softmax, the logit of each token or 0 where another part has
it) -> the same over all parts of the vocabulary."""


def token_logprobs(
    hidden: Float[Tensor, "places hidden"],
    weight: Float[Tensor, "vocab hidden"],
    place: Int[Tensor, " tokens"],
    target: Int[Tensor, " tokens"],
    temperature: float,
    merge: Merge | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:
    """Log-probability (nat) of `target` at `place`, and the entropy (nat) of the distribution at every place.

    log p(v) = z_v - logsumexp(z) and H = logsumexp(z) - sum_v p(v) z_v with z = hidden @ weight^T / temperature.
    Products are in the inputs' dtype, everything after them in float32 (float64 for float64 inputs). The sums over
    the vocabulary are accumulated block by block (online softmax, Milakov & Gimelshein 2018).

    Args:
        hidden: final hidden states where a next token is wanted; several tokens may share a place.
        weight: the LM head; its bias must be absent.
        place: for each token, its row of `hidden`.
        target: token ids in [0, vocab).
        temperature: positive divisor of the logits.
        merge: where `weight` is only a part of the vocabulary, turns this part's sums into those of all parts; `target`
            then counts from the part's first token, is outside [0, vocab) for tokens of other parts, and the gradient of
            `hidden` is this part's share.
    Returns:
        log-probabilities, differentiable in `hidden` and `weight`, and entropies, which are not.
    """
    return _TokenLogprobs.apply(hidden, weight, place, target, temperature, merge)


def _blocks(places: int, vocab: int, item: int) -> Iterator[slice]:
    width = max(64, LOGIT_BYTES // (max(places, 1) * item))
    for start in range(0, vocab, width):
        yield slice(start, min(start + width, vocab))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.t()
    logits = logits.float() if logits.dtype != torch.float64 else logits
    return logits if temperature == 1.0 else logits.div_(temperature)


def gradients(
    hidden: Float[Tensor, "places hidden"],
    weight: Float[Tensor, "vocab hidden"],
    place: Int[Tensor, " tokens"],
    target: Int[Tensor, " tokens"],
    total_R: Float[Tensor, " places"],
    grad_T: Float[Tensor, " tokens"],
    temperature: float,
) -> tuple[Float[Tensor, "places hidden"], Float[Tensor, "vocab hidden"]]:
    """Gradients of `hidden` and `weight`, given those of the log-probabilities that `token_logprobs` defines.

    Args:
        total_R: logsumexp(z) at each place.
    """
    R, V = hidden.shape[0], weight.shape[0]
    grad_T = grad_T.to(total_R.dtype)
    row_R = torch.zeros_like(total_R).index_add_(0, place, grad_T)
    grad_hidden = torch.zeros(hidden.shape, dtype=total_R.dtype, device=hidden.device)
    grad_weight = torch.empty_like(weight)
    for block in _blocks(R, V, total_R.dtype.itemsize):
        slope = _logits(hidden, weight[block], temperature)
        slope.sub_(total_R[:, None]).exp_().mul_(-row_R[:, None])
        inside = (target >= block.start) & (target < block.stop)
        slope.index_put_((place[inside], target[inside] - block.start), grad_T[inside], accumulate=True)
        slope = slope.div_(temperature).to(hidden.dtype)
        grad_hidden += slope @ weight[block]
        torch.mm(slope.t(), hidden, out=grad_weight[block])
    return grad_hidden.to(hidden.dtype), grad_weight


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        place: Tensor,
        target: Tensor,
        temperature: float,
        merge: Merge | None,
    ) -> tuple[Tensor, Tensor]:
        R, V = hidden.shape[0], weight.shape[0]
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        total_R = hidden.new_full((R,), float("-inf"), dtype=wide)
        mean_R = hidden.new_zeros((R,), dtype=wide)
        chosen_T = hidden.new_zeros(target.shape, dtype=wide)
        for block in _blocks(R, V, wide.itemsize):
            logits = _logits(hidden, weight[block], temperature)
            inside = (target >= block.start) & (target < block.stop)
            chosen_T[inside] = logits[place[inside], target[inside] - block.start]
            top_R = logits.amax(1)
            below = logits.sub_(top_R[:, None])
            odds = below.exp()
            mass_R = odds.sum(1)
            part_R = top_R + mass_R.log()
            part_mean_R = top_R + odds.mul_(below).sum(1) / mass_R
            grown_R = torch.logaddexp(total_R, part_R)
            mean_R = mean_R * torch.exp(total_R - grown_R) + part_mean_R * torch.exp(part_R - grown_R)
            total_R = grown_R
        if merge is not None:
            total_R, mean_R, chosen_T = merge(total_R, mean_R, chosen_T)
        entropy_R = total_R - mean_R
        ctx.save_for_backward(hidden, weight, place, target, total_R)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy_R)
        return chosen_T - total_R[place], entropy_R

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return *gradients(*ctx.saved_tensors, grad_T, ctx.temperature), None, None, None, None
