"""Promotion and rollback with a run's real export and engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from furlong.resources.lake import Lake
from furlong.resources.weights.promotion import promote, rollback

if TYPE_CHECKING:
    from furlong.ops.spec import Placement
    from furlong.resources.system import System


def promote_run(placement: Placement, run: str, version: int, tag: str, because: str, by: str = "") -> dict[str, Any]:
    """As `promotion.promote`; the export check is made now, on the version's checkpoint folder."""
    from furlong.resources.weights.checkpoint import compare_logits, export_version

    def reloads() -> str:
        compared = compare_logits(placement, run, export_version(placement, run, version))
        return "" if compared.passed else compared.reason

    return promote(Lake(placement.lake_uri()), run, version, tag, because, reloads, by)


def rollback_run(system: System, run: str, tag: str, because: str, by: str = "") -> dict[str, Any]:
    """As `promotion.rollback`, with the run's engines.

    Raises:
        LockHeld: the run is being trained; its next step would bring the engines forward again, so stop it first.
    """
    with system.holding(run) as lent:
        return rollback(lent.lake, run, tag, because, lent.engines_at, by)
