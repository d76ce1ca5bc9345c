"""The stages of a step on a real engine, trainer, verifier and lake, all in this process: no Ray, no Dagster."""

import dataclasses
import math
import shutil

import pytest

from furlong.ops import records
from furlong.ops.protocols import StaleFence
from furlong.ops.spec import Placement, SpecError
from furlong.ops.stages.context import STAGES, StageError, StepKey
from furlong.resources.engines.local import LocalEngine
from furlong.resources.lake import Lake
from furlong.resources.system import System
from furlong.resources.trainers.host import ReplayMismatch, StepAlreadyTaken, TrainerHost, _Saver
from furlong.resources.trainers.place import Place
from furlong.resources.weights.fleet import Fleet

RUN = "quick"


class Silent:
    """Stands for MLflow here, which has its own test."""

    def gather(self, *_):
        """Nothing to record."""


def new_engine(run):
    model = run.model
    return LocalEngine(str(model.path), 0, run.spec.model.dtype, 1, list(model.stop_token_ids))


def new_fleet(run):
    return Fleet(RUN, run.lake, str(run.model.path), [new_engine(run)], lambda number: new_engine(run))


def new_trainer(run):
    lake = run.placement.lake_uri()
    return TrainerHost(
        run.spec.canonical(), run.name, str(run.model.path), lake, str(run.folder / "state"), Place("", 1)
    )


def open_run(root, spec, overrides=None):
    system = System(Placement(root=str(root), threads=1))
    system.start_run(spec, overrides or {}, RUN)
    run = system._load(RUN)
    vars(run).update(engines=new_fleet(run), trainer=new_trainer(run), tracker=Silent())
    return run


def restart(run, **parties):
    """Go on with a pump that knows nothing but the lake, as a new driver does, and with these parties in place of others."""
    run.pause()
    vars(run).update(parties)


def take(run, step, attempt=1, stages=STAGES):
    return {stage: run.perform(stage, StepKey(RUN, step, attempt)) for stage in stages}


def live(run):
    rows = run.lake.read("weight_versions", {"run": RUN, "state": "live"}, ["version", "digest"]).to_pylist()
    return {row["version"]: row["digest"] for row in rows}


@pytest.fixture(scope="module")
def undisturbed(made, tmp_path_factory, quick_spec):
    root = tmp_path_factory.mktemp("calm")
    shutil.copytree(made / "models", root / "models")
    run = open_run(root, quick_spec)
    for step in (1, 2, 3):
        take(run, step)
    run.verifier.close()
    return live(run)


def test_the_quick_run_trains_on_something(undisturbed):
    assert len(set(undisturbed.values())) == 4, "every step must change the weights, or other tests show nothing"


def test_the_seconds_of_a_step_s_stages_are_kept_once(run):
    run.dagster_run = "a-dagster-run"
    for _ in range(2):
        take(run, 1)
    rows = run.lake.read("stage_times", {"run": RUN}).to_pylist()
    assert sorted(row["stage"] for row in rows) == sorted(STAGES[1:])
    assert all(row["seconds"] >= row["work_seconds"] >= 0 and row["dagster_run"] == "a-dagster-run" for row in rows)


def test_a_stage_done_twice_adds_nothing(run):
    first = take(run, 1)
    assert all(report.wrote for report in first.values())
    versions = {table: run.lake.version(table) for table in records.TABLES}
    second = take(run, 1)
    assert not any(report.wrote for report in second.values())
    assert {table: run.lake.version(table) for table in records.TABLES} == versions
    for stage in STAGES:
        assert second[stage].values == first[stage].values


def test_a_nan_log_probability_fails_the_step_and_names_the_trajectory(run, monkeypatch):
    take(run, 1, stages=("prompts",))
    honest = run.engines.members[0].generate

    def broken(requests):
        samples = honest(requests)
        return [dataclasses.replace(samples[0], logprobs=(math.nan, *samples[0].logprobs[1:])), *samples[1:]]

    monkeypatch.setattr(run.engines.members[0], "generate", broken)
    with pytest.raises(StageError, match=r"quick-00001\.1-g00\d-s00.*nan"):
        take(run, 1, stages=("rollouts",))
    assert run.lake.read("batches", {"run": RUN}).num_rows == 0
    monkeypatch.undo()
    restart(run)
    take(run, 1)


def test_a_prompt_longer_than_the_context_is_refused_before_sampling(run):
    take(run, 1, stages=("prompts",))
    run.model = dataclasses.replace(run.model, context_length=10)
    with pytest.raises(StageError, match=r"exceeds the model's context of 10.*max_new_tokens"):
        take(run, 1, stages=("rollouts",))
    assert run.lake.read("groups", {"run": RUN}).num_rows == 0


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_stage_without_the_one_before_says_what_to_run(run, stage):
    with pytest.raises(StageError, match=r"run (its|`prompts`)"):
        take(run, 1, stages=(stage,))


def test_a_step_is_never_taken_twice(run):
    take(run, 1)
    with pytest.raises(StepAlreadyTaken, match="attempt 2"):
        run.trainer.take_step(1, 1)
    with pytest.raises(StepAlreadyTaken, match="attempt 2"):
        new_trainer(run).take_step(1, 1)


def test_steps_must_come_in_order(run):
    take(run, 1)
    with pytest.raises(StageError, match="step 2"):
        take(run, 3, stages=("rollouts",))


def test_a_new_trainer_and_a_new_engine_continue_bitwise(run, undisturbed):
    take(run, 1)
    restart(run, trainer=new_trainer(run), engines=new_fleet(run))
    take(run, 2)
    run.trainer.settle()
    assert (run.folder / "state" / "00002.1").is_dir(), "save_every is 2"
    restart(run, trainer=new_trainer(run), engines=new_fleet(run))
    take(run, 3)
    assert live(run) == undisturbed


def test_a_step_taken_but_not_recorded_is_given_again_not_taken_again(run, undisturbed):
    take(run, 1)
    take(run, 2, stages=("rollouts", "rewards"))
    record = run.trainer.take_step(2, 1)
    again = run.trainer.take_step(2, 1)
    assert again == record
    take(run, 2)
    take(run, 3)
    assert live(run) == undisturbed


def test_a_trainer_lost_between_record_and_publish_replays(run, undisturbed):
    take(run, 1)
    take(run, 2, stages=("rollouts", "rewards", "train_step"))
    vars(run).update(trainer=new_trainer(run))
    take(run, 2, stages=("weight_publish",))
    assert live(run)[2] == undisturbed[2]


def test_a_damaged_saved_state_costs_a_replay_and_nothing_else(run, undisturbed):
    take(run, 1)
    take(run, 2)
    run.trainer.settle()
    saved = run.folder / "state" / "00002.1"
    for path in saved.glob("*.safetensors"):
        body = bytearray(path.read_bytes())
        body[-5] ^= 1
        path.write_bytes(bytes(body))
    vars(run).update(trainer=new_trainer(run))
    take(run, 3)
    assert live(run) == undisturbed
    assert [path.name for path in saved.parent.glob("00002.1.damaged-*")]


def test_replaying_other_rows_than_recorded_is_an_error(run):
    take(run, 1)
    rows = run.lake.read("rewards", {"run": RUN, "step": 1}).to_pylist()
    rows[0]["score"] = 1.0 - rows[0]["score"]
    run.lake.replace("rewards", {"run": RUN, "step": 1}, records.rows("rewards", rows))
    vars(run).update(trainer=new_trainer(run))
    take(run, 2, stages=("rollouts", "rewards"))
    with pytest.raises(ReplayMismatch, match="step 1: replay gave batch_digest"):
        take(run, 2, stages=("train_step",))


def test_a_missing_trajectory_stops_the_step(run):
    take(run, 1, stages=("prompts", "rollouts", "rewards"))
    rows = run.lake.read("trajectories", {"run": RUN, "step": 1}).to_pylist()[1:]
    run.lake.replace("trajectories", {"run": RUN, "step": 1}, records.rows("trajectories", rows))
    with pytest.raises(StageError, match="3 of 4 samples"):
        take(run, 1, stages=("train_step",))


def corrupted(honest):
    """A method of an engine whose proof has another digest for one tensor."""

    def corrupt(*args):
        proof = honest(*args)
        return dataclasses.replace(proof, tensors={**proof.tensors, min(proof.tensors): "0" * 64})

    return corrupt


@pytest.fixture(params=["auto", "broadcast", "p2p", "disk_delta"])
def transport(request, run):
    run.placement = run.placement.model_copy(update={"transport": request.param})
    return request.param


def test_an_engine_with_other_bytes_is_not_flipped(run, transport, monkeypatch):
    take(run, 1, stages=("prompts", "rollouts", "rewards", "train_step"))
    engine = run.engines.members[0]
    for method in ("stage", "receive"):
        monkeypatch.setattr(engine, method, corrupted(getattr(engine, method)))
    with pytest.raises(StageError, match=r"tensor .* has digest 000000000000"):
        take(run, 1, stages=("weight_publish",))
    assert set(live(run)) == {0}
    assert engine.health()["version"] == 0
    assert not engine.health()["paused"]
    monkeypatch.undo()
    take(run, 1, stages=("weight_publish",))
    assert set(live(run)) == {0, 1}


def test_a_transport_that_fails_is_followed_by_the_lake_s_own_rows(run, monkeypatch):
    take(run, 1, stages=("prompts", "rollouts", "rewards", "train_step"))
    engine = run.engines.members[0]
    monkeypatch.setattr(engine, "receive", corrupted(engine.receive))
    assert take(run, 1, stages=("weight_publish",))["weight_publish"].values["transport"] == "disk_delta"
    assert set(live(run)) == {0, 1}


def test_every_transport_leaves_the_same_versions(run, transport, undisturbed):
    fleet = Fleet(RUN, run.lake, str(run.model.path), [new_engine(run), new_engine(run)], lambda _: new_engine(run))
    restart(run, engines=fleet)
    for step in (1, 2, 3):
        take(run, step)
    assert live(run) == undisturbed
    rows = run.lake.read("weight_versions", {"run": RUN, "version": [1, 2, 3]}).to_pylist()
    used = {row["transport"] for row in rows}
    assert used == ({transport} if transport != "auto" else {"broadcast", "p2p", "disk_delta"})
    assert all(row["wire_bytes"] > 0 and row["stage_seconds"] > 0 for row in rows)
    assert [len(row["attestations"]) for row in rows] == [2, 2, 2]


def test_weights_that_lack_a_tensor_of_the_version_before_are_not_staged(run, monkeypatch):
    take(run, 1, stages=("prompts", "rollouts", "rewards", "train_step"))
    made = run.trainer.publishable(1, 1)
    monkeypatch.setattr(run.trainer, "publishable", lambda *_: {**made, "tensors": made["tensors"][1:]})
    with pytest.raises(StageError, match=f"lack tensor {made['tensors'][0]['name']} of version 0"):
        take(run, 1, stages=("weight_publish",))
    assert not run.lake.read("weight_deltas", {"run": RUN}).num_rows
    monkeypatch.undo()
    take(run, 1, stages=("weight_publish",))
    assert set(live(run)) == {0, 1}


def test_a_driver_that_was_overtaken_can_publish_nothing(run):
    take(run, 1, stages=("prompts", "rollouts", "rewards", "train_step"))
    assert run.fence < Lake(run.placement.lake_uri()).take_fence(RUN)
    with pytest.raises(StaleFence):
        take(run, 1, stages=("weight_publish",))
    assert set(live(run)) == {0}
    run.renew()
    take(run, 1, stages=("weight_publish",))
    assert set(live(run)) == {0, 1}


def test_complete_copies_are_written_when_due_and_engines_start_from_them(run, undisturbed):
    run.spec = run.spec.model_copy(update={"trainer": run.spec.trainer.model_copy(update={"anchor_every": 2})})
    for step in (1, 2):
        take(run, step)
    rows = run.lake.read("weight_versions", {"run": RUN}).to_pylist()
    assert {row["version"]: row["kind"] for row in rows} == {0: "anchor", 1: "delta", 2: "anchor"}
    run.lake.replace("weight_deltas", {"run": RUN, "version": 1}, records.TABLES["weight_deltas"].empty_table())
    restart(run, engines=new_fleet(run))
    take(run, 3)
    assert live(run) == undisturbed


def test_the_newest_step_can_be_repeated_on_purpose(run):
    for step in (1, 2):
        take(run, step)
    before = live(run)
    take(run, 2, attempt=2)
    after = live(run)
    assert set(after) == {0, 1, 2, 3}
    assert {version: after[version] for version in before} == before
    rows = {r["version"]: r for r in run.lake.read("weight_versions", {"run": RUN}).to_pylist()}
    assert (rows[3]["parent"], rows[3]["step"], rows[3]["attempt"]) == (1, 2, 2)
    take(run, 3)
    assert run.lake.read("groups", {"run": RUN, "step": 3})["weights_version"].to_pylist() == [3] * 4
    with pytest.raises(StageError, match="already drawn"):
        take(run, 2, attempt=3, stages=("rollouts",))
    with pytest.raises(StageError, match="next attempt would be 2"):
        take(run, 3, attempt=5, stages=("rollouts",))


def test_a_repetition_that_was_begun_is_finished_before_the_next_step(run):
    for step in (1, 2):
        take(run, step)
    assert run.next_step() == 3
    take(run, 2, attempt=2, stages=("rollouts",))
    assert run.next_step() == 2
    with pytest.raises(StageError, match="step 2 is being repeated"):
        take(run, 3, stages=("rollouts",))
    assert System(run.placement).step_key(RUN, 2) == StepKey(RUN, 2, 2)
    take(run, 2, attempt=2)
    assert run.next_step() == 3
    take(run, 3)
    assert set(live(run)) == {0, 1, 2, 3, 4}


def lost_before_trajectories(run, monkeypatch, step, attempt):
    """Leave a step as a kill does after its groups were reserved, before anything drawn is in the lake."""
    commit = run.lake.commit_once

    def dies(table, key, data, fence=None):
        if table == "trajectories":
            raise OSError("killed here")
        return commit(table, key, data, fence)

    monkeypatch.setattr(run.lake, "commit_once", dies)
    with pytest.raises(OSError, match="killed here"):
        take(run, step, attempt, stages=("rollouts",))
    monkeypatch.undo()
    restart(run)


def test_a_repetition_lost_between_its_two_tables_is_continued(run, monkeypatch):
    take(run, 1)
    lost_before_trajectories(run, monkeypatch, 1, 2)
    assert run.next_step() == 1
    assert System(run.placement).step_key(RUN, 1) == StepKey(RUN, 1, 2)
    take(run, 1, attempt=2)
    assert len(run.lake.read("steps", {"run": RUN})) == 2


def test_a_step_is_not_repeated_under_trajectories_drawn_from_it(run, monkeypatch):
    take(run, 1)
    lost_before_trajectories(run, monkeypatch, 2, 1)
    with pytest.raises(StageError, match="already drawn"):
        take(run, 1, attempt=2, stages=("rollouts",))
    take(run, 2)
    spans = run.lake.read("trajectories", {"run": RUN, "step": 2})["version_spans"].to_pylist()
    assert {span["version"] for row in spans for span in row} == {1}


@pytest.mark.parametrize(("verdict", "score"), [("timeout", None), ("incorrect", 0.0)])
def test_a_step_without_any_gradient_is_recorded_and_published(run, monkeypatch, verdict, score):
    honest = run.verifier.score
    monkeypatch.setattr(
        run.verifier, "score", lambda items: [{**row, "verdict": verdict, "score": score} for row in honest(items)]
    )
    take(run, 1)
    monkeypatch.undo()
    step = run.lake.read("steps", {"run": RUN, "step": 1}).to_pylist()[0]
    assert step["tokens_trained"] == 0
    assert step["digest_after"] == step["digest_before"]
    assert len(step["outcomes"]) == 16
    digests = live(run)
    assert digests[0] == digests[1]
    take(run, 2)
    restart(run, trainer=new_trainer(run), engines=new_fleet(run))
    take(run, 3)
    assert set(live(run)) == {0, 1, 2, 3}


def test_a_failed_save_is_told_once_and_the_run_goes_on(run, undisturbed):
    for step in (1, 2):  # the state is saved after step 2
        take(run, step, stages=STAGES)
    run.trainer.settle()
    run.trainer = new_trainer(run)
    shutil.rmtree(run.folder / "state")
    (run.folder / "state").write_text("in the way")
    run.trainer.saver = _Saver(run.trainer.trainer, run.folder / "state", "00002.1")
    with pytest.raises(StageError, match="saving the trainer's state failed"):
        take(run, 3)
    (run.folder / "state").unlink()
    take(run, 3)
    assert live(run) == undisturbed


def test_what_a_killed_save_left_is_cleared_away(run):
    scrap = run.folder / "state" / ".00001.1.new-1"
    scrap.mkdir(parents=True)
    for step in (1, 2):
        take(run, step)
    run.trainer.settle()
    assert [path.name for path in (run.folder / "state").iterdir()] == ["00002.1"]


def test_evals_are_committed_once_per_version(run):
    take(run, 1, stages=("prompts",))
    report = run.perform("evals", StepKey(RUN, 1))
    assert {"greedy_v0", "sampled_v0", "sampled_pass_at_2_v0"} <= set(report.values)
    rows = run.lake.read("evals", {"run": RUN, "version": 0}).to_pylist()
    assert {(row["mode"], row["samples"]) for row in rows} == {("greedy", 1), ("sampled", 2)}
    assert len(rows) == 2 * 8
    assert not run.perform("evals", StepKey(RUN, 1)).wrote


def test_a_run_keeps_its_spec(run, quick_spec):
    system = System(run.placement)
    assert system.start_run(quick_spec, {}, RUN) == RUN
    with pytest.raises(SpecError, match="seed differ"):
        system.start_run(quick_spec, {"seed": 5}, RUN)


def test_engines_that_the_model_cannot_be_split_over_are_refused_before_anything_starts(run):
    placement = run.placement.model_copy(update={"engine_tp": 3})
    with pytest.raises(SpecError, match=r"FURLONG_ENGINE_TP=3: .* set it to 1 or 2"), System(placement).driving(RUN):
        pass


def test_a_step_of_a_known_run_needs_no_spec(run, quick_spec):
    System(run.placement).ensure_run(RUN, "tiny", {"seed": 7})
    assert run.lake.count("runs", {"run": RUN}) == 1
    System(run.placement).ensure_run("other", quick_spec, {"seed": 7})
    assert '"seed": 7' in run.lake.read("runs", {"run": "other"})["spec"][0].as_py()


@pytest.mark.parametrize("name", ["../other", "Upper", "a b", "a/b", "1st"])
def test_a_run_s_name_must_fit_folders_and_partitions(run, quick_spec, name):
    with pytest.raises(SpecError, match="run name"):
        System(run.placement).start_run(quick_spec, {}, name)
    assert run.lake.count("runs") == 1


def test_an_unfinished_run_is_continued_and_a_new_name_found_otherwise(run, quick_spec):
    system = System(run.placement)
    name = system.start_run(quick_spec, {})
    assert name == f"quick-{run.spec.fingerprint()[:6]}"
    assert system.start_run(quick_spec, {}) == name
    assert system.start_run(quick_spec, {"seed": 1}) != name
