"""A teacher's engine as an actor: replaced when it is lost, none of the run's engines, and ended when nobody needs it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from publish_samples import make_model

from furlong.ops.spec import Placement
from furlong.resources.actors import end_actors, live_actors
from furlong.resources.engines.local import LocalEngine
from furlong.resources.processes import writer_of
from furlong.resources.remote_engine import end_superfluous
from furlong.resources.run_lock import run_lock
from furlong.resources.teacher import Teacher

ROWS = [((5, 9, 11, 2), 1), ((3, 4), 1), ((8,) * 30, 12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model"))


def teacher(folder: str, run: str, placement: Placement) -> Teacher:
    spec = SimpleNamespace(
        engine="local", model=SimpleNamespace(dtype="bfloat16"), algorithm=SimpleNamespace(teacher=folder)
    )
    return Teacher(run, spec, placement, "digest")


def test_a_lost_teacher_is_replaced_and_says_the_same(placement: Placement, folder: str) -> None:
    try:
        served = teacher(folder, "taught", placement.model_copy(update={"engine_tp": 2}))
        said = served.score(ROWS, 0.7)
        assert said == LocalEngine(folder, 0, "bfloat16", 1).score(ROWS, 0.7)
        process = writer_of(Path(placement.folder) / "logs" / "teacher-taught.log")
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert served.score(ROWS, 0.7) == said
        assert [name.role for name in live_actors(placement) if name.run == "taught"] == ["teacher"]
    finally:
        end_actors(placement, lambda name: name.role != "teacher")


def test_teachers_of_runs_that_nobody_drives_are_ended(placement: Placement, folder: str) -> None:
    try:
        with run_lock(placement.folder, "done"), run_lock(placement.folder, "driven"):
            for run in ("done", "driven", "own"):
                teacher(folder, run, placement).start()
        with run_lock(placement.folder, "driven"):
            end_superfluous("own", placement)
            left = {name.run for name in live_actors(placement) if name.role == "teacher"}
        assert left == {"driven", "own"}
    finally:
        end_actors(placement, lambda name: name.role != "teacher")
