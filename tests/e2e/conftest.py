"""A root folder with its own Ray head, shared by all end-to-end tests; each run in it has its own engine and trainer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from furlong.ops import records
from furlong.ops.spec import Placement
from furlong.resources.cluster import stop_cluster
from furlong.resources.lake import Lake
from furlong.resources.processes import writer_of

DRIVE = Path(__file__).with_name("drive.py")
TABLES = (
    "runs", "prompts", "groups", "trajectories", "batches", "rewards", "steps", "weight_versions", "weight_deltas", "evals",
)  # fmt: skip
"""Those whose rows do not depend on how often a run was killed; `ledger`, `fragments` and `failures` tell of that."""


class Place:
    """A root folder with its own Ray head, and runs in it."""

    def __init__(self, root: Path, spec: str):
        self.spec, self.env = spec, {**os.environ, "FURLONG_ROOT": str(root), "DAGSTER_HOME": str(root / "dagster")}
        self.placement = Placement(root=str(root), threads=1)
        self.lake = Lake(self.placement.lake_uri())

    def run(self, *command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=240)

    def drive(self, run: str, kill: dict | None = None, **config) -> subprocess.CompletedProcess:
        arguments = [json.dumps({"spec": self.spec, "run": run, **config})] + ([json.dumps(kill)] if kill else [])
        return self.run(sys.executable, str(DRIVE), *arguments)

    def start(self, run: str, env: dict | None = None, program: Path = DRIVE, **config) -> subprocess.Popen:
        """Drive a run in a process of its own; whoever starts one ends it."""
        command = [sys.executable, str(program), json.dumps({"spec": self.spec, "run": run, **config})]
        return subprocess.Popen(command, env=env or self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self, run: str, **config) -> None:
        done = self.drive(run, **config)
        assert done.returncode == 0, done.stderr[-4000:]

    def actor_process(self, role: str, run: str) -> psutil.Process:
        """The actor's process, by the log file that it holds open."""
        log = self.placement.folder / "logs" / f"{role}-{run}.log"
        process = writer_of(log)
        assert process is not None, f"no process writes {log}"
        return process

    def digests(self, run: str) -> list[tuple[int, str, str]]:
        rows = self.lake.read("weight_versions", {"run": run}, ["version", "state", "digest"]).to_pylist()
        return sorted((row["version"], row["state"], row["digest"]) for row in rows)

    def row_digests(self, run: str, alias: str) -> dict[str, str]:
        """Digest of each table's rows, with the run's name replaced so that two runs can be compared."""
        found = {}
        dataset = self.lake.read("runs", {"run": run}, ["dataset"])["dataset"][0].as_py()
        for table in TABLES:
            data = self.lake.read(table, {"dataset": dataset} if table == "prompts" else {"run": run})
            rows = json.loads(json.dumps(data.to_pylist(), default=bytes.hex).replace(run, alias))
            if table == "weight_deltas":
                rows = [{**row, "data": bytes.fromhex(row["data"])} for row in rows]
            assert rows, table
            found[table] = records.row_digest(table, records.rows(table, rows))
        return found


@pytest.fixture(scope="session")
def place(tmp_path_factory, quick_spec):
    place = Place(tmp_path_factory.mktemp("root"), quick_spec)
    yield place
    stop_cluster(place.placement)


@pytest.fixture(scope="session")
def undisturbed(place):
    place.finish("calm")
    return place.digests("calm"), place.row_digests("calm", "RUN")
