"""One driver per run: a second one is told who drives, and a killed one leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from furlong.resources.run_lock import LockHeld, driven_runs, exclusive, is_driven, run_lock

HOLD = """
import sys, time
from pathlib import Path
from furlong.resources.run_lock import run_lock
with run_lock(Path(sys.argv[1]), sys.argv[2]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def driver(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "one"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_second_driver_is_told_the_first_ones_pid(tmp_path: Path, driver: subprocess.Popen) -> None:
    with pytest.raises(LockHeld, match=rf"run one is being driven by process {driver.pid} "), run_lock(tmp_path, "one"):
        pass
    assert is_driven(tmp_path, "one")
    assert driven_runs(tmp_path) == {"one": driver.pid}
    with run_lock(tmp_path, "two"):
        assert driven_runs(tmp_path) == {"one": driver.pid, "two": os.getpid()}


def test_killed_driver_leaves_the_run_free(tmp_path: Path, driver: subprocess.Popen) -> None:
    driver.kill()
    driver.wait()
    assert not is_driven(tmp_path, "one")
    with run_lock(tmp_path, "one"):
        assert is_driven(tmp_path, "one")
    assert driven_runs(tmp_path) == {}


def test_lock_is_released_by_an_exception_and_not_shared_within_a_process(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), run_lock(tmp_path, "one"):
        raise ZeroDivisionError
    with (
        run_lock(tmp_path, "one"),
        pytest.raises(LockHeld, match=str(os.getpid())),
        run_lock(tmp_path, "one"),
    ):
        pass


def test_unknown_run_is_not_driven_and_asking_creates_nothing(tmp_path: Path) -> None:
    assert not is_driven(tmp_path, "never")
    assert driven_runs(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


def test_waiting_for_a_lock_ends_when_it_gets_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    code = "import sys; from pathlib import Path; from furlong.resources.run_lock import exclusive; import time\n"
    code += "with exclusive(Path(sys.argv[1]), 1, 'x', 'y'):\n print('held', flush=True)\n time.sleep(0.7)\n"
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    begin = time.monotonic()
    with exclusive(path, 30.0, "it is held", "wait"):
        assert 0.2 < time.monotonic() - begin < 20
    assert holder.wait(10) == 0
