"""What `test_fsdp_ranks` compares between numbers of ranks, and, as a program, one rank of several.

Usage: fsdp_rank.py <rank> <world> <folder of plan.pt>; every rank writes what it found to `<folder>/<world>-<rank>.pt`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
import torch.distributed as dist
from tiny_policy import make_spec
from torch import Tensor

from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs
from furlong.resources.trainers.fsdp import FSDPTrainer

ALONE = OtherLogprobs()
LOSSES = {
    "one micro-batch a rank": {"budget": 512},
    "several, and an odd one": {"budget": 24},
    "all slopes at once": {"budget": 24, "name": "gspo"},
}
FORMATS = ("float64", "float32", "bfloat16")
STEPS = 5
Found = dict[str, Any]
Plan = dict[str, Any]


def made(plan: Plan, layout: Layout, rank: int, compute: str = "float64", architecture: str = "llama", **settings: Any):
    trainer = FSDPTrainer(make_spec(plan["folders"][architecture], compute, **settings), 1, layout, rank)
    trainer.load(plan["folders"][architecture])
    return trainer


def gradients(trainer: FSDPTrainer) -> dict[str, Tensor]:
    """Summed gradients as a step left them, whole."""
    if trainer.ranks.world == 1:
        return {name: master.grad.clone() for name, master in trainer.masters.weights.items()}
    return {name: p.grad.full_tensor() for name, p in trainer.module.named_weights().items()}


def masters(trainer: FSDPTrainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.masters.complete()}


def held(trainer: FSDPTrainer) -> dict[str, Tensor]:
    """A copy of this rank's part of the whole state."""
    return {str(piece): tensor.clone() for piece, tensor in trainer.masters.state().items()}


def first_steps(plan: Plan, layout: Layout, rank: int) -> Found:
    """Metrics, gradients, and log-probabilities before the step, by architecture and loss."""
    found = {}
    for architecture, batches in plan["batches"].items():
        for name, settings in LOSSES.items():
            trainer = made(plan, layout, rank, architecture=architecture, **settings)
            logprobs = trainer.logprobs(batches[0])
            found[architecture, name] = (trainer.step(batches[0], ALONE), gradients(trainer), logprobs)
    return found


def more_steps(plan: Plan, layout: Layout, rank: int) -> Found:
    """Masters, digest and gradient norms of five steps, each clipped, by number format."""
    found = {}
    for compute in FORMATS:
        trainer = made(plan, layout, rank, compute, budget=40, max_grad_norm=0.5)
        norms = [trainer.step(batch, ALONE).grad_norm for batch in plan["batches"]["llama"]]
        found[compute] = {"masters": masters(trainer), "norms": norms, "digest": trainer.master_digest()}
    return found


def resumed(plan: Plan, layout: Layout, rank: int, saved: Path) -> Found:
    """Two steps from where `saved` stands, on a trainer that has never seen the model's files."""
    trainer = FSDPTrainer(make_spec(plan["folders"]["llama"], "float32", budget=40), 1, layout, rank)
    done = trainer.restore(str(saved))
    digest = trainer.master_digest()
    for batch in plan["batches"]["llama"][done : done + 2]:
        trainer.step(batch, ALONE)
    return {"done": done, "digest": digest, "held": held(trainer), "masters": masters(trainer)}


def resume(plan: Plan, layout: Layout, rank: int) -> Found:
    """Four steps at once, and two that are saved."""
    trainer = made(plan, layout, rank, "float32", budget=40)
    home = Path(plan["home"])
    for batch in plan["batches"]["llama"][:2]:
        trainer.step(batch, ALONE)
    two = trainer.master_digest()
    trainer.save(str(home / f"state-{layout.world}"))
    for batch in plan["batches"]["llama"][2:4]:
        trainer.step(batch, ALONE)
    return {"two": two, "held": held(trainer), "again": resumed(plan, layout, rank, home / f"state-{layout.world}")}


def published(plan: Plan, layout: Layout, rank: int) -> Found:
    """Log-probabilities of some tokens under other weights, and what the trainer was before and after."""
    trainer = made(plan, layout, rank, budget=24)
    batch = plan["batches"]["llama"][0]
    before, own = held(trainer), trainer.logprobs(batch)
    other = trainer.logprobs(batch, batch.masks, plan["other"])
    return {"other": other, "own": own, "own again": trainer.logprobs(batch), "before": before, "after": held(trainer)}


def spoilt(plan: Plan, layout: Layout, rank: int) -> Found:
    """What is raised, and what has changed, when numbers are bad on one rank alone; then a good step."""
    found, batch = {}, plan["batches"]["llama"][0]
    for what in ("gradient", "log-probability"):
        trainer = made(plan, layout, rank, "float32", budget=24)
        before = held(trainer)
        hook = _poison(trainer, what) if rank == 1 else None
        try:
            trainer.step(batch, ALONE)
            said = "nothing was raised"
        except ValueError as err:
            said = f"{type(err).__name__}: {err}"
        if hook:
            hook.remove()
        same = all(torch.equal(before[name], now) for name, now in held(trainer).items())
        found[what] = {
            "said": said,
            "same": same,
            "next": trainer.step(batch, ALONE),
            "digest": trainer.master_digest(),
        }
    return found


def _poison(trainer: FSDPTrainer, what: str) -> Any:
    def spoil(module: Any, args: Any, out: Any) -> Any:
        if what == "gradient":
            out.register_hook(lambda gradient: gradient * math.inf)
            return out
        return (out[0] * math.nan, out[1])

    place = trainer.module.layers()[0].self_attn.q_proj if what == "gradient" else trainer.module
    return place.register_forward_hook(spoil)


CHECKS: dict[str, Callable[[Plan, Layout, int], Found]] = {
    "first": first_steps, "more": more_steps, "resume": resume, "published": published, "spoilt": spoilt,
}  # fmt: skip


if __name__ == "__main__":
    rank, world, home = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    plan = torch.load(home / "plan.pt", weights_only=False)
    store = dist.FileStore(str(home / f"store-{world}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    try:
        found = {name: check(plan, Layout(dp=world), rank) for name, check in CHECKS.items()}
        found["recompute"] = first_steps(plan, Layout(dp=world, recompute=True), rank)
        found["resharded"] = resumed(plan, Layout(dp=world), rank, home / "state-1")
        torch.save(found, home / f"{world}-{rank}.pt")
    finally:
        dist.destroy_process_group()
