"""Re-scoring a run with the verifier's own processes, and with nothing else of the run: no engine, no trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from furlong.ops.spec import Placement
from furlong.ops.stages.rescore import counterfactual, rescore
from furlong.resources.lake import Lake
from furlong.resources.verifier_pool import VerifierPool
from furlong.resources.weights.run_model import run_row, stored_spec


@dataclass
class _Judged:
    """What of `ops.stages.context.Run` re-scoring uses."""

    lake: Lake
    dataset: str
    verifier: VerifierPool


def rescore_run(placement: Placement, name: str, verifier: str = "") -> dict[str, Any]:
    """Score what this version of the verifier has not scored yet, and tell what it changes: see `counterfactual`."""
    lake = Lake(placement.lake_uri())
    row = run_row(lake, name)
    pool = VerifierPool(placement.verify_deadline)
    try:
        judged = _Judged(lake, row["dataset"], pool)
        wrote = sum(new for _, new in rescore(judged, name, verifier))
        return {"wrote": wrote, **counterfactual(judged, name, stored_spec(row).algorithm, verifier)}
    finally:
        pool.close()
