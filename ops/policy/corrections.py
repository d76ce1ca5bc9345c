"""Settings of what is done about tokens that another engine, or other weights, sampled. Torch-free.

d_t = (trainer's log-probability under the step's starting weights) - (the engine's, as recorded). Its three levels are

    token      exp(d_t)
    sequence   exp(sum of d over the trajectory's trained tokens)
    geometric  exp(mean of d over the trajectory's trained tokens)

The arithmetic is in `ops/policy/importance.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from furlong.ops.options import chosen
from furlong.ops.spec import AlgorithmSpec, SpecError

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")


@dataclass(frozen=True)
class Correction:
    """What `algorithm.correction_options` may set. Weights are constants to the gradient.

    `tis`, `icepop` and `mis` take all (`mode` belongs to `mis`), `ratio` takes the rejections, `none` takes nothing.
    Rejected tokens leave the sums, never the denominators: a step that rejects much takes a smaller stride.
    """

    level: str = "token"
    """Of the weight: `token`, `sequence` or `geometric`."""
    mode: str = "truncate"
    """`truncate`: weights above `high` become `high`; `clip`: those below `low` become `low` too; `mask`: tokens with a
    weight outside [low, high] are rejected."""
    low: float = 0.0
    """Lower bound of the weight. Unset: icepop 0.5, mis 1 / high, tis none."""
    high: float = 2.0
    """Upper bound of the weight. Unset: tis and mis 2, icepop 5."""
    normalise: bool = False
    """Divide the weights by their mean over the step's trained tokens that are not rejected."""
    reject: str = ""
    """Level at which tokens are rejected beside the weight, within `reject_low` and `reject_high`; empty for not."""
    reject_low: float = 0.0
    """Ratios below it are rejected."""
    reject_high: float = math.inf
    """Ratios above it are rejected."""
    veto: float = 0.0
    """A trajectory with a trained token whose exp(d) is below it is rejected whole, e.g. 1e-4; 0 for none."""
    off_policy: float = 0.0
    """Tokens of negative advantage are rejected when their trajectory's mean of -d (nat) is above it; 0 for not."""

    def __post_init__(self) -> None:
        good = (
            self.level in LEVELS
            and self.mode in MODES
            and self.reject in ("", *LEVELS)
            and 0 <= self.low < self.high < math.inf
            and 0 <= self.reject_low < self.reject_high
            and 0 <= self.veto < 1
            and 0 <= self.off_policy < math.inf
        )
        if not good:
            raise SpecError(
                f"algorithm.correction_options: {self} has a value out of range; levels are {', '.join(LEVELS)}, modes "
                f"{', '.join(MODES)}, bounds 0 <= low < high, 0 <= veto < 1, 0 <= off_policy"
            )
        bounded = self.reject_low > 0 or self.reject_high < math.inf
        if bool(self.reject) != bounded:
            raise SpecError(
                "algorithm.correction_options: `reject` names the level that reject_low and reject_high bound; give it "
                "with at least one of them, or none of the three"
            )

    @property
    def whole(self) -> bool:
        """Whether a token's weight depends on other tokens of the step."""
        levels = {self.level, self.reject} - {"token", ""}
        return bool(levels) or self.normalise or self.veto > 0 or self.off_policy > 0


WEIGHTED: dict[str, dict[str, Any]] = {
    "tis": {"mode": "truncate", "high": 2.0},
    "icepop": {"mode": "mask", "low": 0.5, "high": 5.0},
    "mis": {"mode": "mask", "high": 2.0},
}
"""Corrections that weight tokens, and what they set before the spec does.

`tis`: truncated importance sampling, min(w, high) (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"). `icepop`: w inside [low, high], 0 outside (Ling Team 2025, "Every Step Evolves", section on
IcePop). `mis`: masked importance sampling at any level (Liu et al. 2025, "When Speed Kills Stability").
"""
_REJECTIONS = {"reject", "reject_low", "reject_high", "veto", "off_policy"}
_ALL = {field.name for field in fields(Correction)}
_TAKES = {"ratio": _REJECTIONS, "none": set(), "tis": _ALL - {"mode"}, "icepop": _ALL - {"mode"}, "mis": _ALL}


def correction_of(algorithm: AlgorithmSpec) -> Correction:
    """The spec's correction with its name's defaults; SpecError on an option that is unknown, wrong or without effect."""
    name, options = algorithm.correction, algorithm.correction_options
    foreign = sorted(set(options) & (_ALL - _TAKES[name]))
    if foreign:
        takes = ", ".join(sorted(_TAKES[name])) or "no options"
        raise SpecError(
            f"algorithm.correction_options.{foreign[0]} does nothing for correction={name}, which takes {takes}; "
            "remove it or choose another correction"
        )
    settings = {**WEIGHTED.get(name, {}), **options}
    if name == "mis" and "low" not in options:
        high = chosen("algorithm.correction_options", Correction, {**settings, "low": 0.0}).high
        settings["low"] = 1 / high if high > 1 else 0.0
    return chosen("algorithm.correction_options", Correction, settings)
