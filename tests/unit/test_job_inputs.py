"""Jobs launched with a wrong word: the message says what there is and what to set, and nothing is touched."""

import pytest
from blank_rows import blank_row
from dagster import DagsterInstance

from furlong.ops import records
from furlong.ops.spec import Placement, load_spec
from furlong.pipelines.definitions import defs
from furlong.resources.lake import Lake
from furlong.resources.run_lock import run_lock
from furlong.resources.system import System

OPS = {
    "evaluate": "evaluate_version", "publish": "publish_version", "export_hf": "export_version",
    "rebuild_weights": "rebuild_version", "replay_step": "replay", "compact_lake": "compact_tables",
}  # fmt: skip
BY_VERSION = ("evaluate", "publish", "export_hf", "rebuild_weights")


@pytest.fixture
def placement(tmp_path):
    return Placement(root=str(tmp_path))


@pytest.fixture
def lake(placement):
    """Two runs, of which `two` has nothing live."""
    lake = Lake(placement.lake_uri())
    spec = load_spec("tiny")
    for run in ("one", "two"):
        row = blank_row("runs") | {"run": run, "spec": spec.canonical(), "spec_fingerprint": spec.fingerprint()}
        lake.commit_once("runs", {"run": run}, records.rows("runs", [row]))
    return lake


def said(job: str, placement: Placement, **config) -> str:
    """What stops the job, as the UI shows it; empty when nothing does."""
    with DagsterInstance.ephemeral() as instance:
        result = defs.resolve_job_def(job).execute_in_process(
            run_config={"ops": {OPS[job]: {"config": config}}},
            resources={"system": System(placement)},
            instance=instance,
            raise_on_error=False,
        )
        errors = [event.step_failure_data.error for event in result.all_events if event.is_step_failure]
    assert result.success == (not errors)
    return " ".join(error.cause.message if error.cause else error.message for error in errors)


@pytest.mark.parametrize("job", [*BY_VERSION, "replay_step"])
def test_an_empty_lake_says_how_to_begin(job, placement):
    assert "has no runs; set FURLONG_ROOT or FURLONG_LAKE, or start a run first" in said(job, placement)


@pytest.mark.parametrize("job", [*BY_VERSION, "replay_step"])
def test_runs_are_named(job, placement, lake):
    assert "has runs one, two; choose one" in said(job, placement)
    assert "no run 'tow'" in said(job, placement, run="tow")


@pytest.mark.parametrize("job", BY_VERSION)
def test_a_tag_that_is_none_is_told_the_others(job, placement, lake):
    row = blank_row("weight_tags") | {"run": "one", "tag": "best", "version": 3}
    lake.replace("weight_tags", {"run": "one", "tag": "best"}, records.rows("weight_tags", [row]))
    assert "run one has no tag 'bset'; it has best" in said(job, placement, run="one", version="bset")


@pytest.mark.parametrize("job", BY_VERSION)
def test_a_run_without_weights_says_what_to_run(job, placement, lake):
    assert "run two has no live weights version; run its `prompts` first" in said(job, placement, run="two")


def test_a_step_that_was_not_taken_is_not_replayed(placement, lake):
    assert "run one has no committed step 7 to replay; it has none yet" in said(
        "replay_step", placement, run="one", step=7
    )


def test_compaction_keeps_what_a_driver_may_read(placement, lake):
    assert said("compact_lake", placement, retention_hours=0, tables=["runs"]) == ""
    with run_lock(placement.folder, "one"):
        told = said("compact_lake", placement, retention_hours=0)
        assert "retention_hours=0 while run one is driven" in told
        assert "set 24 or more" in told
        assert said("compact_lake", placement, retention_hours=24, tables=["runs"]) == ""


def test_compaction_knows_the_tables(placement, lake):
    assert "the lake has no tables reward; it has runs, prompts" in said("compact_lake", placement, tables=["reward"])
