"""The lake: exactly once whoever writes, all or nothing whatever fails, and nothing read that does not fit."""

import json
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
from deltalake import DeltaTable, write_deltalake

from furlong.ops import records
from furlong.resources import lake_table
from furlong.resources.lake import Lake, RowsDifferError
from furlong.resources.lake_filter import FilterError
from furlong.resources.lake_table import LakeError


def key(step: int, run: str = "r", attempt: int = 1) -> dict:
    return {"run": run, "step": step, "attempt": attempt}


def rewards(step: int, count: int = 3, run: str = "r", score: float = 1.0, seconds: float = 0.1, detail: str = ""):
    common = key(step, run) | {"verifier": "v", "verifier_version": "1", "verdict": "correct", "score": score}
    rest = {"extracted": "1", "detail": detail, "seconds": seconds}
    return records.rows("rewards", [common | rest | {"trajectory_id": f"{run}-{step}-{i}"} for i in range(count)])


def deltas(version: int, sizes: list[int], run: str = "r") -> pa.Table:
    row = {"run": run, "version": version, "base_version": version - 1, "chunk": 0, "offset": 0, "dtype": "bfloat16"}
    rest = {"shape": [2, 3], "encoding": "xor+zstd", "digest": "0" * 64}
    return records.rows("weight_deltas", [
        row | rest | {"name": f"t{i}", "length": size, "data": os.urandom(size)} for i, size in enumerate(sizes)
    ])  # fmt: skip


def ids(table: pa.Table) -> list[str]:
    return sorted(table["trajectory_id"].to_pylist())


def python(code: str, *args: object) -> subprocess.Popen:
    """Run code that may use this module as `t` in a fresh process."""
    head = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_lake as t\n"
    command = [sys.executable, "-c", head + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def lake(tmp_path) -> Lake:
    return Lake(str(tmp_path / "lake"))


def sample(table: str) -> pa.Table:
    """One row of the table with every kind of value filled in."""

    def value(kind: pa.DataType):
        if pa.types.is_list(kind):
            return [value(kind.value_type)] * 2
        if pa.types.is_struct(kind):
            return {field.name: value(field.type) for field in kind}
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return b"\0\xff"
        return {"string": "x'y\n\u00e9", "int32": 7, "int64": 2**40, "bool": True}.get(str(kind), 0.5)

    return records.rows(table, [{field.name: value(field.type) for field in records.TABLES[table]}])


@pytest.mark.parametrize("table", sorted(records.TABLES))
def test_every_table_gives_back_exactly_what_was_committed(lake, table):
    data = sample(table)
    names = [n for n in ("run", "dataset", "step", "version") if n in data.column_names]
    where = {name: data[name][0].as_py() for name in names}
    first = lake.commit_once(table, where, data)
    assert (first.rows, first.wrote) == (1, True)
    fresh = Lake(lake.uri)
    assert fresh.read(table, where).equals(data)
    again = fresh.commit_once(table, where, data)
    assert (again.version, again.rows, again.wrote) == (first.version, 1, False)
    assert lake.count(table) == 1


def test_a_lake_without_tables_reads_as_empty(lake):
    assert lake.read("rewards").equals(records.TABLES["rewards"].empty_table())
    assert lake.read("rewards", key(1), ["score", "run"]).column_names == ["score", "run"]
    assert lake.count("rewards", key(1)) == 0
    assert lake.version("rewards") is None
    assert lake.history("rewards") == []
    assert not Path(lake.uri).exists()
    with pytest.raises(LakeError, match=r"rewards at .* does not exist, so it has no version 3"):
        lake.read("rewards", version=3)


def test_selecting_rows(lake):
    for run in ("r", "s 1/2'%"):
        for step in range(4):
            lake.commit_once("rewards", key(step, run), rewards(step, run=run, score=float(step)))
    assert ids(lake.read("rewards", {"run": "s 1/2'%", "step": [1, 3]})) == ids(
        pa.concat_tables([rewards(1, run="s 1/2'%"), rewards(3, run="s 1/2'%")])
    )
    wanted = ["r-0-1", "r-2-2", "nowhere"]
    assert ids(lake.read("rewards", {"trajectory_id": wanted}, ["trajectory_id"])) == ["r-0-1", "r-2-2"]
    assert lake.read("rewards", {"run": "r", "step": 2}, ["score", "step"]).to_pydict() == {
        "score": [2.0] * 3, "step": [2] * 3,
    }  # fmt: skip
    assert lake.count("rewards", {"step": [0, 1]}) == 12
    assert lake.count("rewards") == 24
    assert lake.read("rewards", {"run": "r", "step": []}).num_rows == 0
    assert lake.read("rewards", {"run": "R"}).num_rows == 0


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"stepp": 1}, "no column 'stepp'"),
        ({"step": "1"}, "rewards.step is int64, but is compared with '1'"),
        ({"step": True}, "compared with True"),
        ({"run": None}, "compared with None"),
        ({"run": 5}, "compared with 5"),
        ({"score": 1.0}, "selected by text and integer columns only"),
    ],
)
def test_a_filter_that_could_not_match_is_refused(lake, where, message):
    with pytest.raises(FilterError, match=message):
        lake.read("rewards", where)


def test_other_misuse_is_refused(lake):
    with pytest.raises(FilterError, match="no table 'reward'"):
        lake.read("reward")
    with pytest.raises(FilterError, match=r"no columns \['scor'\]"):
        lake.read("rewards", columns=["scor"])
    with pytest.raises(FilterError, match="does not name one run"):
        lake.commit_once("rewards", {"step": 1}, rewards(1))
    with pytest.raises(FilterError, match="does not name one run"):
        lake.commit_once("rewards", {"run": ["r", "s"], "step": 1}, rewards(1))
    with pytest.raises(FilterError, match="selects nothing in particular"):
        lake.commit_once("rewards", {"run": "r", "step": []}, rewards(1))
    with pytest.raises(FilterError, match="3 of 6 rows do not have the key"):
        lake.commit_once("rewards", key(1), pa.concat_tables([rewards(1), rewards(2)]))
    with pytest.raises(records.SchemaError, match="rewards"):
        lake.commit_once("rewards", key(1), rewards(1).drop_columns(["score"]))
    assert lake.version("rewards") is None


def test_committing_again_changes_nothing(lake):
    first = lake.commit_once("rewards", key(1), rewards(1))
    shuffled = rewards(1, seconds=9.0).take([2, 0, 1])  # a measured column and the order are not identity
    second = lake.commit_once("rewards", key(1), shuffled)
    assert (first.wrote, second.wrote, second.version, second.rows) == (True, False, first.version, 3)
    assert lake.read("rewards")["seconds"].to_pylist() == [0.1] * 3
    assert lake.version("rewards") == first.version


@pytest.mark.parametrize("offered", [rewards(1, score=0.0), rewards(1, count=2), rewards(1, count=0)])
def test_other_rows_under_the_same_key_are_an_error(lake, offered):
    first = lake.commit_once("rewards", key(1), rewards(1))
    with pytest.raises(
        RowsDifferError, match=r"rewards at .* holds 3 rows for .*'step': 1.*a repeat must give the same"
    ):
        lake.commit_once("rewards", key(1), offered)
    assert lake.version("rewards") == first.version
    assert lake.commit_once("rewards", key(1), rewards(1)).wrote is False


def test_a_stage_without_rows_commits_nothing(lake):
    nothing = lake.commit_once("rewards", key(1), rewards(1, count=0))
    assert (nothing.rows, nothing.wrote, nothing.version) == (0, False, 0)
    assert lake.commit_once("rewards", key(1), rewards(1)).wrote


def test_commits_carry_run_step_and_stage(lake):
    lake.commit_once("rewards", key(4), rewards(4))
    lake.replace("weight_deltas", {"run": "r", "version": 2}, deltas(2, [10]))
    newest = lake.history("rewards", 1)[0]
    assert {k: newest[k] for k in ("run", "step", "attempt", "stage", "version")} == {
        "run": "r", "step": "4", "attempt": "1", "stage": "rewards", "version": 1,
    }  # fmt: skip
    assert lake.history("weight_deltas")[0]["weights_version"] == "2"
    assert [entry["version"] for entry in lake.history("rewards")] == [1, 0]


def test_replace_swaps_exactly_the_rows_of_its_key(lake):
    for step in (1, 2):
        lake.commit_once("rewards", key(step), rewards(step))
    done = lake.replace("rewards", key(1), rewards(1, count=2, score=0.0))
    assert (done.rows, done.wrote, done.version) == (2, True, 3)
    assert lake.read("rewards", key(1))["score"].to_pylist() == [0.0, 0.0]
    assert lake.read("rewards", key(2)).num_rows == 3
    assert lake.replace("rewards", key(3), rewards(3)).rows == 3
    assert lake.replace("rewards", key(3), rewards(3, count=0)).rows == 0
    assert lake.count("rewards") == 5


def test_older_versions_stay_readable(lake):
    first = lake.commit_once("rewards", key(1), rewards(1)).version
    second = lake.replace("rewards", key(1), rewards(1, score=0.0)).version
    lake.commit_once("rewards", key(2), rewards(2))
    assert set(lake.read("rewards", key(1), version=first)["score"].to_pylist()) == {1.0}
    assert set(lake.read("rewards", version=second)["score"].to_pylist()) == {0.0}
    assert lake.read("rewards", version=0).num_rows == 0
    assert lake.count("rewards") == 6
    with pytest.raises(LakeError, match=r"rewards at .*opening its Delta version 99 failed"):
        lake.read("rewards", version=99)


def test_reopening_and_checkpoints_lose_nothing(lake, monkeypatch):
    monkeypatch.setattr(lake_table, "_REOPEN_AFTER", 3)
    monkeypatch.setattr(lake_table, "_CHECKPOINT_EVERY", 5)
    other = Lake(lake.uri)
    for step in range(12):
        assert (lake, other)[step % 2].commit_once("rewards", key(step), rewards(step, count=1)).wrote
    assert list(Path(lake.uri).glob("rewards/_delta_log/*.checkpoint.parquet"))
    for reader in (lake, other, Lake(lake.uri)):
        assert sorted(reader.read("rewards")["step"].to_pylist()) == list(range(12))
        assert reader.read("rewards", version=3).num_rows == 3


def test_two_writers_who_both_looked_collide(lake):
    """The race itself, step by step: the second writer's check is stale, so its write must not go through."""
    lake.commit_once("rewards", key(0), rewards(0))
    handles = [Lake(lake.uri)._tables["rewards"] for _ in range(2)]
    snapshots = [handle.ensure() for handle in handles]
    wanted = {"run": ["r"], "step": [1]}
    assert [h.select(s, wanted).num_rows for h, s in zip(handles, snapshots, strict=True)] == [0, 0]
    handles[0].write(snapshots[0], rewards(1), "r", {}, None)
    with pytest.raises(lake_table.Conflict):
        handles[1].write(snapshots[1], rewards(1), "r", {}, None)
    assert handles[1].select(handles[1].ensure(), wanted).num_rows == 3
    handles[1].write(handles[1].ensure(), rewards(1, run="s"), "s", {}, None)  # another run goes through
    assert lake.count("rewards") == 9


def test_threads_and_lakes_in_one_process_write_once(lake):
    lakes, wrote = [lake, Lake(lake.uri), Lake(lake.uri)], []

    def work(one: Lake, shift: int):
        for step in range(5):
            at = (step + shift) % 5
            wrote.append((at, one.commit_once("rewards", key(at), rewards(at)).wrote))

    threads = [threading.Thread(target=work, args=(lakes[n % 3], n)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(wrote) == 30
    assert sorted(at for at, won in wrote if won) == list(range(5))
    assert lake.count("rewards") == 15


def test_processes_creating_and_writing_at_once_write_once(lake):
    workers = [
        python(
            """
            import time
            while time.time() < float(sys.argv[2]): pass
            lake = t.Lake(sys.argv[1])
            won = [lake.commit_once("rewards", t.key(s), t.rewards(s)).wrote for s in range(8)]
            print(t.json.dumps(won))
            """,
            lake.uri, time.time() + 2.0,
        )
        for _ in range(3)
    ]  # fmt: skip
    outputs = [worker.communicate(timeout=60) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 3, outputs
    won = [json.loads(out) for out, _ in outputs]
    assert [sum(column) for column in zip(*won, strict=True)] == [1] * 8
    assert lake.count("rewards") == 24


def test_a_writer_that_always_loses_gives_up_with_a_reason(lake, monkeypatch):
    def lose(*_):
        raise lake_table.Conflict("lost")

    monkeypatch.setattr(lake_table.LakeTable, "write", lose)
    monkeypatch.setattr("furlong.resources.lake.time.sleep", lambda _: None)
    for method in (lake.commit_once, lake.replace):
        with pytest.raises(LakeError, match="won 12 times in a row, nothing was written"):
            method("rewards", key(1), rewards(1))


def test_a_killed_writer_leaves_whole_commits_only(lake):
    """SIGKILL at several moments of a stream of commits of 2 MB each; every committed version is whole."""
    lake.commit_once("weight_deltas", {"run": "r", "version": 1}, deltas(1, [100]))
    for delay in (0.0, 0.004, 0.011, 0.023, 0.042):
        worker = python(
            """
            lake = t.Lake(sys.argv[1])
            version = max(lake.read("weight_deltas", columns=["version"])["version"].to_pylist())
            print("go", flush=True)
            while True:
                version += 1
                lake.commit_once("weight_deltas", {"run": "r", "version": version}, t.deltas(version, [200_000] * 10))
            """,
            lake.uri,
        )
        assert worker.stdout.readline() == "go\n"
        time.sleep(delay)
        worker.send_signal(signal.SIGKILL)
        worker.communicate(timeout=30)
    found = Lake(lake.uri).read("weight_deltas", columns=["version", "name"]).to_pylist()
    versions = sorted({row["version"] for row in found})
    assert versions == list(range(1, len(versions) + 1))
    assert all(sum(r["version"] == v for r in found) == 10 for v in versions[1:])
    after = versions[-1] + 1
    assert lake.commit_once("weight_deltas", {"run": "r", "version": after}, deltas(after, [100])).wrote


def test_a_kill_between_data_file_and_log_leaves_nothing(lake):
    """The data file is complete, the process dies before its log entry: no row is visible, and a repeat writes once."""
    lake.commit_once("rewards", key(1), rewards(1))
    worker = python(
        """
        import os, threading, time
        lake = t.Lake(sys.argv[1])
        table = lake._tables["rewards"].ensure()
        seen = set(t.Path(lake.uri).glob("rewards/**/*.parquet"))
        log = t.Path(lake.uri, "rewards", "_delta_log")
        log.rename(log.with_name("gone"))
        log.write_text("")  # a file where the log folder was: the entry cannot be written
        try:
            t.write_deltalake(table, t.rewards(2), mode="append")
        finally:
            assert set(t.Path(lake.uri).glob("rewards/**/*.parquet")) - seen, "the data file was not written"
            log.unlink()
            log.with_name("gone").rename(log)
            os.kill(os.getpid(), 9)
        """,
        lake.uri,
    )
    _, err = worker.communicate(timeout=30)
    assert worker.returncode == -signal.SIGKILL, err
    assert "AssertionError" not in err
    assert lake.count("rewards") == 3
    assert lake.commit_once("rewards", key(2), rewards(2)).wrote
    assert lake.count("rewards") == 6


@pytest.mark.parametrize("limit", [20_000, 6_000])
def test_a_full_disk_is_named_and_leaves_nothing(lake, limit):
    """A file-size limit gives real OS errors: at 20 kB in the data file of an append, at 6 kB in a long log entry."""
    for step in range(30):
        lake.commit_once("rewards", key(step), rewards(step, count=1))
    worker = python(
        """
        lake = t.Lake(sys.argv[1])
        import resource
        def allow(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        before = lake.version("rewards")
        if sys.argv[2] == "20000":
            data = t.rewards(99, count=50, detail="").to_pylist()
            data = t.records.rows("rewards", [row | {"detail": t.os.urandom(2000).hex()} for row in data])
            def commit(): return lake.commit_once("rewards", t.key(99), data)
        else:  # swapping all rows of the run writes one small data file and thirty removals
            def commit(): return lake.replace("rewards", {"run": "r"}, t.rewards(99, count=50))
        allow(int(sys.argv[2]))
        try:
            commit()
        except t.LakeError as err:
            message = str(err)
        else:
            raise AssertionError("the limit did not bite")
        assert lake.version("rewards") == t.Lake(lake.uri).version("rewards") == before
        assert lake.count("rewards") == 30
        allow(resource.RLIM_INFINITY)
        assert commit().wrote
        print(message)
        """,
        lake.uri, limit,
    )  # fmt: skip
    out, err = worker.communicate(timeout=60)
    assert worker.returncode == 0, err
    assert f"table rewards at {lake.uri}/rewards: committing to it failed" in out
    assert "File too large" in out
    assert ("parquet" in out.split("failed:")[1]) == (limit == 20_000)  # the data file, else the log
    assert "\x1b" not in out
    assert lake.count("rewards", {"step": 99}) == 50


def test_failing_to_create_a_table_is_named_and_can_be_repeated(lake):
    folder = Path(lake.uri)
    folder.mkdir()
    (folder / "rewards").write_text("in the way")
    for call in (lambda: lake.commit_once("rewards", key(1), rewards(1)), lambda: lake.read("rewards")):
        with pytest.raises(LakeError, match=f"table rewards at {folder}/rewards: opening it failed"):
            call()
    (folder / "rewards").unlink()
    assert lake.commit_once("rewards", key(1), rewards(1)).wrote


def test_a_damaged_data_file_is_named(lake):
    lake.commit_once("rewards", key(1), rewards(1))
    lake.commit_once("rewards", key(2), rewards(2))
    [file] = [p for p in Path(lake.uri).glob("rewards/**/*.parquet") if p.stat().st_size][:1]
    file.unlink()
    with pytest.raises(LakeError, match=r"table rewards at .*reading it failed.*No such file"):
        lake.read("rewards")


@pytest.mark.parametrize("mark", ["furlong schema version 0", "made by hand", None])
def test_a_table_of_another_schema_version_is_refused(lake, mark):
    schema = records.TABLES["rewards"]
    DeltaTable.create(f"{lake.uri}/rewards", schema, partition_by=["run"], description=mark)
    found = "0" if mark and mark.endswith("0") else "none"
    wanted = f"table rewards at .*has schema version {found}, this code needs {records.SCHEMA_VERSION};.*FURLONG_LAKE"
    for call in (
        lambda: lake.read("rewards"),
        lambda: lake.read("rewards", version=0),
        lambda: lake.commit_once("rewards", key(1), rewards(1)),
        lambda: lake.replace("rewards", key(1), rewards(1)),
    ):
        with pytest.raises(records.SchemaError, match=wanted):
            call()
    assert DeltaTable(f"{lake.uri}/rewards").version() == 0


def test_a_table_with_other_columns_is_refused(lake):
    lake.commit_once("rewards", key(1), rewards(1))
    mark = f"furlong schema version {records.SCHEMA_VERSION}"
    wide = records.TABLES["rewards"].append(pa.field("extra", pa.string()))
    retyped = records.TABLES["rewards"].set(1, pa.field("step", pa.string(), nullable=False))
    for other, message in ((wide, "12 columns where 11"), (retyped, "found .*step.*string.*needed .*step.*long")):
        uri = f"{lake.uri}-{len(other)}"
        DeltaTable.create(f"{uri}/rewards", other, description=mark)
        with pytest.raises(records.SchemaError, match=f"(?s)rewards at {uri}/rewards.*{message}"):
            Lake(uri).read("rewards")
    # Also when another process changes the table under an open handle.
    write_deltalake(f"{lake.uri}/rewards", wide.empty_table(), mode="append", schema_mode="merge")
    with pytest.raises(records.SchemaError, match="12 columns where 11"):
        lake.read("rewards")


def test_weight_payloads_cost_their_own_size(lake):
    data = deltas(1, [50_000] * 20 + [2_000_000])
    lake.commit_once("weight_deltas", {"run": "r", "version": 1}, data)
    payload = 50_000 * 20 + 2_000_000
    [file] = Path(lake.uri).glob("weight_deltas/run=r/*.parquet")
    assert payload < file.stat().st_size < 1.01 * payload
    log = sum(p.stat().st_size for p in Path(lake.uri).glob("weight_deltas/_delta_log/*.json"))
    assert log < 10_000  # no payload in the log's statistics
    assert lake.read("weight_deltas", {"run": "r", "version": 1}).equals(data)


def test_reading_one_step_opens_only_its_files(lake):
    for step in range(12):
        lake.commit_once("rewards", key(step), rewards(step))
    files = sorted(Path(lake.uri).glob("rewards/run=r/*.parquet"), key=lambda p: p.stat().st_mtime_ns)
    assert len(files) == 12
    for file in files[:7] + files[8:]:
        file.unlink()
    assert lake.read("rewards", key(7)).num_rows == 3
    assert lake.commit_once("rewards", key(50), rewards(50)).wrote
    with pytest.raises(LakeError):
        lake.read("rewards", key(6))


def test_a_relative_uri_means_one_place_wherever_it_is_used(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lake = Lake("lake")
    monkeypatch.chdir("/")
    lake.commit_once("rewards", key(1), rewards(1))
    assert Lake(f"file://{tmp_path}/lake/").count("rewards") == 3


def test_the_lake_needs_neither_torch_nor_pandas():
    code = "import furlong.resources.lake, sys; assert not {'torch', 'pandas'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_process_that_read_the_lake_exits_cleanly(tmp_path):
    """Arrow's read-ahead threads once called into a dying interpreter and aborted it."""
    row = {
        "run": "r", "spec_fingerprint": "f", "spec": "{}", "dataset": "d", "base_digest": "b", "code_version": "c",
        "created_at": 0.0,
    }  # fmt: skip
    Lake(str(tmp_path)).commit_once("runs", {"run": "r"}, records.rows("runs", [row]))
    read = f"Lake({str(tmp_path)!r}).read('runs', {{'run': 'r'}})"
    code = f"from furlong.resources.lake import Lake\nfor _ in range(3): {read}"
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
