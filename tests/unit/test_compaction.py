"""Compaction of the lake: the same rows in fewer files, beside writers and readers."""

import threading

import pyarrow as pa
from blank_rows import blank_row

from furlong.ops import records
from furlong.resources.lake import Lake


def rows(run: str, step: int) -> pa.Table:
    return records.rows(
        "rewards", [blank_row("rewards") | {"run": run, "step": step, "attempt": 1, "trajectory_id": f"{run}-{step}"}]
    )


def add(lake: Lake, run: str, step: int) -> None:
    lake.commit_once("rewards", {"run": run, "step": step}, rows(run, step))


def test_files_become_fewer_and_rows_stay(tmp_path):
    lake = Lake(str(tmp_path))
    for step in range(1, 9):
        add(lake, "a", step)
        add(lake, "b", step)
    before = records.row_digest("rewards", lake.read("rewards"))
    version = lake.version("rewards")
    assert lake.files("rewards") == 16
    assert lake.compact("rewards") == {"removed": 16, "added": 2}
    assert lake.files("rewards") == 2
    assert records.row_digest("rewards", lake.read("rewards")) == before
    assert lake.count("rewards", {"run": "a", "step": 3}) == 1
    # Old files are kept until they are out of the retention, and with them the older versions.
    assert lake.vacuum("rewards") == []
    assert records.row_digest("rewards", lake.read("rewards", version=version)) == before
    assert len(lake.vacuum("rewards", 0)) == 16
    assert records.row_digest("rewards", Lake(str(tmp_path)).read("rewards")) == before
    assert lake.compact("rewards") == {"removed": 0, "added": 0}


def test_what_there_is_nothing_of_is_left_alone(tmp_path):
    lake = Lake(str(tmp_path))
    assert lake.compact("rewards") == {"removed": 0, "added": 0}
    assert lake.files("rewards") == 0
    add(lake, "a", 1)
    assert lake.compact("rewards") == {"removed": 0, "added": 0}


def test_binary_rows_are_kept(tmp_path):
    lake = Lake(str(tmp_path))
    for version in range(1, 4):
        row = blank_row("weight_deltas") | {"run": "a", "version": version, "data": bytes([version]) * 3000}
        lake.commit_once("weight_deltas", {"run": "a", "version": version}, records.rows("weight_deltas", [row]))
    before = records.row_digest("weight_deltas", lake.read("weight_deltas"))
    assert lake.compact("weight_deltas")["added"] == 1
    assert records.row_digest("weight_deltas", lake.read("weight_deltas")) == before


def test_writers_and_compaction_do_not_hurt_each_other(tmp_path):
    """Appends and replacements by another process's handle, all while compaction goes round and round."""
    writer, compactor = Lake(str(tmp_path)), Lake(str(tmp_path))
    for step in range(1, 5):
        add(writer, "a", step)
    done, errors = threading.Event(), []

    def write() -> None:
        try:
            for step in range(5, 25):
                add(writer, "a", step)
                # Rewrites a file that compaction may be about to take away.
                writer.replace("rewards", {"run": "a", "step": step - 3}, rows("a", step - 3))
        except Exception as err:  # raised in the test's own thread
            errors.append(err)
        finally:
            done.set()

    thread = threading.Thread(target=write)
    thread.start()
    rounds = 0
    while not done.is_set():
        compactor.compact("rewards")
        rounds += 1
    thread.join(60)
    assert errors == []
    assert rounds > 1
    assert sorted(Lake(str(tmp_path)).read("rewards")["step"].to_pylist()) == list(range(1, 25))
