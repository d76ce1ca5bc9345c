"""Claim: branch attention's memory, messages and arithmetic per rank are what the mathematics asks for, and it is fast.

    python benchmarks/branch_attention.py [--repeats 4] [--part all|counts|time]

One pass of test-time training at depth K = 4 over one long document, small heads, float32, on C = 1, 2, 4, 8 ranks: real
processes, gloo. Everything but wall time is counted where torch dispatches its operators (`branch_attention_meter`), by
rank, not taken from the code's word. Eight processes on two cores show no scaling in wall time, so none is shown: time is
a ratio within one run, of one rank and one thread.

"Arithmetic no" means that ATen's flash attention was handed out as zeros of its shapes: plans, tiles, messages, buffers
and merges are those of a real run (points run both ways have to give the same counts), and a quarter of a million tokens
fit into seconds. FlexAttention's kernel is called in the timing alone, where it is compiled; its bytes are those of what
it reads and writes.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from pathlib import Path

import torch
from branch_attention_extras import EXTRA_RANKS, extras_table, measure_extras
from branch_attention_ranks import Case, measure_all
from branch_attention_tables import Points, balance_table, memory_table, resident_table, sent_table, work_table
from branch_attention_time import time_tables

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "distributed"))
from kernel_ranks import run_ranks

K = 1024
RANKS = (1, 2, 4, 8)
TIMED = 8 * K
SIZES = (8 * K, 64 * K, 256 * K)
CASES = [
    *(Case("ring", c, t, True) for t in (4 * K, 8 * K) for c in RANKS),
    *(Case("ring", c, 4 * K, False) for c in RANKS),
    *(Case(side, c, t, False) for side in ("ring", "gather", "flex", "contiguous") for t in SIZES for c in RANKS),
    *(Case("dense", c, t, False) for t in (2 * K, 4 * K, 8 * K) for c in RANKS),
    *(Case(side, c, t, False) for side in ("all depths", "in sequence") for t in (4 * K, 8 * K, 64 * K) for c in RANKS),
    *(Case("all depths", c, 256 * K, False) for c in (4, 8)),
]  # fmt: skip
DEADLINE = 900.0


def facts() -> None:
    name = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    print(
        f"{name or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB, torch {torch.__version__}, ", end=""
    )
    print(f"load {os.getloadavg()[0]:.1f}, {time.strftime('%Y-%m-%d')}\n", flush=True)


def counts() -> list[tuple[str, bool]]:
    began = time.perf_counter()
    points = Points(CASES, run_ranks(max(RANKS), measure_all, CASES, deadline=DEADLINE))
    twice, unlike = points.twins()
    print(f"{len(CASES)} points on up to {max(RANKS)} processes in {time.perf_counter() - began:.0f} s\n")
    targets = [(f"{twice} points run with and without arithmetic: counts equal", not unlike and twice > 0)]
    targets += balance_table(points)
    work_table(points, list(RANKS))
    targets += sent_table(points)
    targets += memory_table(points, list(RANKS))
    targets += resident_table(points, list(SIZES), 8)
    return targets + extras_table(run_ranks(EXTRA_RANKS, measure_extras, deadline=DEADLINE))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--part", choices=("all", "counts", "time"), default="all")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts()
    targets = counts() if args.part != "time" else []
    targets += time_tables(TIMED, args.repeats) if args.part != "counts" else []
    for what, met in targets:
        print(f"{'met   ' if met else 'MISSED'}  {what}")


if __name__ == "__main__":
    main()
