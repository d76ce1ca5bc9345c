"""The lake in an object store: two writers at once commit each key exactly once, and no fencing token is given out twice."""

import json
import os
import subprocess
import sys

import pytest
from object_store import object_store

from furlong.resources.lake import Lake, RowsDifferError

KEYS = 8
WRITER = """
import json, sys
from furlong.ops import records
from furlong.resources.lake import Lake, RowsDifferError
lake, mine, keys = Lake("s3://lake/both"), int(sys.argv[1]), int(sys.argv[2])
sys.stdin.readline()
wrote, refused, fences = [], [], []
for n in range(keys):
    fences.append(lake.take_fence("a"))
    for run, version in (("a", n), ("b", mine)):
        row = {"run": run, "tag": f"t{n}", "version": version, "tagged_at": float(mine)}
        try:
            done = lake.commit_once("weight_tags", {"run": run, "tag": f"t{n}"}, records.rows("weight_tags", [row]))
            wrote += [f"{run}{n}"] if done.wrote else []
        except RowsDifferError:
            refused.append(f"{run}{n}")
print(json.dumps([wrote, refused, fences]))
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with object_store(tmp_path_factory.mktemp("store") / "log") as env:
        yield env


def test_two_writers_commit_each_key_once(store, monkeypatch):
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    Lake("s3://lake/both").create()
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(number), str(KEYS)],
            env=os.environ | store, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in (1, 2)
    ]  # fmt: skip
    try:
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        told = [writer.communicate(timeout=120) for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    assert [writer.returncode for writer in writers] == [0, 0], told
    (first, refused_first, fences), (second, refused_second, others) = (json.loads(out) for out, _ in told)
    keys = sorted(f"{run}{n}" for run in "ab" for n in range(KEYS))
    assert sorted(first + second) == keys
    # Both wanted the same row under a's keys, and different ones under b's.
    assert sorted(refused_first + refused_second) == [key for key in keys if key.startswith("b")]
    assert set(refused_first) <= set(second)
    assert set(refused_second) <= set(first)
    assert sorted(fences + others) == list(range(1, 2 * KEYS + 1))
    rows = Lake("s3://lake/both").read("weight_tags").to_pylist()
    assert sorted(f"{row['run']}{row['tag'][1:]}" for row in rows) == keys
    assert {f"b{row['tag'][1:]}" for row in rows if row["run"] == "b" and row["version"] == 1} == {
        key for key in first if key.startswith("b")
    }


def test_a_store_without_a_bucket_is_an_error_that_names_it(store, monkeypatch):
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    from furlong.resources.lake import LakeError

    with pytest.raises(LakeError, match="s3://nowhere/lake"):
        Lake("s3://nowhere/lake").create()


def test_replacing_what_another_replaced_is_refused(store, monkeypatch):
    for name, value in store.items():
        monkeypatch.setenv(name, value)
    from furlong.ops import records

    one, other, key = Lake("s3://lake/swap"), Lake("s3://lake/swap"), {"run": "a", "tag": "stable"}

    def row(version: int):
        return records.rows("weight_tags", [{**key, "version": version, "tagged_at": 0.0}])

    one.commit_once("weight_tags", key, row(1))
    other.replace("weight_tags", key, row(2), expected=row(1))
    with pytest.raises(RowsDifferError):
        one.replace("weight_tags", key, row(3), expected=row(1))
    assert one.read("weight_tags", key)["version"].to_pylist() == [2]
