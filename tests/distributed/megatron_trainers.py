"""One rank of megatron trainers over several processes, which takes a list of trials in turn.

    python megatron_trainers.py RANK WORLD FOLDER

`FOLDER/plan.json` names the trials for each world; rank 0 writes what they found to `FOLDER/<world>.pt`. The processes
start once, as each trial takes far less time than its imports.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
import torch.distributed as dist
from tiny_policy import make_batch, make_spec
from torch import Tensor

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.parallel import Layout, parse_layout
from furlong.ops.protocols import OtherLogprobs, TrainBatch
from furlong.ops.weights.digest import tensor_digest
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.masters import KINDS
from furlong.resources.trainers.megatron import parallel
from furlong.resources.trainers.megatron.trainer import MegatronTrainer
from furlong.resources.trainers.snapshots import SnapshotError

ALONE = OtherLogprobs()
CLIPS = {"clip_low": 0.9, "clip_high": 8.0}
BUDGET = 40
"""Tokens of a micro-batch: some four to six of them a step."""


def batch_at(step: int) -> TrainBatch:
    """Twelve trajectories; few letters make replies share beginnings."""
    return make_batch(step, (4, 1, 3, 2, 2), step=step, letters=5)


def trainer_of(folder: str, layout: str, rank: int, compute: str = "float64", **algorithm: Any) -> MegatronTrainer:
    # Wide clips: the engine's log-probabilities here are nobody's, and most tokens should give a gradient.
    spec = make_spec(folder, compute, BUDGET, **{**CLIPS, **algorithm})
    return MegatronTrainer(spec, 1, parse_layout(layout), rank, 120.0)


def loaded(folder: str, layout: str, rank: int, compute: str = "float64", **algorithm: Any) -> MegatronTrainer:
    trainer = trainer_of(folder, layout, rank, compute, **algorithm)
    trainer.load(folder)
    return trainer


def digests(trainer: MegatronTrainer) -> dict[str, str]:
    """Of everything a step changes, on rank 0."""
    found = {kind: str({n: tensor_digest(t) for n, t in trainer.masters.complete(kind)}) for kind in KINDS}
    return found | {"updates": str(trainer.masters.adamw.updates), "step": str(trainer.completed)}


def first_step(folder: str, layout: str, rank: int, compute: str = "float64", **algorithm: Any) -> dict[str, Any]:
    """Log-probabilities before a step, its metrics and every gradient, whole, by Hugging Face name."""
    trainer = loaded(folder, layout, rank, compute, **algorithm)
    before = trainer.logprobs(batch_at(1))
    metrics = trainer.step(batch_at(1), ALONE)
    return {"logprobs": before, "metrics": asdict(metrics), "gradients": dict(trainer.masters.complete("grad"))}


def steps(folder: str, layout: str, rank: int, compute: str, count: int = 5) -> dict[str, Any]:
    """Weights after some steps that clip, decay and warm up."""
    trainer = loaded(folder, layout, rank, compute, max_grad_norm=0.5, weight_decay=0.1, warmup_steps=2)
    metrics = [asdict(trainer.step(batch_at(step), ALONE)) for step in range(1, count + 1)]
    export, digest = trainer.export(), trainer.master_digest()
    start = trainer_of(folder, layout, rank, compute)
    start.load(folder)
    return {
        "weights": dict(trainer.masters.complete()),
        "export": export,
        "digest": digest,
        "start": dict(start.masters.complete()),
        "metrics": metrics,
        "rounded": all(torch.equal(*pair) for pair in in_the_model(trainer)),
    }


def in_the_model(trainer: MegatronTrainer) -> list[tuple[Tensor, Tensor]]:
    """What this rank computes with, beside its own masters rounded."""
    pairs = []
    for shard in trainer.masters.adamw.shards:
        if shard.master is not None:
            there = shard.parameter.detach().flatten()[shard.start : shard.stop]
            pairs.append((there, shard.master.to(there.dtype)))
    return pairs


def resumed(folder: str, layout: str, rank: int, compute: str, home: str) -> dict[str, Any]:
    """Four steps, and two and two with a save and a fresh trainer between."""
    one = loaded(folder, layout, rank, compute)
    for step in (1, 2):
        one.step(batch_at(step), ALONE)
    place = f"{home}/state-{layout or 'dp1'}-{compute}-{Path(folder).name}"
    one.save(place)
    halfway, middle = digests(one), dict(one.masters.complete())
    for step in (3, 4):
        one.step(batch_at(step), ALONE)
    other = trainer_of(folder, layout, rank, compute)
    assert other.restore(place) == 2
    restored = digests(other)
    for step in (3, 4):
        other.step(batch_at(step), ALONE)
    found = {"halfway": halfway, "restored": restored, "straight": digests(one), "resumed": digests(other)}
    return found | {"middle": middle, "weights": dict(one.masters.complete())}


def continued(folder: str, layout: str, rank: int, compute: str, state: str) -> dict[str, Any]:
    """What another layout makes of a state, as it reads it and two steps later."""
    trainer = trainer_of(folder, layout, rank, compute)
    assert trainer.restore(state) == 2
    found = {"restored": digests(trainer)}
    for step in (3, 4):
        trainer.step(batch_at(step), ALONE)
    return found | {"weights": dict(trainer.masters.complete())}


def exchanged(folder: str, layout: str, rank: int, compute: str, home: str) -> dict[str, Any]:
    """A state that goes from the fsdp backend, over as many ranks, to this one and back; digests on the way."""
    ours = loaded(folder, layout, rank, compute, weight_decay=0.1, max_grad_norm=0.5)
    world = ours.layout.world
    theirs = [FSDPTrainer(ours.spec, 1, Layout(dp=world), rank) for _ in range(2)]
    theirs[0].load(folder)
    found = {"base": (theirs[0].master_digest(), ours.master_digest())}
    for step in (1, 2):
        theirs[0].step(batch_at(step), ALONE)
    there, back = (f"{home}/state-{way}-{world}-{compute}-{Path(folder).name}" for way in ("there", "back"))
    theirs[0].save(there)
    assert ours.restore(there) == 2
    ours.save(back)
    assert theirs[1].restore(back) == 2
    found["halfway"] = tuple(trainer.master_digest() for trainer in (theirs[0], ours, theirs[1]))
    for trainer in (theirs[0], ours, theirs[1]):
        trainer.step(batch_at(3), ALONE)
    found["after"] = tuple(trainer.master_digest() for trainer in (theirs[0], theirs[1]))
    return found | {"fsdp": dict(theirs[0].masters.complete()), "megatron": dict(ours.masters.complete())}


def poisoned(folder: str, layout: str, rank: int) -> dict[str, Any]:
    """An infinite gradient on the last rank alone: what every rank says, and whether anything changed."""
    trainer = loaded(folder, layout, rank)
    trainer.step(batch_at(1), ALONE)
    before = digests(trainer)
    layer = trainer.masters.chunks[-1].module.decoder.layers[-1].self_attention.linear_proj.weight
    hook = layer.register_hook(lambda grad: grad * torch.inf) if rank == trainer.layout.world - 1 else None
    said = refusal(lambda: trainer.step(batch_at(2), ALONE), trainer)
    after = digests(trainer)
    if hook:
        hook.remove()
    trainer.step(batch_at(2), ALONE)
    clean = loaded(folder, layout, rank)
    for step in (1, 2):
        clean.step(batch_at(step), ALONE)
    return {"said": said, "before": before, "after": after, "next": digests(trainer), "clean": digests(clean)}


def overflowing(folder: str, layout: str, rank: int) -> dict[str, Any]:
    """A ratio that is not finite, noticed in the middle of a pipeline, and a bad weight on one rank."""
    trainer = loaded(folder, layout, rank)
    batch = batch_at(1)
    index = next(i for i, mask in enumerate(batch.masks) if all(mask))
    rows = list(batch.logprobs)
    rows[index] = (-1e4,) * len(rows[index])
    before = digests(trainer)
    said = refusal(lambda: trainer.step(replace(batch, logprobs=tuple(rows)), ALONE), trainer)
    after = digests(trainer)
    with torch.no_grad():
        for parts in trainer.masters._parts.values():
            for part in parts:
                if part.piece.name == "model.layers.3.mlp.up_proj.weight":
                    part.get(part.parameter)[0, 0] = torch.nan
    weight = refusal(lambda: trainer.step(batch, ALONE), trainer)
    return {"said": said, "trajectory": batch.trajectory_ids[index], "before": before, "after": after, "weight": weight}


def damaged(folder: str, layout: str, rank: int, home: str) -> dict[str, Any]:
    """States that cannot be used, one of them for a single rank's sake: what is said, and whether anything changed."""
    trainer, other = loaded(folder, layout, rank), loaded(folder, layout, rank, "float32")
    trainer.step(batch_at(1), ALONE)
    place = Path(home) / f"state-damaged-{trainer.layout}"
    trainer.save(str(place))
    before = digests(trainer)
    said = {"dtype": refusal(lambda: other.restore(str(place)), other)}
    said["absent"] = refusal(lambda: trainer.restore(str(place) + "-not"), trainer)
    if rank == 0:
        last = sorted(place.glob("*.safetensors"))[-1]
        content = bytearray(last.read_bytes())
        content[-1] ^= 1
        last.write_bytes(content)
    trainer.ranks.exchange(None)
    said["damaged"] = refusal(lambda: trainer.restore(str(place)), trainer)
    fresh = trainer_of(folder, layout, rank)
    said["fresh"] = refusal(lambda: fresh.restore(str(place)), trainer)
    assert fresh.config is None
    return {"said": said, "before": before, "after": digests(trainer)}


def refusal(call: Callable[[], Any], trainer: MegatronTrainer) -> list[str]:
    """What each rank was told."""
    try:
        call()
    except (NonFiniteError, SnapshotError) as err:
        return trainer.ranks.exchange(str(err))
    return trainer.ranks.exchange("nothing was refused")


def other_weights(folder: str, layout: str, rank: int, compute: str) -> dict[str, Any]:
    """Log-probabilities under other weights, of some tokens, and the trainer before and after."""
    trainer = loaded(folder, layout, rank, compute)
    first = trainer.ranks.exchange(dict(trainer.masters.complete()))[0]
    batch = batch_at(1)
    own = trainer.logprobs(batch)
    trainer.step(batch, ALONE)
    before = digests(trainer)
    masks = tuple(tuple(t % 2 == 0 and i % 3 > 0 for t in range(len(r))) for i, r in enumerate(batch.replies))
    some = trainer.logprobs(batch, masks, first)
    none = trainer.logprobs(batch, tuple((False,) * len(r) for r in batch.replies), first)
    after = digests(trainer)
    now = trainer.logprobs(batch)
    return {"own": own, "some": some, "none": none, "masks": masks, "before": before, "after": after, "now": now}


def nothing_to_train(folder: str, layout: str, rank: int) -> dict[str, Any]:
    """A step without a trained token, and the one after it."""
    trainer = loaded(folder, layout, rank)
    batch = batch_at(1)
    before = digests(trainer)
    metrics = trainer.step(replace(batch, masks=tuple((False,) * len(r) for r in batch.replies)), ALONE)
    after = digests(trainer)
    trainer.step(batch_at(2), ALONE)
    return {"before": before, "after": after, "metrics": asdict(metrics), "updates": trainer.masters.adamw.updates}


def main(rank: int, world: int, home: Path) -> None:
    if world > 1:
        store = dist.FileStore(str(home / f"store-{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    found: dict[str, Any] = {}
    try:
        for name, (trial, settings) in json.loads((home / "plan.json").read_text())[str(world)].items():
            begin = time.perf_counter()
            result: dict[str, Tensor | Any] = globals()[trial](rank=rank, **settings)
            print(f"{time.perf_counter() - begin:6.2f} s {name}", flush=True)
            if world > 1:
                dist.barrier()
            parallel.teardown()
            if rank == 0:
                found[name] = result
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if rank == 0:
        torch.save(found, home / f"{world}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
