"""Several children score side by side: order, overlap, threads, faults, closing."""

import json
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from furlong.ops.records import Verdict
from furlong.ops.tasks.families import EXACT
from furlong.resources.verifier import VerifierError
from furlong.resources.verifier_pool import VerifierPool

SCORERS = """
import os, time
from furlong.ops.tasks.scoring import Judgement

def nap(reply, entry):
    time.sleep(entry["seconds"])
    return Judgement(reply, 1.0)

def hang(reply, entry):
    time.sleep(60)

def die(reply, entry):
    os._exit(3)

def talk(reply, entry, messages, question):
    return Judgement(f"{question} {len(messages)} {messages[-1]['content']}", 1.0)
"""
SLOW = "import time\ntime.sleep(1.5)\nfrom furlong.ops.tasks.scoring import Judgement\n"
SLOW += "def slow_import(reply, entry):\n    return Judgement(reply, 1.0)\n"
GOOD = {"verifier": EXACT, "entry": json.dumps({"answer": "ok"}), "reply": "ok", "finish_reason": "stop"}


@pytest.fixture(autouse=True)
def _scorers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "furlong_pool_scorers.py").write_text(SCORERS)
    (tmp_path / "furlong_slow_scorers.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(deadline=1.0, workers=2) as pool:
        yield pool


def _item(name: str, reply: str = "ok", module: str = "furlong_pool_scorers", **entry: object) -> dict:
    return {**GOOD, "verifier": f"{module}:{name}", "reply": reply, "entry": json.dumps(entry)}


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_slow_replies_overlap_and_keep_their_order(pool: VerifierPool):
    pool.score([_item("nap", seconds=0)] * 2)
    begin = time.monotonic()
    found = pool.score([_item("nap", str(n), seconds=0.3 if n % 2 else 0.0) for n in range(8)])
    assert [row["extracted"] for row in found] == [str(n) for n in range(8)]
    assert time.monotonic() - begin < 1.1  # 1.2 s of naps one after the other


def test_a_fault_leaves_the_others_alone(pool: VerifierPool):
    found = pool.score([GOOD, _item("hang"), GOOD, _item("die"), GOOD, GOOD])
    assert [row["verdict"] for row in found] == [
        Verdict.CORRECT, Verdict.TIMEOUT, Verdict.CORRECT, Verdict.ERROR, Verdict.CORRECT, Verdict.CORRECT,
    ]  # fmt: skip
    assert [row["score"] for row in found] == [1.0, None, 1.0, None, 1.0, 1.0]


def test_several_threads_get_their_own_answers(pool: VerifierPool):
    def ask(n: int) -> list[str]:
        return [row["extracted"] for row in pool.score([_item("nap", f"{n}.{i}", seconds=0) for i in range(6)])]

    with ThreadPoolExecutor(5) as threads:
        assert list(threads.map(ask, range(5))) == [[f"{n}.{i}" for i in range(6)] for n in range(5)]
    assert pool.score([]) == []


def test_a_verifier_that_imports_slowly_costs_no_reply_its_time(pool: VerifierPool):
    found = pool.score([_item("slow_import", module="furlong_slow_scorers")] * 3)
    assert [row["verdict"] for row in found] == [Verdict.CORRECT] * 3
    assert max(row["seconds"] for row in found) < 1.0


def test_a_verifier_may_ask_for_the_conversation(pool: VerifierPool):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (found,) = pool.score([{**_item("talk"), "question": "Q", "messages": json.dumps(messages)}])
    assert found["extracted"] == "Q 2 a"


def test_an_unknown_verifier_is_an_error_of_its_reply(pool: VerifierPool):
    found = pool.score([_item("talk", module="furlong_no_such_module"), GOOD])
    assert [row["verdict"] for row in found] == [Verdict.ERROR, Verdict.CORRECT]
    assert "furlong_no_such_module" in found[0]["detail"]


def test_closing_ends_the_children_and_scoring_starts_new_ones(pool: VerifierPool):
    pool.start()
    pool.score([GOOD] * 4)
    children = [worker._child.pid for worker in pool._workers if worker._child]
    pool.close()
    pool.close()
    assert children
    assert not any(_alive(pid) for pid in children)
    assert pool.score([GOOD])[0]["verdict"] == Verdict.CORRECT


def test_closing_under_way_waits_for_a_reply_at_most(pool: VerifierPool):
    pool.score([GOOD] * 2)
    outcome: list[object] = []

    def ask() -> None:
        try:
            outcome.append(pool.score([_item("nap", seconds=0.5)] * 6))
        except BaseException as err:
            outcome.append(err)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 3.0
    thread.join(5.0)
    assert not thread.is_alive()
    assert len(outcome) == 1


def test_children_that_cannot_start_are_told(tmp_path: Path):
    (tmp_path / "reasoning_gym.py").write_text("raise RuntimeError('broken installation')\n")
    with VerifierPool(1.0, workers=2) as pool, pytest.raises(VerifierError, match="broken installation"):
        pool.score([GOOD] * 3)


def test_a_pool_of_none_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        VerifierPool(1.0, workers=0)
    with pytest.raises(ValueError, match="must be positive"):
        VerifierPool(0.0)
