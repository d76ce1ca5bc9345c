"""A run's identity and base model, without driving it."""

from __future__ import annotations

import json
from typing import Any

from furlong.ops.spec import Placement, RunSpec, SpecError, parse_spec
from furlong.ops.stages.chain import one_row
from furlong.resources.lake import Lake
from furlong.resources.models import ModelFolder, resolve


def run_row(lake: Lake, run: str) -> dict[str, Any]:
    """The row of `runs`; SpecError lists the runs that there are."""
    row = one_row(lake, "runs", {"run": run})
    if row is None:
        known = ", ".join(known_runs(lake)) or "none"
        raise SpecError(f"no run {run!r} in the lake {lake.uri}; it has {known}: name one of these")
    return row


def known_runs(lake: Lake) -> list[str]:
    return sorted(lake.read("runs", None, ["run"])["run"].to_pylist())


def only_run(lake: Lake, run: str) -> str:
    """The run that is meant: the one named or, without a name, the only one there is.

    Raises:
        SpecError: there is no such run, there are none, or there are several to choose from.
    """
    if run:
        return run_row(lake, run)["run"]
    known = known_runs(lake)
    if not known:
        raise SpecError(f"the lake {lake.uri} has no runs; set FURLONG_ROOT or FURLONG_LAKE, or start a run first")
    if len(known) > 1:
        raise SpecError(f"the lake {lake.uri} has runs {', '.join(known)}; choose one with --run (in Dagster: `run`)")
    return known[0]


def stored_spec(row: dict[str, Any]) -> RunSpec:
    """The spec that a row of `runs` was started with."""
    return parse_spec(json.loads(row["spec"]), f"run {row['run']} in the lake")


def run_model(lake: Lake, run: str, placement: Placement) -> tuple[dict[str, Any], RunSpec, ModelFolder]:
    """The run's row, its spec, and the folder that is its version 0, made again if this machine lacks it.

    Raises:
        SpecError: there is no such run, or the base model is another than the run began with.
    """
    row = run_row(lake, run)
    spec = stored_spec(row)
    model = resolve(spec.model, spec.data, spec.seed, placement.folder)
    if model.digest != row["base_digest"]:
        raise SpecError(
            f"run {run}: its base model in {model.path} has changed since the run began ({model.digest[:12]}, was "
            f"{row['base_digest'][:12]}); restore the folder, so that its versions can be rebuilt"
        )
    return row, spec, model
