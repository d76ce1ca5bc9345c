"""Twenty steps that nobody watches: launched block by block through queue and daemon, while everything is killed once."""

import time
from collections.abc import Callable

import psutil
import pytest
from ui_place import UiPlace

from furlong.resources.processes import mark, marked

STEPS, BLOCK = 20, 4
DEADLINE = 340.0
"""Seconds for the disturbed run; on two quiet cores it takes about a third of that."""
AUTOMATIC = {"dagster/sensor_name": "continuous_training"}


@pytest.fixture
def place(tmp_path, quick_spec):
    place = UiPlace(tmp_path, quick_spec, STEPS)
    try:
        yield place
    finally:
        place.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_steps_under_kills_give_the_digests_of_an_undisturbed_run(place):
    undisturbed = place.undisturbed()
    assert len({digest for _, _, digest in undisturbed[0]}) > 0.8 * STEPS, (
        "too few steps have a gradient to show anything"
    )
    place.start_ui()
    faults = {3: kill_engine, 7: kill_trainer, 10: kill_daemon, 14: hang_reward}
    runs = unattended(place, "wild", faults)
    assert place.digests("wild") == undisturbed[0]
    assert place.steps("wild") == undisturbed[1]
    assert len(runs) == STEPS // BLOCK
    assert "the UI's daemon ended with status -9 and is started again" in place.log.read_text()
    assert place.moods.read_text() == "", "no verifier slept"
    assert (place.root / "runs" / "wild" / "report.json").is_file()


def unattended(place, run: str, faults: dict[int, Callable]) -> list[str]:
    """Request block after block, as continuous training does, and do harm once so many steps are committed."""
    until, runs, left = time.monotonic() + DEADLINE, [], dict(faults)
    while (done := place.count("steps", run)) < STEPS or place.client.wait(runs[-1], seconds=60) != "SUCCESS":
        assert time.monotonic() < until, f"{done} of {STEPS} steps after {DEADLINE:g} s: {place.client.words(runs[-1])}"
        if not runs or place.client.status(runs[-1]) in ("SUCCESS", "FAILURE", "CANCELED"):
            assert not runs or place.client.status(runs[-1]) == "SUCCESS", place.client.words(runs[-1])
            runs.append(place.block(run, BLOCK, AUTOMATIC))
        if due := [step for step in left if step <= done]:
            left.pop(due[0])(place, run)
        time.sleep(0.1)
    assert not left, f"the run was done before {left} could happen"
    return runs


def kill_engine(place, run: str) -> None:
    place.actor("engine", run).kill()


def kill_trainer(place, run: str) -> None:
    place.actor("trainer", run).kill()


def kill_daemon(place, run: str) -> None:
    daemon = next(each for each in marked(mark("ui", place.root)) if "dagster._daemon" in each.cmdline())
    daemon.kill()
    psutil.wait_procs([daemon], timeout=10)


def hang_reward(place, run: str) -> None:
    place.mood("sleep")
