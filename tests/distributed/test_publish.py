"""Publishing to engines in processes of their own: every transport, and every way in which it may fail."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from publish_samples import World, make_model, update, weights, world

from furlong.ops.protocols import GenerateRequest, StaleFence
from furlong.resources.weights.publisher import PHASES, TRANSPORTS, PublishError, publish

REQUEST = [GenerateRequest("r", (5, 9, 11), 3, 12, 1.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared_world(folder: str) -> Iterator[World]:
    with world(folder, [1, 2]) as made:
        yield made


@pytest.fixture
def fresh(shared_world: World) -> World:
    """Every party alive, every engine at version 1."""
    shared_world.heal(2)
    for name in shared_world.processes:
        if name != "source":
            shared_world.remotes[name].resume()
            shared_world.load(name, 1)
    return shared_world


def check_serving(made: World, version: int) -> None:
    for engine in made.engines:
        proof = engine.attest()
        assert (proof.version, proof.digest) == (version, update(made.folder, version)[0]["digest"])
        assert engine.health()["paused"] is False


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_transport_brings_the_same_bytes(fresh: World, transport: str) -> None:
    phases: list[str] = []
    done = fresh.publish(2, transport, watch=phases.append)
    check_serving(fresh, 2)
    row, deltas = update(fresh.folder, 2)
    assert phases == list(PHASES)
    assert [proof.digest for proof in done.attestations] == [row["digest"]] * 2
    assert done.attestations[0].tensors == {t["name"]: t["digest"] for t in row["tensors"]}
    assert 0 < done.pause_seconds < done.stage_seconds + 1
    changed = {name: weights(fresh.folder, 2)[name].nbytes for name in set(deltas["name"].to_pylist())}
    assert "draft.head.weight" in changed
    if transport == "broadcast":
        assert sum(changed.values()) <= done.wire_bytes < 1.02 * sum(changed.values())
    if transport == "p2p":
        assert sum(changed.values()) < done.wire_bytes < 3 * sum(changed.values())
    if transport == "disk_delta":
        assert done.wire_bytes == 2 * sum(len(data.as_py()) for data in deltas["data"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_replies_go_on_during_staging_and_change_only_at_the_flip(fresh: World, transport: str) -> None:
    spans: list[tuple] = []
    stop = threading.Event()

    def generate() -> None:
        while not stop.is_set():
            spans.extend(fresh.engines[0].generate(REQUEST)[0].versions)

    drawing = threading.Thread(target=generate)
    drawing.start()
    try:
        fresh.publish(2, transport)
        time.sleep(0.2)
    finally:
        stop.set()
        drawing.join(30)
    versions = [span[0] for span in spans]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("transport", ["p2p", "disk_delta"])
def test_a_failure_in_any_phase_leaves_the_parent_serving_and_nobody_paused(
    fresh: World, transport: str, phase: str
) -> None:
    def watch(entered: str) -> None:
        if entered == phase:
            raise RuntimeError("the roof fell in")

    with pytest.raises(PublishError, match=f"phase {phase}.*roof fell in.*engine 1 serves version 1") as raised:
        fresh.publish(2, transport, watch=watch)
    assert raised.value.phase == phase
    check_serving(fresh, 1)
    fresh.publish(2, transport)
    check_serving(fresh, 2)


def test_engines_that_a_dead_publisher_brought_there_are_left_alone_but_must_prove_it(fresh: World) -> None:
    _row, deltas = update(fresh.folder, 2)
    fence = fresh.next_fence()
    fresh.engines[0].stage(2, 1, deltas, fence)
    fresh.engines[0].activate(2, fence)
    done = fresh.publish(2, "broadcast")
    assert [proof.version for proof in done.attestations] == [2, 2]
    check_serving(fresh, 2)
    phases: list[str] = []
    again = fresh.publish(2, "broadcast", watch=phases.append)
    assert (phases, again.wire_bytes, again.pause_seconds) == (["plan", "attest", "done"], 0, 0.0)


def test_engines_elsewhere_are_refused_by_name(fresh: World) -> None:
    fresh.load("engine 1", 0)
    with pytest.raises(
        PublishError, match="engine 0 serves version 1, engine 1 serves version 0; bring every engine to 1"
    ):
        fresh.publish(2, "disk_delta")


def test_an_engine_with_the_right_number_and_wrong_bytes_is_found_out(fresh: World) -> None:
    """Its live version calls itself 1 but is version 0: a delta on it cannot come out right; whole tensors do."""
    fresh.remotes["engine 0"].load_anchor(fresh.folder, 1, [], fresh.next_fence())
    with pytest.raises(PublishError, match=r"phase stage.*engine 0: lm_head\.weight"):
        fresh.publish(2, "disk_delta")
    assert fresh.engines[1].attest().version == 1
    fresh.publish(2, "p2p")
    check_serving(fresh, 2)


def test_a_flipped_bit_in_what_the_trainer_sends_is_caught_before_the_flip(fresh: World) -> None:
    row, deltas = update(fresh.folder, 2)
    wrong = {**row, "tensors": [dict(t) for t in row["tensors"]]}
    wrong["tensors"][3]["digest"] = "0" * 64
    fresh.remotes["source"].hold(2)
    for transport in TRANSPORTS:
        args = (wrong, deltas, transport, fresh.next_fence(), 20.0)
        with pytest.raises(PublishError, match=f"phase verify.*engine 0: .*{wrong['tensors'][3]['name']}.*engine 1: "):
            publish(fresh.engines, fresh.remotes["source"], *args)
        check_serving(fresh, 1)


def test_a_late_publisher_is_refused_and_changes_nothing(fresh: World) -> None:
    late = fresh.next_fence()
    fresh.publish(2, "broadcast")
    for transport in TRANSPORTS:
        with pytest.raises(PublishError) as raised:
            fresh.publish(3, transport, fence=late)
        assert isinstance(raised.value.__cause__, StaleFence) or "StaleFence" in str(raised.value)
        check_serving(fresh, 2)


def test_two_publishers_at_once_leave_one_version_everywhere(fresh: World) -> None:
    outcomes: list[Any] = []

    def go(transport: str) -> None:
        try:
            outcomes.append(fresh.publish(2, transport))
        except PublishError as err:
            outcomes.append(err)

    threads = [threading.Thread(target=go, args=(transport,)) for transport in ("broadcast", "disk_delta")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert len(outcomes) == 2
    served = {engine.attest().digest for engine in fresh.engines}
    assert served <= {update(fresh.folder, version)[0]["digest"] for version in (1, 2)}
    fresh.publish(2, "disk_delta")
    check_serving(fresh, 2)


@pytest.mark.parametrize("phase", ["stage", "pause", "flip"])
@pytest.mark.parametrize("transport", ["p2p", "disk_delta"])
def test_an_engine_slower_than_the_deadline_is_named_and_holds_up_nobody(
    fresh: World, transport: str, phase: str
) -> None:
    slow = fresh.processes["engine 0"].pid

    def watch(entered: str) -> None:
        if entered == phase:
            os.kill(slow, signal.SIGSTOP)

    try:
        began = time.monotonic()
        with pytest.raises(PublishError, match=f"phase {phase}.*engine 0.*engine 1 serves version 1") as raised:
            fresh.publish(2, transport, deadline=2.0, watch=watch)
        assert time.monotonic() - began < 20
        assert "engine 0 does not answer" in str(raised.value)
        proof, health = fresh.engines[1].attest(), fresh.engines[1].health()
        assert (proof.digest, health["paused"]) == (update(fresh.folder, 1)[0]["digest"], False)
    finally:
        os.kill(slow, signal.SIGCONT)
    fresh.load("engine 0", 1)
    fresh.publish(2, transport)
    check_serving(fresh, 2)


VICTIMS = [("publisher",), ("engine 0",), ("publisher", "engine 0"), ("source",)]


@pytest.mark.parametrize("victims", VICTIMS, ids="+".join)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sigkill_at_every_phase_leaves_whole_versions_and_the_next_publish_succeeds(
    fresh: World, transport: str, victims: tuple[str, ...]
) -> None:
    for phase in PHASES:
        fresh.heal(2)
        for name in ("engine 0", "engine 1"):
            fresh.load(name, 1)
        pids = [0 if name == "publisher" else fresh.processes[name].pid for name in sorted(victims)]
        state, message = fresh.publisher(2, transport, {phase: pids[::-1]}, deadline=10.0)
        if "publisher" in victims:
            assert state == "dead", (phase, message)
        elif state == "PublishError":
            assert victims[0] in message, (phase, message)
        for name in victims:
            if name != "publisher":
                fresh.processes[name].join(10)
        living = [e for n, e in enumerate(fresh.engines) if fresh.processes[f"engine {n}"].is_alive()]
        assert len(living) == 2 - ("engine 0" in victims), phase
        served = {(proof.version, proof.digest) for proof in (engine.attest() for engine in living)}
        assert served <= {(v, update(fresh.folder, v)[0]["digest"]) for v in (1, 2)}, phase
        if "publisher" not in victims:
            # Whoever is left to decide makes it one version, and the same for all.
            assert served == {(2 if state == "ok" else 1, update(fresh.folder, 2 if state == "ok" else 1)[0]["digest"])}
        fresh.heal(2)
        fresh.publish(2, transport)
        check_serving(fresh, 2)
