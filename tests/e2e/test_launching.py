"""Launched from the UI's own requests, through a real web server and daemon: what fails, dies or is stopped goes on."""

import signal
import subprocess
import time

import pytest
from ui_place import FURLONG, UiPlace

from furlong.pipelines.partitions import partition_key
from furlong.resources.processes import mark, marked
from furlong.resources.run_launcher import TAG
from furlong.resources.stopping import stopped
from furlong.resources.workers import Worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory, quick_spec):
    place = UiPlace(tmp_path_factory.mktemp("launching"), quick_spec, STEPS)
    try:
        place.start_ui()
        yield place
    finally:
        place.close()


@pytest.fixture(scope="module")
def undisturbed(place):
    return place.undisturbed()


@pytest.fixture(autouse=True)
def calm(place):
    yield
    place.moods.unlink(missing_ok=True)


def worker(place, run_id: str) -> Worker:
    tags = {tag["key"]: tag["value"] for tag in place.client.run(run_id)["tags"]}
    return Worker.parse(tags[TAG])


def begun(place, run: str, seconds: float = 200.0) -> None:
    place.until(lambda: place.count("groups", run) > 0, seconds, f"the first groups of {run}")


def same(place, run: str, undisturbed) -> None:
    assert place.digests(run) == undisturbed[0]
    assert place.steps(run) == undisturbed[1]


def test_a_failed_stage_is_executed_again_from_failure(place, undisturbed):
    """An answer (every verdict is needed, and the verifier fails) is not tried again by itself, but by a person's click."""
    config = {"ops": {"prompts": {"config": {"spec": place.spec}}}}
    run = "clicked"
    for step in range(1, STEPS + 1):
        partition = partition_key(run, step)
        if step == 1:
            first = place.client.launch_step(partition, config)
            place.until(lambda: place.count("steps", run) > 0, 150, "the first step")
            place.mood(*["raise"] * 200)
            assert place.client.wait(first) == "FAILURE"
            assert "accuracy needs every verdict" in str(place.client.events(first))
            assert attempts(place, first)["evals"] == 1
            place.moods.unlink()
            again = place.client.again(first)
            assert place.client.wait(again) == "SUCCESS", place.client.words(again)
            assert attempts(place, again).keys() == {"evals"}
        else:
            done = place.client.launch_step(partition, config)
            assert place.client.wait(done) == "SUCCESS", place.client.words(done)
    same(place, run, undisturbed)


def attempts(place, run_id: str) -> dict[str, int]:
    return {stats["stepKey"]: len(stats["attempts"]) for stats in place.client.run(run_id)["stepStats"]}


def test_two_runs_launched_at_once_take_turns(place, undisturbed):
    one, two = place.block("one", steps=1), place.block("two", steps=1)
    place.client.wait(one, "STARTED")
    begun(place, "one")
    assert place.client.status(two) == "QUEUED"
    for each in (one, two):
        assert place.client.wait(each) == "SUCCESS", place.client.words(each)
    first, second = (place.client.run(each)["stats"] for each in (one, two))
    assert first["endTime"] <= second["launchTime"]
    assert place.digests("one") == place.digests("two") == undisturbed[0][:2]


def test_a_lost_trainer_is_tried_again_in_the_same_run(place, undisturbed):
    run = "bereft"
    each = place.block(run)
    begun(place, run)
    with place.suspended("trainer", run) as trainer:
        place.until(lambda: place.count("batches", run) > place.count("steps", run), 60, "a batch to train on")
        time.sleep(2)
        trainer.kill()
    assert place.client.wait(each) == "SUCCESS", place.client.words(each)
    assert "the trainer was lost" in place.client.words(each)
    assert attempts(place, each) == {"block": 2}
    same(place, run, undisturbed)


def test_a_killed_worker_is_launched_again_by_the_daemon(place, undisturbed):
    run = "orphan"
    each = place.block(run)
    begun(place, run)
    worker(place, each).end()
    assert place.client.wait(each) == "FAILURE"
    place.until(lambda: place.client.runs()[0]["parentRunId"] == each, 60, "the next run")
    again = place.client.runs()[0]["runId"]
    assert place.client.wait(again) == "SUCCESS", place.client.words(again)
    same(place, run, undisturbed)


def test_runs_go_on_while_web_server_daemon_and_their_parent_are_killed(place, undisturbed):
    run = "survivor"
    each = place.block(run)
    begun(place, run)
    with place.suspended("trainer", run):
        process = worker(place, each)
        place.kill_ui()
        assert process.lives()
        place.start_ui()
        assert place.client.status(each) == "STARTED"
    assert place.client.wait(each) == "SUCCESS", place.client.words(each)
    assert [other["runId"] for other in place.client.runs() if other["parentRunId"] == each] == []
    same(place, run, undisturbed)


def test_a_terminated_run_stays_stopped_until_a_person_launches_it(place, undisturbed):
    run = "stopped"
    each = place.block(run)
    begun(place, run)
    with place.suspended("trainer", run):
        place.client.terminate(each)
        assert place.client.wait(each, seconds=60) == "CANCELED"
    assert stopped(place.root, run).reason == "terminated in Dagster"
    had = place.steps(run)
    automatic = place.block(run, tags={"dagster/sensor_name": "continuous_training"})
    assert place.client.wait(automatic) == "CANCELED"
    assert place.steps(run) == had
    by_hand = place.block(run)
    assert place.client.wait(by_hand) == "SUCCESS", place.client.words(by_hand)
    assert stopped(place.root, run) is None
    same(place, run, undisturbed)


def test_furlong_stop_lets_the_step_finish(place, undisturbed):
    run = "paused"
    each = place.block(run)
    begun(place, run)
    with place.suspended("trainer", run):
        said = furlong(place, "stop", run)
        assert f"run {run} ends after the step" in said
    assert place.client.wait(each) == "SUCCESS", place.client.words(each)
    done = len(place.steps(run))
    assert 1 <= done < STEPS
    assert place.digests(run)[-1][1] == "live"
    assert f"run {run}, stopped with `furlong stop`" in furlong(place, "status")
    assert f"run {run} may go on" in furlong(place, "resume", run)
    last = place.block(run, tags={"dagster/sensor_name": "continuous_training"})
    assert place.client.wait(last) == "SUCCESS", place.client.words(last)
    same(place, run, undisturbed)


def test_furlong_stop_now_abandons_the_stage(place):
    run = "dropped"
    each = place.block(run)
    begun(place, run)
    with place.suspended("trainer", run):
        said = furlong(place, "stop", run, "--now", "--reason", "lunch")
        assert place.client.status(each) == "CANCELED"
    assert f"run {run} is stopped; what its stage had not committed is done again" in said
    assert stopped(place.root, run).reason == "lunch"
    assert "no run 'dorpped'" in refused(place, "stop", "dorpped")


def refused(place, *arguments: str) -> str:
    done = subprocess.run([FURLONG, *arguments], env=place.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def furlong(place, *arguments: str) -> str:
    done = subprocess.run([FURLONG, *arguments], env=place.env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def test_the_other_jobs_say_what_they_did(place, undisturbed):
    done = {
        "evaluate": ("evaluate_version", {"run": "calm", "version": "1"}, "version 1 of run calm evaluated"),
        "publish": ("publish_version", {"run": "calm", "version": "2"}, "has proved version 2"),
        "export_hf": ("export_version", {"run": "calm"}, "bit for bit"),
        "rebuild_weights": ("rebuild_version", {"run": "calm", "version": "0"}, "every tensor's digest"),
        "compact_lake": ("compact_tables", {}, "files are"),
    }
    runs = {job: place.client.launch(job, {"ops": {op: {"config": config}}}) for job, (op, config, _) in done.items()}
    for job, run_id in runs.items():
        assert place.client.wait(run_id) == "SUCCESS", (job, place.client.events(run_id))
        assert done[job][2] in place.client.words(run_id), job
    same(place, "calm", undisturbed)


def test_publish_finishes_what_a_dead_driver_left_staged(place, undisturbed):
    run = "half"
    done = place.drive(run, {"table": "weight_versions", "step": 1, "when": "after", "how": "commit_once"})
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert [state for _, state, _ in place.digests(run)] == ["live", "staged"]
    each = place.client.launch("publish", {"ops": {"publish_version": {"config": {"run": run}}}})
    assert place.client.wait(each) == "SUCCESS", place.client.events(each)
    assert f"version 1 of run {run} is live now" in place.client.words(each)
    assert place.digests(run) == undisturbed[0][:2]


def test_ctrl_c_ends_the_ui_and_no_run(place, undisturbed):
    run = "lasting"
    each = place.block(run)
    begun(place, run)
    with place.suspended("trainer", run):
        process = worker(place, each)
        place.process.send_signal(signal.SIGINT)
        place.process.wait(60)
        assert process.lives()
        place.start_ui()
    assert place.client.wait(each) == "SUCCESS", place.client.words(each)
    same(place, run, undisturbed)


def test_down_ends_everything_and_leaves_the_run_stopped(place):
    """The last one, as it takes the UI away."""
    from dagster import DagsterInstance

    run = "ended"
    each = place.block(run)
    begun(place, run)
    process = worker(place, each)
    with place.suspended("trainer", run):
        said = furlong(place, "down")
    assert f"run {run} is being driven by process {process.pid} and will be stopped" in said
    place.process.wait(60)
    assert not process.lives()
    assert not any(marked(mark(part, place.root)) for part in ("ui", "worker", "ray"))
    with DagsterInstance.from_config(str(place.root / "dagster")) as instance:
        assert instance.get_run_by_id(each).status.value == "CANCELED"
    assert stopped(place.root, run)
