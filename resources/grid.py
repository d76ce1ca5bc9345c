"""Writes the runs of a grid to the lake; launching them is for whoever fills it."""

from __future__ import annotations

from typing import Any

from furlong.ops.compare.grid import combinations
from furlong.ops.spec import load_spec
from furlong.resources.system import System


def write_grid(
    system: System, spec: str, axes: dict[str, list[Any]], common: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """(run, what it varies) for each run of the grid. A run's name follows from its spec, so a repeat finds the same ones.

    Args:
        common: overrides that all runs share.
    Raises:
        SpecError: a spec of the grid is unusable; no run was written.
    """
    varied = combinations(axes)
    specs = [load_spec(spec, {**common, **one}) for one in varied]
    names = [f"{one.name}-{one.fingerprint()[:6]}" for one in specs]
    return [(system.start_run(spec, {**common, **one}, name), one) for name, one in zip(names, varied, strict=True)]
