"""A run's rows and weights do not depend on how often, where, or by whose hand it was killed.

Every test drives the real thing: Dagster, Ray actors, Delta tables, a policy trained by gradient steps. One Ray head
serves all runs of this module; each run has its own name, engine and trainer.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from furlong.ops import records
from furlong.ops.spec import Placement
from furlong.resources.cluster import stop_cluster
from furlong.resources.lake import Lake

DRIVE = Path(__file__).with_name("drive.py")
TABLES = ("runs", "prompts", "groups", "trajectories", "rewards", "steps", "weight_versions", "weight_deltas", "evals")
STEPS, PER_STEP, SAMPLES = 3, 4, 4
KILLS = {
    "prompts": {"table": "prompts", "step": 0, "when": "after"},
    "rollouts, before any row": {"table": "trajectories", "step": 2, "when": "before"},
    "rollouts, between its two tables": {"table": "trajectories", "step": 2, "when": "after"},
    "rewards": {"table": "rewards", "step": 2, "when": "before"},
    "train_step, taken but not recorded": {"table": "steps", "step": 2, "when": "before"},
    "train_step, recorded": {"table": "steps", "step": 2, "when": "after"},
    "weight_publish, nothing staged": {"table": "weight_deltas", "step": 2, "when": "before"},
    "weight_publish, between its two tables": {"table": "weight_deltas", "step": 2, "when": "after"},
    "weight_publish, flipped but not live": {"table": "weight_versions", "step": 2, "when": "before", "how": "replace"},
}


class Place:
    """A root folder with its own Ray head, and runs in it."""

    def __init__(self, root: Path, spec: str):
        self.spec, self.env = spec, {**os.environ, "FURLONG_ROOT": str(root), "DAGSTER_HOME": str(root / "dagster")}
        self.placement = Placement(root=str(root), threads=1)
        self.lake = Lake(self.placement.lake_uri())

    def drive(self, run: str, kill: dict | None = None, **config) -> subprocess.CompletedProcess:
        arguments = [json.dumps({"spec": self.spec, "run": run, **config})] + ([json.dumps(kill)] if kill else [])
        return subprocess.run(
            [sys.executable, str(DRIVE), *arguments], env=self.env, capture_output=True, text=True, timeout=240
        )

    def finish(self, run: str, **config) -> None:
        done = self.drive(run, **config)
        assert done.returncode == 0, done.stderr[-4000:]

    def digests(self, run: str) -> list[tuple[int, str, str]]:
        rows = self.lake.read("weight_versions", {"run": run}, ["version", "state", "digest"]).to_pylist()
        return sorted((row["version"], row["state"], row["digest"]) for row in rows)

    def row_digests(self, run: str, alias: str) -> dict[str, str]:
        """Digest of each table's rows, with the run's name replaced so that two runs can be compared."""
        found = {}
        for table in TABLES:
            data = self.lake.read(table, {} if table == "prompts" else {"run": run})
            rows = json.loads(json.dumps(data.to_pylist(), default=bytes.hex).replace(run, alias))
            if table == "weight_deltas":
                rows = [{**row, "data": bytes.fromhex(row["data"])} for row in rows]
            assert rows, table
            found[table] = records.row_digest(table, records.rows(table, rows))
        return found


@pytest.fixture(scope="module")
def place(tmp_path_factory, quick_spec):
    place = Place(tmp_path_factory.mktemp("root"), quick_spec)
    yield place
    stop_cluster(place.placement)


@pytest.fixture(scope="module")
def undisturbed(place):
    place.finish("calm")
    return place.digests("calm"), place.row_digests("calm", "RUN")


def check_accounts(place: Place, run: str) -> None:
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


@pytest.mark.parametrize("kill", KILLS.values(), ids=KILLS.keys())
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
