"""Where sampled tokens and engines' time went: what a run's asynchrony gained, and what it threw away."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa

from furlong.ops.history import newest_attempts
from furlong.ops.protocols import LakeLike
from furlong.ops.records import Disposition, State
from furlong.ops.rollouts.bias import length_bias


def usage(lake: LakeLike, run: str) -> dict[str, Any]:
    """Over all steps of a run so far.

    Returns:
        sampled_tokens: of all trajectories, failed tries and replies given up; what leaves share counts once.
        wasted_tokens: those of them that no step trained on, by cause: a `Rejection`, a `Disposition` in a batch (its
            groups without variance too), a `Failure`, `given_up`, or `masked` as rollout.stale_tokens says. Groups that wait
            for a batch are neither trained nor wasted.
        tokens_per_second: sampled tokens over the time in which any reply was under way.
        engine_idle_share: of the time from the first reply to the last publication, the share without any reply under way.
        waited_share: of the same time, the share that the stage `rollouts` waited for its batch.
        staleness_mean, staleness_max: optimiser steps, over batches.
        failures: tries that gave no trajectory, by kind.
        groups: number in each state.
        length_bias: see `bias.length_bias`.
    """
    where = {"run": run}
    columns = ["trajectory_id", "group_id", "loss_mask", "started_at", "seconds"]
    trajectories = lake.read("trajectories", where, columns)
    rows = trajectories.to_pylist()
    tokens = {row["trajectory_id"]: sum(row["loss_mask"]) for row in rows}
    fate = _fates(lake, run)
    failures = lake.read("failures", where, ["trajectory_id", "try", "kind", "tokens"]).to_pylist()
    wasted = _untrained(lake, run, tokens)
    for row in rows:
        if reason := fate.get(row["group_id"], ""):
            wasted[reason] += tokens[row["trajectory_id"]]
    for row in failures:
        wasted[row["kind"]] += row["tokens"]
    tries = {(row["trajectory_id"], row["try"]) for row in failures}
    wasted["given_up"] += (given_up := _given_up(lake, run, set(tokens), tries))
    sampled = sum(tokens.values()) + sum(row["tokens"] for row in failures) + given_up
    batches = lake.read("batches", where)
    batch_rows = newest_attempts(batches.to_pylist())
    whole, busy = _times(lake, run, rows)
    return {
        "sampled_tokens": sampled,
        "wasted_tokens": {cause: count for cause, count in wasted.most_common() if count},
        "tokens_per_second": sampled / busy if busy else 0.0,
        "engine_idle_share": 1 - busy / whole if whole else None,
        "waited_share": sum(row["waited_seconds"] for row in batch_rows) / whole if whole else None,
        "staleness_mean": sum(row["staleness_mean"] for row in batch_rows) / len(batch_rows) if batch_rows else None,
        "staleness_max": max((row["staleness_max"] for row in batch_rows), default=None),
        "failures": dict(Counter(row["kind"] for row in failures).most_common()),
        "groups": _states(lake, run),
        "length_bias": _bias(lake, run, batches, batch_rows, trajectories),
    }


def _last_events(lake: LakeLike, run: str) -> list[dict[str, Any]]:
    last: dict[str, dict[str, Any]] = {}
    for event in sorted(lake.read("ledger", {"run": run}).to_pylist(), key=lambda row: row["seq"]):
        last[event["group_id"]] = event
    return list(last.values())


def _fates(lake: LakeLike, run: str) -> dict[str, str]:
    """Group -> why it was rejected; empty where it was not."""
    return {e["group_id"]: e["reason"] if e["state"] == State.REJECTED else "" for e in _last_events(lake, run)}


def _states(lake: LakeLike, run: str) -> dict[str, int]:
    return dict(Counter(event["state"] for event in _last_events(lake, run)).most_common())


def _untrained(lake: LakeLike, run: str, tokens: dict[str, int]) -> Counter[str]:
    """Tokens in batches that entered no loss, by cause."""
    columns = ["step", "attempt", "outcomes", "tokens_trained"]
    found: Counter[str] = Counter()
    for step in newest_attempts(lake.read("steps", {"run": run}, columns).to_pylist()):
        for outcome in step["outcomes"]:
            cause = "masked" if outcome["disposition"] == Disposition.TRAINED else outcome["disposition"]
            found[cause] += tokens[outcome["trajectory_id"]]
        found["masked"] -= step["tokens_trained"]
    return found


def _given_up(lake: LakeLike, run: str, finished: set[str], failed: set[tuple[str, int]]) -> int:
    """Tokens of interrupted replies that were never resumed; those of failed tries are counted with the failure."""
    total = 0
    for row in lake.read("fragments", {"run": run}, ["request_id", "tokens"]).to_pylist():
        name, _, rest = row["request_id"].partition(":")
        if name not in finished and (name, int(rest.partition(".")[0])) not in failed:
            total += len(row["tokens"])
    return total


def _times(lake: LakeLike, run: str, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Seconds from the first reply to the last publication, and those in which a reply was under way."""
    spans = sorted((row["started_at"], row["started_at"] + row["seconds"]) for row in rows)
    if not spans:
        return 0.0, 0.0
    live = [v for v in lake.read("weight_versions", {"run": run}, ["live_at"])["live_at"].to_pylist() if v is not None]
    busy, until = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return max([until, *live]) - spans[0][0], busy


def _bias(lake: LakeLike, run: str, batches: Any, newest: list[dict[str, Any]], trajectories: Any) -> dict[str, Any]:
    kept = defaultdict(int, {row["step"]: row["attempt"] for row in newest})
    mask = [kept[row["step"]] == row["attempt"] for row in batches.select(["step", "attempt"]).to_pylist()]
    return length_bias(
        batches.filter(pa.array(mask, pa.bool_())),
        lake.read("groups", {"run": run}, ["group_id", "position"]),
        trajectories,
    )
