"""A past step once more, from what the lake has of it, beside a run and without touching it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from furlong.ops.policy.parallel import parse_layout
from furlong.ops.stages.chain import committed_step, one_row
from furlong.ops.stages.context import StageError, StepKey

if TYPE_CHECKING:
    from furlong.ops.spec import Placement

COMPARED = ("batch_digest", "digest_before", "digest_after", "master_digest_after")
"""Columns of `steps` that must come out the same."""


@dataclass(frozen=True)
class Replay:
    """How a replayed step compares with its record."""

    identical: bool
    """Whether batch, weights before and after, and the trainer's master weights are the same, bit for bit."""
    first_difference: str
    """What differs first: a tensor of the published weights, by name, or a digest of the record; empty if nothing does."""
    tensors: int
    """Tensors that were compared with the version's manifest."""


def replay_step(placement: Placement, run: str, step: int, attempt: int = 0) -> Replay:
    """Take a step again: from the nearest saved state at or before the step before it, or the base model, over the recorded
    batches. Earlier steps must come out as recorded, or the replay ends there.

    Args:
        attempt: 0 for the newest.
    Raises:
        StageError: there is no such step, or an earlier one does not come out as recorded (ReplayMismatch).
    """
    from furlong.resources.lake import Lake
    from furlong.resources.trainers.host import TrainerHost
    from furlong.resources.trainers.place import Place
    from furlong.resources.weights.run_model import run_model

    class Replayer(TrainerHost):
        """A trainer that keeps the record of the step in question instead of refusing one that differs."""

        def _compare(self, key: StepKey) -> None:
            if key.step != step:
                super()._compare(key)

    lake = Lake(placement.lake_uri())
    newest = committed_step(lake, run, step)
    if newest is None:
        raise StageError(f"run {run} has no committed step {step} to replay; `furlong sql` shows those there are")
    key = StepKey(run, step, attempt or newest["attempt"])
    recorded = one_row(lake, "steps", key.columns(), [*COMPARED, "version_after"])
    if recorded is None:
        raise StageError(f"{key} is not in the lake; name another attempt, or 0 for the newest")
    if parse_layout(placement.trainer_layout).world > 1:
        from furlong.resources.cluster import ensure_cluster

        ensure_cluster(placement)
    _, spec, model = run_model(lake, run, placement)
    with tempfile.TemporaryDirectory() as scratch:
        states = _borrowed(placement.folder / "runs" / run / "state", Path(scratch))
        place = Place(scratch, placement.threads, placement.trainer_layout, placement.gpus, placement.stage_deadline)
        host = Replayer(spec.canonical(), run, str(model.path), placement.lake_uri(), str(states), place)
        host._reach(step - 1)
        made = host._advance(step, key.attempt)
        row = one_row(lake, "weight_versions", {"run": run, "version": recorded["version_after"]}, ["tensors"])
        return compare(recorded, made, row["tensors"] if row else [], host.tensors)


def compare(
    recorded: dict[str, Any], made: dict[str, Any], published: list[dict[str, Any]], tensors: list[dict[str, Any]]
) -> Replay:
    """The verdict, given two records and two manifests ({name, digest} of each tensor).

    Without a published manifest the digests of the record alone decide. A tensor that is missing on either side differs.
    """
    wanted = {row["name"]: row["digest"] for row in published}
    found = {row["name"]: row["digest"] for row in tensors}
    for name in sorted(wanted.keys() | found.keys()) if wanted else []:
        if wanted.get(name) != found.get(name):
            there = [side for side, names in (("the lake", wanted), ("the replay", found)) if name not in names]
            missing = f"tensor {name} is not in {there[0]}" if there else ""
            digests = f"tensor {name}: {str(found.get(name))[:12]}, recorded {str(wanted.get(name))[:12]}"
            return Replay(False, missing or digests, len(wanted))
    for name in COMPARED:
        if not recorded[name] or recorded[name] != made[name]:
            return Replay(False, f"{name}: {str(made[name])[:12]}, recorded {str(recorded[name])[:12]}", len(wanted))
    return Replay(True, "", len(wanted))


def _borrowed(states: Path, scratch: Path) -> Path:
    """The run's saved states under other names: a replay that finds one damaged sets it aside, and the run's stay."""
    folder = scratch / "states"
    folder.mkdir()
    for state in states.iterdir() if states.is_dir() else []:
        if not state.name.startswith("."):
            (folder / state.name).symlink_to(state)
    return folder
