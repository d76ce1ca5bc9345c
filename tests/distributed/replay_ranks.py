"""One rank of trainers that replay recorded experts, in a list of layouts in turn.

    python replay_ranks.py RANK WORLD FOLDER

`FOLDER/plan.json` has the model and, for each world, the trials; rank 0 writes what they found to `FOLDER/<world>.pt`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))
import torch
import torch.distributed as dist
from expert_records import with_partial_records, with_records
from tiny_policy import make_batch, make_spec

from furlong.ops.policy.parallel import parse_layout
from furlong.ops.policy.routing import RoutingError, decode
from furlong.ops.protocols import OtherLogprobs, TrainBatch
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.megatron import experts, parallel
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.trainer import MegatronTrainer

ALONE = OtherLogprobs()
BUDGET = 40
"""Tokens of a micro-batch: some four to six of them a step, so that several are in flight in a pipeline."""
LAYERS, EXPERTS = (0, 2, 3), 8
SHAPE: dict[str, Any] = {"layers": LAYERS, "experts": EXPERTS}


def batch_of(records: str) -> TrainBatch:
    """Few letters make replies share beginnings; what is routed apart is packed apart."""
    make = {"all": with_records, "some": with_partial_records}[records]
    return make(make_batch(1, (4, 1, 3, 2, 2), letters=5), 5, **SHAPE)


@dataclass
class Sent:
    """Where megatron-core was told to send tokens, by layer, and of which micro-batch they were."""

    calls: list[tuple[int, Feed, torch.Tensor]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        forward, preprocess = experts.Experts.forward, experts.Experts.preprocess
        current: list[Feed] = []

        def watched(block, hidden_states, intermediate_tensors=None, padding_mask=None):
            current[:] = [padding_mask]
            return forward(block, hidden_states, intermediate_tensors, padding_mask)

        def noting(block, hidden, probs, goes):
            self.calls.append((block.layer_number - 1, current[0], goes.clone()))
            return preprocess(block, hidden, probs, goes)

        experts.Experts.forward, experts.Experts.preprocess = watched, noting
        try:
            yield
        finally:
            experts.Experts.forward, experts.Experts.preprocess = forward, preprocess


def compare(batch: TrainBatch, sent: Sent, trainer: MegatronTrainer) -> dict[int, int]:
    """How many tokens of each trajectory went, in a layer, through exactly the experts in the lake's record of it; none
    may have gone through others. Nothing of packing or replay is used but which position of which trajectory a token is."""
    counts = dict.fromkeys(range(len(batch.replies)), 0)
    records = [None if r is None else (r.first, decode(r)) for r in batch.routing]
    for layer, feed, goes in sent.calls:
        rows = len(feed.tokens)
        first = trainer.place.tp * len(goes) // rows if trainer.layout.sp else 0
        for number, went in enumerate(goes):
            at, row = divmod(number, rows)
            for index in owners(feed, row, first + at):
                position = int(feed.positions[row, first + at])
                start, ids = records[index] or (0, [])
                if start <= position < start + len(ids):
                    wanted = set(ids[position - start, LAYERS.index(layer)].tolist())
                    assert wanted == set(went.nonzero().flatten().tolist()), (layer, index, position)
                    counts[index] += 1
    return counts


def owners(feed: Feed, row: int, at: int) -> list[int]:
    """The trajectories that a token is part of."""
    if feed.documents is not None:
        document = int(feed.documents[row, at])
        return [int(feed.owners[document])] if document >= 0 else []
    width = feed.tokens.shape[1]
    seen_by = (feed.places // width == row) & feed.visible[row, 0, feed.places % width, at]
    return sorted(set(feed.trajectory[seen_by[feed.place]].tolist()))


def megatron(folder: str, layout: str, records: str, rank: int) -> dict[str, Any]:
    """Log-probabilities and a step, and per pass how many tokens of each trajectory were replayed, over all ranks."""
    trainer = MegatronTrainer(make_spec(folder, "float64", BUDGET), 1, parse_layout(layout), rank, 60.0)
    trainer.load(folder)
    batch, passes = batch_of(records), {}
    sent = Sent()
    with sent.watching():
        logprobs = trainer.logprobs(batch, batch.masks)
    passes["logprobs"] = together(trainer, compare(batch, sent, trainer))
    sent = Sent()
    with sent.watching():
        metrics = trainer.step(batch, ALONE)
    passes["step"] = together(trainer, compare(batch, sent, trainer))
    return {
        "logprobs": logprobs,
        "loss": metrics.loss,
        "reached": metrics.tokens_reached,
        "gradients": dict(trainer.masters.complete("grad")),
        "passes": passes,
    }


def together(trainer: MegatronTrainer, counts: dict[int, int]) -> list[int]:
    return trainer.ranks.sum(torch.tensor(list(counts.values()))).tolist()


def fsdp(folder: str, layout: str, records: str, rank: int) -> dict[str, Any]:
    trainer = FSDPTrainer(make_spec(folder, "float64", BUDGET), 1, parse_layout(layout), rank)
    trainer.load(folder)
    batch = batch_of(records)
    logprobs = trainer.logprobs(batch, batch.masks)
    metrics = trainer.step(batch, ALONE)
    if trainer.layout.world == 1:
        gradients = {name: weight.grad.clone() for name, weight in trainer.masters.weights.items()}
    else:
        gradients = {name: weight.grad.full_tensor() for name, weight in trainer.module.named_weights().items()}
    return {"logprobs": logprobs, "loss": metrics.loss, "reached": metrics.tokens_reached, "gradients": gradients}


def straying(folder: str, layout: str, records: str, rank: int) -> dict[str, Any]:
    """Every rank sends its first token elsewhere, in the first layer that it has: what each says."""
    trainer = MegatronTrainer(make_spec(folder, "float64", BUDGET), 1, parse_layout(layout), rank, 60.0)
    trainer.load(folder)
    route = experts.route

    def wrong(logits, top_k, renormalised, recorded):
        shares, chosen = route(logits, top_k, renormalised, recorded)
        chosen[0] = torch.tensor([i for i in range(EXPERTS) if i not in chosen[0].tolist()][:top_k])
        return shares, chosen

    experts.route = wrong
    try:
        trainer.logprobs(batch_of(records))
    except RoutingError as err:
        return {"said": trainer.ranks.exchange(str(err))}
    finally:
        experts.route = route
    return {"said": trainer.ranks.exchange("nothing")}


def main(rank: int, world: int, home: Path) -> None:
    if world > 1:
        store = dist.FileStore(str(home / f"store-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    plan, found = json.loads((home / "plan.json").read_text()), {}
    try:
        for trial, layout, records in plan["trials"][str(world)]:
            result = globals()[trial](plan["folder"], layout, records, rank)
            if trial != "fsdp":
                parallel.teardown()
            found[trial, layout, records] = result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        torch.save(found, home / f"{world}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
