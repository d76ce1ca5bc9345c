"""Claim: with a draft that the policy agrees with, the embedded engine draws at least 1.3 times as fast at batch 1 and 4,
and with any draft no slower than without at any batch, as it stops asking a draft that does not pay.

    python benchmarks/speculation.py MODEL_FOLDER [--draft DRAFT_FOLDER] [--vocabulary 8192] [--proposals 4] [--threads 2]

What is physically possible here, first: the policy's forward over k + 1 tokens of each reply against one decode step, and
the draft's own forwards. Their sum over the step's is the acceptance length (tokens per verify) from which on speculation
pays. Then whole replies, all sides by turns on the same prompts: without a draft; with the one of the folder, or one that
was just made from the policy and learnt nothing; with proposals read off the replies, right but for a share, at no cost,
which bounds what any draft can do; and the same at the cost of the draft's forwards.

`--clock cpu` counts the process's CPU time, which hardly changes when other programs use the machine: for ratios there, and
with one thread, as threads that wait for each other count too. The engine itself decides by wall time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.start import start_draft
from furlong.ops.policy.architecture import Architecture, read_architecture
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.checkpoint import DTYPES, read_tensors
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.draft_chain import DraftChain
from furlong.ops.policy.kv_cache import KVCache
from furlong.ops.policy.live import Live
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.protocols import GenerateRequest

BATCHES = (1, 4, 16)
AHEAD = (1, 2, 4, 7)
PROMPT_TOKENS, NEW_TOKENS, CONTEXT = 48, 64, 128
RIGHT = (1.0, 0.8, 0.6)
"""Shares of proposals read off the replies that are right."""


class Recorded(DraftChain):
    """Proposes what the replies are known to say, but for a share of the tokens."""

    replies: dict[str, list[int]]
    right: float
    cost: bool
    rng: random.Random

    def propose(self, asked: list, hidden: Tensor) -> None:
        if self.cost:
            super().propose(asked, hidden)
        for feed, room in asked:
            start = feed.reply.position
            known = self.replies[feed.reply.request.request_id][start : start + room]
            known += [0] * (room - len(known))
            feed.proposals = [token if self.rng.random() < self.right else 0 for token in known]


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Clock = Callable[[], float]


def median(call: Callable[[], object], times: int, clock: Clock) -> float:
    call()
    found = []
    for _ in range(times):
        begin = clock()
        call()
        found.append(clock() - begin)
    return statistics.median(found)


@torch.inference_mode()
def forwards(live: Live, batches: list[int], most: int, times: int, clock: Clock) -> None:
    """Of the policy over k + 1 tokens of each reply, and of the draft."""
    arch, decoder, drafter = live.decoder.architecture, live.decoder, live.drafter
    print("batch | decode step | verify of k + 1 tokens, ms (times a step) for k = " + ", ".join(map(str, AHEAD)))
    for batch in batches:
        cache = KVCache(arch, decoder.dtype, 2**29)
        cache.attach(1, drafter.shape.kv_heads, drafter.shape.head_dim)
        held = [cache.open() for _ in range(batch)]
        for one in held:
            cache.extend(one, CONTEXT + 16)

        def feed(count: int, held: list = held, cache: KVCache = cache, batch: int = batch) -> None:
            plan = Plan([Span(one, CONTEXT, count) for one in held], cache)
            tokens = torch.ones(batch * count, dtype=torch.long)
            decoder.step(tokens, plan, torch.arange(batch * count))

        def draft(count: int, held: list = held, cache: KVCache = cache, batch: int = batch) -> Tensor:
            plan = Plan([Span(one, CONTEXT, count) for one in held], cache)
            hidden = torch.ones(batch * count, arch.hidden)
            return drafter.run(hidden, hidden, plan, cache.layers)[:batch]

        def propose(draft: Callable[[int], Tensor] = draft) -> None:
            hidden = draft(2)
            for depth in range(most):
                drafter.logits(hidden if depth == 0 else draft(1)).softmax(-1)

        step = median(lambda feed=feed: feed(1), times, clock)
        verify = [median(lambda feed=feed, k=k: feed(k + 1), times, clock) for k in AHEAD]
        own = median(propose, times, clock)
        whole = median(lambda feed=feed: feed(most + 1), times, clock)
        cells = ", ".join(f"{1e3 * seconds:.1f} ({seconds / step:.2f})" for seconds in verify)
        print(
            f"{batch:5} | {1e3 * step:8.1f} ms | {cells} | draft of {most}: {1e3 * own:.1f} ms; pays from "
            f"{(whole + own) / step:.2f} tokens per verify on",
            flush=True,
        )


Side = Callable[[list[GenerateRequest]], tuple[dict[str, list[int]], float, float]]


def side(live: Live, clock: Clock, settings: DraftSettings | None, chain: type[DraftChain] = DraftChain) -> Side:
    """Draws replies; which, in how many seconds, and the acceptance length."""
    arch = live.decoder.architecture
    batch = Batch(arch, arch, True, settings)

    def run(asked: list[GenerateRequest]) -> tuple[dict[str, list[int]], float, float]:
        import furlong.ops.policy.speculation as speculation

        speculation.DraftChain = chain
        counts = batch.speculation()
        begin = clock()
        ended = batch.turn(Turn(tuple(asked)), live).replies
        while batch.size:
            ended += batch.turn(Turn(), live).replies
        seconds = clock() - begin
        after = batch.speculation()
        verifies = after["verifies"] - counts["verifies"]
        kept = sum(after["accepted"]) - sum(counts["accepted"])
        replies = {reply.request.request_id: reply.tokens[len(reply.request.prompt) :] for reply, _ in ended}
        return replies, seconds, 1 + kept / verifies if verifies else 1.0

    return run


def whole_replies(live: Live, settings: DraftSettings, batches: list[int], repeats: int, clock: Clock) -> None:
    """All sides by turns."""
    vocab = live.decoder.architecture.vocab
    print("batch | side                         |  tok/s | tokens per verify | times as fast as without (range)")
    for batch in batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(vocab, (batch, PROMPT_TOKENS), generator=generator).tolist()
        asked = [GenerateRequest(str(i), tuple(row), i, NEW_TOKENS, 1.0) for i, row in enumerate(prompts)]
        replies, _, _ = side(live, clock, None)(asked)
        sides = {"without": side(live, clock, None)}
        sides["the draft, always"] = side(live, clock, replace(settings, adaptive=False))
        sides["the draft, where it pays"] = side(live, clock, settings)
        for right in RIGHT:
            for cost in (False, True):
                told = {"replies": replies, "right": right, "cost": cost, "rng": random.Random(0)}
                name = f"{right:.0%} right, {'costs' if cost else 'free'}"
                sides[name] = side(live, clock, replace(settings, adaptive=False), type("Known", (Recorded,), told))
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn in range(repeats + 1):
            for name, run in sides.items():
                found, seconds, length = run(asked)
                if found != replies:
                    raise RuntimeError(f"{name}: other replies than without a draft; nothing can be compared")
                if turn:
                    taken[name].append((seconds, length))
        for name, pairs in taken.items():
            ratios = sorted(base / mine for (base, _), (mine, _) in zip(taken["without"], pairs, strict=True))
            pace = batch * NEW_TOKENS / statistics.median(seconds for seconds, _ in pairs)
            print(
                f"{batch:5} | {name:28} | {pace:6.0f} | {statistics.median(length for _, length in pairs):17.2f} | "
                f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                flush=True,
            )


def with_draft(folder: str, arch: Architecture, settings: DraftSettings, dtype: torch.dtype) -> Live:
    tensors = read_tensors(folder, arch, dtype)
    made, shape = start_draft(settings, arch, tensors, 0)
    return Live(0, Decoder(arch, tensors), serial=1, drafter=Drafter(shape, made, dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--draft", default="")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--proposals", type=int, default=4)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    vocabulary = 0 if args.draft else args.vocabulary
    settings = DraftSettings(
        start=args.draft, vocabulary=vocabulary, proposals=args.proposals, verify="match", shadow=0.0
    )
    live = with_draft(args.folder, read_architecture(args.folder), settings, DTYPES[args.dtype])
    draft = args.draft or "untrained"
    print(f"{args.dtype}, {args.threads} threads, {args.clock} time, draft {draft}, torch {torch.__version__}")
    forwards(live, args.batches, args.proposals, 5 * args.repeats, CLOCKS[args.clock])
    whole_replies(live, settings, args.batches, args.repeats, CLOCKS[args.clock])


if __name__ == "__main__":
    main()
