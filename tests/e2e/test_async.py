"""Runs whose rollouts never wait: nothing is lost or doubled, whoever is killed, and the bound on staleness holds."""

import random
import signal
import time
from pathlib import Path

import pytest

from furlong.ops.records import State
from furlong.ops.rollouts.ledger import Ledger
from furlong.ops.rollouts.reconcile import account, facts, owed

STORM = Path(__file__).with_name("storm.py")
STEPS, PER_STEP, SAMPLES, BOUND = 6, 4, 4, 2
AHEAD = {"steps": STEPS, "staleness": BOUND, "data.train_prompts": 200}


def check_conservation(lake, run: str) -> Ledger:
    """Every prompt drawn is held by one group, every trained one by one batch, and no token is staler than the bound."""
    drawn = lake.read("groups", {"run": run})
    ledger = Ledger.replay(run, lake.read("ledger", {"run": run}))
    positions = dict(zip(drawn["group_id"].to_pylist(), drawn["position"].to_pylist(), strict=True))
    assert account(ledger, positions, owed(ledger, positions)) == []
    batches = lake.read("batches", {"run": run}).to_pylist()
    trained = [group["group_id"] for row in batches for group in row["groups"]]
    assert len(set(trained)) == len(trained)
    assert sorted(trained) == sorted(ledger.groups(State.ADMITTED, State.TRAINED))
    step_of = {r["version"]: r["step"] for r in lake.read("weight_versions", {"run": run}).to_pylist()}
    start = {group["group_id"]: row["step"] - 1 for row in batches for group in row["groups"]}
    rows = [r for r in lake.read("trajectories", {"run": run}).to_pylist() if r["group_id"] in start]
    for row in rows:
        spans = row["version_spans"]
        assert spans, "a token without a version is never trained on"
        assert all(0 <= start[row["group_id"]] - step_of[span["version"]] <= BOUND for span in spans)
        covered = [t for span in spans for t in range(span["start"], span["end"])]
        assert covered == [t for t, value in enumerate(row["logprobs"]) if value is not None], (
            "exactly what was sampled"
        )
    assert len({row["trajectory_id"] for row in rows}) == len(rows) == SAMPLES * len(trained)
    return ledger


def check_finished(place, run: str) -> None:
    ledger = check_conservation(place.lake, run)
    assert len(ledger.groups(State.TRAINED, State.ADMITTED)) == STEPS * PER_STEP
    # The last driver may have died with events untold; a driver that starts tells them.
    known = facts(
        place.lake.read("groups", {"run": run}), place.lake.read("trajectories", {"run": run}),
        place.lake.read("batches", {"run": run}), place.lake.read("steps", {"run": run}),
    )  # fmt: skip
    assert known.trained == frozenset(range(1, STEPS + 1))
    assert [state for _, state, _ in place.digests(run)] == ["live"] * (STEPS + 1)


def test_an_asynchronous_run_draws_ahead_and_loses_nothing(place):
    place.finish("ahead", overrides=AHEAD)
    check_finished(place, "ahead")
    batches = place.lake.read("batches", {"run": "ahead"}).to_pylist()
    assert max(row["staleness_max"] for row in batches) >= 1, "it never drew ahead, so nothing was shown"


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_random_and_run_again(place, seed):
    """SIGKILL of the driver, or of the engine, at moments that nobody chose."""
    run, rng = f"struck-{seed}", random.Random(seed)
    for _ in range(4):
        victim = rng.choice(["driver", "driver", "engine"])
        driver = place.start(run, overrides=AHEAD)
        try:
            begun = time.monotonic()
            while not place.lake.read("groups", {"run": run}, ["step"]).num_rows and driver.poll() is None:
                assert time.monotonic() - begun < 120, "nothing is drawn"
                time.sleep(0.05)
            time.sleep(rng.uniform(0.0, 2.5))
            if victim == "engine" and driver.poll() is None:
                place.actor_process("engine", run).send_signal(signal.SIGKILL)
                time.sleep(rng.uniform(0.5, 2.0))
        finally:
            driver.kill()
            driver.communicate(timeout=60)
    place.finish(run, overrides=AHEAD)
    check_finished(place, run)


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("table", ["groups", "trajectories", "rewards", "ledger"])
def test_killed_between_two_commits_and_run_again(place, table):
    """What was committed alone, without what was to follow, does not stand in the way of what is drawn anew."""
    run = f"between-{table}"
    for commit, when in ((2, "before"), (1, "after")):
        died = place.drive(run, {"table": table, "commit": commit, "when": when}, overrides=AHEAD)
        assert died.returncode == -signal.SIGKILL, died.stderr[-4000:]
    place.finish(run, overrides=AHEAD)
    check_finished(place, run)


@pytest.mark.slow
def test_two_engines_draw_on_while_one_is_killed(place):
    """Publications do not wait for it; that it is admitted again only with its proof, tests of the router show."""
    run = "pair"
    env = {**place.env, "FURLONG_ENGINES": "2"}
    driver = place.start(run, env=env, overrides={**AHEAD, "steps": 2 * STEPS})
    try:
        begun = time.monotonic()
        while not place.lake.read("batches", {"run": run}, ["step"]).num_rows:
            assert time.monotonic() - begun < 120
            assert driver.poll() is None
            time.sleep(0.05)
        place.actor_process("engine-1", run).send_signal(signal.SIGKILL)
        _, err = driver.communicate(timeout=240)
    finally:
        driver.kill()
    assert driver.returncode == 0, err[-4000:]
    versions = place.lake.read("weight_versions", {"run": run}).to_pylist()
    proofs = {row["version"]: len(row["attestations"]) for row in versions if row["version"]}
    assert min(proofs.values()) == 1, "a publication went on without the engine that was lost"
    check_conservation(place.lake, run)


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["in_place", "abort"])
def test_a_storm_loses_no_prompt(place, on_update):
    """One engine of two is killed every third step, some replies take ten times as long, and connections break."""
    run, steps = f"storm-{on_update.replace('_', '-')}", 12
    overrides = {**AHEAD, "steps": steps, "rollout.on_update": on_update, "data.env": {"name": "storm:Storm"}}
    env = {**place.env, "FURLONG_ENGINES": "2", "PYTHONPATH": str(STORM.parent)}
    killed, driver = 0, place.start(run, env=env, program=STORM, overrides=overrides)
    try:
        begun = time.monotonic()
        while driver.poll() is None:
            assert time.monotonic() - begun < 280, "the run hangs"
            done = max(place.lake.read("batches", {"run": run}, ["step"])["step"].to_pylist(), default=0)
            if done >= 3 * (killed + 1):
                place.actor_process(("engine-1", "engine")[killed % 2], run).send_signal(signal.SIGKILL)
                killed += 1
            time.sleep(0.05)
        out, err = driver.communicate(timeout=60)
    finally:
        driver.kill()
    assert driver.returncode == 0, err[-4000:]
    assert killed >= 3
    assert "is taken out" in out + err
    assert "connection broke" in out + err
    ledger = check_conservation(place.lake, run)
    assert len(ledger.groups(State.TRAINED, State.ADMITTED)) == steps * PER_STEP
    assert place.lake.read("failures", {"run": run, "kind": "environment"}).num_rows > steps
    assert [state for _, state, _ in place.digests(run)] == ["live"] * (steps + 1)
