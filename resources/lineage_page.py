"""Writes the lineage page of a weights version beside its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from furlong.ops.lineage.page import version_page
from furlong.ops.lineage.walk import version_lineage
from furlong.ops.spec import Placement
from furlong.resources.lake import Lake
from furlong.resources.sql import Sql

DETAILED = 3
"""Newest steps whose trajectories are on the page; the command lists those of all."""


def page_path(placement: Placement, run: str, version: int) -> Path:
    """Where a version's page lies, written or not."""
    return placement.folder / "runs" / run / "lineage" / f"v{version}.html"


def write_page(placement: Placement, lake: Lake, run: str, version: int) -> tuple[Path, dict[str, Any]]:
    """Write the page, whole or not at all; returns its path and what `version_lineage` told.

    Raises:
        LineageError: no such run or version.
    """
    with Sql(lake) as sql:
        told = version_lineage(sql.rows, run, version, DETAILED)
        checks: list[dict[str, Any]] = []
        if told["steps"]:
            newest = told["steps"][0]
            checks = sql.rows(
                'SELECT * FROM checks WHERE run = ? AND step = ? AND attempt = ? ORDER BY "check"',
                run, newest["step"], newest["attempt"],
            )  # fmt: skip
    path = page_path(placement, run, version)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(version_page(told, checks), encoding="utf-8")
    part.replace(path)
    return path, told
