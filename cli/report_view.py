"""A finished run's report, as text."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from furlong.ops.spec import Placement

PLOT_ROWS = 8


def show_report(console: Console, report: dict[str, Any], placement: Placement) -> None:
    """Print reward, accuracy, bytes, extremes, lineage and what to do next."""
    console.print(reward_plot(report["reward_per_step"]))
    console.print(_numbers(report))
    for name in ("best", "worst"):
        if report[name]:
            console.print(_trajectory(name, report[name]))
    console.print(_lineage(report["lineage"]))
    console.print(f"report: {placement.folder / 'runs' / report['run'] / 'report.json'}")
    console.print(
        f"[bold]make ui[/bold] opens Dagster: its steps are the partitions {report['run']}-00001 and on of each asset; "
        "[bold]make down[/bold] stops Ray"
    )


def reward_plot(rewards: list[float], width: int = 72) -> Text:
    """Mean reward over steps, between 0 and 1, averaged into at most `width` columns."""
    per = max(1, -(-len(rewards) // width))
    columns = [rewards[i : i + per] for i in range(0, len(rewards), per)]
    means = [sum(column) / len(column) for column in columns]
    lines = []
    for row in range(PLOT_ROWS, 0, -1):
        level = row / PLOT_ROWS
        label = f"{level:4.2f} " if row in (PLOT_ROWS, PLOT_ROWS // 2) else "     "
        lines.append(label + "│" + "".join("█" if mean >= level - 0.5 / PLOT_ROWS else " " for mean in means))
    lines.append(f"     └{'─' * len(means)}")
    lines.append(f"      mean reward, steps 1 to {len(rewards)}")
    return Text("\n".join(lines))


def _numbers(report: dict[str, Any]) -> Table:
    table = Table(title=f"run {report['run']}", title_justify="left", show_header=False)
    split = report["eval_split"]
    deltas = report["delta_bytes_per_step"]
    table.add_row(
        "mean reward, first and last step", f"{report['reward_per_step'][0]:.2f} -> {report['reward_per_step'][-1]:.2f}"
    )
    table.add_row("unseen questions, sampled", f"{report['eval_before']:.2f} -> {report['eval_after']:.2f}")
    table.add_row("unseen questions, greedy", f"{report['greedy_before']:.2f} -> {report['greedy_after']:.2f}")
    table.add_row(
        "split by question",
        f"{split['eval_questions']} unseen, {split['train_questions']} for training, "
        f"{split['eval_questions_trained_on']} in both",
    )
    table.add_row("time", f"{report['seconds']:.0f} s for {report['steps']} steps")
    table.add_row("rollout", f"{report['tokens_per_second']:.0f} tokens/s")
    for name, text in [*_rollouts(report["rollouts"]), *_draft(report)]:
        table.add_row(name, text)
    overhead = report["overhead_seconds_per_step"]
    table.add_row(
        "overhead per step, beside engine, trainer, verifier",
        "not measured" if overhead is None else f"{overhead:.2f} s",
    )
    table.add_row("peak memory", f"{report['peak_rss_bytes'] / 1e9:.1f} GB")
    table.add_row("a full publish", f"{report['full_bytes'] / 1e6:.1f} MB")
    table.add_row("a delta publish (mean)", f"{sum(deltas) / len(deltas) / 1e6:.2f} MB")
    return table


def _rollouts(used: dict[str, Any]) -> list[tuple[str, str]]:
    """What an asynchronous or a troubled run adds to a quiet one's numbers."""
    rows = []
    if used["staleness_max"]:
        rows.append(("staleness, mean and largest", f"{used['staleness_mean']:.2f}, {used['staleness_max']} steps"))
        rows.append(("engines idle", f"{used['engine_idle_share']:.0%} of the time"))
    if wasted := used["wasted_tokens"]:
        causes = ", ".join(f"{count / used['sampled_tokens']:.1%} {cause}" for cause, count in wasted.items())
        rows.append(("tokens not trained on", causes))
    if failures := used["failures"]:
        rows.append(("tries that failed", ", ".join(f"{count} {kind}" for kind, count in failures.items())))
    return rows


def _draft(report: dict[str, Any]) -> list[tuple[str, str]]:
    """What a run with a draft adds."""
    told = report["draft"]
    if told is None:
        return []
    lengths = [length for length in report["acceptance_length_per_step"] if length is not None]
    gain, share = report["rollout_speedup"], report["draft_train_share"]
    rows = [
        (
            "acceptance length, first and last",
            f"{lengths[0]:.2f} -> {lengths[-1]:.2f} tokens per verify" if lengths else "nothing was proposed",
        ),
        (
            "rollout speed-up by the draft",
            "not measured: no decode steps of one size both with and without it"
            if gain is None
            else f"{gain:.2f} x, {told['tokens_per_second_with_draft']:.0f} against "
            f"{told['tokens_per_second_without']:.0f} tokens/s",
        ),
    ]
    if told.get("speculation_off_share"):
        rows.append(
            (
                "decode steps without proposals",
                f"{told['speculation_off_share']:.0%} ({told['speculation_off_because']})",
            )
        )
    rows.append(("draft's share of train time", "not trained" if share is None else f"{share:.0%}"))
    return rows


def _trajectory(name: str, told: dict[str, Any]) -> Panel:
    text = Text(f"{told['question']}\n", style="dim")
    text.append(told["reply"] or "(empty)", style="green" if told["reward"] else "red")
    text.append(
        f"\nanswer {told['answer']}, reward {told['reward']:.0f}, ended by {told['finish_reason']}", style="dim"
    )
    return Panel(text, title=f"{name} trajectory of the last step: {told['trajectory_id']}", title_align="left")


def _lineage(line: dict[str, Any]) -> Panel:
    kinds = list(line["trajectories"].values())
    names = [name[:8] for name in line["prompts"]]
    prompts = ", ".join(names[:4]) + (f" ... ({len(names)} in all)" if len(names) > 4 else "")
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in sorted(set(kinds)))
    ancestors = [f"v{version}" for version in line["ancestors"]]
    shown = " <- ".join(ancestors[:6] + (["...", ancestors[-1]] if len(ancestors) > 6 else []))
    sampled = ", ".join(f"v{version}" for version in line["sampled_by_versions"])
    text = (
        f"v{line['version']} digest {line['digest'][:16]} was made by step {line['step']} from {len(kinds)} trajectories "
        f"({counts})\nsampled by {sampled} on prompts {prompts}\nbuilt on {shown}"
    )
    return Panel(Text(text), title="lineage of the last weights version", title_align="left")
