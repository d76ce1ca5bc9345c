"""After a crash: bring the ledger to what the tables say, and check that no prompt is lost or taken twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from furlong.ops.records import Rejection, State
from furlong.ops.rollouts.ledger import Ledger, LedgerError

_PATH = (State.RESERVED, State.RUNNING, State.FINISHED, State.ADMITTED, State.TRAINED)
_REDRAWN = frozenset({Rejection.STALE, Rejection.SURPLUS, Rejection.SUPERSEDED})
"""Rejections after which another group takes the prompt."""


@dataclass(frozen=True)
class Facts:
    """What the tables say of a run's groups, apart from the ledger."""

    positions: Mapping[str, int]
    """Group -> position of its prompt, for every row of `groups`; in order of position and, for one position, in the
    order in which its groups were drawn."""
    finished: frozenset[str]
    """Groups all of whose samples have their rows of `trajectories`."""
    batches: Mapping[str, int]
    """Group -> step, for the groups of each step's newest attempt."""
    trained: frozenset[int]
    """Steps whose newest attempt stands in `steps`."""
    superseded: Mapping[str, int]
    """Group -> step, for the groups of batches whose step has a newer attempt."""


def facts(groups: pa.Table, trajectories: pa.Table, batches: pa.Table, steps: pa.Table) -> Facts:
    """Facts from the run's rows.

    Args:
        groups: columns step, attempt, group_id, position, samples.
        trajectories: columns group_id, sample.
        batches: columns step, attempt, groups.
        steps: columns step, attempt.
    Raises:
        LedgerError: a group there twice, a step without its batch, a group in two batches.
    """
    drawn = sorted(groups.to_pylist(), key=_drawing_order)
    newest: dict[int, int] = {}
    for row in [*drawn, *batches.select(["step", "attempt"]).to_pylist()]:
        newest[row["step"]] = max(newest.get(row["step"], 0), row["attempt"])
    held: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for row in batches.to_pylist():
        current = row["attempt"] == newest[row["step"]]
        for name in [group["group_id"] for group in row["groups"]]:
            if name in held[True] or name in held[False]:
                raise LedgerError(f"group {name} is in two batches, the other of step {row['step']}; restore `batches`")
            held[current][name] = row["step"]
    batched = {(row["step"], row["attempt"]) for row in batches.to_pylist()}
    taken = {(row["step"], row["attempt"]) for row in steps.select(["step", "attempt"]).to_pylist()}
    if taken - batched:
        step, attempt = min(taken - batched)
        raise LedgerError(f"step {step} attempt {attempt} was taken without a row of `batches`; restore that table")
    positions = {row["group_id"]: row["position"] for row in drawn}
    if len(positions) != len(drawn):
        raise LedgerError(f"`groups` has {len(drawn)} rows for {len(positions)} groups; restore that table")
    return Facts(positions, _whole(drawn, trajectories), held[True],
                 frozenset(step for step, attempt in taken if attempt == newest[step]), held[False])  # fmt: skip


def reconcile(ledger: Ledger, known: Facts) -> list[str]:
    """Append the events that the ledger lacks, so that it agrees with the tables; returns a line for each group changed.

    What lags is advanced; what was running without all its trajectories goes back to reserved. Where two groups hold one
    prompt, whoever drew the later one had given up the earlier: it is rejected. A second call changes nothing.

    Raises:
        LedgerError: the ledger tells of something that no table has, or two tables contradict each other. The ledger may
            then hold some of the events already: do not commit them.
    """
    unknown = sorted(set(ledger.groups()) - set(known.positions))
    if unknown:
        raise _leads(unknown[0], "is in the ledger but not in table `groups`")
    for name in sorted((known.finished | set(known.batches) | set(known.superseded)) - set(known.positions)):
        raise LedgerError(f"group {name} has trajectories or a batch but no row in `groups`; restore that table")
    changed = []
    for name in known.positions:
        before = ledger.state(name) if name in ledger else None
        _settle(ledger, name, known)
        if ledger.state(name) is not before:
            changed.append(f"{name}: {before or 'unknown'} -> {ledger.state(name)}")
    return changed + _give_up_earlier(ledger, known.positions)


def owed(ledger: Ledger, positions: Mapping[str, int]) -> list[int]:
    """Positions whose groups were all rejected in favour of another that is not drawn yet, in order: draw these first."""
    return sorted(position for position, names in _by_position(positions).items() if not _holders(ledger, names))


def account(ledger: Ledger, positions: Mapping[str, int], redraw: Collection[int] = ()) -> list[str]:
    """What is wrong with the conservation of prompts; empty when nothing is.

    Every position from 0 to the highest has exactly one group that is under way, trained or done with (zero variance),
    or is in `redraw`; every group is both in the ledger and in `positions`.

    Args:
        positions: group -> position, of every group drawn.
        redraw: positions that the caller is about to draw again; a prompt that nobody holds and nobody will draw is lost.
    """
    wrong = [f"group {name} is drawn but not in the ledger" for name in positions if name not in ledger]
    wrong += [f"group {name} is in the ledger but was not drawn" for name in ledger.groups() if name not in positions]
    if wrong:
        return wrong
    by_position, waiting = _by_position(positions), set(redraw)
    for position in range(max([*by_position, *waiting], default=-1) + 1):
        holders = _holders(ledger, by_position.get(position, []))
        tell = f"position {position}: " + (
            ", ".join(f"{n} is {ledger.state(n)}" for n in holders) or "no group holds it"
        )
        if len(holders) > 1:
            wrong.append(f"{tell}; its prompt is taken twice")
        elif holders and position in waiting:
            wrong.append(f"{tell}; its prompt is about to be drawn again")
        elif not holders and position not in waiting:
            wrong.append(f"{tell} and none will be drawn for it; its prompt is lost")
    return wrong


def _drawing_order(row: dict[str, Any]) -> tuple:
    # By length first: beyond 999 the index in a group's id has more digits.
    return row["position"], row["step"], row["attempt"], len(row["group_id"]), row["group_id"]


def _whole(drawn: list[dict], trajectories: pa.Table) -> frozenset[str]:
    # A sample that branched has several rows; the set of samples is what must be whole.
    pairs = trajectories.select(["group_id", "sample"]).group_by(["group_id", "sample"]).aggregate([]).to_pylist()
    found: dict[str, set[int]] = defaultdict(set)
    for row in pairs:
        found[row["group_id"]].add(row["sample"])
    return frozenset(r["group_id"] for r in drawn if found[r["group_id"]] >= set(range(r["samples"])))


def _settle(ledger: Ledger, name: str, known: Facts) -> None:
    """Bring one group to what the tables say of it."""
    batch = known.batches.get(name, known.superseded.get(name))
    if batch is not None and name not in known.finished:
        raise LedgerError(
            f"group {name} is in the batch of step {batch} without all its trajectories; restore the tables"
        )
    if name not in ledger:
        ledger.reserve(name)
    entry = ledger.entry(name)
    if entry.state is State.REJECTED:
        # The ledger alone tells that a step is being repeated until the new attempt has rows of its own.
        if name in known.batches and (entry.reason, entry.step) != (Rejection.SUPERSEDED, batch):
            raise LedgerError(
                f"group {name} is rejected as {entry.reason} but in the batch of step {batch}; restore `batches` to a "
                "version without it"
            )
        return
    if entry.step is not None and entry.step != batch:
        raise _leads(name, f"is {entry.state} in step {entry.step}, but that step has no batch with it")
    if name in known.superseded:
        ledger.reject(name, Rejection.SUPERSEDED)
        return
    target = State.RESERVED
    if batch is not None:
        target = State.TRAINED if batch in known.trained else State.ADMITTED
    elif name in known.finished:
        target = State.FINISHED
    if entry.state is State.RUNNING and target is State.RESERVED:
        ledger.back(name, "not all of its trajectories were in the lake when the driver started")
        return
    if _PATH.index(entry.state) > _PATH.index(target):
        raise _leads(name, f"is {entry.state} in the ledger, but the tables know it as {target} only")
    for state in _PATH[_PATH.index(entry.state) + 1 : _PATH.index(target) + 1]:
        _advance(ledger, name, state, batch)


def _advance(ledger: Ledger, name: str, state: State, batch: int | None) -> None:
    if state is State.RUNNING:
        ledger.start(name)
    elif state is State.FINISHED:
        ledger.finish(name)
    elif state is State.ADMITTED:
        ledger.admit([name], batch)
    else:
        ledger.train([name], batch)


def _give_up_earlier(ledger: Ledger, positions: Mapping[str, int]) -> list[str]:
    changed = []
    for position, names in _by_position(positions).items():
        *earlier, last = _holders(ledger, names) or [""]
        for name in earlier:
            if ledger.state(name) in (State.ADMITTED, State.TRAINED, State.REJECTED):
                raise LedgerError(
                    f"group {name} is {ledger.state(name)}, yet {last} was drawn for the same prompt at position "
                    f"{position}; restore `groups` to a version without the latter"
                )
            changed.append(f"{name}: {ledger.state(name)} -> rejected, since {last} took its prompt")
            ledger.reject(name, Rejection.STALE)
    return changed


def _by_position(positions: Mapping[str, int]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = defaultdict(list)
    for name, position in positions.items():
        found[position].append(name)
    return found


def _holders(ledger: Ledger, names: list[str]) -> list[str]:
    """Groups that hold their prompt (under way, trained, or done with) in the order in which they were reserved."""
    entries = sorted(((name, ledger.entry(name)) for name in names), key=lambda pair: pair[1].order)
    return [name for name, at in entries if at.state is not State.REJECTED or at.reason not in _REDRAWN]


def _leads(name: str, what: str) -> LedgerError:
    return LedgerError(
        f"group {name} {what}: the ledger tells of something that was never committed; restore the tables of this run to "
        "versions of one moment"
    )
