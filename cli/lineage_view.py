"""Lineage and query results, as text for a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from furlong.ops.lineage.views import VIEWS
from furlong.ops.tables import TABLES

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN = 12
"""Lines of a list; the rest is counted."""


def show_version(console: Console, told: dict[str, Any]) -> None:
    run, chain, steps = told["run"], told["chain"], told["steps"]
    mine = chain[0]
    console.print(
        f"weights version {told['version']} of run {run['run']}, {mine['state']}, {mine['kind']}",
        style="bold",
        markup=False,
    )
    _facts(console, {
        "digest": mine["digest"],
        "tags": ", ".join(told["tags"]) or "none",
        "learnt from": f"{told['trajectories']} trajectories, {told['prompts']} prompts, {told['tokens']} tokens, "
        f"{len(steps)} steps",
        "sampled by": _listed([f"v{row['version']} ({row['tokens']} tokens)" for row in reversed(told["sampled_by"])]),
        "reward code": _listed([f"{row['verifier']} {row['verifier_version'][:12]}" for row in told["verifiers"]]),
        "built on": _listed([f"v{row['version']}" for row in chain[1:]]),
        "base model": run["base_digest"],
        "spec": f"{run['spec_fingerprint']}, code {run['code_version']}, dataset {run['dataset']}",
    })  # fmt: skip
    names = {"step": "step", "attempt": "attempt", "from": "version_before", "made": "version_after"}
    names |= {"reward": "reward_mean", "trajectories": "trajectories", "trained": "trained", "tokens": "tokens_trained"}
    _rows(console, "steps, newest first", steps, names)
    for step, drawn in told["details"].items():
        names = {"trajectory": "trajectory_id", "prompt": "prompt_id", "reward": "reward", "verdict": "verdict"}
        _rows(
            console, f"trajectories of step {step}, best first", drawn, names | {"fate": "disposition", "text": "text"}
        )


def show_prompt(console: Console, told: dict[str, Any]) -> None:
    first = told["prompt"][0]
    console.print(f"prompt {first['prompt_id']}", style="bold")
    _facts(console, {
        "question": first["question"], "answer": first["answer"], "task": first["task"],
        "datasets": _listed([f"{row['dataset']} ({row['split']})" for row in told["prompt"]]),
    })  # fmt: skip
    names = {"group": "group_id", "drawn at": "drawn_at", "step": "step", "trained": "trained_trajectories"}
    names |= {"tokens": "trained_tokens", "first in": "first_version"}
    _rows(console, "drawn", told["draws"], names)
    saw: dict[str, list[str]] = {}
    for row in told["versions"]:
        saw.setdefault(row["run"], []).append(f"v{row['version']}")
    for run, versions in saw.items():
        console.print(f"{len(versions)} versions of {run} have its gradients: {_listed(versions)}", markup=False)
    if not saw:
        console.print("no weights version has its gradients")


def show_trajectory(console: Console, told: dict[str, Any]) -> None:
    row = told["trajectory"]
    console.print(f"trajectory {row['trajectory_id']}", style="bold", markup=False)
    spans = [f"v{span['version']} sampled tokens {span['start']} to {span['end'] - 1}" for span in row["version_spans"]]
    _facts(console, {
        "prompt": row["prompt_id"], "group": row["group_id"], "seed": row["seed"],
        "tokens": f"{row['tokens']}, {row['sampled']} sampled",
        "sampled by": _listed(spans), "engine": row["engine"], "ended by": row["finish_reason"], "text": row["text"],
    })  # fmt: skip
    _rows(console, "rewards", told["rewards"], _same("verifier", "verifier_version", "verdict", "score", "extracted"))
    _rows(console, "steps", told["outcomes"], _same("step", "attempt", "made", "reward", "advantage", "disposition"))
    _rows(console, "failed tries", told["failures"], _same("try", "kind", "tokens", "detail"))


def show_rows(console: Console, found: pa.Table, form: str) -> None:
    """A query's result: a table for people, CSV or JSON lines for programs."""
    if form == "csv":
        import csv

        writer = csv.writer(sys.stdout)
        writer.writerow(found.column_names)
        writer.writerows(row.values() for row in found.to_pylist())
    elif form == "json":
        import json

        for row in found.to_pylist():
            print(json.dumps(row, default=str))
    else:
        _rows(console, f"{found.num_rows} rows", found.slice(0, 200).to_pylist(), _same(*found.column_names), most=200)
        if found.num_rows > 200:
            console.print("the first 200 are shown; --format csv gives all")


def show_schema(console: Console) -> None:
    """Names to ask for."""
    for name, schema in TABLES.items():
        console.print(f"[bold]{name}[/bold]  {', '.join(schema.names)}")
    for name, (told, _) in VIEWS.items():
        console.print(f"[bold]{name}[/bold] (view)  {told}")


def _facts(console: Console, facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        console.print(f"  {name:<12} {value}", markup=False)


def _same(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _rows(console: Console, title: str, rows: list[dict[str, Any]], names: dict[str, str], most: int = SHOWN) -> None:
    """A table; `names` is heading -> column."""
    if not rows:
        return
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading, name in names.items():
        number = all(isinstance(row[name], int | float) or row[name] is None for row in rows)
        # An id that is cut off is no use; a long text may be folded.
        table.add_column(
            heading, justify="right" if number else "left", no_wrap=name.endswith("_id") or number, overflow="fold"
        )
    for row in rows[:most]:
        table.add_row(*(_short(row[name]) for name in names.values()))
    console.print(table)
    if len(rows) > most:
        console.print(f"  and {len(rows) - most} more; --json or SQL gives all")


def _short(value: Any) -> Any:
    from rich.text import Text

    if isinstance(value, float):
        value = f"{value:.4g}"
    return Text("" if value is None else " ".join(str(value).split())[:60])


def _listed(parts: list[str]) -> str:
    rest = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return (", ".join(parts[:SHOWN]) + rest) or "none"
