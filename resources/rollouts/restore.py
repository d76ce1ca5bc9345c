"""What a driver has to know of a run before it draws: read from the lake, whoever died when."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from furlong.ops.protocols import Sample
from furlong.ops.records import State
from furlong.ops.rollouts.course import Course
from furlong.ops.rollouts.fragments import from_rows, reply_name
from furlong.ops.rollouts.ledger import Ledger
from furlong.ops.rollouts.reconcile import facts, owed, reconcile
from furlong.ops.stages.context import Run
from furlong.resources.rollouts.group import KEPT, SAME_DRAW, Group


@dataclass
class Known:
    """The state that rollouts go on from."""

    ledger: Ledger
    """Agrees with the tables; its events that are not in the lake yet are still to be taken."""
    course: Course
    groups: dict[str, Group]
    """Those that are not part of a batch and not rejected."""
    positions: dict[str, int]
    """Group -> position of its prompt, of all groups."""
    step_of: dict[int, int]
    """Weights version -> the step that made it."""
    parts: dict[str, list[Sample]]
    """Reply that was interrupted -> its parts in order."""


def restore(run: Run) -> Known:
    """Read the run's tables; raises LedgerError when they contradict each other."""
    where = {"run": run.name}
    drawn = run.lake.read("groups", where)
    known = facts(
        drawn,
        run.lake.read("trajectories", where, ["group_id", "sample"]),
        run.lake.read("batches", where, ["step", "attempt", "groups"]),
        run.lake.read("steps", where, ["step", "attempt"]),
    )
    ledger = Ledger.replay(run.name, run.lake.read("ledger", where))
    for line in reconcile(ledger, known):
        print(f"ledger of {run.name}: {line}", flush=True)
    positions = dict(known.positions)
    course = Course.of(drawn.to_pylist(), owed(ledger, positions))
    versions = run.lake.read("weight_versions", where, ["version", "step"]).to_pylist()
    groups = _groups(run, drawn.to_pylist(), ledger)
    step_of = {row["version"]: row["step"] for row in versions}
    for name in ledger.groups(State.FINISHED):
        groups[name].finish(step_of)
    return Known(ledger, course, groups, positions, step_of, _parts(run))


def _groups(run: Run, drawn: list[dict], ledger: Ledger) -> dict[str, Group]:
    names = set(ledger.groups(State.RESERVED, State.FINISHED))
    rows = {row["group_id"]: row for row in drawn if row["group_id"] in names}
    where = {"run": run.name, "group_id": sorted(rows)}
    prompts = run.prompts_of(sorted({row["prompt_id"] for row in rows.values()})) if rows else {}
    groups = {name: Group(row, prompts[row["prompt_id"]]) for name, row in rows.items()}
    for row in run.lake.read("trajectories", where, ["group_id", *KEPT]).to_pylist() if rows else []:
        groups[row["group_id"]].add(row)
    homes = {"run": run.name, "step": sorted({row["step"] for row in rows.values()})}
    for row in run.lake.read("failures", homes, ["trajectory_id", "try", "kind"]).to_pylist() if rows else []:
        name, _, sample = row["trajectory_id"].rpartition("-s")
        if name in groups:
            groups[name].count_failure(int(sample), row["try"], row["kind"] not in SAME_DRAW)
    return groups


def _parts(run: Run) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    rows = run.lake.read("fragments", {"run": run.name}).to_pylist()
    for part in from_rows(sorted(rows, key=lambda row: row["part"])):
        found[reply_name(part.request_id)].append(part)
    return dict(found)
