"""README.md of an exported checkpoint: what it is and exactly what it came from."""

from __future__ import annotations

from typing import Any

from furlong.ops.protocols import LakeLike
from furlong.ops.stages.evals import accuracies

_SHOWN = 12
"""Ancestors written out; the rest is counted."""


def model_card(lake: LakeLike, uri: str, run: dict[str, Any], step: dict[str, Any], version: dict[str, Any]) -> str:
    """Markdown with the lineage of one weights version; the same rows give the same text.

    Args:
        lake, uri: where the rows are, and its address for people.
        run, step, version: rows of `runs`, `steps` and `weight_versions`.
    """
    facts = {
        "run": run["run"],
        "spec fingerprint": run["spec_fingerprint"],
        "step": f"{step['step']} (attempt {step['attempt']})",
        "weights version": version["version"],
        "digest of all tensors": version["digest"],
        "built on": _ancestors(lake, version),
        "base model digest": run["base_digest"],
        "dataset": run["dataset"],
        "mean reward of the step": f"{step['reward_mean']:.4f}",
        "batch digest": step["batch_digest"],
        "code version": run["code_version"],
        "lake": uri,
    }
    lines = ["---", "library_name: transformers", "tags: [furlong, reinforcement-learning]", "---", ""]
    lines += [f"# {run['run']}, weights version {version['version']}", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | `{value}` |" for name, value in facts.items()), ""]
    if any(tensor["name"].startswith("adapter.") for tensor in version["tensors"]):
        lines += ["Adapters were trained. `model.safetensors` has them merged, `adapter/` alone, in PEFT's layout.", ""]
    lines += ["## Accuracy on questions kept away from training", "", *_accuracy(lake, run["run"], version["version"])]
    query = f"SELECT * FROM weight_versions WHERE run = '{run['run']}' AND version = {version['version']}"
    lines += ["", "Every token, reward and step behind it are rows of the lake:", "", f"    {query}", ""]
    return "\n".join(lines)


def _ancestors(lake: LakeLike, version: dict[str, Any]) -> str:
    rows = lake.read("weight_versions", {"run": version["run"]}, ["version", "parent"]).to_pylist()
    parents = {row["version"]: row["parent"] for row in rows}
    line, at = [], version["parent"]
    while at is not None and at not in line:
        line.append(at)
        at = parents.get(at)
    shown = [f"v{number}" for number in line]
    if len(shown) > _SHOWN:
        shown = [*shown[: _SHOWN - 1], f"({len(shown) - _SHOWN} more)", shown[-1]]
    return " <- ".join(shown) or "nothing"


def _accuracy(lake: LakeLike, run: str, version: int) -> list[str]:
    measured = []
    for number in sorted({0, version}):
        rows = lake.read("evals", {"run": run, "version": number}).to_pylist()
        if rows:
            told = ", ".join(f"{name} {value:.3f}" for name, value in accuracies(rows).items())
            measured.append(f"- version {number}: {told}")
    return measured or ["Not measured for this version."]
