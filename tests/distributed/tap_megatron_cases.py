"""What each rank does in test_tap_megatron.py: passes with taps and without, and passes in which something goes wrong."""

from __future__ import annotations

import gc
import json
import os
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tap_megatron_ranks import (
    TINY,
    Features,
    Pause,
    at_once,
    counting,
    local_features,
    make_feeds,
    make_policy,
    most_rows,
    one_pass,
    open_channel,
    tapping,
    unsplit,
)
from torch import Tensor

from furlong.kernels.tap_protocol import EMBEDDING, TapError
from furlong.kernels.tap_shards import assemble
from furlong.ops.policy.parallel import Layout, parse_layout
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.parallel import Place

STEP = 3


class Draft:
    """A draft reduced to one matrix, which learns from all features of a micro-batch."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight = torch.eye(TINY.hidden, dtype=dtype).requires_grad_()

    @property
    def gradient(self) -> Tensor:
        return torch.zeros_like(self.weight) if self.weight.grad is None else self.weight.grad

    def learn(self, features: dict[int, Tensor]) -> None:
        assert not any(feature.requires_grad for feature in features.values())
        with torch.enable_grad():  # which autograd turns off while it calls hooks
            (sum(features[layer] for layer in sorted(features)) @ self.weight).square().sum().backward()


def compare(rank: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each case shows on this rank; see `_compare`."""
    return [_compare(rank, **case) for case in cases]


def _compare(
    rank: int, layout: str, taps: list[int], count: int = 8, dtype: str = "float64", slow: str = "", late: bool = False,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A training pass without taps and with them, and a pass without a backward, against the unsplit policy.

    Args:
        count: micro-batches.
        slow: "draft" to pause before each take, "stages" before each forward, "all" for both; for random times.
        late: the draft learns, and gives the features back, when the micro-batch's backward begins.
        more: of the channel.
    """
    split, numbers = parse_layout(layout), getattr(torch, dtype)
    even = split.vpp > 1
    whole, alone = _unsplit(unsplit(split), rank, numbers, count, even, taps)
    unsharded = _unsplit(Layout(dp=split.world), rank, numbers, count, even, taps)[0] if split.tp > 1 else {}
    policy = make_policy(split, rank, numbers)
    feeds = make_feeds(count, policy.place, even)
    without = one_pass(policy, feeds)
    channel, group = open_channel(policy, taps, most_rows(feeds, split), **more)
    taken, draft, pauses, live = {}, Draft(numbers), _pauses(rank, slow), []

    def learn(number: int) -> Pause | None:
        pauses["draft"]()
        if count >= 64 and number in (16, count - 8):  # two moments alike, in any of the schedules
            live.append(live_bytes() - sum(feature.nbytes for feature in taken.values()))
        features = channel.take(STEP, number)
        taken.update({(number, layer): feature.clone() for layer, feature in features.items()})

        def use() -> None:
            draft.learn(features)
            channel.release(STEP, number)

        return use if late else use()

    with counting(group) as counted, tapping(policy, channel, taps, feeds, STEP, pauses["stages"]):
        with_taps = one_pass(policy, feeds, draft=learn)
        sent = dict(counted)
        without_backward, _ = one_pass(policy, feeds, backward=False)
        later = dict(counted)
    channel.close()
    lone = Draft(numbers)
    for number in range(count if taken else 0):
        lone.learn({layer: whole[number, layer] for layer in taps})
    return {
        "stage": policy.place.pp,
        "losses": [alone[0], without[0], with_taps[0], without_backward],
        "unlike_unsplit": unequal({name: alone[1][name] for name in without[1]}, without[1]),
        "moved": unequal(without[1], with_taps[1]),
        "taken": sorted(taken),
        "wrong": unequal({key: whole[key] for key in taken}, taken),
        "draft_moved": unequal({"weight": lone.gradient}, {"weight": draft.gradient}),
        "apart": [_distance(policy.place, feeds, key, taken[key], unsharded[key]) for key in taken if unsharded],
        "rows": [micro.tokens.numel() // (split.tp if split.sp else 1) for micro in feeds],
        "live": live,
        "sent": sent,
        "later": later,
        "stats": asdict(channel.stats),
    }


def _unsplit(
    layout: Layout, rank: int, dtype: torch.dtype, count: int, even: bool, taps: list[int]
) -> tuple[Features, tuple[list[float], dict[str, Tensor]]]:
    """Features, losses and gradients of a policy whose layers are all in one place."""
    policy = make_policy(layout, rank, dtype)
    feeds = make_feeds(count, policy.place, even)
    with local_features(policy, feeds, taps) as features:
        return features, one_pass(policy, feeds)


def unequal(wanted: dict[Any, Tensor], found: dict[Any, Tensor]) -> list[Any]:
    """Keys whose tensors are not the same bytes, or not finite."""
    assert wanted.keys() == found.keys()

    def same(one: Tensor, other: Tensor) -> bool:
        one, other = one.contiguous(), other.contiguous()
        if (one.shape, one.dtype) != (other.shape, other.dtype) or not bool(other.isfinite().all()):
            return False
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))

    return [key for key in wanted if not same(wanted[key], found[key])]


def live_bytes() -> int:
    """Of all storages that a tensor in this process refers to."""
    gc.collect()
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) is Tensor]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _pauses(rank: int, slow: str) -> dict[str, Pause]:
    chance = random.Random(rank)
    slowed = {"": (), "all": ("draft", "stages")}.get(slow, (slow,))

    def pause() -> None:
        time.sleep(chance.uniform(0, 0.04))

    return {who: pause if who in slowed else at_once for who in ("draft", "stages")}


def _distance(place: Place, feeds: list[Feed], key: tuple[int, int], shard: Tensor, whole: Tensor) -> float:
    """Of a feature put together from the parts of the width on this rank and its tensor-parallel neighbours, from all of
    it in one place; relative to the largest."""
    rows, padded = feeds[key[0]].tokens.shape
    # The whole is not padded to a multiple of the parts.
    together = assemble(shard, place.tp_group).view(padded, rows, -1)[: len(whole) // rows].flatten(0, 1)
    return float((together - whole).abs().max() / whole.abs().max())


def break_down(rank: int, layout: str, how: str, at: int, folder: str) -> None:
    """A pass in which something goes wrong: every rank ends with it, as a trainer would, and writes what it was told and
    when; one without a `RANK.json` ended without a word.

    Args:
        how: "dies": the draft's stage ends at this micro-batch; "forgets": it takes no more from there on.
    """
    split = parse_layout(layout)
    policy = make_policy(split, rank, torch.float64)
    feeds = make_feeds(16, policy.place, split.vpp > 1)
    taps = [EMBEDDING, *range(0, TINY.layers // split.pp * (split.pp - 1), 2)]
    channel, _ = open_channel(policy, taps, most_rows(feeds, split), deadline=2.0)

    def learn(number: int) -> None:
        if number >= at and how == "dies":
            os._exit(1)
        if number < at:
            channel.take(STEP, number)
            channel.release(STEP, number)

    began, told = time.monotonic(), []
    try:
        with tapping(policy, channel, taps, feeds, STEP):
            one_pass(policy, feeds, draft=learn)
    except RuntimeError as error:
        told.append([type(error).__name__, str(error)])
    try:
        channel.close()
    except TapError as error:
        told.append([type(error).__name__, str(error)])
    report = {"told": told, "seconds": time.monotonic() - began}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    os._exit(1)
