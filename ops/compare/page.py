"""Several runs side by side as one HTML page that opens offline."""

from __future__ import annotations

import json
import math
from html import escape
from typing import Any

from furlong.ops.history import load_series
from furlong.ops.plots import lines_svg
from furlong.ops.protocols import LakeLike

CURVES = {
    "reward_mean": "mean reward", "mean_reply_tokens": "mean tokens of a reply",
    "mismatch_mean": "mean mismatch, |trainer - engine| log-probability", "loss": "loss",
}  # fmt: skip
_STYLE = (
    "body{font:14px sans-serif;margin:2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:3px 8px;text-align:left}"
)


def differences(specs: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Dotted key -> run -> value, for the keys in which specs differ; a key that a spec lacks shows as -."""
    flat = {run: _flat(spec) for run, spec in specs.items()}
    keys = sorted({key for one in flat.values() for key in one})
    told = {key: {run: one.get(key, "-") for run, one in flat.items()} for key in keys}
    return {key: values for key, values in told.items() if len(set(values.values())) > 1}


def accuracy(rows: list[dict[str, Any]]) -> dict[str, tuple[float, float, float]]:
    """Mode -> (accuracy, lower, upper) from rows of `evals` of one version: Wilson's 95% interval over all replies.

    Replies to one question are not independent, so the interval is too narrow where there are several to each.
    """
    told = {}
    for mode in sorted({row["mode"] for row in rows}):
        mine = [row for row in rows if row["mode"] == mode]
        told[mode] = wilson(sum(row["correct"] for row in mine), sum(row["samples"] for row in mine))
    return told


def wilson(correct: int, samples: int, z: float = 1.96) -> tuple[float, float, float]:
    """Share, lower and upper end (Wilson 1927); without samples everything is possible."""
    if not samples:
        return math.nan, 0.0, 1.0
    share, spread = correct / samples, z * z / samples
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / samples + spread / (4 * samples)) / (1 + spread)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def comparison_page(lake: LakeLike, specs: dict[str, dict[str, Any]]) -> str:
    """The page for runs of the lake, given by name with their specs."""
    series = {run: load_series(lake, run) for run in specs}
    parts = [_table("What differs", specs, differences(specs)), _table("How it ended", specs, _ends(lake, series))]
    for name, title in CURVES.items():
        parts.append(lines_svg({run: told[name] for run, told in series.items()}, title))
    heading = f"<h1>{len(specs)} runs compared</h1>"
    return f'<!doctype html><meta charset="utf-8"><title>Runs</title><style>{_STYLE}</style>{heading}{"".join(parts)}'


def _ends(lake: LakeLike, series: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    told: dict[str, dict[str, str]] = {}
    for run in series:
        steps = lake.read("steps", {"run": run}, ["tokens_trained", "seconds"]).to_pylist()
        told.setdefault("steps", {})[run] = str(len(series[run]["reward_mean"]))
        told.setdefault("tokens trained, repeats included", {})[run] = str(sum(row["tokens_trained"] for row in steps))
        seconds = sum(row["seconds"] or 0.0 for row in steps)
        told.setdefault("seconds in the trainer", {})[run] = f"{seconds:.1f}"
        columns = ["version", "mode", "samples", "correct"]
        evals = lake.read("evals", {"run": run}, columns).to_pylist()
        last = max((row["version"] for row in evals), default=0)
        for mode, (share, low, high) in accuracy([row for row in evals if row["version"] == last]).items():
            label = f"accuracy, {mode}, newest evaluated version (95% interval)"
            told.setdefault(label, {})[run] = f"v{last}: {share:.3f} ({low:.3f} to {high:.3f})"
    return told


def _table(title: str, runs: dict[str, Any], told: dict[str, dict[str, str]]) -> str:
    if not told:
        return f"<h2>{escape(title)}</h2><p>nothing</p>"
    head = "".join(f"<th>{escape(run)}</th>" for run in runs)
    rows = []
    for key, values in told.items():
        cells = "".join(f"<td>{escape(values.get(run, '-'))}</td>" for run in runs)
        rows.append(f"<tr><td>{escape(key)}</td>{cells}</tr>")
    body = "".join(rows)
    return f"<h2>{escape(title)}</h2><table><tr><th></th>{head}</tr>{body}</table>"


def _flat(value: Any, prefix: str = "") -> dict[str, str]:
    if isinstance(value, dict) and value:
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= _flat(inner, f"{prefix}.{key}" if prefix else str(key))
        return found
    return {prefix: json.dumps(value, sort_keys=True, ensure_ascii=False)}
