"""Claim: with a draft that learns beside the policy, the training of it included, a run of SmolLM2 takes no longer.

    python benchmarks/draft_end_to_end.py [--steps 12] [--batches 4,16,64] [--threads 2]

For each batch of so many replies per step two runs, one after the other and from the same seed: without a draft, and with
one that begins from the policy, learns in every step and is asked only where that is measured to pay. What a step's parts
took is compared over the second half, when the draft has learnt something. The machine's own pace changes with what else
runs: compare within a row.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median

from draft_runs import Finished, Runs

SPEC = {
    "data.system": "",
    "sampling.max_new_tokens": 96,
    "algorithm.warmup_steps": 1,
    "data.eval_prompts": 4,
    "evals.samples": 1,
}
"""Replies of some length: one of two tokens leaves nothing to speculate about."""
DRAFT = {"kind": "eagle3", "learning_rate": 3.0e-4, "warmup_steps": 3}


def parts(runs: Runs, name: str, spec: dict) -> tuple[Finished, dict[str, float]]:
    """A run, and the median seconds of its later steps, by stage."""
    found = runs.drive("smollm2", name, spec)
    return found, {stage: median(some[len(some) // 2 :]) for stage, some in runs.stage_seconds(name).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batches", default="4,16,64", help="replies per step, in groups of 4")
    parser.add_argument("--models", type=Path, default=Path("var/models"), help="where converted models lie")
    parser.add_argument("--threads", type=int, default=2)
    asked = parser.parse_args()
    print("| replies | rollout s | with draft | train s | with draft | both together | acceptance length | off |")
    print("|---|---|---|---|---|---|---|---|")
    for batch in map(int, asked.batches.split(",")):
        spec = SPEC | {
            "steps": asked.steps, "algorithm.prompts_per_step": max(1, batch // 4),
            "algorithm.samples_per_prompt": min(4, batch),
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(Path(folder), asked.models, asked.threads)
            _, plain = parts(runs, f"plain-{batch}", spec)
            found, drafted = parts(runs, f"drafted-{batch}", spec | {"draft": DRAFT})
        gain = (plain["rollouts"] + plain["train_step"]) / (drafted["rollouts"] + drafted["train_step"])
        told = found.report["draft"]
        print(
            f"| {batch} | {plain['rollouts']:.2f} | {drafted['rollouts']:.2f} "
            f"({plain['rollouts'] / drafted['rollouts']:.2f} x) | {plain['train_step']:.2f} | {drafted['train_step']:.2f} | "
            f"{gain:.2f} x | {told.get('acceptance_length', float('nan')):.2f} | "
            f"{told.get('speculation_off_share', 0.0):.0%} ({told.get('speculation_off_because', '')}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
