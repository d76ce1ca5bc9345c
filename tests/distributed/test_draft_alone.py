"""A draft published alone, to engines in processes of their own: replies under way go on, bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
import torch
from publish_samples import World, make_model, update, weights, world
from torch import Tensor

from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.weights.publisher import PublishError, publish

REQUESTS = [GenerateRequest(f"long{i}", (5, 9, 11 + i), i, 100, 1.0, stop_ids=()) for i in range(3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(make_model(tmp_path_factory.mktemp("model")), [1, 2]) as made:
        yield made


@pytest.fixture
def at_two(made: World) -> World:
    """Every engine at version 2, the first with a draft."""
    for number in range(len(made.tps)):
        made.remotes[f"engine {number}"].resume()
        made.load(f"engine {number}", 2)
    return made


def alone(folder: str, version: int) -> tuple[dict[str, Any], pa.Table, dict[str, Tensor]]:
    """Version 2 with another draft: its row, as far as publishing reads it, its deltas, whole, and its draft."""
    draw = torch.Generator().manual_seed(version)
    draft = {"draft.head.weight": torch.randn(6, 32, generator=draw), "draft.d2t": torch.arange(6)}
    tensors = manifest(weights(folder, 2) | draft)
    digests = {row["name"]: row["digest"] for row in tensors}
    row = {"version": version, "parent": 2, "digest": weights_digest(digests), "tensors": tensors}
    return row, encode(version, 2, "sample", {}, draft, digests), draft


def drawn(engine: Any) -> list[tuple]:
    return [(s.tokens, s.logprobs, s.model_logprobs, s.finish_reason) for s in engine.generate(REQUESTS)]


def test_replies_under_way_go_on_and_are_the_same(at_two: World) -> None:
    engines = at_two.engines
    wanted = [drawn(engine) for engine in engines]
    row, deltas, _ = alone(at_two.folder, 3)
    found: dict[int, list] = {}

    def draw(number: int) -> None:
        found[number] = engines[number].generate(REQUESTS)

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(len(engines))]
    for thread in threads:
        thread.start()
    try:
        until = time.monotonic() + 20
        while any(engine.health()["running"] < len(REQUESTS) for engine in engines):
            assert time.monotonic() < until, "the replies did not begin"
            time.sleep(0.001)
        done = publish(engines, None, row, deltas, "disk_delta", at_two.next_fence(), 20.0)
    finally:
        for thread in threads:
            thread.join(60)
    assert [proof.digest for proof in done.attestations] == [row["digest"]] * 2
    assert done.wire_bytes == 2 * sum(len(data.as_py()) for data in deltas["data"]), "nothing but the draft travels"
    spans = [span for samples in found.values() for sample in samples for span in sample.versions]
    assert {version for version, *_ in spans} == {2, 3}, "the flip came while they were drawn"
    for number, samples in found.items():
        mine = [(s.tokens, s.logprobs, s.model_logprobs, s.finish_reason) for s in samples]
        assert mine == wanted[number]
        assert drawn(engines[number]) == wanted[number]


def test_the_policy_of_such_a_version_is_its_parent_s_and_a_policy_s_update_goes_on_top(at_two: World) -> None:
    row, deltas, draft = alone(at_two.folder, 3)
    publish(at_two.engines, None, row, deltas, "disk_delta", at_two.next_fence(), 20.0)
    policy = {
        t["name"]: t["digest"] for t in update(at_two.folder, 2)[0]["tensors"] if not t["name"].startswith("draft.")
    }
    for engine in at_two.engines:
        proof = engine.attest()
        assert {name: proof.tensors[name] for name in policy} == policy
    new = {n: t for n, t in weights(at_two.folder, 3).items() if not n.startswith("draft.")} | draft
    tensors = manifest(new)
    digests = {entry["name"]: entry["digest"] for entry in tensors}
    old = weights(at_two.folder, 2) | draft
    after = {"version": 4, "parent": 3, "digest": weights_digest(digests), "tensors": tensors}
    changes = encode(4, 3, "sample", old, new, digests)
    done = publish(at_two.engines, None, after, changes, "disk_delta", at_two.next_fence(), 20.0)
    assert [proof.digest for proof in done.attestations] == [after["digest"]] * 2
    assert {name: done.attestations[0].tensors[name] for name in draft} == {name: digests[name] for name in draft}


def test_an_engine_that_cannot_take_it_leaves_all_with_the_draft_before(at_two: World) -> None:
    row, deltas, _ = alone(at_two.folder, 3)
    wrong = row | {"tensors": [t | {"digest": "0" * 64} if t["name"] == "draft.d2t" else t for t in row["tensors"]]}
    with pytest.raises(PublishError, match=r"phase verify.*draft\.d2t.*engine 1 serves version 2"):
        publish(at_two.engines, None, wrong, deltas, "disk_delta", at_two.next_fence(), 20.0)
    for engine in at_two.engines:
        assert engine.attest().digest == update(at_two.folder, 2)[0]["digest"]
        assert engine.health()["paused"] is False
    publish(at_two.engines, None, row, deltas, "disk_delta", at_two.next_fence(), 20.0)
