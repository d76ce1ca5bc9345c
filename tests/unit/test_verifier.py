"""The verifier's child process: hanging, raising, dying, printing scorers."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from furlong.ops.records import Verdict
from furlong.ops.tasks.families import EXACT
from furlong.resources.verifier import VerifierError, VerifierWorker

SCORERS = """
import os, sys, time
from furlong.ops.tasks.scoring import Judgement

def hang(reply, entry):
    time.sleep(60)

def bad(reply, entry):
    raise KeyError("no such thing")

def die(reply, entry):
    sys.stderr.write("last words\\n")
    sys.stderr.flush()
    os._exit(3)

def noisy(reply, entry):
    print("{}")
    os.write(1, b"[]\\n")
    return Judgement(reply, 1.0)

def infinite(reply, entry):
    return Judgement(reply, float("nan"))

def spawn(reply, entry):
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    with open(entry["file"], "w") as file:
        file.write(str(child.pid))
    time.sleep(60)
"""
GOOD = {"verifier": EXACT, "entry": json.dumps({"answer": "ok"}), "reply": "ok", "finish_reason": "stop"}


@pytest.fixture(autouse=True)
def _scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "furlong_test_scorers.py").write_text(SCORERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def worker() -> Iterator[VerifierWorker]:
    with VerifierWorker(deadline=1.0) as worker:
        yield worker


def _item(name: str, **entry: str) -> dict:
    return {**GOOD, "verifier": f"furlong_test_scorers:{name}", "entry": json.dumps(entry)}


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


def _gone(pid: int) -> bool:
    until = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not _alive(pid)


def test_a_fault_of_one_item_leaves_the_others_alone(worker: VerifierWorker) -> None:
    names = ["hang", "bad", "die", "noisy", "infinite"]
    found = worker.score([GOOD, *[item for name in names for item in (_item(name), GOOD)]])
    assert [v["verdict"] for v in found[0::2]] == [Verdict.CORRECT] * 6
    hang, bad, die, noisy, infinite = found[1::2]
    assert [v["verdict"] for v in (hang, bad, die, noisy, infinite)] == [
        Verdict.TIMEOUT, Verdict.ERROR, Verdict.ERROR, Verdict.CORRECT, Verdict.ERROR,
    ]  # fmt: skip
    assert [v["score"] for v in (hang, bad, die, infinite)] == [None] * 4
    assert 1.0 <= hang["seconds"] < 5.0
    assert "KeyError: 'no such thing'" in bad["detail"]
    assert "furlong_test_scorers.py" in bad["detail"]
    assert "exit status 3" in die["detail"]
    assert "last words" in die["detail"]
    assert "must return a number" in infinite["detail"]
    assert all(set(v) == {"verdict", "score", "extracted", "detail", "seconds"} for v in found)


def test_nothing_to_score_starts_nothing(worker: VerifierWorker) -> None:
    assert worker.score([]) == []
    assert worker._child is None


def test_a_reply_larger_than_a_pipe(worker: VerifierWorker) -> None:
    found = worker.score([{**GOOD, "reply": "x" * 3_000_000}, GOOD])
    assert [v["verdict"] for v in found] == [Verdict.INCORRECT, Verdict.CORRECT]
    assert len(found[0]["extracted"]) == 3_000_000


def test_a_killed_child_is_an_error_and_is_replaced(worker: VerifierWorker) -> None:
    worker.start()
    worker.score([GOOD])
    first = worker._child.pid
    os.kill(first, signal.SIGKILL)
    found = worker.score([GOOD, GOOD])
    assert [v["verdict"] for v in found] == [Verdict.ERROR, Verdict.CORRECT]
    assert worker._child.pid != first


def test_closing_ends_the_child_and_it_starts_again_on_demand(worker: VerifierWorker) -> None:
    worker.score([GOOD])
    pid = worker._child.pid
    worker.close()
    worker.close()
    assert _gone(pid)
    assert worker.score([GOOD])[0]["verdict"] == Verdict.CORRECT


def test_what_a_hanging_scorer_started_is_ended_too(worker: VerifierWorker, tmp_path: Path) -> None:
    file = tmp_path / "pid"
    assert worker.score([_item("spawn", file=str(file))])[0]["verdict"] == Verdict.TIMEOUT
    assert _gone(int(file.read_text()))


def test_a_child_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise RuntimeError('broken installation')\n")
    with (
        VerifierWorker(1.0) as worker,
        pytest.raises(VerifierError, match=r"(?s)died while starting.*broken installation"),
    ):
        worker.score([GOOD])


def test_a_child_that_starts_too_slowly_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "reasoning_gym.py").write_text("import time\ntime.sleep(60)\n")
    with VerifierWorker(1.0, start_deadline=1.0) as worker:
        with pytest.raises(VerifierError, match="not ready within 1 s"):
            worker.score([GOOD])
        assert worker._child is None


def test_a_deadline_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        VerifierWorker(0.0)


@pytest.mark.parametrize("hanging", [False, True])
def test_the_child_does_not_outlive_a_killed_parent(tmp_path: Path, hanging: bool) -> None:
    """An idle child leaves at end of file; one whose scorer hangs, by its own alarm."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import json, os, sys, threading\n"
        "from furlong.resources import verifier\n"
        "worker = verifier.VerifierWorker(0.1 if json.loads(sys.argv[2]) else 5.0)\n"
        "worker.close = lambda: os.kill(os.getpid(), 9)\n"  # the parent dies where it would kill the child
        "good, hang = json.loads(sys.argv[1])\n"
        "worker.score([good])\n"
        "print(worker._child.pid, flush=True)\n"
        "worker.score([hang]) if json.loads(sys.argv[2]) else os.kill(os.getpid(), 9)\n"
    )
    arguments = [json.dumps([GOOD, _item("hang")]), json.dumps(hanging)]
    done = subprocess.run([sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    until = time.monotonic() + 20
    while _alive(int(done.stdout)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _alive(int(done.stdout))


def test_a_child_that_was_ready_in_time_counts_though_it_is_asked_late():
    with VerifierWorker(5.0, start_deadline=20.0) as worker:
        worker.start()
        assert select.select([worker._child.stdout], [], [], 20.0)[0]
        worker._ready_by = time.monotonic() - 60.0  # as when the engines took so long to start meanwhile
        item = {"verifier": EXACT, "reply": "1", "entry": '{"answer": "1"}', "finish_reason": "stop"}
        assert worker.score([item])[0]["verdict"] == "correct"
