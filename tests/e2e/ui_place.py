"""A root folder whose runs are launched through a real web server and daemon, which tests may kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import yaml
from ui_client import UiClient

from furlong.ops.spec import Placement
from furlong.resources.cluster import stop_cluster
from furlong.resources.lake import Lake
from furlong.resources.processes import mark, marked, writer_of
from furlong.resources.services import stop_ui, stop_workers

FURLONG = str(Path(sys.executable).with_name("furlong"))
HERE = Path(__file__).parent


class UiPlace:
    """A root folder; `mood` tells its verifier how to behave, see moody_verifier.py."""

    def __init__(self, root: Path, spec: str, steps: int):
        self.root, self.moods = root, root / "moods"
        self.spec = str(root / f"moody{steps}.yaml")
        wanted = yaml.safe_load(Path(spec).read_text()) | {"name": "moody", "steps": steps}
        wanted["data"]["tasks"][0]["options"]["reward.verifier"] = "moody_verifier:exact"
        Path(self.spec).write_text(yaml.safe_dump(wanted))
        self.env = {
            **os.environ, "FURLONG_ROOT": str(root), "DAGSTER_HOME": str(root / "dagster"), "OMP_NUM_THREADS": "1",
            "FURLONG_THREADS": "1", "FURLONG_VERIFY_DEADLINE": "3", "MOODY_VERIFIER": str(self.moods),
            "PYTHONPATH": str(HERE),
        }  # fmt: skip
        self.placement = Placement(root=str(root), threads=1)
        self.lake = Lake(self.placement.lake_uri())
        self.log = root / "furlong-ui.log"
        self.process: subprocess.Popen | None = None
        self.client: UiClient

    def start_ui(self, seconds: float = 150.0) -> UiClient:
        """Start `furlong ui` and wait until it says where it is."""
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [FURLONG, "ui"], env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.until(lambda: "Dagster UI: " in self.log.read_text() or self.process.poll() is not None, seconds, "the UI")
        said = self.log.read_text()
        assert "Dagster UI: " in said, said
        self.client = UiClient(said.split("Dagster UI: ")[1].split()[0])
        return self.client

    def kill_ui(self) -> None:
        """SIGKILL `furlong ui`, its web server, its daemon and their code servers, all at once."""
        self.process.kill()
        for process in marked(mark("ui", self.root)):
            process.kill()
        self.process.wait(30)

    def close(self) -> None:
        if self.process:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        stop_ui(self.placement)
        stop_workers(self.placement)
        stop_cluster(self.placement)

    def mood(self, *moods: str) -> None:
        self.moods.write_text("".join(f"{mood}\n" for mood in moods))

    def block(self, run: str, steps: int = 0, tags: dict[str, str] | None = None) -> str:
        """Launch a block of steps; the Dagster run's id."""
        config = {"spec": self.spec, "run": run, "steps": steps}
        return self.client.launch("rl_run", {"ops": {"block": {"config": config}}}, tags)

    def undisturbed(self, run: str = "calm") -> tuple[list, dict]:
        """Digests and rows of a run that is driven in one process, without web server and daemon."""
        done = self.drive(run)
        assert done.returncode == 0, done.stderr[-4000:]
        return self.digests(run), self.steps(run)

    def drive(self, run: str, kill: dict | None = None) -> subprocess.CompletedProcess:
        """Drive a run in one process; `kill` as in drive.py."""
        arguments = [json.dumps({"spec": self.spec, "run": run})] + ([json.dumps(kill)] if kill else [])
        command = [sys.executable, str(HERE / "drive.py"), *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=240)

    def digests(self, run: str) -> list[tuple[int, str, str]]:
        rows = self.lake.read("weight_versions", {"run": run}, ["version", "state", "digest"]).to_pylist()
        return sorted((row["version"], row["state"], row["digest"]) for row in rows)

    def steps(self, run: str) -> dict[int, list]:
        """Step -> what must not depend on how often it was disturbed; one row a step, or this says so."""
        columns = ["step", "attempt", "batch_digest", "digest_after", "master_digest_after", "reward_mean", "loss"]
        rows = self.lake.read("steps", {"run": run}, columns).to_pylist()
        assert len(rows) == len({row["step"] for row in rows}), f"a step of {run} was taken twice: {rows}"
        return {row["step"]: [row[name] for name in columns] for row in rows}

    def count(self, table: str, run: str, **where) -> int:
        return self.lake.count(table, {"run": run, **where})

    def actor(self, role: str, run: str) -> psutil.Process:
        log = self.root / "logs" / f"{role}-{run}.log"
        self.until(lambda: writer_of(log) is not None, 60, f"the {role} of {run}")
        return writer_of(log)

    @contextmanager
    def suspended(self, role: str, run: str) -> Iterator[psutil.Process]:
        """An actor that does nothing meanwhile, so that the run cannot get past it."""
        process = self.actor(role, run)
        process.send_signal(signal.SIGSTOP)
        try:
            yield process
        finally:
            if process.is_running():
                process.send_signal(signal.SIGCONT)

    @staticmethod
    def until(true: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, f"{what} took more than {seconds:g} s"
            time.sleep(0.1)
