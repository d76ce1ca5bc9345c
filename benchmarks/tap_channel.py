"""Claim: taps cost the pipeline step at most 3 %, and their messages are as many bytes as the features that cross stages.

    python benchmarks/tap_channel.py [--layout pp2] [--repeats 12] [--hidden 256] [--width 256] [--micro-batches 8]

A policy of eight layers takes its training passes (forward and backward of every micro-batch by megatron-core's own
schedule, gradients summed, no optimiser) in one set of processes, one thread each, with taps and without by turns, so
that each ratio is of neighbours in time. "without, again" is the same as "without": what its ratio strays from 1 is
what the machine does by itself. CPU time, of all ranks together, hardly changes when other programs use the machine; it
counts the channel's own threads. The default taps are a low, a middle and a late layer; the consumer takes each
micro-batch's features in its forward step and gives them back, and trains nothing. Bytes are those of the payload that
the backend was given, counted beneath the channel, beside rows * hidden * bytes of an element for each tap that
crosses stages. Loopback on a CPU says nothing about a network's time; it does about bytes, and about who waits for whom.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "distributed"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from kernel_ranks import run_ranks  # noqa: E402
from tap_megatron_ranks import (  # noqa: E402
    TINY,
    counting,
    make_feeds,
    make_policy,
    open_channel,
    stage_of,
    tapping,
)

from furlong.ops.policy.parallel import parse_layout  # noqa: E402
from furlong.resources.trainers.megatron import schedule  # noqa: E402

LAYERS = 8
TAPS = (1, LAYERS // 2 - 1, LAYERS - 4)
"""A low, a middle and a late layer, where EAGLE-3 taps (Li et al. 2025)."""
WITHOUT, AGAIN, TAPPED, PROJECTED = "without", "without, again", "taps", "taps, projected"
Draft = Callable[[int], None]
"""What the last stage does in a micro-batch's forward step, given its number."""


class Bench:
    """One rank's policy and channels, and the sides that take a pass each; a pass is given its number."""

    def __init__(self, rank: int, options: dict[str, Any]) -> None:
        hidden, width = options["hidden"], options["width"]
        self.architecture = replace(
            TINY, vocab=512, hidden=hidden, layers=LAYERS, heads=8, kv_heads=4, head_dim=hidden // 8, ffn=3 * hidden,
            context=width, tied=False,
        )  # fmt: skip
        self.policy = make_policy(parse_layout(options["layout"]), rank, torch.float32, self.architecture)
        self.feeds = make_feeds(
            options["micro_batches"], self.policy.place, True, 1, width, vocab=self.architecture.vocab
        )
        self.numbers = {id(micro): number for number, micro in enumerate(self.feeds)}
        self.plain, self.plain_group = open_channel(self.policy, TAPS, width)
        self.projected, self.projected_group = open_channel(self.policy, TAPS, width, project=hidden)
        self.weights = {layer: torch.eye(hidden) for layer in TAPS} if self.policy.place.last_stage else None
        # Two without, one before and one after the taps, so that the machine's drift cancels.
        self.sides = {WITHOUT: self.without, TAPPED: self.tapped, AGAIN: self.without, PROJECTED: self.with_projection}

    def without(self, step: int, draft: Draft = lambda number: None) -> None:
        def head(micro: Any, logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            draft(self.numbers[id(micro)])
            return logprobs.sum()

        for chunk in self.policy.chunks:
            chunk.zero_grad_buffer()
        schedule.run(self.policy.chunks, self.feeds, 1.0, head, None, True)

    def tapped(self, step: int) -> None:
        def draft(number: int) -> None:
            self.plain.take(step, number)
            self.plain.release(step, number)

        with tapping(self.policy, self.plain, TAPS, self.feeds, step):
            self.without(step, draft)

    def with_projection(self, step: int) -> None:
        channel = self.projected

        def draft(number: int) -> None:
            channel.return_gradient(step, number, torch.ones_like(channel.take_projected(step, number)))

        channel.load_projection(self.weights)
        with tapping(self.policy, channel, TAPS, self.feeds, step):
            self.without(step, draft)
        channel.projection_gradients()

    def close(self) -> None:
        self.plain.close()
        self.projected.close()


def measure(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Wall and CPU seconds of every pass of every side on this rank, and what was sent in each channel's group."""
    bench = Bench(rank, options)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in bench.sides}
    sent = {}
    for turn in range(options["repeats"] + 1):
        for name in list(bench.sides)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            wall, used = time.perf_counter(), time.process_time()
            if turn:
                bench.sides[name](turn)
            else:  # the first warms up, and is counted
                group = bench.projected_group if name == PROJECTED else bench.plain_group
                with counting(group) as sent[name]:
                    bench.sides[name](turn)
            dist.barrier()
            if turn:
                seconds[name].append((time.perf_counter() - wall, time.process_time() - used))
    stats = {TAPPED: asdict(bench.plain.stats), PROJECTED: asdict(bench.projected.stats)}
    bench.close()
    return {"seconds": seconds, "sent": sent, "stats": stats}


def spread(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def report(options: dict[str, Any], found: list[dict[str, Any]]) -> None:
    layout, turns = parse_layout(options["layout"]), range(options["repeats"])
    # A pass ends for all at a barrier; CPU time is that of all ranks.
    wall = {name: [found[0]["seconds"][name][turn][0] for turn in turns] for name in found[0]["seconds"]}
    used = {name: [sum(rank["seconds"][name][turn][1] for rank in found) for turn in turns] for name in wall}
    base = {
        clock: [(one + other) / 2 for one, other in zip(times[WITHOUT], times[AGAIN], strict=True)]
        for clock, times in (("wall", wall), ("used", used))
    }
    features = options["micro_batches"] * options["width"] * options["hidden"] * 4
    crossing = [stage_of(layer, layout, LAYERS) for layer in TAPS if stage_of(layer, layout, LAYERS) < layout.pp - 1]
    least = {TAPPED: len(crossing) * features, PROJECTED: len(set(crossing)) * features}
    print("| pass | seconds | wall, to without | CPU, to without |\n|---|---|---|---|")
    for name in wall:
        ratios = [
            spread([mine / without for mine, without in zip(times[name], base[clock], strict=True)])
            for clock, times in (("wall", wall), ("used", used))
        ]
        print(f"| {name} | {statistics.median(wall[name]):.3f} | {' | '.join(ratios)} |")
    print(
        "\nBytes of a pass, all ranks:\n\n| pass | features | least | gradients back | weights | headers | all sent |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in least:
        kinds = ("payload_bytes", "gradient_bytes", "weight_bytes", "header_bytes")
        payload, *others = [
            sum(rank["stats"][name][kind] for rank in found) // (options["repeats"] + 1) for kind in kinds
        ]
        sent = sum(rank["sent"][name]["bytes"] for rank in found)
        print(f"| {name} | " + " | ".join(f"{value:,}" for value in (payload, least[name], *others, sent)) + " |")
    for name in least:
        waits = [rank["stats"][name]["longest_put_wait_s"] for rank in found]
        memory = [f"{rank['stats'][name]['allocated_bytes']:,}" for rank in found]
        print(f"\n{name}: longest wait of a put {max(waits) * 1e3:.2f} ms; bytes of slots by rank {', '.join(memory)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="pp2")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=8)
    options = vars(parser.parse_args())
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"torch {torch.__version__}, gloo; layout {options['layout']}, {LAYERS} layers, hidden {options['hidden']}, "
        f"{options['micro_batches']} micro-batches of {options['width']} tokens, float32, taps after layers {TAPS}; "
        f"{options['repeats']} passes a side, medians (quartiles)\n"
    )
    report(options, run_ranks(parse_layout(options["layout"]).world, measure, options, deadline=900))


if __name__ == "__main__":
    main()
