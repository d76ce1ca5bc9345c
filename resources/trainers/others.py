"""Log-probabilities of a step's replies under weights that the step does not start from."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, Any

from furlong.ops.identity import counter_seed
from furlong.ops.policy.algorithms import needs
from furlong.ops.protocols import OtherLogprobs, TrainBatch, Trainer
from furlong.ops.spec import RunSpec
from furlong.ops.stages.batch import teacher_logprobs
from furlong.ops.stages.chain import version_row
from furlong.ops.stages.context import StepKey
from furlong.resources.weights.rebuild import rebuild

if TYPE_CHECKING:
    from torch import Tensor

    from furlong.resources.lake import Lake

    Weights = dict[str, Tensor]

Rows = tuple[tuple[float, ...], ...]
Masks = tuple[tuple[bool, ...], ...]


class OtherWeights:
    """The weights versions that a run's tokens were sampled by, and its base model, at hand as long as they are needed."""

    def __init__(self, lake: Lake, run: str, spec: RunSpec, base_folder: str):
        self.lake, self.run, self.spec, self.base_folder = lake, run, spec, base_folder
        self._recent: dict[int, Weights] = {}

    def remember(self, version: int, weights: Weights) -> None:
        """Keep a version that the next steps' tokens may be sampled by; the oldest beyond the staleness bound goes."""
        if self.spec.staleness:
            self._recent[version] = weights
            for old in sorted(self._recent)[: -self.spec.staleness]:
                del self._recent[old]

    def teacher(self, key: StepKey, batch: TrainBatch) -> Rows | None:
        """The teacher's, as they stand in the lake; None for a run without one."""
        wanted = "teacher" in needs(self.spec.algorithm)
        return teacher_logprobs(self.lake, key, batch) if wanted else None

    def logprobs(self, trainer: Trainer, key: StepKey, batch: TrainBatch, measure: bool) -> OtherLogprobs:
        """What the step's loss and, where it is to be measured, its mismatch need besides the trainer's own."""
        wanted = needs(self.spec.algorithm)
        reference = trainer.logprobs(batch, batch.masks, self._base) if "reference" in wanted else None
        return OtherLogprobs(
            sampling=self._sampling(trainer, batch) if measure else None,
            reference=None if reference is None else tuple(map(tuple, reference)),
            teacher=self.teacher(key, batch),
        )

    def _sampling(self, trainer: Trainer, batch: TrainBatch) -> Rows | None:
        """For each older version one micro-batch's worth of its tokens is compared: enough for a mean, at a bounded cost.
        Of a version that was collected none is, as the coverage tells."""
        trained = (zip(row, mask, strict=True) for row, mask in zip(batch.sampled_by, batch.masks, strict=True))
        stale = sorted({version for row in trained for version, on in row if on} - {batch.version, -1})
        stale = [version for version in stale if version in self._recent or not self._collected(version)]
        if not stale:
            return None
        rows = [[math.nan] * len(reply) for reply in batch.replies]
        for version in stale:
            masks = self._some_of(batch, version)
            found = trainer.logprobs(batch, masks, self._weights(version))
            for row, values, mask in zip(rows, found, masks, strict=True):
                for offset, on in enumerate(mask):
                    row[offset] = values[offset] if on else row[offset]
        return tuple(map(tuple, rows))

    def _some_of(self, batch: TrainBatch, version: int) -> Masks:
        """The trained tokens that `version` sampled, of trajectories drawn by lot, the same lot at every try."""
        masks = [
            tuple(on and by == version for on, by in zip(mask, versions, strict=True))
            for mask, versions in zip(batch.masks, batch.sampled_by, strict=True)
        ]
        lot = sorted(range(len(masks)), key=lambda index: counter_seed("mismatch", batch.trajectory_ids[index]))
        room, kept = self.spec.trainer.micro_batch_tokens, set()
        for index in (index for index in lot if any(masks[index])):
            size = len(batch.prompts[batch.group[index]]) + len(batch.replies[index])
            if kept and size > room:
                break
            kept.add(index)
            room -= size
        return tuple(mask if index in kept else (False,) * len(mask) for index, mask in enumerate(masks))

    def _collected(self, version: int) -> bool:
        row = version_row(self.lake, self.run, version)
        return row is not None and row["state"] == "collected"

    def _weights(self, version: int) -> Weights:
        if version not in self._recent:
            self._recent[version] = rebuild(self.lake, self.run, version, self.base_folder)
        return self._recent[version]

    @cached_property
    def _base(self) -> dict[str, Any]:
        return rebuild(self.lake, self.run, 0, self.base_folder)
