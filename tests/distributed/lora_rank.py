"""One rank of trainers of adapters over several processes, which takes a list of layouts in turn.

    python lora_rank.py RUN RANK WORLD FOLDER

`FOLDER/plan.pt` has models, batches and, for each run, the (backend, layout, model) to try; the rank writes what it found
to `FOLDER/<run>-<rank>.pt`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
import torch.distributed as dist
from lora_samples import with_adapters
from tiny_policy import make_spec

from furlong.ops.policy.parallel import parse_layout
from furlong.ops.protocols import OtherLogprobs
from furlong.resources.trainers.fsdp import FSDPTrainer

ALONE = OtherLogprobs()
BUDGET = 40


def trainer_of(backend: str, layout: str, rank: int, folder: str, compute: str) -> Any:
    spec = with_adapters(make_spec(folder, compute, BUDGET, max_grad_norm=0.5))
    if backend == "fsdp":
        return FSDPTrainer(spec, 1, parse_layout(layout), rank)
    from furlong.resources.trainers.megatron.trainer import MegatronTrainer

    return MegatronTrainer(spec, 1, parse_layout(layout), rank, 60.0)


def stir(trainer: Any) -> None:
    """Adapters that change something, so that A gets a gradient; the same in every layout."""
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in sorted(trainer.masters.weights.items()):
            if "lora_B" in name:
                weight.copy_(0.1 * torch.randn(weight.shape, generator=draw))
    trainer.masters.round()


def adapters(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: whole.clone() for name, whole in trainer.masters.complete()}


def trial(plan: dict[str, Any], backend: str, layout: str, model: str, rank: int, saved: Path) -> dict[str, Any]:
    """A step in float64, three in bfloat16 of which the last follows a save, and that last one again from it."""
    folder, batches = plan["folders"][model], plan["batches"][model]
    trainer = trainer_of(backend, layout, rank, folder, "float64")
    trainer.load(folder)
    stir(trainer)
    found: dict[str, Any] = {"logprobs": trainer.logprobs(batches[0]), "first": trainer.step(batches[0], ALONE)}
    found["gradients"] = {name: weight.grad.clone() for name, weight in trainer.masters.weights.items()}
    found["double"] = adapters(trainer)
    own = trainer.logprobs(batches[0])
    found["under published"] = trainer.logprobs(batches[0], None, plan["published"][model])
    found["same afterwards"] = trainer.logprobs(batches[0]) == own != found["under published"]
    trainer = trainer_of(backend, layout, rank, folder, "bfloat16")
    trainer.load(folder)
    found["zero"] = trainer.export()
    for batch in batches[:2]:
        trainer.step(batch, ALONE)
    trainer.save(str(saved))
    version, found["two"] = trainer.export(), adapters(trainer)
    found["version"] = version
    trainer.step(batches[2], ALONE)
    found["three"], found["digest"] = adapters(trainer), trainer.master_digest()
    again = trainer_of(backend, layout, rank, folder, "bfloat16")
    assert again.restore(str(saved)) == 2
    found["restored"] = adapters(again)
    again.step(batches[2], ALONE)
    found["three again"], found["export again"] = adapters(again), again.export()
    found["export"] = trainer.export()
    if (backend, layout) != ("fsdp", "dp1"):
        other = trainer_of(backend, layout, rank, folder, "bfloat16")
        assert other.restore(plan["states"][model]) == 2
        found["from one rank"], found["export from one rank"] = adapters(other), other.export()
    return found


def main(run: str, rank: int, world: int, home: Path) -> None:
    plan = torch.load(home / "plan.pt", weights_only=False)
    store = dist.FileStore(str(home / f"store-{run}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        found = {
            case: trial(plan, *case, rank, home / f"state-{run}-{number}")
            for number, case in enumerate(plan["cases"][run])
        }
        torch.save(found, home / f"{run}-{rank}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
