"""A policy is trained by a program that only has a URL."""

import os
from pathlib import Path

import pytest

from furlong.ops.records import State

AGENT = {"data.env": {"name": "agent", "options": {"program": "agent_program:play"}}, "algorithm.prompts_per_step": 2}


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_an_agent_is_trained_over_http(place, staleness):
    run, steps = f"agent-{staleness}", 2
    here = str(Path(__file__).parent)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    overrides = {**AGENT, "steps": steps, "staleness": staleness, "data.eval_prompts": 2}
    driver = place.start(run, env={**place.env, "PYTHONPATH": path}, overrides=overrides)
    try:
        _, err = driver.communicate(timeout=240)
    finally:
        driver.kill()
    assert driver.returncode == 0, err[-4000:]
    where = {"run": run}
    rows = place.lake.read("trajectories", where).to_pylist()
    trained = [e for e in place.lake.read("ledger", where).to_pylist() if e["state"] == State.TRAINED]
    assert len(trained) == 2 * steps
    assert place.lake.read("failures", where).to_pylist() == [], "no session drifted, and no agent failed"
    rewards = {row["trajectory_id"]: row for row in place.lake.read("rewards", where).to_pylist()}
    for row in (row for row in rows if row["group_id"] in {event["group_id"] for event in trained}):
        assert rewards[row["trajectory_id"]]["score"] is not None
        assert [span["end"] for span in row["version_spans"]][-1] == len(row["tokens"])
        assert sum(row["loss_mask"]) == len([value for value in row["logprobs"] if value is not None]) > 0
    steps_taken = place.lake.read("steps", where, ["mismatch_coverage", "mismatch_max"]).to_pylist()
    assert all(row["mismatch_max"] < 1e-3 for row in steps_taken if row["mismatch_coverage"])
    evaluated = place.lake.read("evals", where).to_pylist()
    assert {(row["version"], row["samples"]) for row in evaluated} == {(0, 1), (0, 2), (steps, 1), (steps, 2)}
    assert not list((place.placement.folder / "runs" / run).glob("sessions*/*")), "sessions are forgotten once taken"
