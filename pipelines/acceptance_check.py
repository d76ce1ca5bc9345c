"""The check of `rollouts` that warns when the policy has left its draft behind."""

from typing import TYPE_CHECKING, Any

from dagster import AssetCheckEvaluation, AssetCheckResult, AssetCheckSeverity, AssetCheckSpec, AssetKey

from furlong.ops.rollouts.acceptance import DROP, WINDOW, fallen

if TYPE_CHECKING:
    from furlong.resources.runs import OpenRun

CHECK = AssetCheckSpec(
    "acceptance_has_not_fallen",
    asset="rollouts",
    description=f"The draft's accepted tokens per verify, over the last {WINDOW} steps, are no more than {DROP:.0%} below "
    "their best. Passes, too, while there are too few steps, and without a draft.",
)


def check_result(run: "OpenRun") -> AssetCheckResult:
    """What the check says after the newest batch."""
    return AssetCheckResult(check_name=CHECK.name, **_verdict(run))


def check_event(run: "OpenRun") -> AssetCheckEvaluation:
    """The same as an event, for an op that logs materialisations itself."""
    return AssetCheckEvaluation(asset_key=AssetKey("rollouts"), check_name=CHECK.name, **_verdict(run))


def _verdict(run: "OpenRun") -> dict[str, Any]:
    passed, recent, best = True, None, None
    if run.spec.draft:
        below, recent, best = fallen([length for _, length in run.series("acceptance_length")])
        passed = not below
    told = {
        f"acceptance_length_of_last_{WINDOW}_steps": recent,
        f"best_acceptance_length_of_{WINDOW}_steps": best,
        "draft": bool(run.spec.draft),
    }
    return {
        "passed": passed,
        "severity": AssetCheckSeverity.WARN,
        "metadata": {name: value for name, value in told.items() if value is not None},
        "description": None if passed else _advice(recent, best, bool(run.spec.draft.get("train", True))),
    }


def _advice(recent: float, best: float, trains: bool) -> str:
    remedy = (
        "raise draft.learning_rate or draft.depths in another run, and look at draft_loss and draft_skipped of train_step"
        if trains
        else "let the draft learn beside the policy with draft.train: true in another run, or publish a newer one alone"
    )
    return (
        f"acceptance length is {recent:.2f} after a best of {best:.2f}: the policy has left its draft behind; {remedy}"
    )
