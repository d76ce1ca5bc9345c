"""What is tried again, what a stop means, and who may begin: real Dagster runs of a job that fails on demand."""

import time

import pytest
from dagster import (
    DagsterExecutionInterruptedError,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    RetryRequested,
    in_process_executor,
    job,
    op,
)

from furlong.ops.spec import Placement, SpecError
from furlong.ops.stages.context import StageError
from furlong.pipelines import guard
from furlong.pipelines.guard import guarded, training
from furlong.pipelines.rl_run import last_step
from furlong.resources.lake_table import LakeError
from furlong.resources.run_launcher import TAG
from furlong.resources.run_lock import LockHeld, run_lock
from furlong.resources.stopping import clear_stop, request_stop, stopped
from furlong.resources.system import System


@pytest.fixture
def instance(monkeypatch):
    monkeypatch.setattr(guard, "FIRST_WAIT", 0.01)
    with DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture
def system(tmp_path):
    return System(Placement(root=str(tmp_path)))


def drive(instance, system, each_try, tags=None, around=training):
    """A run of a job whose one op calls `each_try(number)` under the guard; the run, and its steps' events."""

    @op
    def work(context) -> None:
        with around(context, system, "r"):
            each_try(context.retry_number)

    @job(executor_def=in_process_executor)
    def driven():
        work()

    try:
        result = driven.execute_in_process(instance=instance, raise_on_error=False, tags=tags or {})
        run_id = result.run_id
    except DagsterExecutionInterruptedError:
        run_id = instance.get_runs(limit=1)[0].run_id
    events = [entry.dagster_event.event_type_value for entry in instance.all_logs(run_id) if entry.dagster_event]
    return instance.get_run_by_id(run_id), events


def test_the_machinery_is_tried_again_and_given_up_after_three_times(instance, system):
    tries = []

    def fail(number):
        tries.append(number)
        raise LakeError("the disk is full; free some")

    run, events = drive(instance, system, fail)
    assert run.status == DagsterRunStatus.FAILURE
    assert tries == [0, 1, 2, 3]
    assert events.count("STEP_UP_FOR_RETRY") == 3


def test_whatever_is_committed_between_failures_makes_room_for_more(instance, system, monkeypatch):
    commits = iter(range(100))
    monkeypatch.setattr(System, "committed", lambda self, tables: (next(commits),))

    def fail(number):
        if number < 7:
            raise LakeError("a hiccup; try again")

    run, events = drive(instance, system, fail)
    assert run.status == DagsterRunStatus.SUCCESS
    assert events.count("STEP_UP_FOR_RETRY") == 7


def test_a_lake_that_cannot_be_looked_at_is_tried_again_too(instance, system, monkeypatch):
    def fail(number):
        monkeypatch.setattr(System, "committed", broken if number < 2 else lambda self, tables: (1,))
        if number < 2:
            raise LakeError("the share is gone; mount it")

    def broken(self, tables):
        raise LakeError("the share is gone; mount it")

    run, events = drive(instance, system, fail)
    assert run.status == DagsterRunStatus.SUCCESS
    assert events.count("STEP_UP_FOR_RETRY") == 2


@pytest.mark.parametrize(
    "answer", [StageError("a check failed; look"), SpecError("no such key; mend"), ValueError("x")]
)
def test_an_answer_is_not_asked_for_twice(instance, system, answer):
    def fail(number):
        raise answer

    run, events = drive(instance, system, fail)
    assert run.status == DagsterRunStatus.FAILURE
    assert "STEP_UP_FOR_RETRY" not in events


def test_a_run_names_what_it_drives_and_its_process(instance, system):
    run, _ = drive(instance, system, lambda number: None)
    assert run.tags["furlong/run"] == "r"
    assert run.tags[TAG]


def test_a_person_s_launch_lets_a_stopped_run_go_on(instance, system):
    request_stop(system.placement.folder, "r", "enough")
    time.sleep(0.01)
    began = []
    run, _ = drive(instance, system, began.append)
    assert run.status == DagsterRunStatus.SUCCESS
    assert began == [0]
    assert stopped(system.placement.folder, "r") is None


@pytest.mark.parametrize("tag", [*guard.AUTOMATIC, guard.RETRY])
def test_what_no_person_launched_leaves_a_stopped_run_alone(instance, system, tag):
    request_stop(system.placement.folder, "r", "enough")
    began = []
    run, _ = drive(instance, system, began.append, {tag: "x"})
    assert run.status == DagsterRunStatus.CANCELED
    assert began == []
    assert stopped(system.placement.folder, "r").reason == "enough"


def test_a_person_s_re_execution_of_what_a_sensor_launched_is_a_person_s(instance, system):
    """It inherits the sensor's tags, and has a parent."""
    assert guard._automatic(DagsterRun(job_name="x", tags={"dagster/sensor_name": "x"}))
    again = DagsterRun(job_name="x", tags={"dagster/sensor_name": "x"}, parent_run_id="a", root_run_id="a")
    assert not guard._automatic(again)
    assert guard._automatic(again.with_tags({guard.RETRY: "1"}))


def test_a_stop_during_a_run_is_no_reason_to_end_it_between_its_tries(instance, system):
    """The block itself looks between steps; here only the beginning is guarded."""

    def fail(number):
        if number == 0:
            request_stop(system.placement.folder, "r", "after this step")
            raise LakeError("a hiccup; try again")

    run, _ = drive(instance, system, fail)
    assert run.status == DagsterRunStatus.SUCCESS
    assert stopped(system.placement.folder, "r")


def test_terminating_in_dagster_stops_the_run_for_good(instance, system):
    def interrupted(number):
        instance.report_run_canceling(instance.get_runs(limit=1)[0])
        raise DagsterExecutionInterruptedError

    run, _ = drive(instance, system, interrupted)
    assert run.status == DagsterRunStatus.CANCELED
    assert stopped(system.placement.folder, "r").reason == "terminated in Dagster"


def test_evaluating_a_stopped_run_leaves_it_stopped(instance, system):
    """Nor does terminating an evaluation stop the run's training."""
    request_stop(system.placement.folder, "r", "enough")
    time.sleep(0.01)
    run, _ = drive(instance, system, lambda number: None, around=guarded)
    assert run.status == DagsterRunStatus.SUCCESS
    assert stopped(system.placement.folder, "r").reason == "enough"
    clear_stop(system.placement.folder, "r")

    def interrupted(number):
        instance.report_run_canceling(instance.get_runs(limit=1)[0])
        raise DagsterExecutionInterruptedError

    drive(instance, system, interrupted, around=guarded)
    assert stopped(system.placement.folder, "r") is None


def test_an_interrupt_that_nobody_asked_for_in_dagster_stops_nothing(instance, system):
    def interrupted(number):
        raise DagsterExecutionInterruptedError

    drive(instance, system, interrupted)
    assert stopped(system.placement.folder, "r") is None


def test_a_block_that_is_tried_again_ends_where_it_was_to_end(instance, system):
    ends = []

    @op
    def block(context) -> None:
        # Begun at step 3 and tried again at step 5, when two steps had been committed.
        ends.append(last_step(context, 5 if ends else 3, 4, 20))
        if len(ends) == 1:
            raise RetryRequested

    @job(executor_def=in_process_executor)
    def blocks():
        block()

    first = blocks.execute_in_process(instance=instance)
    again = blocks.execute_in_process(instance=instance, tags=instance.get_run_by_id(first.run_id).tags)
    assert again.success
    assert ends == [6, 6, 6]


def test_whoever_wants_a_driven_run_waits_its_turn(tmp_path):
    def held(patience: float) -> None:
        with System(Placement(root=str(tmp_path)), patience=patience).holding("r"):
            pass

    with run_lock(tmp_path, "r"):
        began = time.monotonic()
        with pytest.raises(LockHeld, match="run r is being driven by process"):
            held(0.3)
        assert time.monotonic() - began >= 0.3
