"""A micro-batch through the engine's decoder, under autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.decoder import EMBEDDING, FINAL_NORM, HEAD, Decoder
from furlong.ops.policy.exact.attention import Attend, Attention
from furlong.ops.policy.exact.head import TokenLogprobs
from furlong.ops.policy.exact.layers import Context, Finish, Project, attention_weights, block_weights
from furlong.ops.policy.exact.tree import Tree, unpacked
from furlong.ops.policy.packing import MicroBatch
from furlong.ops.policy.replay import Replay, naming
from furlong.ops.policy.row_bits import threads_for_products

Embed = Callable[[Int[Tensor, " nodes"]], Float[Tensor, "nodes hidden"]]
See = Callable[[int, Float[Tensor, "nodes hidden"], Int[Tensor, " nodes"]], None]
"""(layer, the residual stream after it, of which of the micro-batch's rows * width tokens); must leave it as it is."""


def exact_logprobs(
    decoder: Decoder, weights: Mapping[str, Tensor], embed: Embed, micro: MicroBatch, temperature: float,
    see: See | None = None,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " places"]]:  # fmt: skip
    """Log-probabilities (nat, float32) of the wanted tokens, bit for bit those that an engine with this decoder records,
    and the entropy at each place.

    The engine gives a token the same bits whether it is fed alone or with others, and whatever is computed beside it, so
    one pass over whole sequences will do, in which every token is computed once.

    Args:
        weights: the decoder's tensors by Hugging Face name, with the same bits; the gradient goes to these.
        embed: looks tokens up in the embedding.
        see: is shown what every layer gives.
    Raises:
        RoutingError: recorded experts are of another model, or a token did not go through them.
    """
    arch, tree = decoder.architecture, unpacked(micro)
    replay = _replay(arch, tree, micro)
    # As the engine does: where threads share a row, some functions compute what is left over of a vector otherwise.
    with threads_for_products():
        x = _through_layers(decoder, weights, embed(tree.tokens).float(), tree, replay, see)
    if replay is not None:
        replay.require_checked(arch.expert_layers)
    head = weights[EMBEDDING if arch.tied else HEAD]
    return TokenLogprobs.apply(
        x[tree.places], weights[FINAL_NORM], head, decoder, micro.place, micro.target, temperature
    )


def _through_layers(
    decoder: Decoder, weights: Mapping[str, Tensor], x: Tensor, tree: Tree, replay: Replay | None, see: See | None
) -> Float[Tensor, "nodes hidden"]:
    arch = decoder.architecture
    turn, attention = decoder.turns(tree.positions), Attention(arch, decoder.dtype, tree)
    for index, layer in enumerate(decoder.layers):
        replayed = replay.recorded(index) if replay is not None and index in arch.expert_layers else None
        context = Context(arch, index, layer, turn, replayed)
        heads = Project.apply(context, x, *(weights[name] for name in attention_weights(arch, index)))
        seen = Attend.apply(heads, attention)
        x, chosen = Finish.apply(context, x, seen, *(weights[name] for name in block_weights(arch, index)))
        if replayed is not None:
            used = torch.zeros(len(x), arch.experts, dtype=torch.bool)
            replay.check(index, used.scatter_(1, chosen, True))
        if see is not None:
            see(index, x.detach(), tree.flat)
    return x


def _replay(arch: Architecture, tree: Tree, micro: MicroBatch) -> Replay | None:
    if micro.experts is None:
        return None
    words = naming(micro)
    return Replay(arch.expert_layers, micro.experts.flatten(0, 1)[tree.flat], lambda nth: words(int(tree.flat[nth])))
