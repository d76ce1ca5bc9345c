"""What a check says of a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

SHOWN = 10
"""Trajectories that a verdict names, at most: those that moved its number most."""


@dataclass(frozen=True)
class Verdict:
    """One check's answer; a blocking one that did not pass keeps the step's weights from being published."""

    check: str
    passed: bool
    blocking: bool
    message: str = ""
    """What is wrong and what to do; empty where it passed."""
    found: dict[str, Any] = field(default_factory=dict)
    """The numbers it rests on."""
    evidence: list[str] = field(default_factory=list)
    """Ids of the trajectories that moved them."""


def finite(*values: float | None) -> bool:
    """Whether all are numbers; none, or a missing one, is not."""
    return bool(values) and all(value is not None and math.isfinite(value) for value in values)
