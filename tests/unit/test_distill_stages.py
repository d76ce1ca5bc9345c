"""A run that distils, in this process: what the teacher says is in the lake once, and the step depends on it."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from test_stages import RUN, live, new_trainer, open_run, take
from tiny_policy import make_batch

from furlong.ops import records
from furlong.ops.identity import fingerprint
from furlong.ops.spec import Placement, SpecError
from furlong.ops.stages.batch import batch_digest
from furlong.ops.stages.context import StageError
from furlong.resources.engines.local import LocalEngine
from furlong.resources.lake import Lake
from furlong.resources.system import System
from furlong.resources.teacher import check_teacher
from furlong.resources.trainers.host import ReplayMismatch

BEFORE = ("prompts", "rollouts", "rewards")


class Beside:
    """A teacher's engine in this process; counts what it is asked."""

    def __init__(self, folder: str, digest: str):
        self.engine, self.digest, self.rows = LocalEngine(folder, 0, "float32", 1), digest, 0

    def score(self, rows, temperature):
        self.rows += len(rows)
        return self.engine.score(rows, temperature)


@pytest.fixture
def root(made, tmp_path) -> Path:
    shutil.copytree(made / "models", tmp_path / "models")
    return tmp_path


def overrides(folder: Path) -> dict:
    algorithm = {"name": "distill", "teacher": str(folder), "kl_coef": 1.0, "learning_rate": 3e-3}
    return {f"algorithm.{name}": value for name, value in algorithm.items()} | {"sampling.temperature": 0.8}


@pytest.fixture
def run(root, quick_spec):
    """The base model is its own teacher, so what it says of the first step's tokens is known."""
    folder = next(path for path in (root / "models").iterdir() if path.is_dir())
    run = open_run(root, quick_spec, overrides(folder))
    vars(run).update(teacher=Beside(str(folder), check_teacher(run.spec, run.model, run.lake, RUN)))
    yield run
    run.pause()
    run.verifier.close()


def rows_of(run, table: str) -> dict[str, dict]:
    return {row["trajectory_id"]: row for row in run.lake.read(table, {"run": RUN}).to_pylist()}


def test_two_steps_move_away_from_the_teacher_and_are_pulled_back(run):
    take(run, 1)
    drawn, scored = rows_of(run, "trajectories"), rows_of(run, "teacher_scores")
    assert drawn.keys() == scored.keys()
    assert len(scored) == 16
    assert all(scored[name]["logprobs"] == row["logprobs"] for name, row in drawn.items()), "bit for bit, nulls too"
    assert {row["teacher"] for row in scored.values()} == {run.model.digest}
    take(run, 2)
    later = {name: row for name, row in rows_of(run, "teacher_scores").items() if name not in scored}
    drawn = rows_of(run, "trajectories")
    assert len(later) == 16
    assert all(row["logprobs"] != drawn[name]["logprobs"] for name, row in later.items()), "drawn by other weights"
    steps = run.lake.read("steps", {"run": RUN}).sort_by("step").to_pylist()
    assert abs(steps[0]["kl"]) < 1e-6
    assert steps[1]["kl"] > 1e-4
    assert all(row["tokens_trained"] > 0 for row in steps)
    assert run.teacher.rows == 32
    digests = live(run)
    vars(run).update(trainer=new_trainer(run))
    take(run, 3)
    assert live(run).items() > digests.items(), "a new trainer has replayed both steps from the lake"


def test_the_teacher_is_asked_once(run):
    take(run, 1, stages=BEFORE)
    again = take(run, 1, stages=BEFORE)
    assert not any(report.wrote for report in again.values())
    assert run.teacher.rows == 16
    names = sorted(rows_of(run, "teacher_scores"))
    kept = run.lake.read("teacher_scores", {"run": RUN, "trajectory_id": names[:5]})
    run.lake.replace("teacher_scores", {"run": RUN, "step": 1}, kept)
    assert take(run, 1, stages=BEFORE)["rewards"].wrote
    assert run.teacher.rows == 16 + 11
    assert sorted(rows_of(run, "teacher_scores")) == names


def test_a_trajectory_without_a_score_stops_the_step_and_is_named(run):
    take(run, 1, stages=BEFORE)
    rows = sorted(rows_of(run, "teacher_scores").values(), key=lambda row: row["trajectory_id"])
    for change in (rows[1:], [rows[0] | {"logprobs": rows[0]["logprobs"][1:]}, *rows[1:]]):
        run.lake.replace("teacher_scores", {"run": RUN, "step": 1}, records.rows("teacher_scores", change))
        with pytest.raises(
            StageError, match=f"of the .* tokens of trajectory {rows[0]['trajectory_id']}; run its rewards"
        ):
            take(run, 1, stages=("train_step",))
    assert run.lake.count("steps", {"run": RUN}) == 0
    run.lake.replace("teacher_scores", {"run": RUN, "step": 1}, records.rows("teacher_scores", rows))
    take(run, 1)
    assert set(live(run)) == {0, 1}


def test_a_replay_with_other_scores_is_an_error(run):
    take(run, 1)
    rows = list(rows_of(run, "teacher_scores").values())
    at = next(t for t, value in enumerate(rows[0]["logprobs"]) if value is not None)
    rows[0]["logprobs"][at] -= 0.5
    run.lake.replace("teacher_scores", {"run": RUN, "step": 1}, records.rows("teacher_scores", rows))
    vars(run).update(trainer=new_trainer(run))
    take(run, 2, stages=("rollouts", "rewards"))
    with pytest.raises(ReplayMismatch, match="step 1: replay gave batch_digest"):
        take(run, 2, stages=("train_step",))


def test_the_digest_is_over_the_scores_and_without_any_what_it_was():
    batch = make_batch(0)
    values = {name: value for name, value in asdict(batch).items() if name != "trajectory_ids"}
    scores = tuple(tuple(-1.0 for _ in reply) for reply in batch.replies)
    assert batch_digest(batch) == batch_digest(batch, None) == fingerprint(values)
    nothing = (tuple(float("nan") for _ in scores[0]), *scores[1:])
    digests = {
        batch_digest(batch, teacher) for teacher in (None, scores, nothing, ((-1.5, *scores[0][1:]), *scores[1:]))
    }
    assert len(digests) == 4
    assert batch_digest(replace(batch, trajectory_ids=batch.trajectory_ids[::-1]), scores) in digests


def edited(folder: Path, to: Path, file: str, old: str, new: str) -> Path:
    """A copy of a model folder with one file changed."""
    shutil.copytree(folder, to)
    text = (to / file).read_text()
    assert old in text
    (to / file).write_text(text.replace(old, new))
    return to


def test_a_teacher_that_cannot_teach_is_refused_before_anything_starts(root, quick_spec):
    folder = next(path for path in (root / "models").iterdir() if path.is_dir())
    wide = edited(folder, root / "wide", "config.json", '"vocab_size": 13', '"vocab_size": 14')
    other = edited(folder, root / "other", "tokenizer.json", '"3": ', '"x": ')
    bare = root / "bare"
    bare.mkdir()
    system = System(Placement(root=str(root), threads=1))
    for teacher, told in ((wide, "vocabulary of 14 tokens, the policy one of 13"), (other, "not the same tokens"),
                          (bare, "config.json is missing"), (root / "nowhere", "config.json is missing")):  # fmt: skip
        with pytest.raises(SpecError, match=rf"algorithm.teacher={teacher}.*{told}"):
            system.start_run(quick_spec, overrides(teacher), RUN)
    with pytest.raises(SpecError, match="scores at temperature 1"):
        system.start_run(quick_spec, overrides(folder) | {"engine": "sglang"}, RUN)
    assert Lake(system.placement.lake_uri()).count("runs") == 0


def test_a_teacher_that_has_changed_is_refused(run, root):
    take(run, 1, stages=BEFORE)
    folder = Path(run.spec.algorithm.teacher)
    system = System(run.placement)
    assert system._load(RUN).spec == run.spec
    (folder / "note.txt").write_text("added later")
    with pytest.raises(SpecError, match=f"has changed since run {RUN} began"):
        check_teacher(run.spec, run.model, run.lake, RUN)
