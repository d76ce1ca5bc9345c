"""`furlong weights`, as a person uses it."""

import shutil

import pytest
from typer.testing import CliRunner
from weights_lake import WeightsLake, same_bits, small_run

from furlong.cli.main import app
from furlong.resources.lake import Lake
from furlong.resources.weights.anchors import read_file

CLI = CliRunner()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, quick_spec) -> tuple:
    root = tmp_path_factory.mktemp("prepared")
    return root, small_run(root, quick_spec)


@pytest.fixture
def made(prepared, tmp_path, monkeypatch) -> WeightsLake:
    """A copy of the root, and commands that work in it."""
    root, original = prepared
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("FURLONG_ROOT", str(tmp_path))
    monkeypatch.delenv("FURLONG_LAKE", raising=False)
    made = WeightsLake.__new__(WeightsLake)
    vars(made).update(vars(original) | {"lake": Lake(str(tmp_path / "lake"))})
    made.base = original.base.replace(str(root), str(tmp_path))
    return made


def weights(*arguments: object, status: int = 0) -> str:
    """What the command prints: on stdout when it succeeds, on stderr when it does not. Never a traceback."""
    done = CLI.invoke(app, ["weights", *map(str, arguments)])
    assert done.exit_code == status, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert "Traceback" not in done.output
    return " ".join((done.stderr if status else done.stdout).split())


def test_list_shows_every_version_and_its_tags(made):
    weights("tag", "stable", 2)
    told = weights("list")
    for version in made.truth:
        assert made.row(version)["digest"][:12] in told
    assert "stable" in told
    assert "weights versions of run r" in told


def test_rebuild_writes_the_version_or_the_tag(made, tmp_path):
    told = weights("rebuild", 2, "--to", tmp_path / "two", "--run", "r")
    assert f"digest {made.row(2)['digest'][:16]}" in told
    assert same_bits(read_file(tmp_path / "two" / "model.safetensors"), made.truth[2])
    weights("tag", "candidate", 3)
    weights("rebuild", "candidate", "--to", tmp_path / "named")
    assert same_bits(read_file(tmp_path / "named" / "model.safetensors"), made.truth[3])
    assert "exists and is not empty" in weights("rebuild", 1, "--to", tmp_path / "two", status=1)
    (tmp_path / "file").touch()
    assert "could not be written" in weights("rebuild", 1, "--to", tmp_path / "file" / "below", status=1)


def test_verify_counts_and_names_faults(made):
    assert "4 versions verified, 0 at fault" in weights("verify")
    rows = made.lake.read("weight_deltas", {"run": "r", "version": 2})
    made.lake.replace("weight_deltas", {"run": "r", "version": 2}, rows.slice(1))
    told = weights("verify", status=1)
    assert f"version 2: tensor {rows['name'][0].as_py()} comes out with digest" in told
    assert "version 3 is built on version 2, which is at fault itself" in told


def test_a_run_without_a_draft_takes_none(made, tmp_path):
    told = weights("publish-draft", tmp_path, status=1)
    assert "run r draws without a draft, so a published one would lie idle" in told
    assert set(made.states()) == {0, 1, 2, 3}


def test_tags_come_and_go(made):
    assert weights("tag", "stable", 1) == "stable is version 1 of run r"
    assert weights("tag", "old", "stable") == "old is version 1 of run r"
    assert weights("untag", "stable") == "version 1 of run r is no longer stable"
    assert "no tag 'stable'; it has old" in weights("untag", "stable", status=2)
    assert "version 9 is not in the lake; `furlong weights list` shows" in weights("tag", "x", 9, status=2)
    assert "could be taken for something else" in weights("tag", "7", 1, status=2)


def test_collect_tells_first_and_then_does(made, tmp_path):
    for _ in range(2):
        made.publish(share=1.0)
    made.publish(share=1.0)
    dry = weights("collect", "--keep-last", 1, "--dry-run")
    assert "4 versions would be collected: 1-4" in dry
    assert set(made.states().values()) == {"live"}
    assert "0 files of freed rows removed from disk" in weights("collect", "--keep-last", 9)
    told = weights("collect", "--keep-last", 1, "--retention-hours", 0)
    assert told.split(" versions ")[0] == dry.split(" versions ")[0]
    assert "would" not in told
    assert {version for version, state in made.states().items() if state == "collected"} == {1, 2, 3, 4}
    assert "stored completely first: 5" in told
    assert "3 versions verified" in weights("verify")
    assert "version 2 was collected, so its bytes are gone" in weights("rebuild", 2, "--to", tmp_path / "x", status=1)
    assert not (tmp_path / "x").exists()


def test_unknown_and_ambiguous_runs_are_told_with_those_there_are(made, quick_spec, tmp_path, monkeypatch):
    assert "no run 'nobody' in the lake" in (told := weights("list", "--run", "nobody", status=2))
    assert "it has r: name one of these" in told
    row = made.lake.read("runs").to_pylist()[0] | {"run": "s"}
    from furlong.ops import records

    made.lake.commit_once("runs", {"run": "s"}, records.rows("runs", [row]))
    assert "has runs r, s; choose one with --run" in weights("verify", status=2)
    weights("list", "--run", "r")
    monkeypatch.setenv("FURLONG_ROOT", str(tmp_path / "empty"))
    assert "has no runs" in weights("list", status=2)


@pytest.mark.parametrize("arguments", [["collect", "--keep-last", "0"], ["collect"], ["rebuild", "1"], ["frobnicate"]])
def test_wrong_usage_ends_with_status_2(arguments):
    assert CLI.invoke(app, ["weights", *arguments]).exit_code == 2
