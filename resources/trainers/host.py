"""The trainer's home in an actor: it takes each step once and can rebuild any state from the lake.

A trainer's memory proves nothing. Before a step it reads `steps`: a step that stands there is refused. To reach a
state it restores the newest saved one and replays the recorded batches, checking every digest on the way.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from furlong.ops.draft.settings import draft_of
from furlong.ops.draft.shape import PREFIX
from furlong.ops.policy.parallel import parse_layout
from furlong.ops.protocols import StepMetrics, TrainBatch, Trainer
from furlong.ops.spec import parse_spec
from furlong.ops.stages.batch import assemble, batch_digest, score_rows
from furlong.ops.stages.chain import committed_step, committed_steps, one_row, starting_version
from furlong.ops.stages.context import StageError, StepKey
from furlong.ops.weights import delta
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.ops.weights.layout import Offer, Piece, specs, whole
from furlong.resources.actors import code_hash
from furlong.resources.trainers.others import OtherWeights
from furlong.resources.trainers.place import Place
from furlong.resources.trainers.snapshots import SnapshotError
from furlong.resources.weights.anchors import write_anchor
from furlong.resources.weights.rebuild import rebuild
from furlong.resources.weights.send import send

BASE = (0, 1)
"""Where a freshly loaded base model stands: (step, attempt)."""


class StepAlreadyTaken(StageError):
    """The lake holds this step's record, so its optimiser step is not taken again."""


class ReplayMismatch(StageError):
    """Replaying a recorded batch gave other weights than the record says."""


class TrainerHost:
    """One run's trainer. Calls come one at a time; a save runs beside them until the weights change again."""

    def __init__(self, spec_json: str, run: str, base_folder: str, lake: str, state_folder: str, place: Place):
        from furlong.resources.lake import Lake
        from furlong.resources.trainers.make import make_trainer

        self.spec = parse_spec(json.loads(spec_json), f"run {run}")
        self.run, self.base_folder, self.state_folder = run, base_folder, Path(state_folder)
        self.lake = Lake(lake)
        self.trainer: Trainer = make_trainer(
            self.spec, place.threads, parse_layout(place.layout), place.gpus, place.deadline, Path(place.logs)
        )
        self.others = OtherWeights(self.lake, run, self.spec, base_folder)
        self.at: tuple[int, int] | None = None
        self.record: dict[str, Any] | None = None
        self.before: dict[str, Any] | None = None
        self.made: dict[str, Any] | None = None
        self.after: dict[str, Any] = {}
        self.tensors: list[dict[str, Any]] = []
        self.saver: _Saver | None = None

    def base(self) -> dict[str, Any]:
        """Manifest and bytes of the base model's weights in the published dtype."""
        self._reach(0)
        return {"tensors": self.tensors, "digest": self._digest(), "full_bytes": delta.full_bytes(self.after)}

    def take_step(self, step: int, attempt: int) -> dict[str, Any]:
        """Take a step, or give again the record of the one just taken, if its driver died before committing it.

        Raises:
            StepAlreadyTaken: the lake holds the step's record.
        """
        key = StepKey(self.run, step, attempt)
        if one_row(self.lake, "steps", key.columns(), ["step"]):
            raise StepAlreadyTaken(f"{key}: its record is in the lake; to repeat it, ask for attempt {attempt + 1}")
        if self.at == (step, attempt) and self.record is not None:
            batch, _ = assemble(self.lake, self.spec, key)
            if batch_digest(batch, self.others.teacher(key, batch)) == self.record["batch_digest"]:
                return self.record
        self._reach(step - 1)
        record = self._advance(step, attempt, measure=True)
        if step % self.spec.trainer.save_every == 0 or step == self.spec.steps:
            self.saver = _Saver(self.trainer, self.state_folder, _folder_name(step, attempt))
        return record

    def publishable(self, step: int, attempt: int) -> dict[str, Any]:
        """What the step changed in the weights, encoded; version numbers on the rows are the caller's to fill."""
        if self.at == (step, attempt) and self.made:
            return self.made
        if self.at != (step, attempt) or self.before is None:
            self._reach(step - 1)
            self._advance(step, attempt)
        encoded = delta.encode_and_digest(0, 0, self.run, self.before, self.after)
        self.made = {
            "deltas": encoded.rows,
            "tensors": self.tensors,
            "digest": weights_digest(encoded.digests),
            "full_bytes": delta.full_bytes(self.after),
            "delta_bytes": pc.sum(pc.binary_length(encoded.rows["data"])).as_py() or 0,
            "changed_fraction": encoded.changed_fraction,
        }
        self.before = None  # as large as the model, and no longer needed
        return self.made

    def anchor(self, version: int, digest: str) -> str:
        """Write the weights held as a complete copy below the lake; returns its place there."""
        self._require(digest)
        return write_anchor(self.lake.uri, self.run, version, self.after, digest)

    def holds(self, digest: str) -> bool:
        """Whether the weights held have this digest."""
        return bool(self.tensors) and self._digest() == digest

    def holdings(self) -> list[list[Piece]]:
        """One rank, which has every tensor whole."""
        return [[whole(spec) for spec in specs(self.tensors)]]

    def send(self, offer: Offer) -> int:
        """Send the weights held; refuses when they are not the offer's."""
        self._require(weights_digest({spec.name: spec.digest for spec in offer.tensors}))
        return send(offer, 0, {whole(spec): self.after[spec.name] for spec in offer.tensors})

    def health(self) -> dict[str, Any]:
        """Where the trainer stands."""
        return {"at": self.at, "trainer": self.trainer.fingerprint()}

    def settle(self) -> None:
        """Wait until a save in progress is on disk."""
        # A save that failed is told once: the steps after it only lose a place to restore from.
        saver, self.saver = self.saver, None
        if saver is None or (error := saver.join()) is None:
            return
        if not isinstance(error, OSError):
            self.at = None  # ranks may have been lost over it
        advice = "free some disk space and run again" if isinstance(error, OSError) else "run the same command again"
        raise StageError(f"saving the trainer's state failed: {error}; {advice}") from error

    def _require(self, digest: str) -> None:
        if not self.holds(digest):
            held = self._digest()[:12] if self.tensors else "none"
            raise StageError(
                f"run {self.run}: the trainer was asked for weights {digest[:12]} but holds {held}, after (step, "
                f"attempt) {self.at}; publish from the lake, with FURLONG_TRANSPORT=disk_delta, or run the step again"
            )

    def _reach(self, step: int) -> None:
        """Bring weights and optimiser to the state after the latest committed attempt of `step`."""
        row = committed_step(self.lake, self.run, step) if step else None
        if step and row is None:
            raise StageError(
                f"{self.run} step {step} has no record, so the step after it cannot be taken; run it first"
            )
        if self.at == ((step, row["attempt"]) if row else BASE) and self._agrees(row):
            return
        self.settle()
        chain = committed_steps(self.lake, self.run)
        at = self._restore(step, chain)
        for later in range(at + 1, step + 1):
            self._advance(later, chain[later]["attempt"])

    def _agrees(self, row: dict[str, Any] | None) -> bool:
        """Whether the weights held are those of the record."""
        held = self.record["master_digest_after"] if self.record else None
        return held == (row["master_digest_after"] if row else None)

    def _restore(self, step: int, chain: dict[int, dict[str, Any]]) -> int:
        """Load the newest saved state on the committed chain at or before `step`, else the base model."""
        self.at, self.record, self.before, self.made = None, None, None, None
        for candidate in range(step, 0, -1):
            folder = self.state_folder / _folder_name(candidate, chain[candidate]["attempt"])
            if not folder.is_dir():
                continue
            try:
                self.trainer.restore(str(folder))
                intact = self.trainer.master_digest() == chain[candidate]["master_digest_after"]
            except (OSError, SnapshotError) as err:
                # Nothing else: a layout that does not fit the model is no fault of the state's.
                print(f"saved state {folder} cannot be read: {err}", flush=True)
                intact = False
            if intact:
                self._hold(candidate, chain[candidate])
                return candidate
            # An older state plus recorded batches gives the same weights, so a damaged one only costs time.
            print(f"saved state {folder} does not match step {candidate}; replaying from an older one", flush=True)
            folder.rename(folder.with_name(f"{folder.name}.damaged-{time.time_ns()}"))
        self.trainer.load(self.base_folder)
        self._hold(0, None)
        return 0

    def _hold(self, step: int, row: dict[str, Any] | None) -> None:
        self.at = (step, row["attempt"]) if row else BASE
        self.record = {"master_digest_after": row["master_digest_after"]} if row else None
        self.after = self.trainer.export()
        self.tensors = manifest(self.after)

    def _advance(self, step: int, attempt: int, measure: bool = False) -> dict[str, Any]:
        """One optimiser step from the rows in the lake; in a replay, the result must equal the record, and what only
        measures is left out."""
        key = StepKey(self.run, step, attempt)
        begin = time.perf_counter()
        batch, outcomes = assemble(self.lake, self.spec, key)
        self.settle()
        self.at = None  # a failure from here on leaves an unknown state, which the next call rebuilds
        draft = self._draft_in_force(key)
        if any(self.after.get(name) is not tensor for name, tensor in draft.items()):
            self.after = self.after | draft
            self.tensors = manifest(self.after)
        others = self.others.logprobs(self.trainer, key, batch, measure)
        metrics = self.trainer.step(batch, others)
        digest_before = self._digest()
        self.others.remember(batch.version, self.after)
        self.before, self.after, self.made = self.after, self.trainer.export() | draft, None
        self.tensors = manifest(self.after)
        self.record = self._record(batch_digest(batch, others.teacher), batch, outcomes, metrics, digest_before)
        self.record["seconds"] = time.perf_counter() - begin
        self._compare(key)
        self.at = (step, attempt)
        return self.record

    def _draft_in_force(self, key: StepKey) -> dict[str, Any]:
        """Of a run that does not train its draft, the one that the step's versions have: the trainer's own, until another
        was published alone. Empty where the trainer's own holds."""
        settings = draft_of(self.spec)
        if settings is None or settings.train:
            return {}
        step = one_row(self.lake, "steps", key.columns(), ["version_before"])
        version = step["version_before"] if step else starting_version(self.lake, key)
        row = one_row(self.lake, "weight_versions", {"run": self.run, "version": version}, ["tensors"])
        wanted = {tensor["name"]: tensor["digest"] for tensor in row["tensors"] if tensor["name"].startswith(PREFIX)}
        if not wanted.items() <= {tensor["name"]: tensor["digest"] for tensor in self.tensors}.items():
            whole = rebuild(self.lake, self.run, version, self.base_folder)
            return {name: whole[name] for name in wanted}
        return {name: self.after[name] for name in wanted}

    def _digest(self) -> str:
        return weights_digest({row["name"]: row["digest"] for row in self.tensors})

    def _record(
        self, digest: str, batch: TrainBatch, outcomes: list[dict], metrics: StepMetrics, before: str
    ) -> dict[str, Any]:
        scored = [outcome["reward"] for outcome in outcomes if outcome["reward"] is not None]
        reached = dict(zip(batch.trajectory_ids, metrics.tokens_reached, strict=True))
        measured = asdict(metrics)
        del measured["tokens_reached"], measured["scores"]
        return {
            "batch_digest": digest,
            "digest_before": before,
            "digest_after": self._digest(),
            "master_digest_after": self.trainer.master_digest(),
            "outcomes": [row | {"tokens_reached": reached.get(row["trajectory_id"], 0)} for row in outcomes],
            "reward_mean": sum(scored) / len(scored) if scored else 0.0,
            "trainer": f"{self.trainer.fingerprint()}/code={code_hash()}",
            "trainer_scores": score_rows(batch, metrics.scores),
            **measured,
        }

    def _compare(self, key: StepKey) -> None:
        columns = ["batch_digest", "digest_after", "master_digest_after"]
        committed = one_row(self.lake, "steps", key.columns(), columns) or {}
        for name, wanted in committed.items():
            if self.record[name] != wanted:
                raise ReplayMismatch(
                    f"{key}: replay gave {name} {self.record[name][:12]}, the record says {wanted[:12]}; the machine, "
                    "threads, library versions or Furlong's own code differ from the first pass, as steps.trainer tells; "
                    "go back to those, or start another run under a new name"
                )


class _Saver:
    """Writes the trainer's state in the background; the trainer must not change until `join` returned."""

    def __init__(self, trainer: Trainer, root: Path, name: str):
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, args=(trainer, root, name), name="save", daemon=True)
        self.thread.start()

    def _run(self, trainer: Trainer, root: Path, name: str) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            for scrap in root.glob(".*"):  # left by a process that was killed while it saved; as large as a state
                shutil.rmtree(scrap)
            trainer.save(str(root / name))
            for old in _superseded(path.name for path in root.iterdir() if path.is_dir()):
                shutil.rmtree(root / old)
        except BaseException as err:  # handed to the caller by `join`
            self.error = err

    def join(self) -> BaseException | None:
        """Wait for the save; what it raised."""
        self.thread.join()
        return self.error


KEPT = 2
"""Steps whose newest saved state is kept: a repetition of the last one starts from the one before."""


def _folder_name(step: int, attempt: int) -> str:
    return f"{step:05d}.{attempt}"


def _superseded(names: Iterable[str]) -> set[str]:
    """Those of `_folder_name`'s that are no longer needed; other names are passed over."""
    states = {tuple(map(int, name.split("."))): name for name in names if name.replace(".", "", 1).isdigit()}
    newest = {step: states[step, attempt] for step, attempt in sorted(states)}
    return set(states.values()) - {newest[step] for step in sorted(newest)[-KEPT:]}
