"""The output head over a vocabulary that is cut over the tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from jaxtyping import Float
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from furlong.ops.policy.head import token_logprobs
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.parallel import Place


def span(vocabulary: int, place: Place) -> tuple[int, int]:
    """First and last (exclusive) token whose row this rank holds; what its share has beyond them is padding."""
    share = padded(vocabulary, place) // place.layout.tp
    return min(place.tp * share, vocabulary), min((place.tp + 1) * share, vocabulary)


def padded(vocabulary: int, place: Place) -> int:
    """Rows of the embedding on all ranks together: equally many on each."""
    return -(-vocabulary // place.layout.tp) * place.layout.tp


def vocab_logprobs(
    hidden: Float[Tensor, "width rows hidden"],
    weight: Float[Tensor, "share hidden"],
    feed: Feed,
    place: Place,
    vocabulary: int,
    temperature: float,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:
    """Log-probabilities (nat) of the rank's wanted tokens, and the entropy at its places; see `ops.policy.head`.

    Every tensor-parallel rank gets the same numbers, and all of them have to take the same loss of them: the gradient of
    `hidden` is the sum of what each rank's part of the vocabulary contributes. Under context parallelism each rank has
    the tokens that its own positions predict, so that losses add up over cp as they do over dp.

    Args:
        hidden: after the final norm; with sequence parallelism only this rank's part of the width.
        weight: this rank's rows of the head, padding included.
    """
    layout = place.layout
    if layout.sp:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
    wanted = hidden.transpose(0, 1).flatten(0, 1).index_select(0, feed.places)
    if layout.tp > 1 and not layout.sp:
        wanted = copy_to_tensor_model_parallel_region(wanted)
    start, stop = span(vocabulary, place)
    rows = weight if stop - start == weight.shape[0] else weight[: stop - start]
    merge = None
    if layout.tp > 1:

        def merge(total: Tensor, mean: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return _merge(total, mean, chosen, place)

    return token_logprobs(wanted, rows, feed.place, feed.target - start, temperature, merge)


def _merge(total_R: Tensor, mean_R: Tensor, chosen_T: Tensor, place: Place) -> tuple[Tensor, Tensor, Tensor]:
    mine = torch.stack([total_R, mean_R])
    parts = [torch.empty_like(mine) for _ in range(place.layout.tp)]
    dist.all_gather(parts, mine, group=place.tp_group)
    totals, means = torch.stack(parts).unbind(1)
    whole_R = torch.logsumexp(totals, 0)
    mean_R = (torch.exp(totals - whole_R) * means).sum(0)
    # One rank has the token and the others add zeros, so that the sum is exact in any order.
    dist.all_reduce(chosen_T, group=place.tp_group)
    return whole_R, mean_R, chosen_T
