"""What surrounds everything that drives a run from Dagster: who may begin, what is tried again, what a stop leaves.

Tried again, in the same Dagster run, is what the machinery failed at (`resources.failures`), never an answer: a failed
check, a spec that cannot run, data that must not be trained on. Whatever had been committed is found in the lake.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster import DagsterExecutionInterruptedError, DagsterRunStatus, RetryRequested

from furlong.resources.run_lock import is_driven
from furlong.resources.stopping import clear_stop, request_stop, stopped
from furlong.resources.workers import Worker

if TYPE_CHECKING:
    from dagster import DagsterRun, OpExecutionContext

    from furlong.resources.system import System

RUN_TAG = "furlong/run"
"""Tag of a Dagster run that names the run it drives, for searching the list of runs."""
RETRY = "dagster/retry_number"
"""Tag of Dagster runs that the daemon launches for ones whose process died."""
AUTOMATIC = ("dagster/sensor_name", "dagster/schedule_name")
"""Tags of Dagster runs that no person launched; a person's re-execution of such a run inherits them."""
TRIES = 3
"""Failures of the machinery in a row, without anything committed in between, after which a person has to look."""
FIRST_WAIT = 2.0
"""Seconds before the first new try; each further one waits twice as long."""
PROGRESS = ("batches", "rewards", "steps", "weight_versions", "evals")
"""Tables in which a commit means that a try was not in vain."""


_introduced: set[str] = set()
"""Dagster runs that are tagged already."""
_begun: set[str] = set()
"""Dagster runs that this process has let in: a stop from then on lets them finish the step that they are at."""


@dataclass
class _Failures:
    count: int
    committed: tuple[int | None, ...]


_failures: dict[str, _Failures] = {}
"""Dagster run -> its failures in a row; all its tries are made in one process, so memory is enough."""


@contextmanager
def training(context: OpExecutionContext, system: System, run: str) -> Iterator[None]:
    """Around the training of a run: as `guarded`, and a stop is kept to.

    Raises:
        DagsterExecutionInterruptedError: the run was stopped after this Dagster run was launched, or a sensor or
            schedule launched it.
        Others: as `guarded`.
    """
    _respect_stop(context, system, run)
    try:
        with guarded(context, system, run):
            yield
    except DagsterExecutionInterruptedError:
        if context.instance.get_run_by_id(context.run_id).status == DagsterRunStatus.CANCELING:
            if stopped(system.placement.folder, run) is None:
                request_stop(system.placement.folder, run, "terminated in Dagster")
            context.log.info(_how_to_go_on(run))
        raise


@contextmanager
def guarded(context: OpExecutionContext, system: System, run: str) -> Iterator[None]:
    """Around whatever needs a run's engines or its trainer.

    Raises:
        RetryRequested: the machinery failed; Dagster tries the op again.
        Others: what is raised inside.
    """
    _introduce(context, run)
    if is_driven(system.placement.folder, run):
        context.log.info(f"waiting for another process, which drives run {run}")
    try:
        yield
    except Exception as err:
        _try_again(context, system, run, err)
        raise


def _introduce(context: OpExecutionContext, run: str) -> None:
    from furlong.resources.run_launcher import TAG

    if context.run_id not in _introduced:
        _introduced.add(context.run_id)
        context.instance.add_run_tags(context.run_id, {RUN_TAG: run, TAG: str(Worker.of(os.getpid()))})


def _respect_stop(context: OpExecutionContext, system: System, run: str) -> None:
    root = system.placement.folder
    mark = stopped(root, run)
    if mark is None or context.run_id in _begun:
        _begun.add(context.run_id)
        return
    launched = context.instance.get_run_record_by_id(context.run_id).create_timestamp.timestamp()
    if launched > mark.at and not _automatic(context.run):
        clear_stop(root, run)
        _begun.add(context.run_id)
        context.log.info(f"run {run} goes on; it had been stopped: {mark.reason}")
    else:
        context.log.info(f"nothing is done, as run {run} was stopped: {mark.reason}. {_how_to_go_on(run)}")
        context.instance.report_run_canceling(context.run)
        raise DagsterExecutionInterruptedError


def _automatic(run: DagsterRun) -> bool:
    return RETRY in run.tags or (run.parent_run_id is None and any(tag in run.tags for tag in AUTOMATIC))


def _how_to_go_on(run: str) -> str:
    return f"`furlong resume {run}`, or launching it by hand, lets it go on after its last committed step"


def _try_again(context: OpExecutionContext, system: System, run: str, err: Exception) -> None:
    from furlong.resources.failures import infrastructure

    words = infrastructure(err)
    if words is None:
        return
    count = _count(system, context.run_id)
    if count > TRIES:
        context.log.error(f"{words}, {count} times without anything committed in between: this needs a person")
        return
    system.disconnect(run)
    wait = FIRST_WAIT * 2 ** (count - 1)
    context.log.warning(f"{words}: {type(err).__name__}: {err}\nTried again in {wait:g} s; nothing committed is lost.")
    raise RetryRequested(max_retries=context.retry_number + 1, seconds_to_wait=wait) from err


def _count(system: System, run_id: str) -> int:
    """How many failures in a row this one is."""
    from furlong.resources.lake_table import LakeError

    before = _failures.get(run_id, _Failures(0, ()))
    try:
        committed = system.committed(PROGRESS)
    except LakeError:
        committed = before.committed  # a lake that cannot even be looked at has taken nothing
    count = before.count + 1 if before.committed in ((), committed) else 1
    _failures[run_id] = _Failures(count, committed)
    return count
