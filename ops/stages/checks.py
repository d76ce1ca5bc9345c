"""The checks of a step: made once, when its record stands, kept as rows, and read again before its weights go out."""

from __future__ import annotations

import json
import time
from typing import Any

from furlong.ops import records
from furlong.ops.checks.data import conservation, routing_coverage, staleness_bound, token_round_trip
from furlong.ops.checks.learning import finite_loss, mismatch_ceiling, mismatch_history
from furlong.ops.checks.verdict import SHOWN, Verdict
from furlong.ops.checks.watch import WINDOW, length_drift, repetition, reward_drift
from furlong.ops.history import newest_attempts
from furlong.ops.stages.chain import batch_groups, one_row
from furlong.ops.stages.context import Run, StageError, StageReport, StepKey
from furlong.ops.stages.rollouts import batch_rows

ASSET = "train_step"
CHECKS: dict[str, tuple[bool, str]] = {
    "conservation": (True, "Every sample of every prompt is trained on or dropped with a reason, exactly once."),
    "token_round_trip": (True, "Trajectories are the very tokens that were sampled, and read as their texts say."),
    "staleness_bound": (True, "No trained token was sampled by weights older than the run's bound."),
    "routing_coverage": (True, "Of a model with experts, those of every token are recorded. Passes without experts."),
    "finite_loss": (True, "Loss, gradient norm and the step's other numbers are finite."),
    "mismatch_ceiling": (True, "Trainer and engine agree on sampled tokens' log-probabilities within fixed ceilings."),
    "mismatch_history": (False, "Their mismatch has not grown against the steps before."),
    "reward_drift": (False, "Mean reward has not fallen off its best."),
    "length_drift": (False, "Replies are about as long as when the run began."),
    "repetition": (False, "Replies do not repeat themselves."),
}
"""Name -> whether it blocks publication, and what it says when it passes."""
_TRAJECTORY = (
    "trajectory_id", "group_id", "sample", "leaf", "tokens", "logprobs", "loss_mask", "version_spans", "text", "routing",
)  # fmt: skip


def check_step(run: Run, key: StepKey, step: dict[str, Any], report: StageReport) -> list[dict[str, Any]]:
    """The rows of `checks` of a recorded step, made unless they are there.

    Args:
        step: its row of `steps`.
    """
    rows = run.lake.read("checks", key.columns()).to_pylist()
    if missing := [name for name in CHECKS if name not in {row["check"] for row in rows}]:
        made = [_row(key, verdict) for verdict in _verdicts(run, key, step) if verdict.check in missing]
        where = {**key.columns(), "check": missing}
        report.note(run.lake.commit_once("checks", where, records.rows("checks", made)))
        rows += made
    return sorted(rows, key=lambda row: list(CHECKS).index(row["check"]) if row["check"] in CHECKS else len(CHECKS))


def require_passed(run: Run, key: StepKey) -> None:
    """Refuse to go on unless every blocking check of the step has passed; one that is missing has not.

    Raises:
        StageError: with what the check says, and how a person lets the step through all the same.
    """
    rows = {row["check"]: row for row in run.lake.read("checks", key.columns()).to_pylist()}
    for name, (blocking, _) in CHECKS.items():
        if blocking and name not in rows:
            raise StageError(
                f"{key}: check {name} was never made, so its weights are not published; run its train_step again"
            )
        if blocking and not rows[name]["passed"]:
            named = f" Trajectories: {', '.join(rows[name]['evidence'])}." if rows[name]["evidence"] else ""
            raise StageError(
                f"{key}: check {name} failed, so its weights are not published: {rows[name]['message']}.{named} If you know "
                f"better: furlong checks waive {key.run} {key.step} {name} --because '...'"
            )


def waive(lake: Any, key: StepKey, check: str, because: str) -> None:
    """Let a step through a check that failed, for a reason that stays in its row.

    Raises:
        StageError: no such verdict, one that passed, or no reason.
    """
    where = {**key.columns(), "check": check}
    row = one_row(lake, "checks", where)
    if row is None or row["passed"]:
        state = "was never made" if row is None else "has passed"
        raise StageError(
            f"{key}: check {check} {state}, so there is nothing to waive; `furlong checks show` lists them"
        )
    if not because.strip():
        raise StageError(f"{key}: waiving {check} needs a reason; say --because '...'")
    told = row | {
        "passed": True,
        "severity": "WAIVED",
        "message": f"waived because {because.strip()}; it said: {row['message']}",
    }
    old, new = (records.rows("checks", [some]) for some in (row, told))
    lake.replace("checks", where, new, expected=old)


def _verdicts(run: Run, key: StepKey, step: dict[str, Any]) -> list[Verdict]:
    batch = batch_groups(run.lake, key)
    drawn = batch_rows(run.lake, key, "trajectories", list(_TRAJECTORY), batch)
    drawn.sort(key=lambda row: row["trajectory_id"])
    groups = batch_rows(run.lake, key, "groups", ["group_id", "samples", "prompt_tokens"], batch)
    rewards = batch_rows(run.lake, key, "rewards", ["trajectory_id"], batch)
    before = _steps_before(run, key)
    versions = run.lake.read("weight_versions", {"run": key.run}, ["version", "step"]).to_pylist()
    step_of = {row["version"]: row["step"] for row in versions}
    rewarded = [*(row["reward_mean"] for row in before), step["reward_mean"]]
    lengths = [*_lengths_before(run, key), _tokens_per_reply(step)]
    verdicts = [
        conservation(groups, drawn, rewards, step["outcomes"]),
        token_round_trip(groups, drawn, run.decode),
        staleness_bound(drawn, step_of, key.step, run.spec.staleness, run.spec.rollout.stale_tokens == "mask"),
        routing_coverage(drawn) or Verdict("routing_coverage", True, True, found={"experts": False}),
        finite_loss(step),
        _mismatch(run, key, step, drawn),
        mismatch_history(step, before),
        reward_drift(rewarded, step["outcomes"]),
        length_drift(lengths, drawn),
        repetition(drawn),
    ]
    if [verdict.check for verdict in verdicts] != list(CHECKS):
        raise StageError(f"{key}: the checks made are not those that are due ({', '.join(CHECKS)}); report this")
    return verdicts


def _steps_before(run: Run, key: StepKey) -> list[dict[str, Any]]:
    columns = ["step", "attempt", "reward_mean", "mismatch_mean"]
    rows = newest_attempts(run.lake.read("steps", {"run": key.run}, columns).to_pylist())
    return [row for row in rows if row["step"] < key.step]


def _lengths_before(run: Run, key: StepKey) -> list[float]:
    """Mean trained tokens per reply of the run's first steps and of the newest before this one; nothing as long as those
    are the same steps."""
    if key.step < 2 * WINDOW:
        return []
    steps = [step for step in range(1, key.step) if step <= WINDOW or step > key.step - WINDOW]
    where = {"run": key.run, "step": steps}
    rows = newest_attempts(run.lake.read("steps", where, ["step", "attempt", "outcomes"]).to_pylist())
    return [_tokens_per_reply(row) for row in rows]


def _tokens_per_reply(step: dict[str, Any]) -> float:
    trained = [row["tokens_trained"] for row in step["outcomes"] if row["tokens_trained"]]
    return sum(trained) / len(trained) if trained else 0.0


def _mismatch(run: Run, key: StepKey, step: dict[str, Any], drawn: list[dict[str, Any]]) -> Verdict:
    told = mismatch_ceiling(step, [])
    # Every token's scores are read only where somebody is to look at them.
    return told if told.passed else mismatch_ceiling(step, _worst_tokens(run, key, drawn))


def _worst_tokens(run: Run, key: StepKey, drawn: list[dict[str, Any]]) -> list[dict[str, Any]]:
    engines = {row["trajectory_id"]: row["logprobs"] for row in drawn}
    found = [
        {"trajectory_id": row["trajectory_id"], "position": at, "difference": trainer - engine}
        for row in run.lake.read("trainer_scores", key.columns(), ["trajectory_id", "logprobs"]).to_pylist()
        for at, (trainer, engine) in enumerate(zip(row["logprobs"], engines[row["trajectory_id"]], strict=True))
        if trainer is not None and engine is not None
    ]
    return sorted(found, key=lambda row: -abs(row["difference"]))[:SHOWN]


def _row(key: StepKey, verdict: Verdict) -> dict[str, Any]:
    severity = "" if verdict.passed else ("ERROR" if verdict.blocking else "WARN")
    return {
        **key.columns(), "check": verdict.check, "asset": ASSET, "passed": verdict.passed, "blocking": verdict.blocking,
        "severity": severity, "message": verdict.message, "found": json.dumps(verdict.found, sort_keys=True),
        "evidence": verdict.evidence, "at": time.time(),
    }  # fmt: skip
