"""The checks of a step as its stages make them and read them again: on a real engine, trainer and lake."""

import json
import shutil

import pytest

from furlong.ops import records
from furlong.ops.stages.checks import CHECKS, waive
from furlong.ops.stages.context import STAGES, StageError, StepKey

RUN, KEY = "quick", StepKey("quick", 1, 1)
TRAINED = ("prompts", "rollouts", "rewards", "train_step")


@pytest.fixture(scope="module")
def stood(made, tmp_path_factory, quick_spec):
    """A run whose first step is trained but not published."""
    from test_stages import open_run

    root = tmp_path_factory.mktemp("stood")
    shutil.copytree(made / "models", root / "models")
    run = open_run(root, quick_spec)
    perform(run, TRAINED)
    yield run
    run.pause()
    run.verifier.close()


def perform(run, stages):
    return {stage: run.perform(stage, KEY) for stage in stages}


def verdicts(run):
    return {row["check"]: row for row in run.lake.read("checks", KEY.columns()).to_pylist()}


def swap(run, table, where, change):
    """Replace rows of the lake by changed ones, as a fault would."""
    rows = run.lake.read(table, where).to_pylist()
    assert rows
    run.lake.replace(table, where, records.rows(table, [change(row) for row in rows]))


def test_a_step_passes_every_check_once_and_its_scores_are_the_mismatch(run):
    perform(run, STAGES)
    made = verdicts(run)
    assert set(made) == set(CHECKS)
    assert all(row["passed"] for row in made.values())
    assert json.loads(made["conservation"]["found"])["trajectories"] > 0
    drawn = {row["trajectory_id"]: row for row in run.lake.read("trajectories", {"run": RUN}).to_pylist()}
    step = run.lake.read("steps", KEY.columns()).to_pylist()[0]
    gaps = []
    for row in run.lake.read("trainer_scores", KEY.columns()).to_pylist():
        theirs = drawn[row["trajectory_id"]]["logprobs"]
        assert [value is not None for value in row["logprobs"]] == drawn[row["trajectory_id"]]["loss_mask"]
        gaps += [abs(a - b) for a, b in zip(row["logprobs"], theirs, strict=True) if a is not None]
    assert len(gaps) == step["tokens_trained"] > 0
    assert sum(gaps) / len(gaps) == pytest.approx(step["mismatch_mean"], abs=1e-6)  # scores are kept in float32
    versions = [run.lake.version(table) for table in ("checks", "trainer_scores")]
    perform(run, STAGES)
    assert [run.lake.version(table) for table in ("checks", "trainer_scores")] == versions


def test_a_changed_token_is_refused_and_a_person_lets_it_through_with_a_reason(run):
    perform(run, TRAINED[:3])
    name = min(run.lake.read("trajectories", {"run": RUN}, ["trajectory_id"])["trajectory_id"].to_pylist())

    def change(row):
        at = max(place for place, on in enumerate(row["loss_mask"]) if on) - 1
        row["tokens"][at] = (row["tokens"][at] + 1) % 40
        return row

    swap(run, "trajectories", {"run": RUN, "trajectory_id": name}, change)
    perform(run, ("train_step",))
    assert verdicts(run)["token_round_trip"]["evidence"] == [name]
    with pytest.raises(StageError, match=rf"token_round_trip failed.*{name}.*furlong checks waive quick 1 token_round"):
        perform(run, ("weight_publish",))
    assert run.lake.read("weight_versions", {"run": RUN, "version": 1}).num_rows == 0
    with pytest.raises(StageError, match="needs a reason"):
        waive(run.lake, KEY, "token_round_trip", "  ")
    with pytest.raises(StageError, match="has passed"):
        waive(run.lake, KEY, "conservation", "why not")
    for check, row in list(verdicts(run).items()):
        if not row["passed"]:
            waive(run.lake, KEY, check, "the fault is known")
    perform(run, ("weight_publish",))
    row = verdicts(run)["token_round_trip"]
    assert (row["passed"], row["severity"]) == (True, "WAIVED")
    assert "the fault is known" in row["message"]


@pytest.mark.parametrize("check", [name for name, (blocking, _) in CHECKS.items() if blocking])
def test_a_verdict_that_is_missing_or_bad_refuses(check, stood):
    rows = [row for row in stood.lake.read("checks", KEY.columns()).to_pylist() if row["check"] != check]
    kept = stood.lake.read("checks", KEY.columns())
    stood.lake.replace("checks", KEY.columns(), records.rows("checks", rows))
    try:
        with pytest.raises(StageError, match=f"check {check} was never made"):
            perform(stood, ("weight_publish",))
        perform(stood, ("train_step",))
        assert set(verdicts(stood)) == set(CHECKS), "what is missing is made again"
    finally:
        stood.lake.replace("checks", KEY.columns(), kept)


def test_a_mismatch_too_high_is_refused_with_its_worst_tokens(run):
    perform(run, TRAINED[:3])
    honest = run.trainer.take_step

    def other_model(step, attempt):
        return honest(step, attempt) | {"mismatch_mean": 1.0}

    run.trainer.take_step = other_model
    perform(run, ("train_step",))
    told = verdicts(run)["mismatch_ceiling"]
    assert len(told["evidence"]) >= 1
    with pytest.raises(StageError, match=r"mismatch_mean is 1\.0.*Worst tokens: quick-00001.* token \d+"):
        perform(run, ("weight_publish",))


def test_dagster_is_told_each_verdict_with_the_replies_behind_it(stood):
    from furlong.pipelines.checks import check_events

    name = min(stood.lake.read("trajectories", {"run": RUN}, ["trajectory_id"])["trajectory_id"].to_pylist())
    kept = stood.lake.read("checks", KEY.columns())
    bad = {"passed": False, "message": "replies loop", "evidence": [name]}
    swap(stood, "checks", {**KEY.columns(), "check": "repetition"}, lambda row: row | bad)
    swap(stood, "trajectories", {"run": RUN, "trajectory_id": name}, lambda row: row | {"text": "<b>1|2</b>\n3"})
    try:
        told = {event.check_name: event for event in check_events(stood, KEY)}
    finally:
        stood.lake.replace("checks", KEY.columns(), kept)
    assert set(told) == set(CHECKS)
    assert [name for name, event in told.items() if not event.passed] == ["repetition"]
    assert told["repetition"].description == "replies loop"
    shown = told["repetition"].metadata["evidence"].value
    assert name in shown
    assert "&lt;b>1\\|2&lt;/b> 3" in shown
    assert told["conservation"].metadata["trajectories"].value == 16
