"""A stage's report as Dagster metadata: row counts, durations, digests, Delta versions, links, a plot."""

from typing import TYPE_CHECKING, Any

from dagster import MetadataValue

from furlong.ops.plots import line_plot, lines_plot
from furlong.ops.stages.context import StageReport
from furlong.pipelines.column_lineage import table_metadata

if TYPE_CHECKING:
    from furlong.resources.runs import OpenRun

PLOTS = {
    "rollouts": ("mean_reply_tokens", "mean reply length (tokens)"),
    "rewards": ("reward_mean", "mean reward"),
    "train_step": ("mismatch_mean", "mean |trainer - engine| log-probability (nat)"),
    "weight_publish": ("delta_bytes", "bytes of the delta"),
}
"""Stage -> the value drawn over the run's steps, and its title."""


def metadata(report: StageReport, run: "OpenRun") -> dict[str, Any]:
    """Metadata of one materialisation."""
    facts: dict[str, Any] = {
        "seconds": round(report.seconds, 4),
        "seconds_in_actors": round(report.work_seconds, 4),
        "already_committed": not report.wrote,
        "run": report.key.run,
        "step": report.key.step,
        "attempt": report.key.attempt,
        "sql": MetadataValue.md(f"```sql\n{_sql(report)}\n```"),
    }
    facts |= table_metadata(report.stage)
    if version := report.values.get("version") if report.stage == "weight_publish" else None:
        facts["lineage"] = MetadataValue.md(f"`furlong lineage weights v{version} --run {report.key.run}`")
    for commit in report.commits:
        facts[f"{commit.table}_rows"] = commit.rows
        facts[f"{commit.table}_delta_version"] = commit.version
    facts |= {name: value for name, value in report.values.items() if value is not None}
    facts |= {name: MetadataValue.url(link) for name, link in run.links().items()}
    if report.stage == "rollouts" and run.spec.draft:
        mine = "this run, co-trained" if run.spec.draft.get("train", True) else "this run, frozen"
        lines = {mine: run.series("acceptance_length"), **run.twins}
        facts["acceptance_plot"] = MetadataValue.md(lines_plot(lines, "acceptance length (tokens per verify)"))
    if report.stage == "train_step" and run.spec.draft:
        facts["draft_plot"] = MetadataValue.md(line_plot(run.series("draft_loss"), "draft loss (nat)"))
    if report.stage in PLOTS:
        value, title = PLOTS[report.stage]
        facts["plot"] = MetadataValue.md(line_plot(run.series(value), title))
    return facts


def _sql(report: StageReport) -> str:
    """What to ask the lake for a stage's rows, in words that DataFusion and DuckDB both understand."""
    run, where = repr(report.key.run), " AND ".join(f"{k} = {v!r}" for k, v in report.key.columns().items())
    batch = f"(SELECT unnest(groups)['group_id'] FROM batches WHERE {where})"
    dataset = f"(SELECT dataset FROM runs WHERE run = {run})"
    queries = {
        "prompts": f"SELECT split, count(*) FROM prompts WHERE dataset IN {dataset} GROUP BY split",
        "rollouts": f"SELECT * FROM trajectories WHERE group_id IN {batch}",
        "rewards": "SELECT verdict, count(*), avg(score) FROM rewards JOIN trajectories USING (run, trajectory_id)\n"
        f"WHERE group_id IN {batch} GROUP BY verdict",
        "train_step": f"SELECT * FROM steps WHERE {where}",
        "weight_publish": f"SELECT version, state, digest, delta_bytes FROM weight_versions WHERE {where}",
        "evals": f"SELECT version, mode, avg(1.0 * correct / samples) FROM evals WHERE run = {run} GROUP BY version, mode",
    }
    return queries[report.stage]
