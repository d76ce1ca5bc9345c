"""Claim: the embedded engine draws replies several times as fast as `transformers` generate, with log-probabilities.

    python benchmarks/rollout_decode.py MODEL_FOLDER [--threads 2] [--repeats 5]

Both run by turns in one process on the same prompts, up to 8 replies to each, ends of text ignored so that both make the
same number of tokens. Time includes the prompts. transformers is not asked for log-probabilities. CPU time per token is
printed beside wall time because it hardly changes when other programs use the machine. The way idle OpenMP threads wait
(OMP_WAIT_POLICY) is the caller's to set, and is printed: passive threads are slower alone and much faster in company.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM

from furlong.ops.policy.architecture import Architecture, read_architecture
from furlong.ops.policy.checkpoint import DTYPES, read_tensors
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.generate import generate
from furlong.ops.policy.kv_cache import CachePool
from furlong.ops.policy.wave import Live
from furlong.ops.protocols import GenerateRequest
from furlong.resources.engines.step_gate import StepGate

BATCHES = (1, 8, 32, 64)
SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 8, 37, 24


def prompts(batch: int, vocab: int) -> list[list[int]]:
    """One row per reply; up to 8 rows share a prompt."""
    generator = torch.Generator().manual_seed(batch)
    distinct = torch.randint(vocab, (max(1, batch // SAMPLES), PROMPT_TOKENS), generator=generator).tolist()
    return [distinct[row // SAMPLES] for row in range(batch)]


def engine_side(folder: str, architecture: Architecture, dtype: str) -> Callable[[list[list[int]]], int]:
    gate = StepGate(Live(0, Decoder(architecture, read_tensors(folder, architecture, DTYPES[dtype]))))
    pool = CachePool()

    def run(rows: list[list[int]]) -> int:
        asked = [GenerateRequest(str(i), tuple(row), i, NEW_TOKENS, 1.0) for i, row in enumerate(rows)]
        return sum(len(s.tokens) for s in generate(asked, architecture, (), gate, pool))

    return run


def transformers_side(folder: str, dtype: str) -> Callable[[list[list[int]]], int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()

    def run(rows: list[list[int]]) -> int:
        ids = torch.tensor(rows)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, pad_token_id=0,
            )  # fmt: skip
        return out.shape[0] * (out.shape[1] - ids.shape[1])

    return run


def measure(run: Callable[[list[list[int]]], int], rows: list[list[int]]) -> tuple[float, float]:
    """Wall and CPU seconds per token."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = run(rows)
    if tokens != len(rows) * NEW_TOKENS:
        raise RuntimeError(f"{tokens} tokens were made, not {len(rows) * NEW_TOKENS}: the two sides cannot be compared")
    return (time.perf_counter() - wall) / tokens, (time.process_time() - cpu) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    architecture = read_architecture(args.folder)
    sides = {
        "engine": engine_side(args.folder, architecture, args.dtype),
        "transformers": transformers_side(args.folder, args.dtype),
    }
    waiting = os.environ.get("OMP_WAIT_POLICY") or "default"
    print(
        f"{args.dtype}, {args.threads} threads waiting {waiting}, torch {torch.__version__}, medians of {args.repeats}"
    )
    print(f"{PROMPT_TOKENS} prompt + {NEW_TOKENS} new tokens")
    print("batch | engine tok/s | transformers tok/s | ratio (range) | CPU ms per token, engine / transformers")
    for batch in BATCHES:
        rows = prompts(batch, architecture.vocab)
        for run in sides.values():
            run(rows)  # kernels are compiled at the first use of each shape
        taken = {name: [] for name in sides}
        for _ in range(args.repeats):
            for name, run in sides.items():
                taken[name].append(measure(run, rows))
        wall, cpu = ({n: statistics.median(pair[k] for pair in taken[n]) for n in sides} for k in (0, 1))
        pairs = zip(taken["transformers"], taken["engine"], strict=True)
        ratios = sorted(theirs[0] / ours[0] for theirs, ours in pairs)
        print(
            f"{batch:5} | {1 / wall['engine']:12.0f} | {1 / wall['transformers']:18.0f} | "
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}) | "
            f"{1e3 * cpu['engine']:.2f} / {1e3 * cpu['transformers']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
