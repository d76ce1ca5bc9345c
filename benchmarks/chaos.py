"""The tiny demo with bound 2 while things go wrong all the time: does the reward still rise, and is nothing lost?

    python benchmarks/chaos.py [--steps 160] [--every 3]

Two engines. Every few steps one of them, in turn, is killed (SIGKILL) or, each fourth time, stopped (SIGSTOP), which
breaks its connections without ending it; every tenth conversation takes ten times as long as the median one. Prints the
reward, accuracy before and after, failures and rejections by kind, and whether every prompt is accounted for.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

from furlong.ops.envs.protocol import Message, Observation
from furlong.ops.envs.single_turn import opening

SLOW_SHARE, SLOW_SECONDS = 0.1, 1.0
FURLONG = str(Path(sys.executable).with_name("furlong"))


class Uneven:
    """A single reply, after which one conversation in ten does not end for a while; named in the run's `data.env`."""

    tools = ()

    def __init__(self, system: str = ""):
        self._system = system

    def begin(self, prompt: dict) -> list[Message]:
        return opening(self._system, prompt["question"])

    def episode(self, prompt: dict, seed: int) -> Uneven:
        # Of the seed, so that a conversation that is played again is as slow as before.
        return _Slow() if random.Random(seed).random() < SLOW_SHARE else self

    def step(self, reply: Message, deadline: float) -> Observation:
        return Observation((), done=True)

    def close(self) -> None:
        """Nothing is held."""


class _Slow(Uneven):
    def step(self, reply: Message, deadline: float) -> Observation:
        time.sleep(SLOW_SECONDS)
        return Observation((), done=True)


def disturb(root: Path, run: str, driver: subprocess.Popen, every: int) -> dict[str, int]:
    """Kill or stop an engine each `every` published steps until the driver ends."""
    from furlong.resources.lake import Lake
    from furlong.resources.processes import writer_of

    lake, done, struck = Lake(str(root / "lake")), 0, {"killed": 0, "stopped": 0}
    while driver.poll() is None:
        time.sleep(0.2)
        newest = max(lake.read("steps", {"run": run}, ["step"])["step"].to_pylist(), default=0)
        if newest < done + every:
            continue
        count, done = sum(struck.values()), newest
        engine = writer_of(root / "logs" / f"{('engine', 'engine-1')[count % 2]}-{run}.log")
        if engine is not None:
            stop = count % 4 == 3
            engine.send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
            struck["stopped" if stop else "killed"] += 1
    return struck


def drive(root: Path, steps: int) -> subprocess.Popen:
    from furlong.ops.spec import SPEC_FOLDER

    spec = yaml.safe_load((SPEC_FOLDER / "tiny.yaml").read_text())
    spec |= {"name": "chaos", "staleness": 2, "steps": steps}
    spec["data"]["env"] = {"name": "chaos:Uneven"}
    path = root / "chaos.yaml"
    path.write_text(yaml.safe_dump(spec))
    env = {
        **os.environ, "FURLONG_ROOT": str(root), "FURLONG_ENGINES": "2", "FURLONG_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent),
    }  # fmt: skip
    return subprocess.Popen([FURLONG, "demo", "--spec", str(path), "--run", "chaos"], env=env)


def account_of(root: Path, run: str) -> tuple[list[str], dict]:
    """What is wrong with the conservation of prompts, and `usage`."""
    from furlong.ops.rollouts.ledger import Ledger
    from furlong.ops.rollouts.reconcile import account, owed
    from furlong.ops.rollouts.usage import usage
    from furlong.resources.lake import Lake

    lake = Lake(str(root / "lake"))
    ledger = Ledger.replay(run, lake.read("ledger", {"run": run}))
    positions = {row["group_id"]: row["position"] for row in lake.read("groups", {"run": run}).to_pylist()}
    return account(ledger, positions, owed(ledger, positions)), usage(lake, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--every", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        began = time.monotonic()
        driver = drive(root, asked.steps)
        try:
            struck = disturb(root, "chaos", driver, asked.every)
        finally:
            driver.kill()
            subprocess.run([FURLONG, "down"], env={**os.environ, "FURLONG_ROOT": folder}, check=False, timeout=120)
        wrong, used = account_of(root, "chaos")
        report = json.loads((root / "runs" / "chaos" / "report.json").read_text())
        rewards = report["reward_per_step"]
        print(f"{time.monotonic() - began:.0f} s, {struck}; lost or doubled prompts: {wrong or 'none'}")
        print(f"reward first ten {statistics.mean(rewards[:10]):.2f}, last ten {statistics.mean(rewards[-10:]):.2f}")
        print(f"sampled accuracy {report['eval_before']:.2f} -> {report['eval_after']:.2f}")
        print(f"staleness mean {used['staleness_mean']:.2f}, largest {used['staleness_max']}; groups {used['groups']}")
        print(f"failures {used['failures']}; wasted {used['wasted_tokens']} of {used['sampled_tokens']} tokens")


if __name__ == "__main__":
    main()
