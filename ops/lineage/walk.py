"""Walks through the lake: from a weights version back to everything that made it, from a prompt forward to every version
that saw it, from a trajectory to both.

All of them are SQL over the views of `views.py`; whoever calls gives the function that runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Rows = Callable[..., list[dict[str, Any]]]
"""(SQL, value for each `?`) -> rows as dictionaries."""


class LineageError(LookupError):
    """Something that is not in the lake; the message says what there is."""


def version_lineage(rows: Rows, run: str, version: int, detail: int = 1) -> dict[str, Any]:
    """Everything that made a weights version.

    Args:
        detail: of so many of its newest steps the trajectories are listed too; 0 for none, -1 for all.
    Returns:
        `run` (its row of `runs`, the spec as text), `chain` (the version and its ancestors, newest first), `steps` (those
        whose gradients are in it, newest first, with counts), `verifiers`, `sampled_by` (versions whose tokens it learnt
        from), `prompts`, `trajectories`, `tokens` (distinct or summed over all steps), `tags`, and `details` (trajectories
        by step).
    Raises:
        LineageError: no such run or version.
    """
    found = rows("SELECT * FROM runs WHERE run = ?", run)
    if not found:
        names = [row["run"] for row in rows("SELECT run FROM runs ORDER BY run")]
        raise LineageError(f"the lake has no run {run!r}; it has {', '.join(names) or 'none'}")
    made = _ancestors(rows, run, version)
    if not made:
        told = rows("SELECT min(version) AS a, max(version) AS b FROM version_parents WHERE run = ?", run)[0]
        has = "none yet" if told["b"] is None else f"{told['a']} to {told['b']}"
        raise LineageError(f"run {run} has no weights version {version}; it has {has}")
    chain = rows(
        """
        SELECT version, parent, step, attempt, state, kind, digest, anchor, full_bytes, delta_bytes, changed_fraction,
            transport, attestations, staged_at, live_at
        FROM weight_versions WHERE run = ? AND version = ANY(?)
        """,
        run, made,
    )  # fmt: skip
    chain.sort(key=lambda row: -row["version"])
    steps = rows(_STEPS, run, made)
    newest = steps if detail < 0 else steps[:detail]
    return {
        "version": version,
        "run": found[0],
        "chain": chain,
        "steps": steps,
        "tags": [row["tag"] for row in rows("SELECT tag FROM weight_tags WHERE run = ? AND version = ?", run, version)],
        **rows(_TOTALS, run, made, run)[0],
        "verifiers": rows(_VERIFIERS, run, made, run),
        "sampled_by": rows(_SAMPLED_BY, run, made, run),
        "details": {row["step"]: step_trajectories(rows, run, row["step"], row["attempt"]) for row in newest},
    }


_STEPS = """
    SELECT step, attempt, version_before, version_after, reward_mean, loss, batch_digest, digest_before, digest_after,
        tokens_trained, mismatch_mean, trainer, len(outcomes) AS trajectories,
        len(list_filter(outcomes, lambda o: o.tokens_trained > 0)) AS trained
    FROM steps WHERE run = ? AND version_after = ANY(?) ORDER BY step DESC
"""
_TAKEN = "SELECT trajectory_id, group_id, tokens_trained FROM outcomes WHERE run = ? AND made = ANY(?)"
_TOTALS = f"""
    WITH taken AS ({_TAKEN}), learnt AS (SELECT * FROM taken WHERE tokens_trained > 0)
    SELECT count(DISTINCT trajectory_id) AS trajectories, count(DISTINCT learnt.group_id) AS groups,
        count(DISTINCT prompt_id) AS prompts, coalesce(sum(tokens_trained), 0)::BIGINT AS tokens
    FROM learnt JOIN (SELECT group_id, prompt_id FROM groups WHERE run = ?) AS drawn ON drawn.group_id = learnt.group_id
"""
_VERIFIERS = f"""
    WITH taken AS ({_TAKEN})
    SELECT verifier, verifier_version, count(*) AS trajectories
    FROM (SELECT * FROM rewards WHERE run = ?) JOIN taken USING (trajectory_id)
    GROUP BY ALL ORDER BY trajectories DESC, verifier, verifier_version
"""
_SAMPLED_BY = f"""
    WITH taken AS ({_TAKEN})
    SELECT span.version AS version, sum(span."end" - span.start)::BIGINT AS tokens FROM (
        SELECT unnest(version_spans) AS span
        FROM (SELECT * FROM trajectories WHERE run = ?) JOIN taken USING (trajectory_id) WHERE tokens_trained > 0
    ) GROUP BY ALL ORDER BY version
"""


def _ancestors(rows: Rows, run: str, version: int) -> list[int]:
    """The version and what it is built on, newest first; none where there is no such version."""
    parents = {row["version"]: row["parent"] for row in rows("SELECT * FROM version_parents WHERE run = ?", run)}
    found, at = [], version
    while at in parents:
        found.append(at)
        at = parents[at]
    return found


def step_trajectories(rows: Rows, run: str, step: int, attempt: int) -> list[dict[str, Any]]:
    """The trajectories that one attempt of a step took, with what came of each; the best first."""
    where = (run, step, attempt)
    drawn_for = rows("SELECT DISTINCT drawn_for FROM batch_groups WHERE run = ? AND step = ? AND attempt = ?", *where)
    # Rows are found by the step that they were drawn for: files that hold none of it are not opened.
    drawn = [row["drawn_for"] for row in drawn_for]
    return rows(
        """
        WITH seen AS (SELECT * FROM outcomes WHERE run = ? AND step = ? AND attempt = ?),
            drawn AS (SELECT * FROM trajectories WHERE run = ? AND step = ANY(?)),
            told AS (SELECT * FROM rewards WHERE run = ? AND step = ANY(?)),
            asked AS (SELECT * FROM prompts WHERE dataset = (SELECT dataset FROM runs WHERE run = ?))
        SELECT trajectory_id, drawn.group_id, prompt_id, drawn.step AS drawn_for, drawn.seed, drawn.finish_reason,
            len(drawn.tokens) AS tokens, drawn.version_spans, drawn.text, seen.reward, seen.advantage, seen.disposition,
            seen.tokens_trained, told.verifier, told.verifier_version, told.verdict, asked.question, asked.answer, asked.task
        FROM seen JOIN drawn USING (trajectory_id) LEFT JOIN told USING (trajectory_id) LEFT JOIN asked USING (prompt_id)
        ORDER BY seen.reward DESC NULLS LAST, trajectory_id
        """,
        *where, run, drawn, run, drawn, run,
    )  # fmt: skip


def prompt_lineage(rows: Rows, prompt_id: str) -> dict[str, Any]:
    """Where a prompt went: every draw of it in every run, and the versions that have its gradients.

    A version saw it if the version's chain holds a step that trained on one of its trajectories. `sampled` counts draws
    that no gradient came of, too.

    Raises:
        LineageError: no such prompt.
    """
    asked = rows("SELECT * FROM prompts WHERE prompt_id = ? ORDER BY dataset", prompt_id)
    if not asked:
        raise LineageError(
            f"no prompt has the id {prompt_id!r}; `furlong sql 'SELECT prompt_id, question FROM prompts'` lists them"
        )
    draws = _draws(rows, prompt_id)
    saw = [row for run in sorted({row["run"] for row in draws}) for row in _descendants(rows, run, draws)]
    tested = rows(
        "SELECT run, version, mode, samples, correct FROM evals WHERE prompt_id = ? ORDER BY run, version", prompt_id
    )
    return {"prompt": asked, "draws": draws, "versions": saw, "evaluated": tested}


def _draws(rows: Rows, prompt_id: str) -> list[dict[str, Any]]:
    """The rows of `prompt_exposure` of one prompt, found without reading those of others."""
    drawn = rows("SELECT run, group_id FROM groups WHERE prompt_id = ?", prompt_id)
    found: list[dict[str, Any]] = []
    for run in sorted({row["run"] for row in drawn}):
        groups = [row["group_id"] for row in drawn if row["run"] == run]
        taken = "SELECT * FROM batch_groups WHERE run = ? AND group_id = ANY(?)"
        steps = sorted({row["step"] for row in rows(taken, run, groups)})
        found += rows(
            f"""
            WITH taken AS (SELECT group_id, step, attempt FROM ({taken})), seen AS (
                SELECT group_id, step, attempt, made, count(*) AS trajectories, sum(tokens_trained)::BIGINT AS tokens
                FROM outcomes WHERE run = ? AND step = ANY(?) AND group_id = ANY(?) AND tokens_trained > 0 GROUP BY ALL
            )
            SELECT drawn.run, dataset, prompt_id, group_id, weights_version AS drawn_at, taken.step, taken.attempt,
                made AS first_version, coalesce(trajectories, 0) AS trained_trajectories,
                coalesce(tokens, 0) AS trained_tokens
            FROM (SELECT run, dataset, prompt_id, group_id, weights_version FROM groups WHERE run = ? AND prompt_id = ?)
                AS drawn
            LEFT JOIN taken USING (group_id) LEFT JOIN seen USING (group_id, step, attempt)
            ORDER BY taken.step, taken.attempt, group_id
            """,
            run, groups, run, steps, groups, run, prompt_id,
        )  # fmt: skip
    return found


def _descendants(rows: Rows, run: str, draws: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The versions of a run that are, or are built on, one that a draw's gradient first came into."""
    first = {row["first_version"] for row in draws if row["run"] == run} - {None}
    saw: set[int] = set()
    # A parent's number is lower than its child's.
    for row in rows("SELECT * FROM version_parents WHERE run = ? ORDER BY version", run) if first else []:
        if row["version"] in first or row["parent"] in saw:
            saw.add(row["version"])
    return [{"run": run, "version": version} for version in sorted(saw)]


def trajectory_lineage(rows: Rows, trajectory_id: str) -> dict[str, Any]:
    """One trajectory: its row without the token lists, its rewards, what steps did with it, what it was drawn by.

    Raises:
        LineageError: no such trajectory.
    """
    found = rows(
        """
        SELECT * EXCLUDE (tokens, logprobs, model_logprobs, loss_mask, routing, drafted), len(tokens) AS tokens,
            len(list_filter(loss_mask, lambda m: m)) AS sampled
        FROM trajectories WHERE trajectory_id = ?
        """,
        trajectory_id,
    )
    if not found:
        raise LineageError(f"no trajectory has the id {trajectory_id!r}; ids look like RUN-00012.1-g003-s00")
    return {
        "trajectory": found[0],
        "rewards": rows("SELECT * FROM rewards WHERE run = ? AND trajectory_id = ?", found[0]["run"], trajectory_id),
        "outcomes": rows("SELECT * FROM outcomes WHERE run = ? AND trajectory_id = ?", found[0]["run"], trajectory_id),
        "failures": rows("SELECT * FROM failures WHERE run = ? AND trajectory_id = ?", found[0]["run"], trajectory_id),
    }
