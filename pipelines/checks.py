"""The checks of a step as Dagster's asset checks.

A blocking one keeps `weight_publish` from running in the same Dagster run; in any other, that stage reads it itself.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dagster import AssetCheckEvaluation, AssetCheckResult, AssetCheckSeverity, AssetCheckSpec, AssetKey, MetadataValue

from furlong.ops.stages.checks import ASSET, CHECKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from furlong.ops.stages.context import StepKey
    from furlong.resources.runs import OpenRun

SPECS = [
    AssetCheckSpec(name, asset=ASSET, blocking=blocking, description=description)
    for name, (blocking, description) in CHECKS.items()
]


def check_results(run: OpenRun, key: StepKey) -> list[AssetCheckResult]:
    """What the step's checks said."""
    return [AssetCheckResult(check_name=name, **told) for name, told in _told(run, key)]


def check_events(run: OpenRun, key: StepKey) -> list[AssetCheckEvaluation]:
    """The same as events, for an op that logs materialisations itself."""
    return [AssetCheckEvaluation(asset_key=AssetKey(ASSET), check_name=name, **told) for name, told in _told(run, key)]


def _told(run: OpenRun, key: StepKey) -> Iterator[tuple[str, dict[str, Any]]]:
    rows = {row["check"]: row for row in run.lake.read("checks", key.columns()).to_pylist()}
    texts = _texts(run, key, {name for row in rows.values() for name in row["evidence"]})
    for name, (blocking, _) in CHECKS.items():
        row = rows[name]
        facts: dict[str, Any] = {"run": key.run, "step": key.step, "attempt": key.attempt, **json.loads(row["found"])}
        if row["evidence"]:
            lines = [f"| `{one}` | {_cell(texts.get(one, ''))} |" for one in row["evidence"]]
            facts["evidence"] = MetadataValue.md("\n".join(["| trajectory | reply |", "|---|---|", *lines]))
        yield (
            name,
            {
                "passed": row["passed"],
                "severity": AssetCheckSeverity.ERROR if blocking else AssetCheckSeverity.WARN,
                "metadata": {fact: value for fact, value in facts.items() if value is not None},
                "description": row["message"] or None,
            },
        )


def _texts(run: OpenRun, key: StepKey, names: set[str]) -> dict[str, str]:
    if not names:
        return {}
    where = {"run": key.run, "trajectory_id": sorted(names)}
    rows = run.lake.read("trajectories", where, ["trajectory_id", "text"]).to_pylist()
    return {row["trajectory_id"]: row["text"] for row in rows}


def _cell(text: str) -> str:
    """A reply in a cell of a Markdown table."""
    return " ".join(text.split())[:200].replace("|", "\\|").replace("<", "&lt;")
