"""Which finished groups make the next batch: in order of position, within a window, none too stale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from furlong.ops.stages.context import StageError


class AdmissionError(StageError):
    """A group whose versions do not tell whether it may be trained on; the message names it."""


@dataclass(frozen=True)
class Candidate:
    """A group that is reserved, running or finished. All of these are given to `choose`, unfinished ones too."""

    group_id: str
    position: int
    """Number of its prompt over the whole run, from 0; no two candidates share one."""
    finished: bool
    """In state finished; a group that the filter still has to judge is not."""
    sampled: Mapping[int, int] = field(default_factory=dict)
    """Step that made the weights -> tokens that they sampled of its trajectories so far; see `tokens_by_step`. Put a
    running group's replies under way in with the step whose weights they began under and 0 tokens; empty before."""
    mean_tokens: float = 0.0
    """Sampled tokens per trajectory."""

    @property
    def oldest_step(self) -> int | None:
        """The step that made the oldest weights that sampled any of its tokens; None when none did."""
        return min(self.sampled, default=None)


@dataclass(frozen=True)
class Choice:
    """A batch."""

    taken: tuple[str, ...]
    """Group ids, in order of position."""
    passed_over: int
    """Groups that are not ready and stand before the last one taken."""
    waiting: tuple[str, ...]
    """Groups that are ready but left, in order of position."""
    waiting_tokens: float | None
    """Mean of their mean_tokens; None without any."""
    staleness_mean: float
    """Over all sampled tokens of the batch."""
    staleness_max: int

    def columns(self) -> dict[str, Any]:
        """As columns of table `batches`."""
        return {
            "staleness_mean": self.staleness_mean,
            "staleness_max": self.staleness_max,
            "passed_over": self.passed_over,
            "waiting_groups": len(self.waiting),
            "waiting_tokens": self.waiting_tokens,
        }


def tokens_by_step(spans: Iterable[tuple[int, int, int]], step_of: Mapping[int, int]) -> dict[int, int]:
    """Count tokens of spans (version, start, end) by the step that made the version: `Candidate.sampled`.

    Raises:
        AdmissionError: a version that `step_of` (0 for the base, else column `step` of weight_versions) lacks.
    """
    counted: dict[int, int] = {}
    for version, start, end in spans:
        if version not in step_of:
            raise AdmissionError(
                f"tokens were sampled by weights version {version}, which the run does not have (it has "
                f"{sorted(step_of)[-5:]} and earlier); the engine serves another run's weights: restart it with `make down`"
            )
        counted[step_of[version]] = counted.get(step_of[version], 0) + end - start
    return counted


def staleness(candidate: Candidate, start_step: int) -> int:
    """Optimiser steps between the weights of its oldest token and those that step `start_step` made.

    Raises:
        AdmissionError: no version, or one of a later step, i.e. of weights that the run has thrown away since.
    """
    oldest = candidate.oldest_step
    if oldest is None:
        raise AdmissionError(
            f"group {candidate.group_id} is finished but tells no weights version of its tokens; it cannot count as "
            "fresh: look at the version_spans of its trajectories"
        )
    newest = max(candidate.sampled)
    if oldest < 0 or newest > start_step:
        raise AdmissionError(
            f"group {candidate.group_id} was sampled by weights of steps {oldest} to {newest}, but the next step starts "
            f"from those of step {start_step}; when a step was repeated, reject what its old weights sampled as superseded"
        )
    return start_step - oldest


def too_old(candidates: Iterable[Candidate], start_step: int, bound: int) -> list[str]:
    """Groups to evict, in order of position: some token of theirs is staler than `bound`, so no batch can have them.

    Ask when a group finishes, whenever new weights are published, and before a batch is chosen. `start_step` is the
    last step taken.
    """
    begun = [c for c in _ordered(candidates) if c.finished or c.oldest_step is not None]
    return [c.group_id for c in begun if staleness(c, start_step) > bound]


def choose(candidates: Iterable[Candidate], wanted: int, start_step: int, bound: int, window: float) -> Choice | None:
    """The batch of step `start_step` + 1, or None while there are not enough groups that it may have.

    A group is ready when it is finished and no staler than `bound`. Ready groups are taken in order of position. Some
    may be taken past one that is not ready, so that a straggler does not hold up everything, but not past a horizon
    `window * wanted` positions long, which begins at the oldest group that is not ready and is shortened by the ready
    ones before it. Measured in positions of the run, which never change, a prompt is overtaken by fewer than `window`
    batches in all, however often it is evicted and drawn again: then everything waits for it, the more so as nothing
    grows stale while no step is taken. With `window` 1 nothing is overtaken at all.

    Args:
        candidates: every group that is reserved, running or finished, in any order. A prompt that has to be drawn again
            holds its place only once its new group is among them: draw before choosing.
        wanted: groups in a batch.
        bound: largest staleness, `RunSpec.staleness`.
        window: `RolloutSpec.window`, at least 1.
    Raises:
        AdmissionError: two groups for one prompt, or a group that does not tell its versions.
    """
    if not (wanted >= 1 and window >= 1 and bound >= 0):
        raise AdmissionError(
            f"cannot choose {wanted} groups with window={window}, bound={bound}; set 1, 1 and 0 at least"
        )
    ordered = _ordered(candidates)
    ready = [c for c in ordered if c.finished and staleness(c, start_step) <= bound]
    is_ready = {c.group_id for c in ready}
    behind = [c.position for c in ordered if c.group_id not in is_ready]
    if behind:
        before = sum(c.position < behind[0] for c in ready)
        # However many are ready before it, the first `wanted` of them lie before the horizon, wherever that falls.
        horizon = behind[0] + window * wanted - before
        taken = [c for c in ready if c.position < horizon][:wanted]
    else:
        taken = ready[:wanted]
    if len(taken) < wanted:
        return None
    left = [c for c in ready if c not in taken]
    return Choice(
        taken=tuple(c.group_id for c in taken),
        passed_over=sum(position < taken[-1].position for position in behind),
        waiting=tuple(c.group_id for c in left),
        waiting_tokens=sum(c.mean_tokens for c in left) / len(left) if left else None,
        staleness_mean=_mean_staleness(taken, start_step),
        staleness_max=max(staleness(c, start_step) for c in taken),
    )


def _ordered(candidates: Iterable[Candidate]) -> list[Candidate]:
    ordered = sorted(candidates, key=lambda c: c.position)
    for one, other in pairwise(ordered):
        if one.position == other.position:
            raise AdmissionError(
                f"groups {one.group_id} and {other.group_id} both hold the prompt at position {one.position}; reject one"
            )
    return ordered


def _mean_staleness(taken: list[Candidate], start_step: int) -> float:
    tokens = sum(sum(c.sampled.values()) for c in taken)
    lag = sum((start_step - step) * count for c in taken for step, count in c.sampled.items())
    if not tokens:
        raise AdmissionError(f"groups {', '.join(c.group_id for c in taken[:3])} hold no sampled token; reject them")
    return lag / tokens
