"""Whether speculating pays for a batch, and with how many proposals, from what steps of such batches were measured to take.

A step with k proposals for each of b replies takes the policy's forward over b (k + 1) tokens and the draft's own; it adds
1 + a_1 + a_1 a_2 + ... + a_1...a_k tokens to each reply on average, a_d being the share of proposals of depth d that are
kept, of those whose predecessors were. What is decided has the most tokens per second by these figures.

Nothing here reads a clock: the same calls give the same decisions. But what it is told are wall-clock seconds, which are
not the same twice, so neither are the decisions. With `match` (see `ops/draft/verify.py`) no token depends on them. With
`rejection` the distribution of replies does not depend on them, as a decision is made before the proposals it is about
are drawn, but the replies themselves do: for the same seeds to give the same replies again, set `fixed`, which speculates
with the same number of proposals always, whether it pays or not; and even then a reply that lacks pages for some of them
goes on with other tokens. For the same reason one rank of a split model decides for all, and its decision travels with the
step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import astuple, dataclass, field
from statistics import median

from furlong.ops.spec import SpecError

WINDOW = 5
"""Latest steps whose median stands for all: few, so that a machine that has become slower is seen."""
BURST = 3
"""Steps that are measured in a row, most of a window, so that they are its median."""
FIRST_PROBE, LAST_PROBE = 32, 512
"""Steps until the choice that was not made is measured again; doubled each time that the measurement confirms it."""
MARGIN = 0.05
"""How much faster another choice must be to take the place of the present one."""
MEMORY = 0.98
"""What the counts of kept proposals weigh one verified step later, relative to its own."""


@dataclass(frozen=True)
class StepSeconds:
    """Wall-clock seconds of one step's parts. Steps that also computed prompts tell nothing: leave them out."""

    policy: float
    """Its forward pass and the draw or verification after it."""
    extend: float = 0.0
    """The draft's forward pass over what the replies were found to say."""
    propose: float = 0.0
    """The draft's forward passes over its own proposals."""

    @property
    def total(self) -> float:
        return self.policy + self.extend + self.propose


@dataclass(frozen=True)
class Decision:
    proposals: int
    """For each reply; 0 to decode without the draft."""
    why: str
    """`fixed`: it is set so; `measure`: too little is known of such batches; `probe`: what was decided against is measured
    again; `pays`, `costs`: more and less tokens per second than without the draft; `held`: another choice is faster, but
    by too little to change."""


@dataclass
class _Size:
    """What is known of batches of about one size."""

    seconds: dict[int, deque[StepSeconds]] = field(default_factory=dict)
    """By number of proposals."""
    present: int = 0
    since: int = 0
    """Steps since the last probe ended."""
    interval: int = FIRST_PROBE
    probing: int = 0
    """Steps that the running probe has still to take."""
    probed: int = 0
    """What it is a probe of."""
    probes: int = 0

    def known(self, proposals: int) -> bool:
        return len(self.seconds.get(proposals, ())) >= BURST

    def total(self, proposals: int) -> float:
        """Median seconds of such a step; between two numbers of proposals that are known, in proportion."""
        known = {k: median(step.total for step in some) for k, some in self.seconds.items() if len(some) >= BURST}
        if proposals in known:
            return known[proposals]
        below, above = max(k for k in known if k < proposals), min(k for k in known if k > proposals)
        share = (proposals - below) / (above - below)
        return known[below] * (1 - share) + known[above] * share


class CostModel:
    """Decides before every step of a batch, and is told afterwards what it took and what was kept."""

    def __init__(self, proposals: int, fixed: bool = False):
        """
        Args:
            proposals: the most for each reply.
            fixed: always that many; see above.
        Raises:
            SpecError: less than one.
        """
        if proposals < 1:
            raise SpecError(f"draft.proposals: {proposals} leaves nothing to verify; set 1 or more, or no draft")
        self._most, self._fixed = proposals, fixed
        self._sizes: dict[int, _Size] = {}
        self._tried, self._kept = [0.0] * proposals, [0.0] * proposals

    def decide(self, replies: int) -> Decision:
        """How many proposals the next step of this many replies should verify for each. To ask twice changes nothing."""
        if self._fixed:
            return Decision(self._most, "fixed")
        size = self._size(replies)
        for choice in (0, self._most):
            if not size.known(choice):
                return Decision(choice, "measure")
        if size.probing:
            return Decision(size.probed, "probe")
        best = self._best(size)
        why = "held" if best != size.present and self._beats(size, best, 0.0) else "pays" if size.present else "costs"
        return Decision(size.present, why)

    def stepped(self, replies: int, proposals: int, seconds: StepSeconds) -> None:
        """A step of this many replies has been made with so many proposals for each.

        Raises:
            ValueError: seconds that no clock can have shown.
        """
        if not all(0 <= part < float("inf") for part in astuple(seconds)):
            raise ValueError(f"{seconds} was not measured; pass differences of a monotonic clock, in seconds")
        size = self._size(replies)
        size.seconds.setdefault(proposals, deque(maxlen=WINDOW)).append(seconds)
        if not (size.known(0) and size.known(self._most)):
            return
        self._settle(size, proposals)

    def verified(self, proposed: list[int], accepted: list[int]) -> None:
        """Of each reply of a step, how many proposals it had and how many were kept.

        Raises:
            ValueError: more were kept than there were.
        """
        if len(proposed) != len(accepted) or any(not 0 <= a <= n for a, n in zip(accepted, proposed, strict=False)):
            raise ValueError(f"{accepted} of {proposed} proposals cannot have been kept; pass both of each reply")
        if not any(proposed):
            return
        for depth in range(self._most):
            tried = sum(n > depth and a >= depth for n, a in zip(proposed, accepted, strict=True))
            kept = sum(a > depth for a in accepted)
            self._tried[depth] = MEMORY * self._tried[depth] + tried
            self._kept[depth] = MEMORY * self._kept[depth] + kept

    def renewed(self) -> None:
        """Policy or draft have new weights: what was kept so far counts little, and whether it pays is soon looked at."""
        weight = MEMORY**100
        self._tried, self._kept = [weight * n for n in self._tried], [weight * n for n in self._kept]
        for size in self._sizes.values():
            size.interval = FIRST_PROBE

    def acceptance(self) -> list[float]:
        """By depth, the share of proposals kept, of those whose predecessors were; a depth that was not tried as the one
        before it."""
        found, last = [], 0.0
        for tried, kept in zip(self._tried, self._kept, strict=True):
            last = kept / tried if tried > 0 else last
            found.append(last)
        return found

    def expected(self, proposals: int) -> float:
        """Tokens that a step with so many proposals adds to a reply on average."""
        total, share = 1.0, 1.0
        for rate in self.acceptance()[:proposals]:
            share *= rate
            total += share
        return total

    def seconds(self, replies: int, proposals: int) -> StepSeconds | None:
        """Medians of the parts of such steps; None when too few were made."""
        size = self._size(replies)
        if not size.known(proposals):
            return None
        steps = size.seconds[proposals]
        return StepSeconds(*(median(part) for part in zip(*map(astuple, steps), strict=True)))

    def _size(self, replies: int) -> _Size:
        """Those of up to twice as many replies are taken together."""
        return self._sizes.setdefault((replies - 1).bit_length(), _Size())

    def _speed(self, size: _Size, proposals: int) -> float:
        """Tokens per second and reply."""
        return self.expected(proposals) / max(size.total(proposals), 1e-9)

    def _best(self, size: _Size) -> int:
        return max(range(self._most + 1), key=lambda k: (self._speed(size, k), -k))

    def _beats(self, size: _Size, other: int, margin: float) -> bool:
        return self._speed(size, other) > (1 + margin) * self._speed(size, size.present)

    def _settle(self, size: _Size, proposals: int) -> None:
        """Count the step, and change the present choice, or begin or end a probe, as is due."""
        if size.probing:
            size.probing -= proposals == size.probed
            if size.probing:
                return
            size.since, size.interval = 0, min(2 * size.interval, LAST_PROBE)
        best = self._best(size)
        if best != size.present and self._beats(size, best, MARGIN):
            size.present, size.since, size.interval = best, 0, FIRST_PROBE
            return
        size.since += 1
        if size.since >= size.interval:
            size.probed, size.probing, size.probes = self._next_probe(size), BURST, size.probes + 1

    def _next_probe(self, size: _Size) -> int:
        """Off: what would be fastest. On: off, and in between one proposal more and one fewer, in turn."""
        if size.present == 0:
            return max(range(1, self._most + 1), key=lambda k: self._speed(size, k))
        near = [k for k in (size.present + 1, size.present - 1) if 0 < k <= self._most]
        return near[size.probes // 2 % len(near)] if near and size.probes % 2 else 0
