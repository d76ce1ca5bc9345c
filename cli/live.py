"""The live view of a run in the terminal: stage, step, reward, tokens per second, time left."""

from __future__ import annotations

import json
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from furlong.ops.spec import Placement
from furlong.ops.stages.context import StageReport, StepKey

BARS = " ▁▂▃▄▅▆▇█"
SPARKS = 50
"""Steps that the live view draws, so that a line fits 80 columns."""


class LiveView:
    """An Observer that redraws one small panel; in a pipe it prints a line per step instead."""

    def __init__(self, console: Console):
        self.console = console
        self.run: Any = None
        self.stage, self.step, self.begin = "starting Ray, engine and trainer", 0, time.time()
        self.stage_begin = time.time()
        self.walls: list[float] = []
        self.tokens_per_second = 0.0
        self.last: dict[str, Any] = {}
        self.animated = console.is_terminal
        self.live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveView:
        if self.animated:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def run_opened(self, run: Any) -> None:
        self.run = run
        self.console.print(
            f"run [bold]{run.name}[/bold]: {run.spec.steps} steps of {run.spec.algorithm.prompts_per_step} prompts x "
            f"{run.spec.algorithm.samples_per_prompt} replies, ready after {time.time() - self.begin:.0f} s"
        )

    def stage_started(self, stage: str, key: StepKey) -> None:
        self.stage, self.step, self.stage_begin = stage, key.step, time.time()

    def stage_finished(self, report: StageReport) -> None:
        self.last |= report.values
        if report.stage == "rollouts" and report.wrote and not self.run.spec.staleness:
            self.tokens_per_second = report.values["reply_tokens"] / max(report.work_seconds, 1e-9)
        if report.stage == "evals" and report.values:
            shown = ", ".join(f"{name} {value:.2f}" for name, value in report.values.items() if "pass" not in name)
            self.console.print(f"accuracy on unseen questions: {shown}")

    def step_finished(self, step: int, drive: Any) -> None:
        self.walls.append(drive.steps[-1]["wall"])
        if self.run.spec.staleness:
            # Replies are drawn all the time, not only while a batch is waited for.
            self.tokens_per_second = self.last.get("reply_tokens", 0) / max(self.walls[-1], 1e-9)
        if not self.animated:
            self.console.print(
                f"step {step}/{self.run.spec.steps} reward {self.last.get('reward_mean', 0):.2f} "
                f"{self.tokens_per_second:.0f} tokens/s {self.walls[-1]:.1f} s"
            )

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_row("stage", Text(f"{self.stage}  {time.time() - self.stage_begin:.0f} s", style="cyan"))
        if self.run is not None:
            table.add_row("step", f"{self.step} of {self.run.spec.steps}   time left {self._left()}")
            rewards = self.run.series("reward_mean")
            if rewards:
                table.add_row("reward", f"{rewards[-1][1]:.2f}  {sparkline([value for _, value in rewards[-SPARKS:]])}")
            table.add_row("rollout", f"{self.tokens_per_second:.0f} tokens/s{self._acceptance()}{self._staleness()}")
        return table

    def _acceptance(self) -> str:
        if "acceptance_length" not in self.last:
            return ""
        return f"   {self.last['acceptance_length']:.2f} tokens per verify"

    def _staleness(self) -> str:
        if not self.run.spec.staleness or "staleness_mean" not in self.last:
            return ""
        return f"   staleness {self.last['staleness_mean']:.2f}, at most {self.last['staleness_max']}"

    def _left(self) -> str:
        if not self.walls:
            return "unknown yet"
        recent = self.walls[-5:]
        seconds = (self.run.spec.steps - self.step + 1) * sum(recent) / len(recent) - (time.time() - self.stage_begin)
        return f"{max(seconds, 0) // 60:.0f} min {max(seconds, 0) % 60:.0f} s"

    def report(self, placement: Placement) -> dict[str, Any]:
        """The finished run's report."""
        return json.loads((placement.folder / "runs" / self.run.name / "report.json").read_text())


def sparkline(values: list[float], low: float = 0.0, high: float | None = None) -> str:
    """One character per value, between `low` and `high` (by default the largest value)."""
    top = max(values) if high is None else high
    scale = (top - low) or 1.0
    return "".join(BARS[round(max(0.0, min(1.0, (value - low) / scale)) * (len(BARS) - 1))] for value in values)
