"""Stopping on purpose, the processes of runs, and what counts as a failure of the machinery."""

import os
import subprocess
import sys

import psutil
import pytest

from furlong.ops.protocols import StaleFence
from furlong.ops.rollouts.budget import BudgetSpent
from furlong.ops.rollouts.trajectory import EngineLost
from furlong.ops.spec import SpecError
from furlong.ops.stages.context import StageError
from furlong.resources.stopping import clear_stop, request_stop, stopped, stopped_runs
from furlong.resources.workers import Worker


def test_a_stop_stays_until_it_is_cleared(tmp_path):
    assert stopped(tmp_path, "r") is None
    assert clear_stop(tmp_path, "r") is None
    request_stop(tmp_path, "r", "ärger <b>")
    request_stop(tmp_path, "s", "two")
    assert {name: mark.reason for name, mark in stopped_runs(tmp_path).items()} == {"r": "ärger <b>", "s": "two"}
    assert clear_stop(tmp_path, "r").reason == "ärger <b>"
    assert stopped(tmp_path, "r") is None
    assert sorted(path.name for path in (tmp_path / "runs" / "r").iterdir()) == []


@pytest.fixture
def sleeper():
    code = "import subprocess, time; subprocess.Popen(['sleep', '600']); print(1, flush=True); time.sleep(600)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    process.stdout.readline()
    yield process
    process.stdout.close()
    for child in psutil.Process(process.pid).children() if process.poll() is None else []:
        child.kill()
    process.kill()
    process.wait(10)


def test_a_worker_is_known_by_its_name_and_ended_with_its_children(sleeper):
    worker = Worker.parse(str(Worker.of(sleeper.pid)))
    children = psutil.Process(sleeper.pid).children()
    assert worker.lives()
    assert not worker.wait(0.1)
    worker.end()
    assert worker.wait(10)  # though nobody has waited for it yet: a zombie does not live
    psutil.wait_procs(children, timeout=10)
    assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)
    assert not worker.interrupt()


def test_a_worker_that_is_asked_to_end_does(sleeper):
    worker = Worker.of(sleeper.pid)
    assert worker.interrupt()
    assert worker.wait(10)


def test_a_number_used_again_is_another_worker():
    mine = Worker.of(os.getpid())
    assert not Worker(mine.host, mine.pid, mine.started_at - 60).lives()


def test_a_worker_elsewhere_is_left_alone():
    there = Worker("another:machine", os.getpid(), 1.0)
    assert Worker.parse(str(there)) == there
    assert there.elsewhere
    assert there.lives()
    assert not there.interrupt()
    there.end()


def test_only_what_the_machinery_failed_at_is_worth_another_try():
    from furlong.resources.actors import ActorLost, ActorTimeout
    from furlong.resources.failures import infrastructure
    from furlong.resources.lake import RowsDifferError
    from furlong.resources.lake_table import LakeError
    from furlong.resources.run_lock import LockHeld
    from furlong.resources.weights.publisher import PublishError

    machinery = [ActorLost("x"), ActorTimeout("x"), EngineLost("x"), LakeError("x")]
    assert all(infrastructure(error) for error in machinery)
    answers = [
        StageError("x"), SpecError("x"), StaleFence("x"), BudgetSpent("x"), RowsDifferError("x"), AssertionError("x"),
        ValueError("x"), PublishError("x", "verify"), LockHeld("x"),
    ]  # fmt: skip
    assert [error for error in answers if infrastructure(error)] == []
    assert infrastructure(caused(PublishError("x", "stage"), ActorLost("y")))
    assert infrastructure(caused(PublishError("x", "stage"), StageError("y"))) is None
    assert infrastructure(caused(StageError("x"), ActorLost("y"))) is None


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error
