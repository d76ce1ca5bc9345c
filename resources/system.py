"""The one resource that pipelines use: finds runs in the lake, starts new ones, and opens them for driving."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from furlong.ops.identity import fingerprint
from furlong.ops.spec import Placement, RunSpec, SpecError, load_spec
from furlong.ops.stages.chain import attempts, next_step, one_row
from furlong.ops.stages.context import StepKey
from furlong.resources.run_lock import FREE_AFTER, run_lock

RUN_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class System:
    """Everything below is connected on first use, so that loading the code location costs nothing."""

    def __init__(self, placement: Placement | None = None, observer: Any = None, patience: float = FREE_AFTER):
        """`patience`: seconds to wait for another driver of the run that is wanted."""
        self._placement = placement
        self._observer = observer
        self._patience = patience
        self._open: dict[str, Any] = {}

    @property
    def placement(self) -> Placement:
        if self._placement is None:
            self._placement = Placement.from_env()
        return self._placement

    def ensure_run(self, name: str, spec_name: str, overrides: dict[str, Any]) -> None:
        """Write the run to the lake unless it is there; one that is there keeps its spec, whichever is asked for."""
        from furlong.resources.lake import Lake

        if one_row(Lake(self.placement.lake_uri()), "runs", {"run": name}, ["run"]) is None:
            self.start_run(spec_name, overrides, name)

    def start_run(self, spec_name: str, overrides: dict[str, Any], name: str = "") -> str:
        """The name of the run to drive, written to the lake if it is new.

        Without a name: the spec's unfinished run if there is one, else a new one. A given name must be free, or belong
        to a run; an existing run keeps the spec it was started with.

        Raises:
            SpecError: the spec is unusable, or `name` exists with another spec than the one asked for.
        """
        from furlong.resources.lake import Lake

        if name and not RUN_NAME.fullmatch(name):
            raise SpecError(
                f"run name {name!r} cannot be a folder and part of a partition key; use lower-case letters, digits, "
                "'-' and '_', beginning with a letter"
            )
        lake = Lake(self.placement.lake_uri())
        if name and (row := one_row(lake, "runs", {"run": name})):
            self._same_spec(row, spec_name, overrides)
            return name
        spec = load_spec(spec_name, overrides)
        return self._write_run(lake, spec, name or self._unfinished(lake, spec))

    @contextmanager
    def driving(self, name: str, dagster_run: str = "") -> Iterator[Any]:
        """An OpenRun that no other process drives meanwhile; the second to try gets an error with the first's pid."""
        from furlong.resources.drives import Drive

        with self.holding(name) as run:
            run.observer = self._observer
            run.drive = Drive(self.placement.folder)
            try:
                run.connect()
                run.dagster_run = dagster_run
                if dagster_run:
                    run.tracker.link_dagster(dagster_run)
                if self._observer:
                    self._observer.run_opened(run)
                yield run
                run.tracker.flush()
            finally:
                try:
                    run.pause()
                finally:
                    run.drive.save(run.folder)

    @contextmanager
    def holding(self, name: str) -> Iterator[Any]:
        """An OpenRun that nobody else uses meanwhile, none of whose parties has been met yet."""
        with run_lock(self.placement.folder, name, self._patience):
            if name not in self._open:
                self._open[name] = self._load(name)
            run = self._open[name]
            run.renew()
            try:
                yield run
            finally:
                run.pause()

    def disconnect(self, name: str) -> None:
        """Meet the parties of a run anew the next time it is held: some of them may be gone."""
        if name in self._open:
            self._open[name].disconnect()

    def committed(self, tables: tuple[str, ...]) -> tuple[int | None, ...]:
        """The newest Delta version of each table, to tell whether anything was committed since."""
        from furlong.resources.lake import Lake

        lake = Lake(self.placement.lake_uri())
        return tuple(lake.version(table) for table in tables)

    def step_key(self, run: str, step: int, attempt: int = 0) -> StepKey:
        """The key of a step; attempt 0 means the current one."""
        from furlong.resources.lake import Lake

        lake = self._open[run].lake if run in self._open else Lake(self.placement.lake_uri())
        return StepKey(run, step, attempt or max(1, attempts(lake, run, step)))

    def _load(self, name: str) -> Any:
        from furlong.ops.policy.architecture import read_architecture
        from furlong.ops.policy.parallel import parse_layout
        from furlong.resources.lake import Lake
        from furlong.resources.runs import OpenRun
        from furlong.resources.teacher import check_teacher
        from furlong.resources.weights.run_model import run_model

        lake = Lake(self.placement.lake_uri())
        row, spec, model = run_model(lake, name, self.placement)
        parse_layout(self.placement.trainer_layout)
        sizes = read_architecture(str(model.path)).splits()
        if self.placement.engine_tp not in sizes:
            raise SpecError(
                f"FURLONG_ENGINE_TP={self.placement.engine_tp}: the model of run {name} cannot be split over so many "
                "processes, as each needs whole key/value heads and an equal part of the feed-forward width; set it to "
                f"{' or '.join(map(str, sizes))}"
            )
        if spec.trainer.exact and self.placement.engine_tp > 1:
            raise SpecError(
                f"FURLONG_ENGINE_TP={self.placement.engine_tp}: run {name} has trainer.exact, and sums over processes "
                "round otherwise than its trainer does; unset it"
            )
        return OpenRun(row, spec, model, self.placement, check_teacher(spec, model, lake, name))

    def _unfinished(self, lake: Any, spec: RunSpec) -> str:
        stem = f"{spec.name}-{spec.fingerprint()[:6]}"
        for number in range(1, 1000):
            name = stem if number == 1 else f"{stem}-{number}"
            row = one_row(lake, "runs", {"run": name}, ["run"])
            if row is None or next_step(lake, name, spec.steps) <= spec.steps:
                return name
        raise SpecError(
            f"spec {spec.name} has 999 complete runs in this lake; give the next one a name, or another seed"
        )

    def _write_run(self, lake: Any, spec: RunSpec, name: str) -> str:
        from furlong.ops import records
        from furlong.ops.tasks.prompts import dataset_id
        from furlong.resources.actors import code_hash
        from furlong.resources.models import resolve
        from furlong.resources.rollouts.players import check_env
        from furlong.resources.teacher import check_teacher

        if one_row(lake, "runs", {"run": name}):
            return name
        check_env(spec.data)
        model = resolve(spec.model, spec.data, spec.seed, self.placement.folder)
        check_teacher(spec, model, lake, name)
        row = {
            "run": name, "spec_fingerprint": spec.fingerprint(), "spec": spec.canonical(),
            "dataset": dataset_id(spec.data, spec.seed), "base_digest": model.digest, "code_version": code_hash(),
            "created_at": time.time(),
        }  # fmt: skip
        lake.create()
        lake.commit_once("runs", {"run": name}, records.rows("runs", [row]))
        return name

    @staticmethod
    def _same_spec(row: dict[str, Any], spec_name: str, overrides: dict[str, Any]) -> None:
        from furlong.resources.weights.run_model import stored_spec

        asked = load_spec(spec_name, overrides)
        if asked.fingerprint() == row["spec_fingerprint"]:
            return
        stored, wanted = stored_spec(row).model_dump(mode="json"), asked.model_dump(mode="json")
        odd = [key for key in wanted if fingerprint(wanted[key]) != fingerprint(stored[key])]
        raise SpecError(
            f"run {row['run']} was started with another spec: {', '.join(odd)} differ from {spec_name}; a run keeps its "
            "spec, so use that one, or another run name"
        )
