"""How long lineage takes over many trajectories: weights back to tokens, and a prompt forward to weights.

    python benchmarks/lineage.py [--trajectories 10000 100000 1000000] [--keep FOLDER]

Makes a lake of 8 runs whose steps take 8 groups of 8 trajectories of 32 tokens, as compaction leaves one (files of many
steps, in order), and asks for the newest weights version of one run and for one prompt, three times each. `open` is what
a new process pays first, beside its imports; `command` is the whole of `furlong lineage ...`, imports included.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from furlong.ops import records
from furlong.ops.lineage.walk import prompt_lineage, version_lineage
from furlong.resources.lake import Lake
from furlong.resources.sql import Sql

RUNS, GROUPS, SAMPLES, PROMPT, REPLY, PROMPTS = 8, 8, 8, 8, 24, 4096
REPEATS = 3
CHUNK = 256
"""Steps that are written at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--keep", default="", help="Folder to keep the largest lake in; by default none is kept.")
    chosen = parser.parse_args()
    print(f"{'trajectories':>12} {'on disk':>9} {'written':>9} {'open':>7} {'weights':>8} {'prompt':>8} {'command':>8}")
    found: list[tuple[int, float, float]] = []
    for count in sorted(chosen.trajectories):
        keep = chosen.keep if count == max(chosen.trajectories) else ""
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(keep or scratch)
            found.append(measure(root, count))
    if len(found) > 1:
        (few, *small), (many, *large) = found[0], found[-1]
        growth = [math.log(b / a) / math.log(many / few) for a, b in zip(small, large, strict=True)]
        print(f"growth exponent from {few:,} to {many:,}: weights {growth[0]:.2f}, prompt {growth[1]:.2f}")


def measure(root: Path, count: int) -> tuple[int, float, float]:
    """Make the lake and ask; prints one line."""
    steps = max(1, count // (RUNS * GROUPS * SAMPLES))
    begin = time.perf_counter()
    lake = Lake(str(root / "lake"))
    lake.create()
    for number in range(RUNS):
        write_run(lake, f"run{number}", steps)
    write(lake, "prompts", "", prompts())
    written = time.perf_counter() - begin
    size = sum(path.stat().st_size for path in (root / "lake").rglob("*") if path.is_file())
    opened, weights, prompt = [], [], []
    for _ in range(REPEATS):
        with timed(opened):
            sql = Sql(Lake(str(root / "lake")))
        with sql:
            with timed(weights):
                told = version_lineage(sql.rows, "run3", steps)
            assert told["trajectories"] == steps * GROUPS * SAMPLES, told["trajectories"]
            with timed(prompt):
                seen = prompt_lineage(sql.rows, prompt_id(steps % PROMPTS))
            assert seen["draws"]
    command: list[float] = []
    for _ in range(REPEATS):
        with timed(command):
            subprocess.run(
                [Path(sys.executable).with_name("furlong"), "lineage", "weights", f"v{steps}", "--run", "run3"],
                env=os.environ | {"FURLONG_ROOT": str(root)},
                check=True,
                capture_output=True,
                timeout=300,
            )
    middle = [statistics.median(taken) for taken in (opened, weights, prompt, command)]
    total = RUNS * steps * GROUPS * SAMPLES
    print(
        f"{total:12,} {size / 2**20:6.0f} MB {written:8.1f}s " + " ".join(f"{seconds:7.2f}" for seconds in middle),
        flush=True,
    )
    return total, middle[1], middle[2]


class timed:
    """Adds the seconds of a block to a list."""

    def __init__(self, into: list[float]):
        self._into = into

    def __enter__(self) -> None:
        self._begin = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._into.append(time.perf_counter() - self._begin)


def write(lake: Lake, table: str, run: str, data: pa.Table) -> None:
    handle = lake._handle(table)
    handle.write(handle.ensure(), records.validate(table, data), run, {}, None)


def write_run(lake: Lake, run: str, steps: int) -> None:
    spec = {
        "spec_fingerprint": "f" * 16,
        "spec": "{}",
        "dataset": "d" * 16,
        "base_digest": "b" * 64,
        "code_version": "c",
    }
    write(lake, "runs", run, records.rows("runs", [{"run": run, **spec, "created_at": 0.0}]))
    versions = [version(run, number) for number in range(steps + 1)]
    write(lake, "weight_versions", run, records.rows("weight_versions", versions))
    for first in range(1, steps + 1, CHUNK):
        some = np.arange(first, min(first + CHUNK, steps + 1))
        for table, data in chunk(run, some).items():
            write(lake, table, run, data)


def version(run: str, number: int) -> dict[str, Any]:
    return {
        "run": run,
        "step": number,
        "attempt": 1,
        "version": number,
        "state": "live",
        "kind": "delta" if number else "anchor",
        "parent": number - 1 if number else None,
        "digest": f"{number:064x}",
        "tensors": [],
        "anchor": None if number else "base",
        "full_bytes": 1,
        "delta_bytes": 1,
        "changed_fraction": 0.1,
        "attestations": [],
        "fence": 1,
        "transport": "p2p",
        "wire_bytes": 1,
        "stage_seconds": 0.1,
        "pause_seconds": 0.01,
        "retried_because": "",
        "staged_at": 0.0,
        "live_at": 0.0,
    }


def prompt_id(number: int) -> str:
    return f"{number:016x}"


def prompts() -> pa.Table:
    n = PROMPTS
    same = {"dataset": "d" * 16, "split": "train", "task": "sums", "question": "1 + 1", "answer": "2", "entry": "{}"}
    columns: dict[str, Any] = {name: [value] * n for name, value in same.items()}
    columns |= {"prompt_id": [prompt_id(at) for at in range(n)], "position": range(n), "verifier": ["exact"] * n}
    return pa.table(
        {
            name: pa.array(columns[name], records.TABLES["prompts"].field(name).type)
            for name in records.TABLES["prompts"].names
        }
    )


def chunk(run: str, steps: np.ndarray) -> dict[str, pa.Table]:
    """The rows of some steps."""
    by_group = np.repeat(steps, GROUPS)
    by_sample = np.repeat(by_group, SAMPLES)
    group_number, sample = np.tile(np.arange(GROUPS), len(steps)), np.tile(np.arange(SAMPLES), len(by_group))
    groups = [f"{run}-{step:05d}.1-g{g:03d}" for step, g in zip(by_group, group_number, strict=True)]
    names = [f"{groups[at // SAMPLES]}-s{s:02d}" for at, s in enumerate(sample)]
    of_group = np.repeat(np.array(groups), SAMPLES)
    asked = [prompt_id((int(step) * GROUPS + int(g)) % PROMPTS) for step, g in zip(by_group, group_number, strict=True)]
    n, rng = len(names), np.random.default_rng(int(steps[0]))
    score = rng.integers(0, 2, n).astype(float)
    whole = PROMPT + REPLY
    sampled = np.tile(np.arange(whole) >= PROMPT, n)
    logprobs = pa.array(np.where(sampled, -rng.random(n * whole), np.nan).astype(np.float32), mask=~sampled)
    tables = {
        "groups": {
            "run": run,
            "step": by_group,
            "attempt": 1,
            "group_id": groups,
            "position": by_group * GROUPS + group_number,
            "dataset": "d" * 16,
            "prompt_id": asked,
            "prompt_tokens": listed(np.zeros(len(groups) * PROMPT), len(groups)),
            "samples": SAMPLES,
            "weights_version": by_group - 1,
        },
        "trajectories": {
            "run": run,
            "step": by_sample,
            "attempt": 1,
            "trajectory_id": names,
            "group_id": of_group,
            "prompt_id": np.repeat(np.array(asked), SAMPLES),
            "sample": sample,
            "leaf": 0,
            "turns": 1,
            "messages": "[]",
            "tokens": listed(rng.integers(0, 50_000, n * whole), n),
            "logprobs": listed(logprobs, n),
            "model_logprobs": listed(logprobs, n),
            "loss_mask": listed(sampled, n),
            "routing": None,
            "drafted": None,
            "version_spans": listed(
                pa.StructArray.from_arrays(
                    [
                        pa.array(by_sample - 1, pa.int64()),
                        pa.array([PROMPT] * n, pa.int32()),
                        pa.array([whole] * n, pa.int32()),
                    ],
                    ["version", "start", "end"],
                ),
                n,
            ),
            "finish_reason": "stop",
            "seed": rng.integers(0, 2**62, n),
            "text": "2",
            "engine": "e",
            "started_at": 0.0,
            "seconds": 0.5,
        },
        "rewards": {
            "run": run,
            "step": by_sample,
            "attempt": 1,
            "trajectory_id": names,
            "verifier": "exact",
            "verifier_version": "1",
            "verdict": "correct",
            "score": score,
            "extracted": "2",
            "detail": "",
            "seconds": 0.0,
        },
        "batches": {
            "run": run,
            "step": steps,
            "attempt": 1,
            "version": steps - 1,
            "groups": listed(
                pa.StructArray.from_arrays(
                    [pa.array(by_group, pa.int64()), pa.array([1] * len(groups), pa.int32()), pa.array(groups)],
                    ["step", "attempt", "group_id"],
                ),
                len(steps),
            ),
            "staleness_mean": 0.0,
            "staleness_max": 0,
            "passed_over": 0,
            "waiting_groups": 0,
            "waiting_tokens": None,
            "waited_seconds": 0.0,
            "speculation": None,
        },
        "steps": {
            **{name: 0.5 for name in records.TABLES["steps"].names if not records.TABLES["steps"].field(name).nullable},
            **{name: None for name in records.TABLES["steps"].names if records.TABLES["steps"].field(name).nullable},
            "run": run,
            "step": steps,
            "attempt": 1,
            "version_before": steps - 1,
            "version_after": steps,
            **dict.fromkeys(("batch_digest", "digest_before", "digest_after", "master_digest_after"), "d" * 64),
            "trainer": "t",
            "tokens_trained": GROUPS * SAMPLES * REPLY,
            "outcomes": listed(
                pa.StructArray.from_arrays(
                    [
                        pa.array(names),
                        pa.array(of_group),
                        pa.array(score),
                        pa.array(score - 0.5),
                        pa.array(["trained"] * n),
                        pa.array([REPLY] * n, pa.int64()),
                        pa.array([REPLY] * n, pa.int64()),
                    ],
                    [
                        "trajectory_id",
                        "group_id",
                        "reward",
                        "advantage",
                        "disposition",
                        "tokens_trained",
                        "tokens_reached",
                    ],
                ),
                len(steps),
            ),
        },
    }
    return {table: as_table(table, columns) for table, columns in tables.items()}


def listed(values: Any, rows: int) -> pa.ListArray:
    """Values in lists of equal length, one per row."""
    values = values if isinstance(values, pa.Array) else pa.array(values)
    return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1) * (len(values) // rows), pa.int32()), values)


def as_table(table: str, columns: dict[str, Any]) -> pa.Table:
    """Columns in the table's types; a single value stands for all rows."""
    rows = max(len(value) for value in columns.values() if isinstance(value, np.ndarray | pa.Array | list))
    schema, arrays = records.TABLES[table], []
    for field in schema:
        value = columns[field.name]
        if not isinstance(value, np.ndarray | pa.Array | list):
            arrays.append(
                pa.array([None] * rows, field.type) if value is None else pa.repeat(pa.scalar(value, field.type), rows)
            )
        else:
            arrays.append((value if isinstance(value, pa.Array) else pa.array(value)).cast(field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


if __name__ == "__main__":
    main()
