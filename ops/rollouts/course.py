"""Which prompts a run draws next, and for which step: a function of what it has drawn, never of when."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reservation:
    """A group about to be drawn."""

    step: int
    attempt: int
    index: int
    """Number among the groups of its step and attempt."""
    position: int
    """Place in the run's endless stream of prompts (`ops.tasks.prompts.draw`)."""

    def group_id(self, run: str) -> str:
        return f"{run}-{self.step:05d}.{self.attempt}-g{self.index:03d}"


def attempt_of(group_id: str) -> int:
    """The attempt that a group was drawn for."""
    return int(group_id.rpartition("-g")[0].rpartition(".")[2])


@dataclass
class Course:
    """What a run has drawn so far."""

    fresh: int = 0
    """The first position that no group has had."""
    returned: list[int] = field(default_factory=list)
    """Positions whose groups were rejected for no fault of the prompt, lowest first: they are drawn again."""
    drawn: Counter = field(default_factory=Counter)
    """(step, attempt) -> groups drawn for it."""

    @classmethod
    def of(cls, groups: list[dict[str, Any]], returned: list[int]) -> Course:
        """From rows of `groups`, and the positions that no group holds any more."""
        drawn = Counter((row["step"], row["attempt"]) for row in groups)
        return cls(max((row["position"] for row in groups), default=-1) + 1, sorted(returned), drawn)

    def give_back(self, position: int) -> None:
        """This position is drawn again before any new one."""
        bisect.insort(self.returned, position)

    def reserve(self, count: int, step: int, attempt: int, ahead: int, per_step: int, bound: int) -> list[Reservation]:
        """The next `count` groups.

        Args:
            step, attempt: of the batch that is wanted next.
            ahead: groups begun for it or for later ones already.
            per_step: groups of a batch.
            bound: the staleness bound, and so how many steps after `step` a group may be drawn for.
        """
        made = []
        for place in range(ahead, ahead + count):
            later = min(place // per_step, bound)
            home = (step + later, 1 if later else attempt)
            position = self.returned.pop(0) if self.returned else self.fresh
            self.fresh = max(self.fresh, position + 1)
            made.append(Reservation(*home, self.drawn[home], position))
            self.drawn[home] += 1
        return made


def room(begun: int, unadmitted: int, step: int, steps: int, per_step: int, bound: int, oversample: float) -> int:
    """How many more groups may be begun.

    Between a group's first token and the end of its step lie at most `bound` other steps when no more than
    per_step * (bound + 1) groups are under way; and a run never begins groups that none of its steps will need.

    Args:
        begun: groups that are neither rejected nor part of a published step.
        unadmitted: those of them that are not part of a batch.
        step: of the batch that is wanted next; steps: of the whole run.
    """
    most = math.ceil(per_step * (bound + 1) * oversample) - begun
    needed = per_step * (steps - step) + math.ceil(per_step * oversample) - unadmitted
    return max(0, min(most, needed))
