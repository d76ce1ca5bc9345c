"""A grid of runs: every combination of some values of some fields of one spec."""

from __future__ import annotations

from itertools import product
from typing import Any

import yaml

from furlong.ops.spec import SpecError

MOST = 256
"""Runs in one grid; a larger one is a typing error more often than a wish."""


def parse_vary(given: list[str]) -> dict[str, list[Any]]:
    """Dotted key -> values, from words such as `algorithm.name=grpo,rloo`; values are read as YAML.

    Raises:
        SpecError: a word without a key or a value, a value that is no YAML, or a key twice.
    """
    axes: dict[str, list[Any]] = {}
    for word in given:
        key, _, values = word.partition("=")
        parts = [part.strip() for part in values.split(",")]
        if not key.strip() or not all(parts) or key.strip() in axes:
            raise SpecError(f"--vary {word!r} is not KEY=VALUE,VALUE with a key of its own; write e.g. seed=0,1,2")
        try:
            axes[key.strip()] = [yaml.safe_load(part) for part in parts]
        except yaml.YAMLError as err:
            raise SpecError(f"--vary {word!r}: a value cannot be read as YAML ({err}); quote it") from err
    return axes


def combinations(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """The overrides of each run of the grid, the last key varying fastest.

    Raises:
        SpecError: more than MOST runs, or no key with values at all.
    """
    if not axes or not all(axes.values()):
        raise SpecError("a grid needs a key with values to vary; give e.g. --vary seed=0,1,2")
    found = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    if len(found) > MOST:
        raise SpecError(f"the grid has {len(found)} runs, more than {MOST}; vary less, or write several grids")
    return found
