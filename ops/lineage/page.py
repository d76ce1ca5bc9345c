"""A weights version's lineage as one HTML file that needs nothing beside it: no network, no script, no other file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from html import escape
from typing import Any

STYLE = """
:root{color-scheme:light dark;--line:#8884;--dim:#888;--good:#2a8f5b;--bad:#c0392b}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem} h2{font-size:1.15rem;margin-top:2rem;border-bottom:1px solid var(--line)}
table{border-collapse:collapse;width:100%;font-size:.87rem} th{text-align:left;color:var(--dim);font-weight:600}
td,th{padding:.25rem .7rem .25rem 0;vertical-align:top;border-bottom:1px solid var(--line)}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums} code{font-size:.85em;overflow-wrap:anywhere}
.text{white-space:pre-wrap;overflow-wrap:anywhere;max-width:30rem} .dim{color:var(--dim)}
.trained{color:var(--good)} .failed{color:var(--bad)} summary{cursor:pointer;margin:.6rem 0} pre{overflow:auto}
"""
LONGEST = 600
"""Characters of a question or reply that are shown."""


def version_page(told: dict[str, Any], checks: Iterable[dict[str, Any]] = ()) -> str:
    """The page.

    Args:
        told: from `version_lineage`.
        checks: rows of `checks` of the step that made the version.
    """
    run, chain = told["run"], told["chain"]
    mine = chain[0]
    name = f"{run['run']} v{told['version']}"
    parts = [
        f"<h1>{_(name)}</h1><p class=dim>{_(', '.join(told['tags']) or 'no tags')} · {_(mine['state'])} · "
        f"written {_when(time.time())}</p>",
        _facts(told, mine, run),
        "<h2>Steps whose gradients are in it</h2>",
        _table(told["steps"], _STEP_COLUMNS),
        "<h2>Versions it is built on</h2>",
        _table(chain, _CHAIN_COLUMNS),
        "<h2>Sampled by</h2><p>Trained tokens by the weights version that sampled them.</p>",
        _table(told["sampled_by"], {"version": _number, "tokens": _number}),
        "<h2>Reward code</h2>",
        _table(told["verifiers"], {"verifier": _code, "verifier_version": _code, "trajectories": _number}),
        "<h2>Checks of its step</h2>",
        _table(list(checks), {"check": _, "passed": _yes, "blocking": _yes, "message": _text}),
        *(_step(step, rows) for step, rows in told["details"].items()),
        "<h2>Spec</h2><details><summary>every field</summary>"
        f"<pre>{_(json.dumps(json.loads(run['spec']), indent=2))}</pre></details>",
    ]
    body = "\n".join(parts)
    head = f'<meta charset="utf-8"><title>{_(name)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _facts(told: dict[str, Any], mine: dict[str, Any], run: dict[str, Any]) -> str:
    proofs = ", ".join(f"{proof['engine']}: {proof['digest'][:16]}" for proof in mine["attestations"] or [])
    facts = {
        "digest of all tensors": _code(mine["digest"]),
        "proved by": _(proofs or "no engine yet"),
        "base model": _code(run["base_digest"]),
        "spec fingerprint": _code(run["spec_fingerprint"]),
        "code": _code(run["code_version"]),
        "dataset": _code(run["dataset"]),
        "learnt from": _(
            f"{told['trajectories']:,} trajectories of {told['prompts']:,} prompts, {told['tokens']:,} tokens, "
            f"in {len(told['steps']):,} steps"
        ),
        "live since": _when(mine["live_at"]),
        "the same as text": _code(f"furlong lineage weights v{told['version']} --run {run['run']}"),
    }
    rows = "".join(f"<tr><th>{_(key)}</th><td>{value}</td></tr>" for key, value in facts.items())
    return f"<table>{rows}</table>"


def _step(step: int, rows: list[dict[str, Any]]) -> str:
    shown = [
        row | {"answered": row["text"], "by": ", ".join(f"v{span['version']}" for span in row["version_spans"])}
        for row in rows
    ]
    table = _table(shown, _TRAJECTORY_COLUMNS)
    title = f"<h2>Trajectories of step {step}</h2>"
    return f"{title}<details open><summary>{len(rows)} trajectories, best first</summary>{table}</details>"


def _table(rows: list[dict[str, Any]], columns: dict[str, Callable[[Any], str]]) -> str:
    if not rows:
        return "<p class=dim>none</p>"
    right = {name for name, show in columns.items() if show is _number}
    head = "".join(f"<th{' class=n' if name in right else ''}>{_(name.replace('_', ' '))}</th>" for name in columns)
    lines = []
    for row in rows:
        cells = (f"<td{' class=n' if name in right else ''}>{show(row[name])}</td>" for name, show in columns.items())
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _(value: Any) -> str:
    return "" if value is None else escape(str(value))


def _number(value: Any) -> str:
    if value is None:
        return "<span class=dim>-</span>"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _code(value: Any) -> str:
    return f"<code>{_(value)}</code>" if value is not None else ""


def _short(value: Any) -> str:
    return f'<code title="{_(value)}">{_(str(value)[:12])}</code>' if value is not None else ""


def _text(value: Any) -> str:
    value = "" if value is None else str(value)
    return f"<div class=text>{_(value[:LONGEST])}{'<span class=dim> …</span>' if len(value) > LONGEST else ''}</div>"


def _yes(value: Any) -> str:
    return "<span class=trained>yes</span>" if value else "<span class=failed>no</span>"


def _when(value: float | None) -> str:
    return "" if value is None else _(time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(value)))


_STEP_COLUMNS: dict[str, Callable[[Any], str]] = {
    "step": _number, "attempt": _number, "version_before": _number, "version_after": _number, "reward_mean": _number,
    "trajectories": _number, "trained": _number, "tokens_trained": _number, "mismatch_mean": _number,
    "batch_digest": _short, "digest_after": _short,
}  # fmt: skip
_CHAIN_COLUMNS: dict[str, Callable[[Any], str]] = {
    "version": _number, "step": _number, "attempt": _number, "state": _, "kind": _, "delta_bytes": _number, "transport": _,
    "digest": _short, "live_at": _when,
}  # fmt: skip
_TRAJECTORY_COLUMNS: dict[str, Callable[[Any], str]] = {
    "reward": _number, "verdict": _, "disposition": _, "advantage": _number, "question": _text, "answered": _text,
    "answer": _text, "by": _, "seed": _code, "trajectory_id": _code, "prompt_id": _code,
}  # fmt: skip
