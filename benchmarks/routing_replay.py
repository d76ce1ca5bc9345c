"""What routing replay removes of the mismatch between engine and trainer: random, fine-tuned and trained experts.

    python benchmarks/routing_replay.py [--spec moe] [--steps 160] [--set KEY=VALUE ...] [--without]

The spec's policy is trained in this process, by the loop's own engine, verifier and trainer but without lake and Ray, with
replay or, to see what it buys, `--without`. Then the trainer scores replies that the engine has drawn, twice: through
the recorded experts, and through its own choice. "elsewhere" is the share of tokens, over all layers, for which the
trainer's router would have chosen another set. The trainer's weights are the engine's, rounded alike.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from furlong.ops.identity import counter_seed
from furlong.ops.policy.advantages import group_advantages
from furlong.ops.policy.packing import pack
from furlong.ops.policy.replay import route
from furlong.ops.protocols import GenerateRequest, OtherLogprobs, Sample, TrainBatch
from furlong.ops.records import Disposition
from furlong.ops.spec import RunSpec, load_spec, parse_changes
from furlong.ops.tasks.prompts import draw, prompt_rows
from furlong.ops.tasks.render import decode, load_tokenizer, render_prompt
from furlong.ops.tasks.scoring import score_reply
from furlong.resources.engines.local import LocalEngine
from furlong.resources.models import resolve
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.module import PolicyModule, load_module

RANDOM = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "eos_token_id": 0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
HELD_OUT = range(1_000_000, 1_000_004)
"""Steps whose prompts and seeds the table is measured with: no training step has them."""


@dataclass(frozen=True)
class Gap:
    """Trainer minus engine, over all sampled tokens."""

    mean: float
    worst: float
    p99: float
    k3: float
    elsewhere: float


@contextmanager
def choices(module: PolicyModule) -> Iterator[list[tuple[int, Tensor]]]:
    """(layer, the experts its router prefers) of every forward within."""
    seen: list[tuple[int, Tensor]] = []
    blocks = [module.causal.get_decoder().layers[layer].mlp for layer in module.expert_shape[0]]

    def note(block):
        return lambda gate, args, out: seen.append((block.layer, route(out, block.top_k, block.renormalised, None)[1]))

    hooks = [block.gate.register_forward_hook(note(block)) for block in blocks]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def gap(module: PolicyModule, batches: list[TrainBatch], replayed: bool, budget: int = 2048) -> Gap:
    """How far the module's log-probabilities are from the engine's."""
    layers = module.expert_shape[0]
    parts, moved, routed = [], 0, 0
    for batch, micro in ((some, micro) for some in batches for micro in pack(some, some.masks, budget)):
        with choices(module) as seen:
            logprobs, _ = module(micro if replayed else replace(micro, experts=None), batch.temperature)
        engine = [batch.logprobs[i][t] for i, t in zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True)]
        parts.append(logprobs.double() - torch.tensor(engine, dtype=torch.float64))
        for layer, chosen in seen:
            recorded = micro.experts[:, :, layers.index(layer)].flatten(0, 1)
            real = recorded[:, 0] >= 0
            moved += int((recorded.sort(1).values != chosen.sort(1).values).any(1)[real].sum())
            routed += int(real.sum())
    d = torch.cat(parts)
    k3 = float((d.exp() - 1 - d).mean())
    return Gap(float(d.abs().mean()), float(d.abs().max()), float(d.abs().quantile(0.99)), k3, moved / routed)


def show(name: str, folder: str, batches: list[TrainBatch]) -> None:
    for compute in ("bfloat16", "float32"):
        module = load_module(folder)
        for weight in module.parameters():
            weight.data = weight.data.bfloat16().to(getattr(torch, compute))
        for replayed in (False, True):
            found = gap(module, batches, replayed)
            print(
                f"{name:11s} {compute:9s} {'replayed' if replayed else 'own':9s} {found.mean:9.2e} {found.worst:8.3f} "
                f"{found.p99:9.2e} {found.k3:9.2e} {100 * found.elsewhere:8.2f} %",
                flush=True,
            )


def batch_of(
    samples: list[Sample], prompts: list[tuple[int, ...]], per_prompt: int, rewards: list[float]
) -> TrainBatch:
    """All of them, without advantages."""
    zeros = (0.0,) * len(samples)
    return TrainBatch(
        step=1,
        temperature=1.0,
        prompts=tuple(prompts),
        group=tuple(i // per_prompt for i in range(len(samples))),
        replies=tuple(s.tokens for s in samples),
        logprobs=tuple(s.logprobs for s in samples),
        masks=tuple((True,) * len(s.tokens) for s in samples),
        sampled_by=tuple((0,) * len(s.tokens) for s in samples),
        version=0,
        advantages=zeros,
        rewards=tuple(rewards),
        routing=tuple(s.routing for s in samples),
        trajectory_ids=tuple(s.request_id for s in samples),
    )


class Loop:
    """The spec's questions, one engine and one trainer."""

    def __init__(self, spec: RunSpec, folder: str) -> None:
        self.spec, self.folder = spec, folder
        self.tokenizer = load_tokenizer(folder)
        self.rows = [row for row in prompt_rows(spec.data, spec.seed) if row["split"] == "train"]
        self.engine = LocalEngine(folder, 0, spec.model.dtype, 1)
        self.trainer = FSDPTrainer(spec, threads=1)
        self.trainer.load(folder)

    def sample(self, step: int) -> TrainBatch:
        """The groups of a step, scored."""
        a = self.spec.algorithm
        rows = [self.rows[at] for at in draw(len(self.rows), step, a.prompts_per_step, self.spec.seed)]
        prompts = [tuple(render_prompt(self.tokenizer, self.spec.data.system, row["question"])) for row in rows]
        count = self.spec.sampling.max_new_tokens
        asked = [
            GenerateRequest(f"{step}-{g}-{n}", prompt, counter_seed(self.spec.seed, step, g, n), count, 1.0)
            for g, prompt in enumerate(prompts)
            for n in range(a.samples_per_prompt)
        ]
        samples = self.engine.generate(asked)
        rewards = []
        for index, sample in enumerate(samples):
            reply = decode(self.tokenizer, sample.tokens)
            item = rows[index // a.samples_per_prompt] | {"reply": reply, "finish_reason": sample.finish_reason}
            rewards.append(score_reply(item)["score"])
        return replace(batch_of(samples, prompts, a.samples_per_prompt, rewards), step=step)

    def train(self, batch: TrainBatch, replayed: bool) -> float | None:
        """One step on the groups whose rewards differ, and its weights to the engine; the mismatch it measured."""
        made = group_advantages(list(batch.rewards), [str(g) for g in batch.group], self.spec.algorithm)
        kept = [i for i, out in enumerate(made) if out.disposition == Disposition.TRAINED]
        chosen = {
            name: tuple(getattr(batch, name)[i] for i in kept)
            for name in ("group", "replies", "logprobs", "masks", "sampled_by", "rewards", "routing", "trajectory_ids")
        }
        chosen["advantages"] = tuple(made[i].advantage for i in kept)
        if not replayed:
            chosen["routing"] = (None,) * len(kept)
        metrics = self.trainer.step(replace(batch, **chosen), OtherLogprobs())
        self.publish(batch.step)
        return metrics.mismatch_mean

    def publish(self, version: int) -> None:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "model.safetensors"
            save_file(self.trainer.export(), path)
            self.engine.load_anchor(str(path), version, [], version)

    def export(self, place: Path) -> str:
        """A model folder of the weights as they are now."""
        for file in Path(self.folder).iterdir():
            if file.suffix != ".safetensors":
                (place / file.name).write_bytes(file.read_bytes())
        save_file(self.trainer.export(), place / "model.safetensors", {"format": "pt"})
        return str(place)


def random_experts(place: Path) -> tuple[str, list[TrainBatch]]:
    """A model nobody has trained, and replies of it."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**RANDOM)).bfloat16().save_pretrained(place)
    prompts = [tuple(torch.randint(1, 256, (8,)).tolist()) for _ in range(16)]
    engine = LocalEngine(str(place), 0, "bfloat16", 1)
    try:
        asked = [GenerateRequest(f"{g}-{n}", p, 100 * g + n, 32, 1.0) for g, p in enumerate(prompts) for n in range(4)]
        samples = engine.generate(asked)
    finally:
        engine.close()
    return str(place), [batch_of(samples, prompts, 4, [0.0] * len(samples))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spec", default="moe")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--without", action="store_true", help="train without replay")
    parser.add_argument("--models", type=Path, default=Path("var"), help="root of the folder that models are made in")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = load_spec(args.spec, {"steps": args.steps, **parse_changes(args.set)})
    loop = Loop(spec, resolve(spec.model, spec.data, spec.seed, args.models).path)
    try:
        run(loop, not args.without)
    finally:
        loop.engine.close()


def run(loop: Loop, replayed: bool) -> None:
    tuned, began = [loop.sample(step) for step in HELD_OUT], time.monotonic()
    rewards, gaps = [], []
    for step in range(1, loop.spec.steps + 1):
        batch = loop.sample(step)
        rewards.append(sum(batch.rewards) / len(batch.rewards))
        gaps.append(loop.train(batch, replayed) or 0.0)
        if step % 10 == 0:
            reward, mean, seconds = sum(rewards[-10:]) / 10, sum(gaps[-10:]) / 10, (time.monotonic() - began) / step
            print(
                f"steps {step - 9}-{step}: reward {reward:.3f}, mismatch {mean:.2e}, {seconds:.2f} s a step", flush=True
            )
    print(f"all steps: mismatch {sum(gaps) / max(1, len(gaps)):.2e}, {'with' if replayed else 'without'} replay\n")
    trained = [loop.sample(step) for step in HELD_OUT]
    columns = {"mean": 9, "max": 8, "p99": 9, "k3": 9, "elsewhere": 10}
    print(f"{'weights':11s} {'trainer':9s} {'experts':9s}", *(f"{name:>{wide}s}" for name, wide in columns.items()))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        show("random", *random_experts(Path(one)))
        show("fine-tuned", loop.folder, tuned)
        show("trained", loop.export(Path(other)), trained)
    before, after = (sum(sum(b.rewards) / len(b.rewards) for b in some) / len(some) for some in (tuned, trained))
    print(f"reward on these prompts: {before:.3f} before, {after:.3f} after {loop.spec.steps} steps")


if __name__ == "__main__":
    main()
