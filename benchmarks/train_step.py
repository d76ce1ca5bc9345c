"""Claim: both trainers take a step faster than a plain transformers loop, as a group's shared prompt is computed once; what
they do besides (a witness of gradients, exact denominators, deterministic algorithms) costs less than that gains.

    python benchmarks/train_step.py MODEL_FOLDER [--threads 2] [--repeats 5] [--groups 8] [--samples 8]

Steps of both backends and of a plain loop (transformers' module in float32 under bfloat16 autocast, one padded row per
trajectory, PyTorch's fused AdamW, the same clipped loss) by turns in one process on the same batch of random tokens. Tokens
per second count reply tokens; every side trains on the same ones. CPU time is printed beside wall time because it hardly
changes when other programs use the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs, TrainBatch, Trainer
from furlong.ops.spec import RunSpec, load_spec
from furlong.resources.trainers.make import make_rank

PROMPT, REPLY = 40, 24
"""Tokens of each prompt, and of the longest reply; replies are of 4 to REPLY tokens."""
Side = Callable[[TrainBatch], float]


def make_batch(groups: int, samples: int, vocab: int) -> TrainBatch:
    rng = random.Random(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab) for _ in range(count))

    group = tuple(g for g in range(groups) for _ in range(samples))
    replies = tuple(tokens(rng.randint(4, REPLY)) for _ in group)
    return TrainBatch(
        step=1,
        temperature=1.0,
        prompts=tuple(tokens(PROMPT) for _ in range(groups)),
        group=group,
        replies=replies,
        logprobs=tuple((0.0,) * len(reply) for reply in replies),
        masks=tuple((True,) * len(reply) for reply in replies),
        sampled_by=tuple((0,) * len(reply) for reply in replies),
        version=0,
        advantages=tuple(rng.gauss(0, 1) for _ in group),
        rewards=tuple(0.0 for _ in group),
        routing=tuple(None for _ in group),
        trajectory_ids=tuple(f"t{i}" for i in range(len(group))),
    )


def trainer_side(trainer: Trainer) -> Side:
    step = 0

    def run(batch: TrainBatch) -> float:
        nonlocal step
        step += 1
        return trainer.step(replace(batch, step=step), OtherLogprobs()).loss

    return run


def plain_side(spec: RunSpec, folder: str) -> Side:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    a = spec.algorithm
    adamw = torch.optim.AdamW(model.parameters(), a.learning_rate, a.betas, weight_decay=a.weight_decay, fused=True)
    per_pass = max(1, spec.trainer.micro_batch_tokens // (PROMPT + REPLY))

    def run(batch: TrainBatch) -> float:
        total, rows = 0.0, range(len(batch.replies))
        for start in range(0, len(rows), per_pass):
            chosen = rows[start : start + per_pass]
            loss = _row_losses(model, batch, list(chosen), a.clip_low, a.clip_high) / len(rows)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), a.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
        return total

    return run


def _row_losses(model: torch.nn.Module, batch: TrainBatch, chosen: list[int], low: float, high: float) -> torch.Tensor:
    """The sum over rows of each row's mean loss."""
    rows = [batch.prompts[batch.group[i]] + batch.replies[i] for i in chosen]
    width = max(map(len, rows))
    ids = torch.tensor([row + (0,) * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids, attention_mask=mask, use_cache=False, logits_to_keep=width - PROMPT + 1).logits
    losses = []
    for place, index in enumerate(chosen):
        reply = torch.tensor(batch.replies[index])
        logprobs = torch.log_softmax(logits[place, : len(reply)].float(), -1)[range(len(reply)), reply]
        ratio = torch.exp(logprobs - torch.tensor(batch.logprobs[index]))
        gain = torch.minimum(ratio * batch.advantages[index], ratio.clamp(1 - low, 1 + high) * batch.advantages[index])
        losses.append(-gain.mean())
    return torch.stack(losses).sum()


def measure(sides: dict[str, Side], batch: TrainBatch, repeats: int) -> None:
    tokens = sum(map(len, batch.replies))
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            wall, used = time.perf_counter(), time.process_time()
            side(batch)
            if turn:  # the first warms up
                taken[name].append((time.perf_counter() - wall, time.process_time() - used))
    plain = taken["plain loop"]
    print(f"{tokens} reply tokens a step, {repeats} steps each by turns; medians (lowest to highest)")
    for name, times in taken.items():
        rates = sorted(tokens / wall for wall, _ in times)
        ratios = sorted(p / t for (p, _), (t, _) in zip(plain, times, strict=True))
        used = sorted(p / t for (_, p), (_, t) in zip(plain, times, strict=True))
        print(
            f"{name:12} {statistics.median(rates):7.0f} tokens/s ({rates[0]:.0f} to {rates[-1]:.0f})   "
            f"x plain: wall {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"CPU {statistics.median(used):.2f} ({used[0]:.2f} to {used[-1]:.2f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = load_spec("smollm2", {"steps": args.repeats + 1})
    batch = make_batch(args.groups, args.samples, read_architecture(args.folder).vocab)
    sides: dict[str, Side] = {}
    for backend in ("fsdp", "megatron"):
        changed = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"backend": backend})})
        trainer = make_rank(changed, args.threads, Layout(), 0, 600.0)
        trainer.load(args.folder)
        if not sides:  # the ratio of the first step is then 1, as in a run
            batch = replace(batch, logprobs=tuple(map(tuple, trainer.logprobs(batch))))
        sides[backend] = trainer_side(trainer)
    sides["plain loop"] = plain_side(spec, args.folder)
    print(f"threads {args.threads}, bfloat16 arithmetic, micro-batches of {spec.trainer.micro_batch_tokens} tokens")
    measure(sides, batch, args.repeats)


if __name__ == "__main__":
    main()
