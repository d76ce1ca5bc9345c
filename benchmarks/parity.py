"""What makes trainer and engine disagree about a token's log-probability, and how much each cause does by itself.

    python benchmarks/parity.py [--specs smollm2,tiny,moe] [--parts causes,price] [--root var] [--threads 2]

Every row compares two computations of the same tokens that differ in one thing only; nothing is compared with itself.
Replies are drawn by the embedded engine's batch, from the spec's policy before its first step, for the spec's prompts.
Then the price of exact mode: the time of training steps (forward, backward, AdamW), plain and exact by turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import torch

from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.attention import NAME
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.checkpoint import DTYPES, read_tensors
from furlong.ops.policy.decoder import EMBEDDING, Decoder
from furlong.ops.policy.divergence import mismatch
from furlong.ops.policy.exact.forward import exact_logprobs
from furlong.ops.policy.live import Live
from furlong.ops.policy.packing import MicroBatch, pack
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.row_bits import row_bits
from furlong.ops.policy.schedule import learning_rate
from furlong.ops.protocols import GenerateRequest, TrainBatch
from furlong.ops.spec import RunSpec, load_spec
from furlong.ops.tasks.prompts import prompt_rows
from furlong.ops.tasks.render import decode, load_tokenizer, render_prompt
from furlong.resources.engines.local import LocalEngine
from furlong.resources.models import resolve
from furlong.resources.trainers.exact_module import load_exact
from furlong.resources.trainers.masters import MasterWeights
from furlong.resources.trainers.module import PolicyModule, load_module

HEAT, SHARE = 0.8, 0.9
"""The temperature and the top-p that a trainer forgets."""
Rows = list[list[float]]
"""Log-probabilities of every reply's tokens."""
Forward = Callable[[MicroBatch, float], tuple[torch.Tensor, torch.Tensor]]


class Subject:
    """A spec's policy, and replies that the engine drew with it."""

    def __init__(self, name: str, groups: int, samples: int, new: int, root: Path):
        self.spec: RunSpec = load_spec(name)
        self.folder = str(resolve(self.spec.model, self.spec.data, self.spec.seed, root).path)
        self.arch = read_architecture(self.folder)
        self.dtype = DTYPES[self.spec.model.dtype]
        self.tensors = read_tensors(self.folder, self.arch, self.dtype)
        self.decoder = Decoder(self.arch, self.tensors)
        self.tokenizer = load_tokenizer(self.folder)
        rows = prompt_rows(self.spec.data, self.spec.seed)[:groups]
        prompts = [tuple(render_prompt(self.tokenizer, self.spec.data.system, row["question"])) for row in rows]
        room = min(new, self.arch.context - max(map(len, prompts)))
        self.asked = [
            GenerateRequest(f"{g}.{s}", prompt, 1000 * g + s, room, 1.0, stop_ids=tuple(self.tokenizer.stop_ids))
            for g, prompt in enumerate(prompts)
            for s in range(samples)
        ]
        self.drawn = self.draw(self.asked)
        self.batch = self.batch_of(self.drawn)

    def live(self, decoder: Decoder, version: int = 0) -> Live:
        return Live(version, decoder, serial=version)

    def draw(self, asked: list[GenerateRequest], invariant: bool = True, new: Decoder | None = None) -> list[Reply]:
        """In the order asked.

        Args:
            new: weights that take the others' place after ten steps, in the midst of the replies.
        """
        batch, found, steps = Batch(self.arch, self.arch, invariant), {}, 0
        ended = batch.turn(Turn(tuple(asked)), self.live(self.decoder))
        while True:
            found |= {reply.request.request_id: reply for reply, _ in ended.replies}
            if not batch.size:
                return [found[request.request_id] for request in asked]
            steps += 1
            live = self.live(new, 1) if new is not None and steps > 10 else self.live(self.decoder)
            ended = batch.turn(Turn(), live)

    def batch_of(self, drawn: list[Reply]) -> TrainBatch:
        prompts = list(dict.fromkeys(reply.request.prompt for reply in drawn))
        replies = tuple(tuple(reply.tokens[reply.given :]) for reply in drawn)
        signs = [1.0 if index % 2 else -1.0 for index in range(len(drawn))]
        return TrainBatch(
            step=1,
            temperature=1.0,
            prompts=tuple(prompts),
            group=tuple(prompts.index(reply.request.prompt) for reply in drawn),
            replies=replies,
            logprobs=tuple(tuple(reply.logprobs) for reply in drawn),
            masks=tuple((True,) * len(reply) for reply in replies),
            sampled_by=tuple(tuple(reply.versions) for reply in drawn),
            version=0,
            advantages=tuple(signs),
            rewards=tuple(signs),
            routing=tuple(reply.sample("length", self.arch, 0.0).routing for reply in drawn),
            trajectory_ids=tuple(reply.request.request_id for reply in drawn),
        )

    def exact(self, decoder: Decoder) -> Forward:
        tensors = decoder.tensors

        def run(micro: MicroBatch, heat: float) -> tuple[torch.Tensor, torch.Tensor]:
            return exact_logprobs(decoder, tensors, lambda tokens: tensors[EMBEDDING][tokens], micro, heat)

        return run

    def plain(self, dtype: torch.dtype) -> PolicyModule:
        return rounded(load_module(self.folder), dtype)


def rounded(module: PolicyModule, dtype: torch.dtype) -> PolicyModule:
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


@torch.no_grad()
def logprobs(forward: Forward, batch: TrainBatch, together: bool = True) -> Rows:
    """Of every reply token; groups packed into prefix trees, or every sequence by itself."""
    found = [[0.0] * len(reply) for reply in batch.replies]
    most = max(len(batch.prompts[g]) + len(r) for g, r in zip(batch.group, batch.replies, strict=True))
    for mask in [batch.masks] if together else [only(batch, index) for index in range(len(batch.replies))]:
        for micro in pack(batch, mask, max(2048, most)):
            values, _ = forward(micro, batch.temperature)
            where = zip(micro.trajectory.tolist(), micro.offset.tolist(), values.tolist(), strict=True)
            for index, offset, value in where:
                found[index][offset] = value
    return found


def only(batch: TrainBatch, index: int) -> tuple[tuple[bool, ...], ...]:
    return tuple(mask if at == index else (False,) * len(mask) for at, mask in enumerate(batch.masks))


def recorded(drawn: list[Reply]) -> Rows:
    return [torch.tensor(reply.logprobs).float().tolist() for reply in drawn]


@dataclass
class Table:
    """Rows of the report, as they come."""

    name: str

    def add(self, cause: str, one: Rows, other: Rows) -> None:
        """Print one against the other."""
        flat = [torch.tensor([value for row in rows for value in row], dtype=torch.float64) for rows in (one, other)]
        gap = mismatch(*flat, [""] * len(flat[0]))
        share = float((flat[0] != flat[1]).double().mean())
        numbers = " | ".join("0" if not value else f"{value:.1e}" for value in (gap.mean, gap.max, gap.k3))
        print(f"| {self.name} | {cause} | {numbers} | {share:.0%} | {len(flat[0])} |", flush=True)


def shared(one: list[Reply], other: list[Reply]) -> tuple[Rows, Rows]:
    """Log-probabilities up to where the replies part, as different tokens cannot be compared."""
    found: tuple[Rows, Rows] = ([], [])
    for a, b in zip(one, other, strict=True):
        pairs = zip(a.tokens[a.given :], b.tokens[b.given :], strict=False)
        count = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        for rows, values in zip(found, recorded([a, b]), strict=True):
            rows.append(values[:count])
    return found


def causes(subject: Subject, table: Table) -> None:
    dtype, batch, drawn = subject.dtype, subject.batch, subject.drawn
    own, engine = logprobs(subject.exact(subject.decoder), batch), recorded(drawn)
    table.add("none: exact mode", own, engine)
    arithmetic(subject, table, own)
    serving(subject, table, own)
    plain = subject.plain(dtype)
    unpacked = logprobs(plain, batch, together=False)
    table.add("packing into prefix trees", logprobs(plain, batch), unpacked)
    plain.causal.set_attn_implementation("sdpa")
    table.add("attention kernel", logprobs(plain, batch, together=False), unpacked)
    plain.causal.set_attn_implementation(NAME)
    table.add("transformers' arithmetic instead of the engine's", unpacked, own)
    if subject.arch.experts:
        free = replace(batch, routing=(None,) * len(batch.routing))
        table.add("routing without replay", logprobs(plain, free, together=False), unpacked)
    asking(subject, table)
    staleness(subject, table, own)


def arithmetic(subject: Subject, table: Table, own: Rows) -> None:
    dtype, batch = subject.dtype, subject.batch
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    tensors = {name: tensor.to(other) for name, tensor in subject.tensors.items()}
    table.add(
        f"{str(other)[6:]} instead of {str(dtype)[6:]}",
        logprobs(subject.exact(Decoder(subject.arch, tensors)), batch),
        own,
    )
    if dtype == torch.bfloat16:
        wide, narrow = subject.plain(torch.float32), subject.plain(dtype)
        with torch.autocast("cpu", torch.bfloat16):
            cast = logprobs(wide, batch, together=False)
        table.add("bfloat16 autocast instead of bfloat16 weights", cast, logprobs(narrow, batch, together=False))
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    table.add("number of threads", logprobs(subject.exact(subject.decoder), batch), own)
    torch.set_num_threads(threads)


def serving(subject: Subject, table: Table, own: Rows) -> None:
    with row_bits(False):
        alone = [subject.draw([request], invariant=False)[0] for request in subject.asked]
        whole = logprobs(subject.exact(subject.decoder), subject.batch_of(alone), together=False)
    table.add("decoding with a cache, not one forward", recorded(alone), whole)
    table.add("company in the batch", *shared(subject.draw(subject.asked, invariant=False), alone))
    size = subject.arch.splits()[1]
    engine = LocalEngine(subject.folder, 0, subject.spec.model.dtype, 1, list(subject.tokenizer.stop_ids), tp=size)
    try:
        split = engine.generate(subject.asked)
    finally:
        engine.close()
    replies = tuple(sample.tokens for sample in split)
    masks = tuple((True,) * len(reply) for reply in replies)
    routing = tuple(sample.routing for sample in split)
    found = replace(subject.batch, replies=replies, masks=masks, routing=routing)
    values = [torch.tensor(sample.logprobs).float().tolist() for sample in split]
    table.add(f"engine split over {size} processes", values, logprobs(subject.exact(subject.decoder), found))


def asking(subject: Subject, table: Table) -> None:
    """What a trainer gets wrong that does not ask how the token was drawn."""
    for cause, changes in (
        (f"temperature {HEAT} left out", {"temperature": HEAT}),
        (f"top-p {SHARE} left out", {"top_p": SHARE}),
    ):
        drawn = subject.draw([replace(request, **changes) for request in subject.asked])
        table.add(cause, [reply.model_logprobs for reply in drawn], [reply.logprobs for reply in drawn])
    tokens = list(subject.batch.replies)
    again, same = [], 0
    for reply in tokens:
        ended = len(reply) > 0 and reply[-1] in subject.tokenizer.stop_ids
        text = decode(subject.tokenizer, reply)
        ids = subject.tokenizer.encoder.encode(text, add_special_tokens=False).ids if text else []
        again.append(tuple(ids) + (reply[-1:] if ended else ()))
        same += again[-1] == reply
    kept = [index for index, reply in enumerate(again) if reply]
    some = replace(
        subject.batch,
        group=tuple(subject.batch.group[i] for i in kept),
        replies=tuple(again[i] for i in kept),
        masks=tuple((True,) * len(again[i]) for i in kept),
        routing=(None,) * len(kept),
    )
    values = logprobs(subject.exact(subject.decoder), some)
    moved = [abs(sum(v) - sum(subject.drawn[i].logprobs)) for i, v in zip(kept, values, strict=True)]
    print(
        f"| {table.name} | text encoded again: {len(tokens) - same} of {len(tokens)} replies get other tokens; a reply's "
        f"log-probability moves by {statistics.mean(moved):.1e} in the mean, {max(moved):.1e} at most | | | | | |",
        flush=True,
    )


def staleness(subject: Subject, table: Table, own: Rows) -> None:
    """The run's first step on this batch, with advantages +1 and -1 (of AdamW's steps the first is the boldest)."""
    module = load_exact(subject.folder)
    masters = MasterWeights(module.named_weights(), subject.spec.algorithm, subject.dtype)
    train(module, masters, subject.batch, subject.spec)
    newer = Decoder(subject.arch, masters.export(subject.dtype))
    table.add("weights one step older", own, logprobs(subject.exact(newer), subject.batch))
    mixed = subject.draw(subject.asked, new=newer)
    after = logprobs(subject.exact(newer), subject.batch_of(mixed))
    late = [[version == 1 for version in reply.versions] for reply in mixed]
    chosen = [
        [[value for value, on in zip(row, mask, strict=True) if on] for row, mask in zip(rows, late, strict=True)]
        for rows in (recorded(mixed), after)
    ]
    if any(map(any, late)):
        table.add("keys and values of the weights before (in_place)", *chosen)


def train(module: PolicyModule, masters: MasterWeights, batch: TrainBatch, spec: RunSpec) -> None:
    """Policy gradient of the batch, and AdamW."""
    masters.begin()
    micros = pack(batch, batch.masks, spec.trainer.micro_batch_tokens)
    tokens = sum(map(len, batch.replies))
    for micro in micros:
        values, _ = module(micro, batch.temperature)
        advantages = torch.tensor([batch.advantages[index] for index in micro.trajectory.tolist()])
        masters.expect(micro is micros[-1])
        (values * -advantages / tokens).sum().backward()
    masters.update(learning_rate(spec.algorithm, spec.steps, 1), masters.gradient_norm())


@contextmanager
def timed(times: list[tuple[float, float]]) -> Iterator[None]:
    """Adds wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    times.append((time.perf_counter() - wall, time.process_time() - cpu))


def price(subject: Subject, repeats: int) -> None:
    sides = {}
    for name, load in (("plain", load_module), ("exact", load_exact)):
        module = load(subject.folder)
        sides[name] = module, MasterWeights(module.named_weights(), subject.spec.algorithm, subject.dtype), []
    for _ in range(repeats + 1):
        for module, masters, times in sides.values():
            with timed(times):
                train(module, masters, subject.batch, subject.spec)
    (_, _, plain), (_, _, exact) = sides.values()
    ratios = [
        [e[which] / p[which] for p, e in zip(plain[1:], exact[1:], strict=True)] for which in (0, 1)
    ]  # without the first, which probes kernels
    wall, cpu = (f"{statistics.median(r):.2f} ({min(r):.2f} to {max(r):.2f})" for r in ratios)
    seconds = [statistics.median(t[0] for t in times[1:]) for times in (plain, exact)]
    tokens = sum(map(len, subject.batch.replies))
    print(f"| {subject.spec.name} | {tokens} | {seconds[0]:.2f} s | {seconds[1]:.2f} s | {wall} | {cpu} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--specs", default="smollm2,tiny,moe")
    parser.add_argument("--parts", default="causes,price")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--new", type=int, default=96, help="tokens of the longest reply, where the context has room")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=Path("var"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.threads} threads, {platform.processor() or platform.machine()}\n",
        flush=True,
    )
    subjects = [
        Subject(name, options.groups, options.samples, options.new, options.root.resolve())
        for name in options.specs.split(",")
    ]
    if "causes" in options.parts:
        print(
            "| policy | cause | mean abs(d) | max | k3 | tokens that differ | tokens |\n" + "|---" * 7 + "|", flush=True
        )
        for subject in subjects:
            causes(subject, Table(subject.spec.name))
    if "price" in options.parts:
        print("\n| policy | reply tokens | plain step | exact step | wall, exact / plain | CPU, exact / plain |")
        print("|---" * 6 + "|", flush=True)
        for subject in subjects:
            price(subject, options.repeats)


if __name__ == "__main__":
    main()
