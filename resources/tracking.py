"""MLflow: one MLflow run per training run, metrics per step, linked both ways with the Dagster run."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from furlong.ops.spec import Placement, RunSpec

EXPERIMENT = "furlong"
MLFLOW_PORT = 5000
"""Where `make ui` serves the metrics, unless FURLONG_MLFLOW names a server."""


class Tracker:
    """Writes in the background, in order: a metric is never on a step's critical path, nor is an error lost."""

    def __init__(self, placement: Placement, run: str, spec: RunSpec):
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        self.uri, self.run, self.spec = placement.mlflow_uri(), run, spec
        self.artifacts = str(placement.folder / "mlruns")
        placement.folder.mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._opened: Future = self._pool.submit(self._open)
        self._waiting: list[Future] = []
        self._gathered: dict[int, dict[str, float]] = {}
        self._written: dict[str, int] = {}

    def _open(self) -> tuple[Any, str, str]:
        import logging

        from mlflow.tracking import MlflowClient

        # It would announce every table of a new store in the middle of the live view.
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self.uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        identity = (
            experiment.experiment_id
            if experiment
            else client.create_experiment(EXPERIMENT, artifact_location=self.artifacts)
        )
        found = client.search_runs([identity], f"tags.`furlong.run` = '{self.run}'")
        if found:
            run_id = found[0].info.run_id
            # A step that is driven again after a kill must not appear twice.
            for name in found[0].data.metrics:
                self._written[name] = max(metric.step for metric in client.get_metric_history(run_id, name))
            return client, identity, run_id
        tags = {"furlong.run": self.run, "furlong.spec_fingerprint": self.spec.fingerprint()}
        made = client.create_run(identity, run_name=self.run, tags=tags)
        for section, fields in self.spec.model_dump(mode="json").items():
            for name, value in fields.items() if isinstance(fields, dict) else [("", fields)]:
                client.log_param(made.info.run_id, f"{section}.{name}".rstrip("."), str(value)[:500])
        return client, identity, made.info.run_id

    def gather(self, step: int, stage: str, values: dict[str, float]) -> None:
        """Keep numbers of a step until `log`."""
        self._gathered.setdefault(step, {}).update({f"{stage}/{name}": value for name, value in values.items()})

    def log(self) -> None:
        """Write what was gathered, in one request."""
        if self._gathered:
            self._submit(self._log, self._gathered)
            self._gathered = {}

    def _log(self, gathered: dict[int, dict[str, float]]) -> None:
        from mlflow.entities import Metric

        client, _, run_id = self._opened.result()
        now = int(time.time() * 1000)
        fresh = [
            Metric(name, value, now, step)
            for step, values in gathered.items()
            for name, value in values.items()
            if step > self._written.get(name, 0)
        ]
        for metric in fresh:
            self._written[metric.key] = metric.step
        if fresh:
            client.log_batch(run_id, metrics=fresh)

    def link_dagster(self, dagster_run: str) -> None:
        """Tag the MLflow run with the Dagster run that drives it now."""
        self._submit(self._tag, "dagster/run_id", dagster_run)

    def _tag(self, name: str, value: str) -> None:
        client, _, run_id = self._opened.result()
        client.set_tag(run_id, name, value)

    def url(self) -> str:
        """Page of this run in the MLflow UI."""
        _, experiment, run_id = self._opened.result(timeout=120)
        server = self.uri if self.uri.startswith("http") else f"http://127.0.0.1:{MLFLOW_PORT}"
        return f"{server}/#/experiments/{experiment}/runs/{run_id}"

    def finish(self, report: dict[str, Any]) -> None:
        """Write out everything and mark the run finished; raises the first error of any write before."""
        self.log()
        self._submit(self._end, {k: v for k, v in report.items() if isinstance(v, (int, float))})
        self.flush()

    def _end(self, numbers: dict[str, float]) -> None:
        client, _, run_id = self._opened.result()
        for name, value in numbers.items():
            client.log_metric(run_id, f"report/{name}", float(value))
        client.set_terminated(run_id)

    def flush(self) -> None:
        """Write out what was gathered and wait for all writes so far; raises the first error of any."""
        self.log()
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            future.result(timeout=120)

    def _submit(self, call: Any, *args: Any) -> None:
        done = [future for future in self._waiting if future.done()]
        self._waiting = [future for future in self._waiting if not future.done()]
        for future in done:
            future.result()
        self._waiting.append(self._pool.submit(call, *args))
