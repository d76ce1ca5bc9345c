"""A run's rows and weights do not depend on how often, where, or by whose hand it was killed.

Every test drives the real thing: Dagster, Ray actors, Delta tables, a policy trained by gradient steps.
"""

import signal

import pytest

from furlong.ops.records import TABLES

STEPS, PER_STEP, SAMPLES = 3, 4, 4
KILLS = {
    "prompts": {"table": "prompts", "step": 0, "when": "after"},
    "rollouts, before any row": {"table": "groups", "step": 2, "when": "before"},
    "rollouts, reserved": {"table": "groups", "step": 2, "when": "after"},
    "rollouts, drawn but in no batch": {"table": "trajectories", "step": 2, "when": "after"},
    "rollouts, in a batch that the ledger does not know": {"table": "batches", "step": 2, "when": "after"},
    "rewards": {"table": "rewards", "step": 2, "when": "before"},
    "train_step, taken but not recorded": {"table": "steps", "step": 2, "when": "before"},
    "train_step, recorded": {"table": "steps", "step": 2, "when": "after"},
    "weight_publish, nothing staged": {"table": "weight_deltas", "step": 2, "when": "before"},
    "weight_publish, between its two tables": {"table": "weight_deltas", "step": 2, "when": "after"},
    "weight_publish, flipped but not live": {"table": "weight_versions", "step": 2, "when": "before", "how": "replace"},
}


def check_accounts(place, run: str) -> None:
    """Every prompt drawn is in exactly one group, every sample in one trajectory, one reward and one outcome."""
    groups = place.lake.read("groups", {"run": run}).to_pylist()
    trajectories = place.lake.read("trajectories", {"run": run}, ["trajectory_id", "group_id"]).to_pylist()
    rewards = place.lake.read("rewards", {"run": run}, ["trajectory_id"])["trajectory_id"].to_pylist()
    steps = place.lake.read("steps", {"run": run}).to_pylist()
    assert sorted(row["step"] for row in steps) == list(range(1, STEPS + 1))
    assert len({row["group_id"] for row in groups}) == len(groups) == STEPS * PER_STEP
    assert len({row["prompt_id"] for row in groups}) == len(groups), "one epoch: no prompt is drawn twice"
    names = [row["trajectory_id"] for row in trajectories]
    assert len(set(names)) == len(names) == STEPS * PER_STEP * SAMPLES
    assert sorted(rewards) == sorted(names)
    assert sorted(outcome["trajectory_id"] for row in steps for outcome in row["outcomes"]) == sorted(names)


def test_a_run_accounts_for_every_prompt(place, undisturbed):
    check_accounts(place, "calm")
    versions = undisturbed[0]
    assert [version for version, _, _ in versions] == list(range(STEPS + 1))
    assert {state for _, state, _ in versions} == {"live"}
    assert len({digest for _, _, digest in versions}) == STEPS + 1, "every step changed the weights"


def test_the_same_spec_gives_the_same_rows(place, undisturbed):
    place.finish("again")
    assert place.digests("again") == undisturbed[0]
    assert place.row_digests("again", "RUN") == undisturbed[1]


def test_running_a_finished_run_adds_nothing(place, undisturbed):
    before = {table: place.lake.version(table) for table in TABLES}
    place.finish("calm")
    assert {table: place.lake.version(table) for table in TABLES} == before


QUICK = {
    "rollouts, drawn but in no batch", "train_step, taken but not recorded", "weight_publish, flipped but not live"
}  # fmt: skip
"""Kills that `make test` tries; the others are in `make test-all`."""


@pytest.mark.parametrize(
    "kill",
    [pytest.param(kill, id=name, marks=() if name in QUICK else pytest.mark.slow) for name, kill in KILLS.items()],
)
def test_killed_in_a_stage_and_run_again(place, undisturbed, kill, request):
    run = "killed-" + request.node.callspec.id.replace(",", "").replace(" ", "-").replace("_", "-")
    if kill["table"] == "prompts":
        kill = {**kill, "table": "weight_versions"}
    died = place.drive(run, kill)
    assert died.returncode == -signal.SIGKILL, died.stderr[-4000:]
    place.finish(run)
    assert place.digests(run) == undisturbed[0]
    assert place.row_digests(run, "RUN") == undisturbed[1]
    check_accounts(place, run)
