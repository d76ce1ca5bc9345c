"""Rewards of finished steps, made again by the verifier as it is now or by another one: what would have been otherwise.

Nothing that was trained is touched: the rows go to `rescores`, and each step's are committed at once, so that a killed
re-scoring goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from furlong.ops import records
from furlong.ops.policy.advantages import group_advantages
from furlong.ops.records import Verdict
from furlong.ops.spec import AlgorithmSpec
from furlong.ops.stages.chain import committed_steps
from furlong.ops.stages.context import Run, StageError, StepKey
from furlong.ops.stages.rewards import NEEDED, verifier_items
from furlong.ops.stages.rollouts import batch_rows
from furlong.ops.tasks.scoring import verifier_version


def rescore(run: Run, name: str, verifier: str = "") -> Iterator[tuple[int, int]]:
    """Score every trajectory of the run's finished steps that this version of the verifier has not scored yet.

    Args:
        run: its lake, dataset and verifier are used, nothing else.
        verifier: "module:function" to judge by; empty for each prompt's own, as its code is now.
    Yields:
        (step, rows that were new), step by step, after they are committed.
    Raises:
        StageError: the run has no finished step.
    """
    steps = committed_steps(run.lake, name)
    if not steps:
        raise StageError(f"run {name} has no finished step, so there is nothing to score again; train it first")
    for step, row in sorted(steps.items()):
        trajectories = batch_rows(run.lake, StepKey(name, step, row["attempt"]), "trajectories", NEEDED)
        yield step, _one_step(run, name, verifier, sorted(trajectories, key=lambda row: row["trajectory_id"]))


def _one_step(run: Run, name: str, verifier: str, trajectories: list[dict[str, Any]]) -> int:
    items = verifier_items(run, trajectories)
    by_judge: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for row, item in zip(trajectories, items, strict=True):
        judge = verifier or item["verifier"]
        by_judge.setdefault(judge, []).append((row["trajectory_id"], {**item, "verifier": judge}))
    wrote = 0
    for judge, asked in sorted(by_judge.items()):
        key = {"run": name, "verifier": judge, "verifier_version": verifier_version(judge)}
        where = {**key, "trajectory_id": [which for which, _ in asked]}
        known = set(run.lake.read("rescores", where, ["trajectory_id"])["trajectory_id"].to_pylist())
        if todo := [(which, item) for which, item in asked if which not in known]:
            rows = [
                {**key, "trajectory_id": which, **verdict, "at": time.time()}
                for (which, _), verdict in zip(todo, _twice(run, [item for _, item in todo]), strict=True)
            ]
            key_of_new = {**key, "trajectory_id": [which for which, _ in todo]}
            run.lake.commit_once("rescores", key_of_new, records.rows("rescores", rows))
            wrote += len(rows)
    return wrote


def _twice(run: Run, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As the flow does: a verifier that failed once is asked once more, since it may fail for reasons of its own."""
    verdicts = run.verifier.score(items)
    lost = [n for n, found in enumerate(verdicts) if found["verdict"] in (Verdict.TIMEOUT, Verdict.ERROR)]
    for n, found in zip(lost, run.verifier.score([items[n] for n in lost]) if lost else [], strict=True):
        verdicts[n] = found
    return verdicts


def counterfactual(run: Run, name: str, algorithm: AlgorithmSpec, verifier: str = "") -> dict[str, Any]:
    """What the new verdicts change.

    Returns:
        `trajectories` scored again; `flips`: those whose verdict or score differs ({step, trajectory_id, group_id, old, new,
        old_score, new_score, text}); `groups`, and how many of them have advantages that `changed_sign` for some
        trajectory, `vanished`, or `appeared`.
    Raises:
        StageError: trajectories are not scored again yet.
    """
    told: dict[str, Any] = {
        "trajectories": 0,
        "groups": 0,
        "changed_sign": 0,
        "vanished": 0,
        "appeared": 0,
        "flips": [],
    }
    for step, row in sorted(committed_steps(run.lake, name).items()):
        key = StepKey(name, step, row["attempt"])
        columns = [*NEEDED, "group_id"]
        found = sorted(batch_rows(run.lake, key, "trajectories", columns), key=lambda row: row["trajectory_id"])
        old = {row["trajectory_id"]: row for row in batch_rows(run.lake, key, "rewards", ["trajectory_id", *_SHOWN])}
        new = _new_verdicts(run, name, verifier, found)
        if lost := [row["trajectory_id"] for row in found if row["trajectory_id"] not in new.keys() & old.keys()]:
            raise StageError(f"{key}: trajectory {lost[0]} lacks an old or a new verdict; re-score the run to its end")
        told["trajectories"] += len(found)
        for row in found:
            before, after = old[row["trajectory_id"]], new[row["trajectory_id"]]
            if any(before[column] != after[column] for column in _SHOWN):
                told["flips"].append(
                    {
                        "step": step, "trajectory_id": row["trajectory_id"], "group_id": row["group_id"],
                        "old": before["verdict"], "new": after["verdict"], "old_score": before["score"],
                        "new_score": after["score"], "text": row["text"],
                    }
                )  # fmt: skip
        _count_groups(told, found, old, new, algorithm)
    return told


_SHOWN = ["verdict", "score"]


def _new_verdicts(run: Run, name: str, verifier: str, found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    judges = {verifier or item["verifier"] for item in verifier_items(run, found)}
    new: dict[str, dict[str, Any]] = {}
    for judge in sorted(judges):
        where = {"run": name, "verifier": judge, "verifier_version": verifier_version(judge)}
        where["trajectory_id"] = [row["trajectory_id"] for row in found]
        for row in run.lake.read("rescores", where, ["trajectory_id", *_SHOWN]).to_pylist():
            new[row["trajectory_id"]] = row
    return new


def _count_groups(
    told: dict[str, Any],
    found: list[dict[str, Any]],
    old: dict[str, Any],
    new: dict[str, Any],
    algorithm: AlgorithmSpec,
) -> None:
    groups = [row["group_id"] for row in found]
    signs: list[list[int]] = []
    for verdicts in (old, new):
        scores = [verdicts[row["trajectory_id"]]["score"] for row in found]
        signs.append([_sign(outcome.advantage) for outcome in group_advantages(scores, groups, algorithm)])
    for group in sorted(set(groups)):
        at = [n for n, name in enumerate(groups) if name == group]
        before, after = [signs[0][n] for n in at], [signs[1][n] for n in at]
        told["groups"] += 1
        if any(before) and not any(after):
            told["vanished"] += 1
        elif any(after) and not any(before):
            told["appeared"] += 1
        elif before != after:
            told["changed_sign"] += 1


def _sign(value: float | None) -> int:
    return 0 if not value else 1 if value > 0 else -1
