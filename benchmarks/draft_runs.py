"""Whole runs for comparisons about drafts: each by the Dagster job, in one root folder, one after the other."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STILL = 1.0e-12
"""Learning rate that leaves a policy as it is, whatever the format of its weights."""


@dataclass(frozen=True)
class Finished:
    report: dict[str, Any]
    """Of report.json."""
    batches: list[str]
    """Digest of each step's batch: tokens, log-probabilities, versions, rewards."""

    def mean(self, name: str, part: slice) -> float:
        """Of a list in the report, what was measured."""
        values = [value for value in self.report[name][part] if value is not None]
        return sum(values) / len(values) if values else float("nan")


class Runs:
    """A root folder with a lake."""

    def __init__(self, root: Path, models: Path, threads: int):
        """
        Args:
            models: where converted models lie, to be used as they are.
        """
        self.root = root.resolve()
        self.root.mkdir(parents=True, exist_ok=True)
        if not (self.root / "models").exists() and models.is_dir():
            (self.root / "models").symlink_to(models.resolve())
        os.environ.update(
            FURLONG_ROOT=str(self.root), DAGSTER_HOME=str(self.root / "dagster"), FURLONG_THREADS=str(threads)
        )

    def drive(self, spec: str, run: str, overrides: dict[str, Any]) -> Finished:
        """Take all steps of a run, or those that are left of it; nothing of it is alive afterwards."""
        from dagster import DagsterInstance

        from furlong.ops.spec import Placement
        from furlong.pipelines.definitions import defs
        from furlong.resources.cluster import stop_cluster
        from furlong.resources.dagster_home import ensure_dagster_home
        from furlong.resources.lake import Lake
        from furlong.resources.system import System

        placement = Placement.from_env()
        ensure_dagster_home(placement)
        config = {"spec": spec, "run": run, "overrides": overrides}
        try:
            with DagsterInstance.get() as instance:
                defs.resolve_job_def("rl_run").execute_in_process(
                    run_config={
                        "ops": {"block": {"config": config}},
                        "loggers": {"console": {"config": {"log_level": "ERROR"}}},
                    },
                    resources={"system": System(placement)},
                    instance=instance,
                )
        finally:
            stop_cluster(placement)
        report = json.loads((placement.folder / "runs" / run / "report.json").read_text())
        rows = Lake(placement.lake_uri()).read("steps", {"run": run}, ["step", "batch_digest"]).to_pylist()
        return Finished(report, [row["batch_digest"] for row in sorted(rows, key=lambda row: row["step"])])

    def stage_seconds(self, run: str) -> dict[str, list[float]]:
        """Of `rollouts` and `train_step`, what each step of a synchronous run took, by the lake's own clocks."""
        from furlong.ops.history import newest_attempts
        from furlong.ops.spec import Placement
        from furlong.resources.lake import Lake

        lake = Lake(Placement.from_env().lake_uri())
        waited = lake.read("batches", {"run": run}, ["step", "attempt", "waited_seconds"]).to_pylist()
        trained = lake.read("steps", {"run": run}, ["step", "attempt", "seconds"]).to_pylist()
        return {
            "rollouts": [row["waited_seconds"] for row in newest_attempts(waited)],
            "train_step": [row["seconds"] for row in newest_attempts(trained)],
        }

    def draft_of(self, run: str) -> str:
        """Folder with the draft of a run's last version, written now."""
        from furlong.ops.spec import Placement
        from furlong.resources.lake import Lake
        from furlong.resources.weights.draft_folder import FOLDER, draft_shape
        from furlong.resources.weights.export import export_folder
        from furlong.resources.weights.run_model import run_model

        placement = Placement.from_env()
        lake, target = Lake(placement.lake_uri()), self.root / "drafts" / run
        if not target.is_dir():
            _, spec, model = run_model(lake, run, placement)
            version = max(lake.read("weight_versions", {"run": run}, ["version"])["version"].to_pylist())
            export_folder(lake, run, version, str(model.path), target, draft=draft_shape(spec, model.path))
        return str(target / FOLDER)
