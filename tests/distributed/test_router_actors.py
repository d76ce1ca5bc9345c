"""Replies from engines in actors while their processes are killed, stopped, or followed by another driver's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from router_lake import Versions, until

from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.rollouts.trajectory import EngineLost
from furlong.ops.spec import Placement
from furlong.ops.stages.context import StageError
from furlong.resources import remote_engine
from furlong.resources.actors import ActorLost, end_actors, find_or_start
from furlong.resources.remote_engine import RemoteEngine, role
from furlong.resources.router import Router
from furlong.resources.weights.fleet import Fleet

PERIOD = 0.2
PACE = 0.01


def requests(prefix: str, count: int, length: int = 20) -> list[GenerateRequest]:
    return [GenerateRequest(f"{prefix}-{n}", (1, n), n, length, 1.0) for n in range(count)]


def tokens(request: GenerateRequest) -> tuple[int, ...]:
    return tuple((request.seed * 31 + t) % 97 for t in range(request.max_new_tokens))


class Ring:
    """A router over engines in actors."""

    def __init__(self, placement: Placement, folder: Path, count: int = 2):
        self.placement, self.folder, self.starts = placement, folder, 0
        members = [self.find(number) for number in range(count)]
        self.fleet = Fleet("routed", Versions(3), "base", members, self.replace)
        self.router = Router(self.fleet, PERIOD, patience=40.0)

    def find(self, number: int) -> RemoteEngine:
        args = (str(self.folder), PACE)
        return RemoteEngine(find_or_start(role(number), "routed", "actor_samples:PacedEngine", args, self.placement, 4))

    def replace(self, number: int) -> RemoteEngine:
        self.fleet.members[number].end()
        self.starts += 1
        return self.find(number)

    def all_serve(self) -> None:
        self.router.bring(0, 1)
        until(lambda: len(self.fleet.serving()) == len(self.fleet.members))

    def pid(self, number: int) -> int:
        return self.fleet.members[number].health()["pid"]


@pytest.fixture
def ring(placement: Placement, tmp_path: Path) -> Iterator[Callable[..., Ring]]:
    made: list[Ring] = []

    def make(**options: int) -> Ring:
        made.append(Ring(placement, tmp_path, **options))
        return made[-1]

    yield make
    for one in made:
        one.router.close()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("furlong-")])
    end_actors(placement, lambda name: not name.role.startswith("engine"))


def draw(one: Ring, groups: int, length: int) -> dict[str, list[Sample]]:
    """Groups of four replies, each from a thread of its own."""
    ready = threading.Barrier(groups)

    def play(name: str) -> list[Sample]:
        ready.wait(20)
        return one.router.generate(requests(name, 4, length), name)

    with ThreadPoolExecutor(groups) as pool:
        calls = {name: pool.submit(play, name) for name in (f"g{n}" for n in range(groups))}
        return {name: call.result(50) for name, call in calls.items()}


def check(replies: dict[str, list[Sample]], length: int) -> None:
    for name, samples in replies.items():
        wanted = requests(name, 4, length)
        assert [(sample.request_id, sample.tokens) for sample in samples] == [
            (request.request_id, tokens(request)) for request in wanted
        ]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_is_killed_or_stopped_and_its_replies_come_all_the_same(
    ring: Callable[..., Ring], monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    monkeypatch.setattr(remote_engine, "HEALTH_DEADLINE", 1.5)
    one = ring()
    one.all_serve()
    victim = one.pid(0)

    def strike() -> None:
        until(lambda: all(row["in_flight"] for row in one.router.loads()))
        os.kill(victim, how)

    striker = threading.Thread(target=strike)
    striker.start()
    began = time.monotonic()
    replies = draw(one, 20, 60)
    seconds = time.monotonic() - began
    striker.join()
    check(replies, 60)
    assert seconds < 20, "the calls moved, and waited for no long deadline"
    until(lambda: len(one.fleet.serving()) == 2)
    assert one.pid(0) != victim
    until(lambda: not psutil.pid_exists(victim))
    assert one.starts == 1
    check(draw(one, 4, 5), 5)


def test_a_successor_that_proves_something_else_is_never_let_in(ring: Callable[..., Ring]) -> None:
    one = ring()
    one.all_serve()
    (one.folder / "lies").touch()
    os.kill(one.pid(0), signal.SIGKILL)
    check(draw(one, 8, 30), 30)
    until(lambda: "tensor w has digest" in one.router.loads()[0]["trouble"])
    for n in range(10):
        one.router.generate(requests(f"more{n}", 2, 2), f"more{n}")
    assert [row["serving"] for row in one.router.loads()] == [False, True]
    (one.folder / "lies").unlink()
    until(lambda: len(one.fleet.serving()) == 2)


def test_without_any_engine_the_reason_is_told(ring: Callable[..., Ring]) -> None:
    one = ring(count=1)
    (one.folder / "lies").touch()
    one.fleet.members[0].load_anchor("base", 1, [], 1)
    with pytest.raises(StageError, match="tensor w has digest"):
        one.router.bring(0, 1)


def test_two_hundred_threads_cost_few_calls(ring: Callable[..., Ring], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real = remote_engine.call
    monkeypatch.setattr(
        remote_engine, "call", lambda actor, method, *a, **k: made.append(method) or real(actor, method, *a, **k)
    )
    one = ring()
    one.all_serve()
    began = time.monotonic()
    replies = draw(one, 200, 10)
    assert time.monotonic() - began < 15
    check(replies, 10)
    assert made.count("submit") + made.count("collect") < 100


def test_closing_is_quick_and_the_next_driver_gets_the_same_replies(ring: Callable[..., Ring]) -> None:
    one = ring()
    one.all_serve()
    wanted = requests("long", 4, 150)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(one.router.generate, wanted, "long")
        until(lambda: any(member.health()["running"] for member in one.fleet.members))
        began = time.monotonic()
        one.router.close()
        with pytest.raises(EngineLost, match="not driven any more"):
            call.result(5)
        assert time.monotonic() - began < 5
    at = next(n for n, member in enumerate(one.fleet.members) if member.health()["running"])
    second = one.find(at)
    assert second.health()["running"] == 4, "the engine went on"
    assert [sample.tokens for sample in second.generate(wanted)] == [tokens(request) for request in wanted]


def test_the_next_driver_gets_what_was_drawn_for_a_killed_one(
    placement: Placement, tmp_path: Path, drive: Callable
) -> None:
    code = f"""
import os, signal, threading, time
from furlong.ops.protocols import GenerateRequest
from furlong.resources.actors import find_or_start
from furlong.resources.remote_engine import RemoteEngine
args = ({str(tmp_path)!r}, {PACE})
engine = RemoteEngine(find_or_start("engine", "left", "actor_samples:PacedEngine", args, placement, 4))
ids = [GenerateRequest(f"left-{{n}}", (1, n), n, 30, 1.0) for n in range(4)]
threading.Thread(target=engine.generate, args=(ids,), daemon=True).start()
while not engine.health()["running"]:
    time.sleep(0.02)
print(engine.health()["pid"], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = drive(placement.folder, code)
    try:
        pid = int(process.communicate(timeout=60)[0])
        args = (str(tmp_path), PACE)
        engine = RemoteEngine(find_or_start("engine", "left", "actor_samples:PacedEngine", args, placement, 4))
        assert engine.health()["pid"] == pid
        until(lambda: not engine.health()["running"])
        wanted = requests("left", 4, 30)
        began = time.monotonic()
        assert [sample.tokens for sample in engine.generate(wanted)] == [tokens(request) for request in wanted]
        assert time.monotonic() - began < 30 * PACE, "they were not drawn again"
    finally:
        process.kill()
        end_actors(placement, lambda name: not name.role.startswith("engine"))


def test_a_reply_that_never_comes_ends_the_engine(
    placement: Placement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_engine, "GRACE", 0.5)
    args = (str(tmp_path), 100.0)
    engine = RemoteEngine(find_or_start("engine", "stuck", "actor_samples:PacedEngine", args, placement, 4))
    try:
        with pytest.raises(remote_engine.ActorTimeout, match="answers, but gave no a"):
            engine.generate([GenerateRequest("a", (1,), 1, 5, 1.0, deadline=0.5)])
        with pytest.raises(ActorLost):
            engine.health()
    finally:
        end_actors(placement, lambda name: not name.role.startswith("engine"))
