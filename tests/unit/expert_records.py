"""Batches whose trajectories say which experts they went through: drawn at random, or as a router chose."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from furlong.ops.policy.routing import decode, encode
from furlong.ops.protocols import Routing, TrainBatch

LAYERS, TOP_K, EXPERTS = (0, 2), 2, 6
"""As `tiny_policy.make_tiny_moe` has them."""


def fed(batch: TrainBatch, index: int) -> int:
    """Tokens of a trajectory that have had a forward pass: all but the last."""
    return len(batch.prompts[batch.group[index]]) + len(batch.replies[index]) - 1


def drawn(rng: random.Random, first: int, rows: int, layers=LAYERS, top_k=TOP_K, experts=EXPERTS) -> Routing:
    """Any experts, in any order."""
    ids = [[rng.sample(range(experts), top_k) for _ in layers] for _ in range(rows)]
    return encode(first, np.array(ids, np.int64).reshape(rows, len(layers), top_k), layers, experts)


def with_records(batch: TrainBatch, seed: int = 5, **shape: object) -> TrainBatch:
    """Each trajectory with records of its own, so that nothing of a group's prompt is routed alike."""
    rng = random.Random(seed)
    return replace(batch, routing=tuple(drawn(rng, 0, fed(batch, i), **shape) for i in range(len(batch.group))))


def with_partial_records(batch: TrainBatch, seed: int = 5, **shape: object) -> TrainBatch:
    """Some trajectories without a record, the others with one of a part of them."""
    rng, records = random.Random(seed), []
    for index in range(len(batch.group)):
        first = rng.randint(0, fed(batch, index))
        part = drawn(rng, first, rng.randint(0, fed(batch, index) - first), **shape)
        records.append(rng.choice([None, part, part]))
    return replace(batch, routing=tuple(records))


def altered(record: Routing, row: int, layer: int, ids: tuple[int, ...], layers=LAYERS, experts=EXPERTS) -> Routing:
    """A record that says something else of one token in one layer."""
    rows = decode(record).copy()
    rows[row, layer] = ids
    return encode(record.first, rows, layers, experts)
