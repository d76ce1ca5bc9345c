"""Claim: over 100 steps of RL a draft that learns beside the policy does not fall behind it; one that stands still does.

    python benchmarks/draft_drift.py [tiny_draft | smollm2_draft] [--steps 100] [--warm 60] [--plot PLOT.svg]

First a draft learns beside a policy that stands still, so that it is good at proposing what that policy says. From there
on the policy learns, with the same seeds, three times: without a draft, with that draft left as it is, and with that draft
learning on. Proposals are verified by `match`, under which no token depends on the draft, so that all three draw and learn
the very same: that is checked, step by step. Interrupted, the same command with the same --root goes on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from draft_runs import STILL, Finished, Runs

from furlong.ops.plots import lines_svg

ENDS = 10
"""First and last steps whose mean is compared."""


def compare(runs: Runs, spec: str, steps: int, warm: int) -> dict[str, Finished]:
    """The three runs, by name."""
    still = {"algorithm.learning_rate": STILL, "steps": warm, "draft.verify": "match"}
    runs.drive(spec, f"{spec}-warm", still)
    start = {"draft.start": runs.draft_of(f"{spec}-warm"), "draft.verify": "match", "steps": steps}
    return {
        "no draft": runs.drive(spec, f"{spec}-none", {"draft": {}, "steps": steps}),
        "frozen": runs.drive(spec, f"{spec}-frozen", start | {"draft.train": False}),
        "co-trained": runs.drive(spec, f"{spec}-learning", start),
    }


def show(found: dict[str, Finished]) -> bool:
    """Print the comparison; whether it is what is claimed."""
    first, last = slice(1, 1 + ENDS), slice(-ENDS, None)
    print(
        "| draft | acceptance length, first -> last | reward, first -> last | s per run | draft's share of training |"
    )
    print("|---|---|---|---|---|")
    ends = {}
    for name, run in found.items():
        ends[name] = [run.mean("acceptance_length_per_step", part) for part in (first, last)]
        lengths = "" if name == "no draft" else f"{ends[name][0]:.2f} -> {ends[name][1]:.2f}"
        rewards = [run.mean("reward_per_step", part) for part in (first, last)]
        share = run.report["draft_train_share"]
        print(
            f"| {name} | {lengths} | {rewards[0]:.3f} -> {rewards[1]:.3f} | {run.report['seconds']:.0f} | "
            f"{'' if share is None else f'{share:.0%}'} |"
        )
    plain = found["no draft"].batches
    same = bool(plain) and all(run.batches == plain for run in found.values())
    print(
        f"all three drew the same, token for token and log-probability for log-probability: {'yes' if same else 'NO'}"
    )
    # Written so that NaN fails.
    kept = ends["co-trained"][1] >= 0.98 * ends["co-trained"][0]
    fell = ends["frozen"][1] < 0.95 * ends["frozen"][0]
    print(
        f"the co-trained draft kept up: {'yes' if kept else 'NO'}; the frozen one fell behind: {'yes' if fell else 'NO'}"
    )
    return same and kept and fell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("spec", nargs="?", default="tiny_draft")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warm", type=int, default=60, help="steps that the draft learns before")
    parser.add_argument("--models", type=Path, default=Path("var/models"), help="where converted models lie")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--root", type=Path, help="folder to keep the runs in; a temporary one without")
    parser.add_argument("--plot", type=Path, help="where to write the plot of frozen against co-trained, as SVG")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(asked.root or Path(folder), asked.models, asked.threads)
        found = compare(runs, asked.spec, asked.steps, asked.warm)
        held = show(found)
        if asked.plot:
            lines = {
                name: [(n, v) for n, v in enumerate(run.report["acceptance_length_per_step"], 1) if v is not None]
                for name, run in found.items()
            }
            asked.plot.write_text(lines_svg(lines, f"acceptance length, {asked.spec}") + "\n")
    sys.exit(not held)


if __name__ == "__main__":
    main()
