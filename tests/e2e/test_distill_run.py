"""A whole run that distils: an engine of its own serves the teacher, and what the policy says comes closer to it."""

import signal
import time
from statistics import mean

import pytest

from furlong.ops.records import Disposition
from furlong.ops.spec import load_spec
from furlong.resources.actors import live_actors
from furlong.resources.cluster import ensure_cluster
from furlong.resources.models import resolve

STEPS = 24
LEARNT = {"model.scratch.sft.steps": 250}
"""Long enough that teacher and policy understand the task, and differ in the errors that they were shown."""


@pytest.fixture(scope="module")
def teacher(place) -> str:
    """The folder of a policy that was taught the same task with few errors."""
    spec = load_spec(place.spec, LEARNT | {"model.scratch.sft.demo_noise": 0.1})
    return str(resolve(spec.model, spec.data, spec.seed, place.placement.folder).path)


@pytest.mark.slow
def test_the_policy_comes_closer_to_its_teacher_though_that_is_killed_once(place, teacher):
    algorithm = {
        "name": "distill", "teacher": teacher, "kl_coef": 1.0, "kl_estimator": "k1", "learning_rate": 1.5e-3,
        "normalise_std": False, "decay": "constant", "prompts_per_step": 16, "samples_per_prompt": 4,
    }  # fmt: skip
    overrides = {f"algorithm.{name}": value for name, value in algorithm.items()} | LEARNT | {"steps": STEPS}
    driver = place.start("distilled", overrides=overrides)
    try:
        until = time.monotonic() + 300
        while place.lake.count("steps", {"run": "distilled"}) < 2:
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < until, "no two steps in time"
            time.sleep(0.1)
        place.actor_process("teacher", "distilled").send_signal(signal.SIGKILL)
        _, told = driver.communicate(timeout=240)
        assert driver.returncode == 0, told[-4000:]
    finally:
        driver.kill()
        driver.communicate()
    steps = sorted(place.lake.read("steps", {"run": "distilled"}).to_pylist(), key=lambda row: row["step"])
    assert len(steps) == STEPS
    divergence = [row["kl"] for row in steps]
    assert mean(divergence[:4]) > 2 * mean(divergence[-4:]), divergence
    assert all(o["disposition"] == Disposition.TRAINED for row in steps for o in row["outcomes"]), "no group is flat"
    drawn = place.lake.read("trajectories", {"run": "distilled"}, ["trajectory_id"])["trajectory_id"].to_pylist()
    scored = place.lake.read("teacher_scores", {"run": "distilled"}).to_pylist()
    assert sorted(row["trajectory_id"] for row in scored) == sorted(drawn)
    assert len(drawn) == STEPS * 64
    assert len({row["teacher"] for row in scored}) == 1
    ensure_cluster(place.placement)
    roles = [name.role for name in live_actors(place.placement) if name.run == "distilled"]
    assert sorted(roles) == ["engine", "teacher", "trainer"], "the teacher is none of the run's engines"
