"""Fencing tokens: each is given out once, in rising order for ever, and a late publisher cannot write."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pyarrow as pa
import pytest
from blank_rows import blank_row
from deltalake import DeltaTable

from furlong.ops import records
from furlong.ops.protocols import StaleFence
from furlong.resources.lake import Lake, RowsDifferError
from furlong.resources.lake_filter import FilterError
from furlong.resources.lake_table import Conflict, LakeError


def version(number: int, state: str = "staged", run: str = "r", fence: int = 1) -> pa.Table:
    row = blank_row("weight_versions") | {"run": run, "version": number, "state": state, "fence": fence}
    return records.rows("weight_versions", [row])


def key(number: int, run: str = "r") -> dict:
    return {"run": run, "version": number}


@pytest.fixture
def lake(tmp_path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def python(code: str, *args: object) -> subprocess.Popen:
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_fence as t\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_tokens_rise_for_each_run_and_outlive_process_and_checkpoint(lake):
    assert [lake.take_fence("r") for _ in range(3)] == [1, 2, 3]
    assert lake.take_fence("s") == 1
    assert Lake(lake.uri).take_fence("r") == 4
    lake.commit_once("weight_versions", key(1), version(1), fence=4)
    DeltaTable(f"{lake.uri}/weight_versions").create_checkpoint()
    assert list(Path(lake.uri, "weight_versions", "_delta_log").glob("*.checkpoint.parquet"))
    assert Lake(lake.uri).take_fence("r") == 5
    assert Lake(lake.uri).take_fence("s") == 2


def test_tokens_survive_the_lakes_own_checkpoint_and_the_loss_of_the_log_before_it(lake):
    for _ in range(101):
        token = lake.take_fence("r")
    log = Path(lake.uri, "weight_versions", "_delta_log")
    assert list(log.glob("*100.checkpoint.parquet"))
    for number in range(100):
        (log / f"{number:020d}.json").unlink()
    assert Lake(lake.uri).take_fence("r") == token + 1


def test_taking_a_token_leaves_rows_and_files_alone(lake):
    lake.commit_once("weight_versions", key(1), version(1), fence=lake.take_fence("r"))
    before = lake.read("weight_versions")
    files = sorted(Path(lake.uri).rglob("*.parquet"))
    lake.take_fence("r")
    assert lake.read("weight_versions").equals(before)
    assert sorted(Path(lake.uri).rglob("*.parquet")) == files


def test_a_late_publisher_is_refused_and_nothing_of_it_stands(lake):
    old, new = lake.take_fence("r"), lake.take_fence("r")
    for write in (lake.commit_once, lake.replace):
        with pytest.raises(StaleFence, match=r"run r: fencing token 1 is out of date, 2 is the newest"):
            write("weight_versions", key(1), version(1), fence=old)
    assert lake.count("weight_versions") == 0
    lake.commit_once("weight_versions", key(1), version(1), fence=new)
    with pytest.raises(StaleFence):  # also where its rows stand already
        lake.commit_once("weight_versions", key(1), version(1), fence=old)
    with pytest.raises(StaleFence):
        lake.replace("weight_versions", key(1), version(1, "live"), fence=old)
    assert lake.replace("weight_versions", key(1), version(1, "live"), fence=new).wrote
    assert lake.read("weight_versions")["state"].to_pylist() == ["live"]
    other = Lake(lake.uri)
    assert not other.commit_once("weight_versions", key(1), version(1, "live"), fence=new).wrote


def test_the_runs_do_not_shut_each_other_out(lake):
    mine = lake.take_fence("r")
    for _ in range(3):
        theirs = lake.take_fence("s")
    assert lake.commit_once("weight_versions", key(1), version(1), fence=mine).wrote
    assert lake.commit_once("weight_versions", key(1, "s"), version(1, run="s"), fence=theirs).wrote


def test_the_roles_of_a_run_do_not_shut_each_other_out(lake):
    publisher, collector = lake.take_fence("r"), lake.take_fence("r", "collector")
    assert (publisher, collector, lake.take_fence("r", "collector")) == (1, 1, 2)
    assert lake.commit_once("weight_versions", key(1), version(1), fence=publisher).wrote
    with pytest.raises(StaleFence, match="another collector has taken over"):
        lake.replace("weight_versions", key(1), version(1, "collected"), fence=collector, role="collector")
    assert lake.replace("weight_versions", key(1), version(1, "live"), fence=2, role="collector").wrote


def test_a_token_nobody_gave_out_is_refused(lake):
    lake.take_fence("r")
    with pytest.raises(LakeError, match=r"token 7 was never given out to a publisher .* newest is 1"):
        lake.commit_once("weight_versions", key(1), version(1), fence=7)


def test_tables_without_a_fence_refuse_one(lake):
    data = records.rows("weight_tags", [{"run": "r", "tag": "stable", "version": 1, "tagged_at": 0.0}])
    for write in (lake.commit_once, lake.replace):
        with pytest.raises(FilterError, match="weight_tags takes no fencing token, only weight_versions does"):
            write("weight_tags", {"run": "r", "tag": "stable"}, data, fence=1)


@pytest.mark.parametrize("fenced", [False, True])
def test_a_token_taken_between_look_and_write_refuses_the_write(lake, fenced, monkeypatch):
    """The race itself: the late publisher has checked its token when the new one takes over."""
    token = lake.take_fence("r")
    handle, rival, raced = lake._handle("weight_versions"), Lake(lake.uri), []
    write = handle.write

    def slow_write(*args):
        if not raced:
            raced.append(rival.take_fence("r"))
            if fenced:
                rival.commit_once("weight_versions", key(1), version(1, fence=2), fence=raced[0])
        return write(*args)

    monkeypatch.setattr(handle, "write", slow_write)
    with pytest.raises(StaleFence, match="token 1 is out of date, 2 is the newest"):
        lake.replace("weight_versions", key(1), version(1, "live"), fence=token)
    assert rival.read("weight_versions")["state"].to_pylist() == (["staged"] if fenced else [])


def test_two_takers_on_one_snapshot_collide(lake):
    lake.take_fence("r")
    one, two = lake._handle("weight_versions"), Lake(lake.uri)._handle("weight_versions")
    mine, theirs = one.ensure(), two.ensure()
    assert one.claim(mine, "fence/publisher/r") == 2
    with pytest.raises(Conflict):
        two.claim(theirs, "fence/publisher/r")
    assert two.claim(two.ensure(), "fence/publisher/r") == 3


def test_replacing_what_someone_else_changed_is_refused(lake):
    lake.commit_once("weight_versions", key(1), version(1))
    seen = lake.read("weight_versions", key(1))
    lake.replace("weight_versions", key(1), version(1, "live"), expected=seen)
    with pytest.raises(RowsDifferError, match="weight_versions"):
        lake.replace("weight_versions", key(1), version(1, "collected"), expected=seen)
    assert lake.read("weight_versions")["state"].to_pylist() == ["live"]


def test_a_token_is_renewed_only_by_who_holds_the_newest(lake):
    first = lake.take_fence("r")
    second = lake.take_fence("r", held=first)
    assert second == first + 1
    with pytest.raises(StaleFence, match="fencing token 1 is out of date, 2 is the newest"):
        Lake(lake.uri).take_fence("r", held=first)
    assert lake.take_fence("r") == second + 1


def test_threads_never_get_the_same_token(lake):
    got: list[int] = []

    def take(own: Lake) -> None:
        mine = [own.take_fence("r") for _ in range(5)]
        assert mine == sorted(mine)
        got.extend(mine)

    lakes = [lake, lake, Lake(lake.uri), Lake(lake.uri)]
    threads = [threading.Thread(target=take, args=(own,)) for own in lakes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(got) == list(range(1, 21))


def test_processes_never_get_the_same_token_even_when_killed(lake):
    """Each prints its tokens; one of them is killed at a time of its own, and its tokens are not given out again."""
    lake.take_fence("r")
    loop = """
        lake = t.Lake(sys.argv[1])
        for _ in range(int(sys.argv[2])):
            print(lake.take_fence("r"), flush=True)
    """
    workers = [python(loop, lake.uri, 10), python(loop, lake.uri, 10), python(loop, lake.uri, 10**6)]
    try:
        first = workers[2].stdout.readline()
        time.sleep(0.3)
        os.kill(workers[2].pid, signal.SIGKILL)
        outputs = [worker.communicate(timeout=60) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers[:2]] == [0, 0], outputs
    tokens = [[int(line) for line in text.splitlines()] for text, _ in outputs]
    tokens[2].insert(0, int(first))
    assert all(mine == sorted(mine) for mine in tokens)
    flat = [token for mine in tokens for token in mine]
    assert len(flat) == len(set(flat)) >= 21
    assert lake.take_fence("r") > max(flat)
