"""Routing replay in a megatron-core model (`ops/policy/replay.py`).

A layer gets the micro-batch that it is computing as an argument (`feed.Feed`), in the forward and when activations are
computed again; so each router knows whose experts to take, however many micro-batches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state

from furlong.ops.policy.replay import Replay, naming
from furlong.resources.trainers.megatron.feed import Feed


def replay_of(feed: Feed, layers: tuple[int, ...], sequence_parallel: bool) -> Replay | None:
    """What this rank's routers follow in a micro-batch, the same object for all its layers; None without a record.

    Args:
        layers: index in the whole model of each layer that has experts.
        sequence_parallel: routers see this rank's part of the positions only.
    """
    return feed.once("replay", lambda: None if feed.experts is None else _replay(feed, layers, sequence_parallel))


def _replay(feed: Feed, layers: tuple[int, ...], sequence_parallel: bool) -> Replay:
    """Routers see positions first, then rows."""
    rows, width = feed.tokens.shape
    order = torch.arange(rows * width, device=feed.experts.device).view(rows, width).t()
    if sequence_parallel:
        parts = parallel_state.get_tensor_model_parallel_world_size()
        order = order.chunk(parts)[parallel_state.get_tensor_model_parallel_rank()]
    order = order.flatten()
    words = naming(feed) if feed.documents is None else _in_documents(feed)
    return Replay(layers, feed.experts.flatten(0, 1)[order], lambda token: words(int(order[token])))


def _in_documents(feed: Feed) -> Callable[[int], str]:
    def name(token: int) -> str:
        owner = int(feed.owners[feed.documents[0, token]])
        return f"trajectory number {owner} of the batch, token {int(feed.positions[0, token])}"

    return name
