"""What `test_value_ranks` compares between layouts of PPO's two models, and, as a program, one rank of several.

    python value_rank.py RANK WHICH FOLDER

WHICH is a key of LAYOUTS. `FOLDER/plan.pt` says what to train on; every rank writes to `FOLDER/<which>-<rank>.pt`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
import torch.distributed as dist
from tiny_policy import make_batch, make_spec

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.parallel import parse_layout
from furlong.ops.protocols import OtherLogprobs, TrainBatch
from furlong.resources.trainers.make import make_rank
from furlong.resources.trainers.rank_trainer import RankTrainer

LAYOUTS = {
    "two": (2, [("fsdp", "dp2"), ("megatron", "tp2")]),
    "more of two": (2, [("megatron", "dp2"), ("megatron", "pp2"), ("megatron", "cp2")]),
    "four": (4, [("fsdp", "dp4"), ("megatron", "tp2-pp2"), ("megatron", "cp2-dp2")]),
}
"""Number of ranks, and what they do one after the other, as starting them takes far longer."""
Found = dict[str, Any]


def batch_at(step: int) -> TrainBatch:
    batch = make_batch(step, (4, 1, 3, 2, 2), step=step, letters=5)
    return replace(batch, advantages=batch.rewards)


def others_of(batch: TrainBatch) -> OtherLogprobs:
    return OtherLogprobs(reference=tuple(tuple(0.9 * value for value in row) for row in batch.logprobs))


def made(folder: str, backend: str, layout: str, rank: int, compute: str) -> RankTrainer:
    critic = {"learning_rate": 5e-3, "updates": 2, "max_grad_norm": 0.3, "clip": 0.05}
    spec = make_spec(folder, compute, 24, name="ppo", kl_coef=0.1, critic=critic, clip_low=0.9, clip_high=8.0)
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"backend": backend})})
    return make_rank(spec, 1, parse_layout(layout), rank, 120.0)


def taken(trainer: RankTrainer, steps: range) -> list[Found]:
    return [asdict(trainer.step(batch_at(step), others_of(batch_at(step)))) for step in steps]


def weights(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    """All masters, whole; of megatron's policy on rank 0 alone."""
    return {name: t.clone() for name, t in [*trainer.masters.complete(), *trainer.critic.complete()]}


def held(trainer: RankTrainer) -> dict[str, torch.Tensor]:
    """A copy of this rank's part of what is saved."""
    return {str(piece): tensor.clone() for piece, tensor in (trainer.masters.state() | trainer.critic.state()).items()}


def trial(plan: Found, backend: str, layout: str, rank: int) -> Found:
    """Three steps; four, and two and two; a state of one rank read here; a value that is bad on the last rank alone."""
    folder = plan["folder"]
    trainer = made(folder, backend, layout, rank, "float64")
    trainer.load(folder)
    found = {"metrics": taken(trainer, range(1, 4)), "weights": weights(trainer), "digest": trainer.master_digest()}
    found["export"] = sorted(trainer.export())
    found["bad"] = spoilt(trainer, rank)
    straight, again = (made(folder, backend, layout, rank, "float32") for _ in range(2))
    straight.load(folder)
    taken(straight, range(1, 3))
    place = str(Path(plan["home"]) / f"state-{backend}-{layout}")
    straight.save(place)
    found["two"] = straight.master_digest()
    taken(straight, range(3, 5))
    assert again.restore(place) == 2
    taken(again, range(3, 5))
    found["straight"], found["resumed"] = held(straight), held(again)
    other = made(folder, backend, layout, rank, "float32")
    if "state" in plan:
        assert other.restore(plan["state"]) == 2
        found["moved"] = other.master_digest()
        taken(other, range(3, 5))
        found["after"] = weights(other)
    else:
        found["after"] = weights(straight)
    return found


def spoilt(trainer: RankTrainer, rank: int) -> Found:
    """In the second update, after the first has moved the value model on all ranks."""
    before, calls, passes = held(trainer), [], []
    trainer.critic.masters.begin, begin = lambda: (passes.append(1), begin())[1], trainer.critic.masters.begin

    def spoil(module: Any, args: Any, out: Any) -> Any:
        calls.append(1)
        return out * math.nan if len(passes) == 2 and rank == trainer.ranks.world - 1 else out

    hook = trainer.critic.module.register_forward_hook(spoil)
    said = "nothing was raised"
    try:
        taken(trainer, range(4, 5))
    except NonFiniteError as err:
        said = str(err)
    hook.remove()
    return {"said": said, "same": all(torch.equal(before[name], now) for name, now in held(trainer).items())}


def main(rank: int, which: str, home: Path) -> None:
    from furlong.resources.trainers.megatron import parallel

    world, layouts = LAYOUTS[which]
    store = dist.FileStore(str(home / f"store {which}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    plan, found = torch.load(home / "plan.pt", weights_only=False), {}
    try:
        for backend, layout in layouts:
            found[backend, layout] = trial(plan, backend, layout, rank)
            dist.barrier()
            parallel.teardown()
        torch.save(found, home / f"{which}-{rank}.pt")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
