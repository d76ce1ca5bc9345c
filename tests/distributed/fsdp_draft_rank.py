"""What `test_fsdp_draft` compares between layouts of FSDPTrainer, and, as a program, one rank of several.

    python fsdp_draft_rank.py RANK WORLD FOLDER

`FOLDER/plan.pt` says what to train on; every rank writes to `FOLDER/found-<world>-<rank>.pt`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
import torch.distributed as dist
from lora_samples import with_adapters
from tiny_policy import make_batch, make_spec
from torch import Tensor

from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs
from furlong.resources.trainers.fsdp import FSDPTrainer

DRAFT = {"kind": "eagle3", "learning_rate": 5e-3, "warmup_steps": 2, "max_grad_norm": 0.3}
BLOCK = {"kind": "block", "proposals": 3, "layers": 2, "learning_rate": 5e-3, "warmup_steps": 0}
POLICIES = {"float32": 24, "bfloat16": 24, "adapters": 24, "one micro-batch": 512}
"""By name, the padded tokens of a micro-batch; with 512, one rank has all of a step and the others nothing."""
Found = dict[str, Any]


def made(folder: str, rank: int, world: int, compute: str, draft: Found | None = None, budget: int = 24) -> FSDPTrainer:
    adapters, compute = compute == "adapters", "float32" if compute == "adapters" else compute
    spec = make_spec(folder, compute, budget).model_copy(update={"draft": draft or {}})
    return FSDPTrainer(with_adapters(spec) if adapters else spec, 1, Layout(dp=world), rank)


def taken(trainer: FSDPTrainer, steps: range) -> list[Found]:
    batches = (make_batch(step, (4, 1, 3, 2, 2), step, letters=5) for step in steps)
    return [asdict(trainer.step(batch, OtherLogprobs())) for batch in batches]


def whole(trainer: FSDPTrainer) -> dict[str, Tensor]:
    """All masters, whole, on every rank."""
    return {name: t.clone() for name, t in [*trainer.masters.complete(), *trainer.draft.complete()]}


def drafts(trainer: FSDPTrainer) -> dict[str, Tensor]:
    """What this rank has of the draft: all of it, with moments."""
    return {name: tensor.clone() for name, tensor in trainer.draft.masters._held().items()}


def trial(plan: Found, rank: int, world: int) -> Found:
    folder, home = plan["folder"], Path(plan["home"])
    found: Found = {"policies": policies(folder, rank, world)}
    for kind, draft, steps in (("block", BLOCK, 1), ("eagle3", DRAFT, 3)):
        trainer = made(folder, rank, world, "float64", draft)
        trainer.load(folder)
        found[kind] = {
            "metrics": taken(trainer, range(1, steps + 1)),
            "weights": whole(trainer),
            "held": drafts(trainer),
        }
        found[kind]["export"] = {name: t.shape for name, t in trainer.export().items()}
    found["bad"] = spoilt(trainer, rank)
    straight, again = (made(folder, rank, world, "float32", DRAFT) for _ in range(2))
    straight.load(folder)
    taken(straight, range(1, 3))
    place = str(home / f"state-{world}")
    straight.save(place)
    found["two"] = straight.master_digest()
    last = taken(straight, range(3, 5))
    assert again.restore(place) == 2
    found["goes on"] = [without_time(one) for one in taken(again, range(3, 5))] == [without_time(one) for one in last]
    found["four"], found["resumed"] = (each.master_digest() for each in (straight, again))
    found["straight"], found["again"] = drafts(straight), drafts(again)
    found["after"] = whole(straight)
    if world > 1:
        other = made(folder, rank, world, "float32", DRAFT)
        assert other.restore(str(home / "state-1")) == 2
        found["moved"] = other.master_digest()
        taken(other, range(3, 5))
        found["after"] = whole(other)
    return found


def without_time(metrics: Found) -> Found:
    return {name: value for name, value in metrics.items() if name != "draft_seconds"}


def policies(folder: str, rank: int, world: int) -> Found:
    """The policy after two steps without and with a draft, in every way of training it."""
    found: Found = {}
    for name, budget in POLICIES.items():
        compute = name if budget == 24 else "float32"
        for draft in (None, DRAFT):
            trainer = made(folder, rank, world, compute, draft, budget)
            trainer.load(folder)
            metrics = [
                {key: value for key, value in one.items() if not key.startswith("draft_")}
                for one in taken(trainer, range(1, 3))
            ]
            state = {str(piece): tensor.clone() for piece, tensor in trainer.masters.state().items()}
            found[name, draft is not None] = metrics, state, torch.get_rng_state()
    return found


def spoilt(trainer: FSDPTrainer, rank: int) -> Found:
    """A gradient of the draft that is bad on the last rank alone."""
    before = drafts(trainer)
    bad = rank == trainer.ranks.world - 1
    hook = trainer.draft.module.get_parameter("norm.weight").register_hook(lambda g: g * math.nan if bad else g)
    told = taken(trainer, range(4, 5))[0]
    hook.remove()
    same = all(torch.equal(before[name], now) for name, now in drafts(trainer).items())
    return {"told": told, "same": same, "next": taken(trainer, range(5, 6))[0], "held": drafts(trainer)}


def main(rank: int, world: int, home: Path) -> None:
    store = dist.FileStore(str(home / f"store {world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        found = trial(torch.load(home / "plan.pt", weights_only=False), rank, world)
        torch.save(found, home / f"found-{world}-{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
