"""Actors on one head: found again, replaced, lost, timed out, and what their methods raise."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
from distributed.conftest import result

from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.spec import Placement
from furlong.resources.actor_host import ActorHost
from furlong.resources.actors import (
    Actor,
    ActorLost,
    ActorName,
    ActorTimeout,
    call,
    code_hash,
    end_actors,
    find_or_start,
    live_actors,
)
from furlong.resources.cluster import ClusterError, ensure_cluster
from furlong.resources.remote_engine import RemoteEngine
from furlong.resources.run_lock import run_lock

COUNTER = "actor_samples:Counter"


@pytest.fixture
def counter(placement: Placement) -> Actor:
    """A fresh counter of run `r`, taking two calls at once."""
    ensure_cluster(placement)
    end_actors(placement, lambda name: False)
    return find_or_start("counter", "r", COUNTER, (5,), placement, concurrency=2)


def names(placement: Placement) -> set[str]:
    return {str(name) for name in live_actors(placement)}


def old_actor(placement: Placement, role: str, run: str) -> str:
    """An actor as another version of the code would have left it."""
    import ray

    name = ActorName(role, run, "0123456789ab")
    maker = ray.remote(ActorHost).options(name=str(name), namespace="furlong", lifetime="detached", num_cpus=1)
    ray.get(maker.remote(role, run, str(placement.folder / "logs" / "old.log"), 1, 0).describe.remote(), timeout=60)
    return str(name)


def test_second_process_finds_the_same_actor(
    counter: Actor, placement: Placement, drive: Callable[..., subprocess.Popen]
) -> None:
    here = call(counter, "where")
    assert call(counter, "add", 2) == 7
    code = (
        "from furlong.resources.actors import call, find_or_start\n"
        f"actor = find_or_start('counter', 'r', {COUNTER!r}, (5,), placement, 2)\n"
        "print(call(actor, 'where')['pid'], call(actor, 'add', 1))\n"
    )
    assert result(drive(placement.folder, code)) == f"{here['pid']} 8"
    assert call(counter, "add", 0) == 8


def test_threads_are_set_before_torch_is_loaded(counter: Actor, placement: Placement) -> None:
    found = call(counter, "where")
    assert not found["torch_before"]
    assert (found["torch_threads"], found["omp"], found["wait"]) == (1, "1", "passive")
    assert found["executable"] == sys.executable
    everything = placement.model_copy(update={"threads": 0})
    found = call(find_or_start("counter", "r", COUNTER, (5,), everything), "where")
    assert found["omp"] == str(len(os.sched_getaffinity(0)))  # Ray itself would set 1
    assert call(find_or_start("counter", "r", COUNTER, (5,), placement), "where")["omp"] == "1"


@pytest.mark.parametrize(
    ("how", "shown"), [("kill", "about to go down"), ("segfault", "Segmentation fault"), ("exit", "about to go down")]
)
def test_death_shows_last_lines_and_the_next_start_is_fresh(
    counter: Actor, placement: Placement, how: str, shown: str
) -> None:
    pid = call(counter, "where")["pid"]
    call(counter, "add", 1)
    if how == "kill":
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    begin = time.monotonic()
    with pytest.raises(ActorLost) as caught:
        call(counter, "crash", how)
    assert time.monotonic() - begin < 15
    message = str(caught.value)
    assert "the counter of run r was lost in crash" in message
    assert shown in message
    assert "continues from the last committed step" in message
    again = find_or_start("counter", "r", COUNTER, (5,), placement, 2)
    assert call(again, "add", 0) == 5
    assert call(again, "where")["pid"] != pid


def test_start_that_finds_a_dying_actor_makes_a_new_one(counter: Actor, placement: Placement) -> None:
    os.kill(call(counter, "where")["pid"], signal.SIGKILL)
    assert call(find_or_start("counter", "r", COUNTER, (5,), placement, 2), "add", 0) == 5


def test_stale_code_and_undriven_runs_are_ended_others_stay(counter: Actor, placement: Placement) -> None:
    mine, other_role = old_actor(placement, "counter", "r"), old_actor(placement, "painter", "r")
    driven, undriven = old_actor(placement, "counter", "driven"), old_actor(placement, "counter", "left")
    with run_lock(placement.folder, "driven"):
        find_or_start("counter", "r", COUNTER, (5,), placement, 2)
    assert names(placement) == {str(counter.name), other_role, driven}
    assert {mine, undriven}.isdisjoint(names(placement))
    assert call(counter, "add", 0) == 5
    assert counter.name.code == code_hash()


def test_exception_of_a_method_keeps_type_and_message(counter: Actor) -> None:
    with pytest.raises(LookupError) as caught:
        call(counter, "fail", "flour")
    assert str(caught.value) == "no flour in store"
    assert "raised in counter.fail of run r" in caught.value.__notes__[0]
    assert "actor_samples.py" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="Unsendable: 12"):
        call(counter, "fail", "unsendable")
    with pytest.raises(AttributeError, match="no_such"):
        call(counter, "no_such")
    assert call(counter, "add", 0) == 5


def test_exception_of_a_constructor_leaves_no_actor(counter: Actor, placement: Placement) -> None:
    with pytest.raises(ValueError, match="start=-1 is negative"):
        find_or_start("other", "r", COUNTER, (-1,), placement)
    end_actors(placement, lambda name: name.role != "other")
    assert call(find_or_start("other", "r", COUNTER, (1,), placement), "add", 0) == 1


def test_deadline_names_the_call_and_ends_the_actor(counter: Actor, placement: Placement) -> None:
    pid = call(counter, "where")["pid"]
    with pytest.raises(ActorTimeout, match=r"counter\.sleep of run r .* 1 s.*FURLONG_STAGE_DEADLINE"):
        call(counter, "sleep", 60.0, deadline=1.0)
    again = find_or_start("counter", "r", COUNTER, (5,), placement, 2)
    assert call(again, "where")["pid"] != pid
    assert not psutil.pid_exists(pid)


def test_two_calls_at_once_and_control_beside_them(counter: Actor) -> None:
    results: list[str] = []
    waiting = [threading.Thread(target=lambda: results.append(call(counter, "sleep", 60.0))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    time.sleep(0.3)
    assert results == []
    call(counter, "release", deadline=10.0, control=True)
    for thread in waiting:
        thread.join(10)
    assert results == ["released", "released"]


def test_two_processes_starting_the_same_actor_share_it(
    counter: Actor, placement: Placement, drive: Callable[..., subprocess.Popen]
) -> None:
    code = (
        "from furlong.resources.actors import call, find_or_start\n"
        f"print(call(find_or_start('counter', 'r', {COUNTER!r}, (5,), placement), 'where')['pid'])\n"
    )
    end_actors(placement, lambda name: False)
    drivers = [drive(placement.folder, code) for _ in range(2)]
    assert len({result(driver) for driver in drivers}) == 1


def test_two_roles_started_from_two_threads(counter: Actor, placement: Placement) -> None:
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(find_or_start, role, "r", COUNTER, (n,), placement) for n, role in enumerate(("a", "b"))]
        assert [call(future.result(), "add", 0) for future in made] == [0, 1]


def test_actor_that_finds_no_room_says_what_is_free(counter: Actor, placement: Placement) -> None:
    import ray

    room = ray.cluster_resources()["CPU"] - 1  # the counter has one
    hog = ray.remote(ActorHost).options(num_cpus=room).remote("hog", "r", str(placement.folder / "hog.log"), 1, 0)
    ray.get(hog.describe.remote(), timeout=60)
    try:
        with pytest.raises(ActorTimeout, match=r"FURLONG_START_DEADLINE.*free resources \{'CPU': 0"):
            find_or_start("other", "r", COUNTER, (1,), placement.model_copy(update={"start_deadline": 1.5}))
    finally:
        ray.kill(hog)


def test_interrupt_while_waiting(counter: Actor, placement: Placement, drive: Callable[..., subprocess.Popen]) -> None:
    code = (
        "from furlong.resources.actors import call, find_or_start\n"
        f"actor = find_or_start('counter', 'r', {COUNTER!r}, (5,), placement, 2)\n"
        "print('waiting', actor.name.code, flush=True)\n"
        "call(actor, 'sleep', 50.0)\n"
    )
    driver = drive(placement.folder, code)
    assert driver.stdout.readline() == f"waiting {code_hash()}\n"
    time.sleep(0.5)
    driver.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, err = driver.communicate(timeout=20)
    assert time.monotonic() - begin < 10
    assert "KeyboardInterrupt" in err
    assert call(counter, "add", 0) == 5  # the actor does not mind


def test_death_of_the_head_is_told(drive: Callable[..., subprocess.Popen], tmp_path: Path) -> None:
    code = (
        "import os, signal, threading, time\n"
        "from furlong.resources.actors import ActorLost, call, find_or_start\n"
        "from furlong.resources.cluster import stop_cluster\n"
        "from furlong.resources.ray_head import running_head\n"
        f"actor = find_or_start('counter', 'r', {COUNTER!r}, (5,), placement, 2)\n"
        "pid = running_head(placement.folder).pid\n"
        "threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()\n"
        "begin = time.monotonic()\n"
        "try:\n"
        "    call(actor, 'sleep', 50.0)\n"
        "except ActorLost as err:\n"
        "    print(time.monotonic() - begin, err, flush=True)\n"
        "stop_cluster(placement)\n"
        "os._exit(0)\n"  # no farewell to a head that is gone
    )
    seconds, _, message = result(drive(tmp_path, code)).partition(" ")
    assert float(seconds) < 15
    assert "Ray's head has ended" in message


def test_large_table_arrives(counter: Actor) -> None:
    table = pa.table({"data": pa.array([b"x" * (64 << 20)] * 4, pa.large_binary())})
    assert call(counter, "bytes_of", table) == table.nbytes


def test_more_gpus_than_there_are_is_refused(placement: Placement) -> None:
    with pytest.raises(ClusterError, match="FURLONG_GPUS=99"):
        find_or_start("counter", "r", COUNTER, (), placement.model_copy(update={"gpus": 99}))


def test_engine_answers_while_it_generates(placement: Placement, tmp_path: Path) -> None:
    args = (str(tmp_path), 0.01)
    engine = RemoteEngine(find_or_start("engine", "r", "actor_samples:PacedEngine", args, placement, 2))
    drawn: list[list[Sample]] = []
    requests = [GenerateRequest("a", (1,), 7, 100_000, 1.0), GenerateRequest("b", (2,), 8, 100_000, 1.0)]
    thread = threading.Thread(target=lambda: drawn.append(engine.generate(requests)))
    thread.start()
    until = time.monotonic() + 20
    while not engine.health()["running"]:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert engine.abort() == 2
    thread.join(20)
    assert [(sample.request_id, sample.finish_reason) for sample in drawn[0]] == [("a", "abort"), ("b", "abort")]
