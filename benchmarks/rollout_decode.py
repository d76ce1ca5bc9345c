"""Claim: the embedded engine draws replies at least 1.5 times as fast as `transformers` generate at batch 32, and at
least as fast as its continuous batching (generate_batch), with log-probabilities, and batch-invariant at that.

    python benchmarks/rollout_decode.py MODEL_FOLDER [--threads 2] [--repeats 5]

All run by turns in one process on the same prompts, no two alike, so that no prompt is shared; ends of text are ignored,
so that all make the same number of tokens. Time includes the prompts. transformers is not asked for log-probabilities.
CPU time per token is printed beside wall time because it hardly changes when other programs use the machine. The way
idle OpenMP threads wait (OMP_WAIT_POLICY, GOMP_SPINCOUNT) is the caller's to set, and is printed: passive threads are
slower alone, as each product of a decode step wakes them anew, and much faster in company.

Beside them stand the limits of a step on this machine, measured in the same run: reading all weights once from memory,
and the step's matrix products alone, as the engine computes them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from furlong.ops.policy.architecture import Architecture, read_architecture
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.checkpoint import DTYPES, read_tensors
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.live import Live
from furlong.ops.policy.packed_linear import PackedLinear
from furlong.ops.protocols import GenerateRequest

BATCHES = (1, 8, 32, 64)
CONTINUOUS = 32
"""The batch at which transformers' continuous batching runs too."""
PROMPT_TOKENS, NEW_TOKENS = 48, 48
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
Side = Callable[[list[list[int]]], int]


def prompts(batch: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(vocab, (batch, PROMPT_TOKENS), generator=generator).tolist()


def engine_side(architecture: Architecture, live: Live, invariant: bool) -> Side:
    batch = Batch(architecture, architecture, invariant)

    def run(rows: list[list[int]]) -> int:
        asked = [GenerateRequest(str(i), tuple(row), i, NEW_TOKENS, 1.0) for i, row in enumerate(rows)]
        ended = batch.turn(Turn(tuple(asked)), live).replies
        while batch.size:
            ended += batch.turn(Turn(), live).replies
        return sum(len(reply.versions) for reply, _ in ended)

    return run


def generate_side(model: torch.nn.Module) -> Side:
    def run(rows: list[list[int]]) -> int:
        ids = torch.tensor(rows)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0,
            )  # fmt: skip
        return out.shape[0] * (out.shape[1] - ids.shape[1])

    return run


def generate_batch_side(model: torch.nn.Module) -> Side:
    settings = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    # Two pages of 256 tokens for each; otherwise most of the machine's memory is filled with empty cache.
    room = ContinuousBatchingConfig(num_blocks=2 * CONTINUOUS, max_batch_tokens=CONTINUOUS * PROMPT_TOKENS)

    def run(rows: list[list[int]]) -> int:
        with torch.inference_mode():
            out = model.generate_batch(rows, generation_config=settings, continuous_batching_config=room)
        return sum(len(found.generated_tokens) for found in out.values())

    return run


def measure(run: Side, rows: list[list[int]]) -> tuple[float, float]:
    """Wall and CPU seconds per token."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run(rows)
    if tokens != len(rows) * NEW_TOKENS:
        raise RuntimeError(f"{tokens} tokens were made, not {len(rows) * NEW_TOKENS}: the sides cannot be compared")
    return (time.perf_counter() - wall) / tokens, (time.process_time() - cpu) / tokens


def best(call: Callable[[], object], times: int = 5) -> float:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


@torch.inference_mode()
def products(architecture: Architecture, dtype: torch.dtype) -> Callable[[int], None]:
    """The matrix products of one decode step for a number of rows, on weights of their own for each layer."""
    arch, heads = architecture, architecture.heads + 2 * architecture.kv_heads
    shapes = [
        (heads * arch.head_dim, arch.hidden), (arch.hidden, arch.heads * arch.head_dim),
        (2 * arch.ffn, arch.hidden), (arch.hidden, arch.ffn),
    ] * arch.layers + [(arch.vocab, arch.hidden)]  # fmt: skip
    layers = [PackedLinear(torch.randn(shape).to(dtype)) for shape in shapes]

    @torch.inference_mode()
    def run(rows: int) -> None:
        for layer, (_, inputs) in zip(layers, shapes, strict=True):
            layer(torch.ones((rows, inputs), dtype=dtype))

    return run


def limits(architecture: Architecture, live: Live, dtype: torch.dtype, batches: list[int]) -> None:
    weights = sum(tensor.nbytes for tensor in live.tensors.values())
    memory = torch.ones(weights // 8, dtype=torch.float64)
    seconds = best(memory.sum)
    print(f"reading {weights / 1e6:.0f} MB of weights: {1e3 * seconds:.1f} ms, {weights / seconds / 1e9:.1f} GB/s")
    step = products(architecture, dtype)
    for batch in batches:
        step(batch)
        seconds = best(partial(step, batch))
        print(
            f"products of a step of {batch:2}: {1e3 * seconds:.1f} ms, at most {batch / seconds:.0f} tok/s of decoding"
        )


def report(batch: int, sides: dict[str, Side], rows: list[list[int]], repeats: int) -> None:
    for run in sides.values():
        run(rows)  # kernels are compiled at the first use of each shape
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            taken[name].append(measure(run, rows))
    for name, pairs in taken.items():
        wall, cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = sorted(
            theirs[0] / ours[0] for theirs, ours in zip(taken[name], taken["engine, invariant"], strict=True)
        )
        print(
            f"{batch:5} | {name:18} | {1 / wall:8.0f} | {1e3 * cpu:7.2f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    architecture, dtype = read_architecture(args.folder), DTYPES[args.dtype]
    live = Live(0, Decoder(architecture, read_tensors(args.folder, architecture, dtype)))
    theirs = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).eval()
    sides = {
        "engine, invariant": engine_side(architecture, live, True),
        "engine, any rows": engine_side(architecture, live, False),
        "generate": generate_side(theirs),
    }
    waiting = " ".join(f"{name}={os.environ[name]}" for name in WAITING if name in os.environ) or "the default way"
    print(f"{args.dtype}, {args.threads} threads waiting {waiting}, torch {torch.__version__}")
    limits(architecture, live, dtype, args.batches)
    print(f"{PROMPT_TOKENS} prompt + {NEW_TOKENS} new tokens, medians of {args.repeats}")
    print("batch | side               |    tok/s | CPU ms per token | times as long as the engine, invariant (range)")
    for batch in args.batches:
        here = sides | ({"generate_batch": generate_batch_side(theirs)} if batch == CONTINUOUS else {})
        report(batch, here, prompts(batch, architecture.vocab), args.repeats)


if __name__ == "__main__":
    main()
