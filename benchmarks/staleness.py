"""What the staleness bound buys: the same run with bound 0, 1 and 2, one after the other, on replies of uneven length.

    python benchmarks/staleness.py [--steps 10] [--bounds 0,1,2]

The policy is SmolLM2 without a system message and with room for long replies, which makes their lengths heavy-tailed by
themselves. Engine and trainer get one thread each, so that they can work at the same time on two cores; every bound has
a run of its own in a fresh folder, with the same spec and seed otherwise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

SPEC = {
    "data.system": "",
    "sampling.max_new_tokens": 160,
    "algorithm.prompts_per_step": 4,
    "algorithm.samples_per_prompt": 4,
    "algorithm.warmup_steps": 2,
    "data.eval_prompts": 4,
    "evals.samples": 1,
    "trainer.micro_batch_tokens": 2048,
}


def measure(root: Path, models: Path, bound: int, steps: int) -> dict:
    """Usage (ops.rollouts.usage) of one run, and the median seconds of a step."""
    os.environ.update(FURLONG_ROOT=str(root), DAGSTER_HOME=str(root / "dagster"), FURLONG_THREADS="1")
    from dagster import DagsterInstance

    from furlong.ops.rollouts.usage import usage
    from furlong.ops.spec import Placement
    from furlong.pipelines.definitions import defs
    from furlong.resources.cluster import stop_cluster
    from furlong.resources.dagster_home import ensure_dagster_home
    from furlong.resources.lake import Lake
    from furlong.resources.system import System

    root.mkdir(parents=True)
    (root / "models").symlink_to(models)
    placement = Placement.from_env()
    ensure_dagster_home(placement)
    config = {"spec": "smollm2", "run": f"bound-{bound}", "overrides": {**SPEC, "staleness": bound, "steps": steps}}
    began = time.monotonic()
    try:
        with DagsterInstance.get() as instance:
            defs.resolve_job_def("rl_run").execute_in_process(
                run_config={
                    "ops": {"block": {"config": config}},
                    "loggers": {"console": {"config": {"log_level": "ERROR"}}},
                },
                resources={"system": System(placement)},
                instance=instance,
            )
    finally:
        stop_cluster(placement)
    lake, run = Lake(placement.lake_uri()), config["run"]
    live = sorted(v for v in lake.read("weight_versions", {"run": run}, ["live_at"])["live_at"].to_pylist() if v)
    lengths = [sum(mask) for mask in lake.read("trajectories", {"run": run}, ["loss_mask"])["loss_mask"].to_pylist()]
    return usage(lake, run) | {
        "seconds": time.monotonic() - began,
        "step": statistics.median(b - a for a, b in pairwise(live[1:])),
        "lengths": statistics.quantiles(lengths, n=20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--bounds", default="0,1,2")
    parser.add_argument("--models", type=Path, default=Path("var/models"), help="where the converted model lies")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for bound in map(int, asked.bounds.split(",")):
            found = measure(Path(folder) / f"bound-{bound}", asked.models.resolve(), bound, asked.steps)
            lengths, wasted = found["lengths"], found["wasted_tokens"]
            print(
                f"k={bound}: step {found['step']:.2f} s, engines idle {found['engine_idle_share']:.0%}, waited for a batch "
                f"{found['waited_share']:.0%}, staleness {found['staleness_mean']:.2f} (max {found['staleness_max']}), "
                f"{found['tokens_per_second']:.0f} tokens/s while drawing, reply length p50 {lengths[9]:.0f} p95 "
                f"{lengths[18]:.0f}, wasted {wasted or 'nothing'} of {found['sampled_tokens']}, "
                f"length bias {found['length_bias']}"
            )


if __name__ == "__main__":
    main()
