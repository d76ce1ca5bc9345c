"""Whole runs with a value model: it moves between layouts with the policy, and the policy learns from it."""

import signal
import time
from statistics import mean

import pytest

PPO = {"algorithm.name": "ppo", "algorithm.critic": {"learning_rate": 3e-3}}
VALUE = ("value_loss", "value_grad_norm")


def steps_of(place, run: str) -> list[dict]:
    rows = place.lake.read("steps", {"run": run}).to_pylist()
    return sorted(rows, key=lambda row: row["step"])


@pytest.mark.slow
def test_a_run_goes_on_over_two_ranks_with_the_value_model_of_one(place):
    place.finish("valued", overrides=PPO, steps=2)
    before = place.digests("valued")
    process = place.start("valued", {**place.env, "FURLONG_TRAINER_LAYOUT": "dp2"}, overrides=PPO)
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]
    rows = steps_of(place, "valued")
    assert ["layout=dp2" in row["trainer"] for row in rows] == [False, False, True]
    assert all(row[name] > 0 for row in rows for name in VALUE)
    assert place.digests("valued")[:3] == before
    assert [state for _, state, _ in place.digests("valued")] == ["live"] * 4


@pytest.mark.slow
def test_the_reward_rises_and_the_value_foretells_it_though_the_trainer_is_killed_once(place):
    steps = 40
    algorithm = {"prompts_per_step": 16, "samples_per_prompt": 4, "learning_rate": 2e-3, "decay": "constant"}
    overrides = PPO | {f"algorithm.{name}": value for name, value in algorithm.items()} | {"steps": steps}
    driver = place.start("rising", overrides=overrides)
    try:
        until = time.monotonic() + 300
        while place.lake.count("steps", {"run": "rising"}) < 3:
            assert driver.poll() is None, driver.communicate()
            assert time.monotonic() < until, "no three steps in time"
            time.sleep(0.1)
        place.actor_process("trainer", "rising").send_signal(signal.SIGKILL)
        driver.communicate(timeout=300)
    finally:
        driver.kill()
        driver.communicate()
    if driver.returncode:
        place.finish("rising", overrides=overrides)
    rows = steps_of(place, "rising")
    assert len(rows) == steps
    reward = [row["reward_mean"] for row in rows]
    assert mean(reward[-8:]) > mean(reward[:8]) + 0.1, reward
    assert rows[0]["value_explained"] in (0.0, None), "all values are 0 at first"
    # Rewards are 0 or 1. A value of 0 everywhere would err by 0.38 of the mean reward, half the square of what is left of
    # it some three tokens earlier; the right mean alone by half its variance, 1/8 at most.
    loss = [row["value_loss"] for row in rows]
    assert mean(loss[-8:]) < 0.3 * mean(reward[-8:]), loss
