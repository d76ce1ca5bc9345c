"""What `test_megatron_draft` compares between layouts of a policy whose draft learns beside it, and, as a program, one rank
of several.

    python megatron_draft_rank.py RANK WHICH FOLDER

WHICH is a key of LAYOUTS. `FOLDER/plan.json` says what to train; every rank writes to `FOLDER/<which>-<rank>.pt`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

import torch
import torch.distributed as dist
from tiny_policy import make_batch, make_spec
from torch import Tensor

from furlong.ops.policy.parallel import parse_layout
from furlong.ops.protocols import OtherLogprobs, StepMetrics, TrainBatch
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.megatron import parallel
from furlong.resources.trainers.megatron.trainer import MegatronTrainer
from furlong.resources.trainers.rank_trainer import RankTrainer

Case = tuple[str, str, str]
"""Layout, model, draft."""
LAYOUTS: dict[str, tuple[int, list[Case]]] = {
    "two": (2, [("cp2", "qwen3", "eagle3"), ("pp2", "qwen3", "eagle3")]),
    "more of two": (
        2,
        [
            ("tp2", "llama", "eagle3"),
            ("pp2", "llama", "reduced"),
            ("tp2-sp", "moe", "eagle3"),
            ("dp2", "qwen3", "block"),
            ("cp2", "qwen3", "block"),
            ("pp2-vpp2-recompute", "llama", "eagle3"),
        ],
    ),
    "four": (
        4,
        [
            ("tp2-pp2", "llama", "reduced"),
            ("tp2-cp2-sp", "qwen3", "eagle3"),
            ("pp2-cp2", "llama", "block"),
            ("pp4", "qwen3", "block"),
            ("cp2-dp2", "qwen3", "reduced"),
            ("tp2-pp2-vpp2-sp-recompute", "moe", "eagle3"),
        ],
    ),
}
"""Number of ranks, and what they do one after the other, as starting them takes far longer."""
DRAFTS = {
    "eagle3": {"kind": "eagle3", "depths": 3},
    "reduced": {"kind": "eagle3", "depths": 4, "vocabulary": 40, "loss": "mixed", "taps": "1,2"},
    "block": {"kind": "block", "proposals": 3, "layers": 2},
}
LEARNING = {"learning_rate": 5e-3, "warmup_steps": 2, "max_grad_norm": 0.5}
BUDGET = 32
"""Tokens of a micro-batch, so that there are several per rank."""
Found = dict[str, Any]


def batch_at(step: int) -> TrainBatch:
    """Twelve trajectories; few letters make replies share beginnings."""
    return make_batch(step, (4, 1, 3, 2, 2), step=step, letters=5)


def made(
    folder: str, layout: str, rank: int, compute: str, draft: str, fsdp: bool = False, deadline: float = 120.0
) -> RankTrainer:
    """A trainer that holds nothing yet; `draft` of DRAFTS, or empty for none."""
    spec = make_spec(folder, compute, BUDGET, clip_low=0.9, clip_high=8.0)
    spec = spec.model_copy(update={"draft": {**DRAFTS[draft], **LEARNING} if draft else {}})
    return FSDPTrainer(spec, 1) if fsdp else MegatronTrainer(spec, 1, parse_layout(layout), rank, deadline)


def loaded(folder: str, *args: Any, **more: Any) -> RankTrainer:
    trainer = made(folder, *args, **more)
    trainer.load(folder)
    return trainer


def taken(trainer: RankTrainer, steps: range) -> list[StepMetrics]:
    return [trainer.step(batch_at(step), OtherLogprobs()) for step in steps]


def of_draft(metrics: list[StepMetrics]) -> list[Found]:
    """The draft's share of each step's metrics, without its time."""
    return [{n: v for n, v in asdict(one).items() if n.startswith("draft_") and "seconds" not in n} for one in metrics]


def of_policy(metrics: list[StepMetrics]) -> list[Found]:
    """The rest of them."""
    return [{n: v for n, v in asdict(one).items() if not n.startswith("draft_")} for one in metrics]


def held(trainer: RankTrainer) -> dict[str, Tensor]:
    """A copy of what this rank saves of the policy, and the random state."""
    state = {str(piece): tensor.clone() for piece, tensor in trainer.masters.state().items()}
    return state | {"random": torch.get_rng_state()}


def of_the_draft(trainer: RankTrainer) -> dict[str, Tensor]:
    """A copy of the draft's masters and moments, which every rank has."""
    return {name: tensor.clone() for name, tensor in trainer.draft.masters._held().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trial(folder: str, home: str, layout: str, rank: int, draft: str) -> Found:
    """Three steps beside a policy alone; a step that the draft fails in; two and two with a save, and another's state."""
    trainer = loaded(folder, layout, rank, "float64", draft)
    metrics = taken(trainer, range(1, 4))
    found = {"metrics": of_draft(metrics), "seconds": [one.draft_seconds for one in metrics]}
    found["masters"] = {name: w.detach().clone() for name, w in trainer.draft.masters.weights.items()}
    found["digest"], found["exported"] = trainer.master_digest(), sorted(trainer.export())
    policy = held(trainer)
    found["refused"] = refused(trainer)
    later = of_policy(taken(trainer, range(4, 5))), held(trainer)
    alone = loaded(folder, layout, rank, "float64", "")
    found["policy metrics"] = of_policy(taken(alone, range(1, 4))) == of_policy(metrics)
    found["policy"] = same(policy, held(alone))
    after = of_policy(taken(alone, range(4, 5))), held(alone)
    found["after the refusal"] = later[0] == after[0] and same(later[1], after[1])
    return found | resumed(folder, home, layout, rank, draft)


def refused(trainer: RankTrainer) -> Found:
    """A step in which the draft fails once it has added a micro-batch's gradients."""
    before, draft, learn = held(trainer), of_the_draft(trainer), trainer.draft.learn

    def fail(*args: Any) -> None:
        learn(*args)
        raise ValueError("the draft cannot learn this")

    trainer.draft.learn = fail
    said = ""
    try:
        taken(trainer, range(4, 5))
    except ValueError as error:
        said = str(error)
    trainer.draft.learn = learn
    return {"said": said, "same": same(before, held(trainer)) and same(draft, of_the_draft(trainer))}


def resumed(folder: str, home: str, layout: str, rank: int, draft: str) -> Found:
    """In float32: what is left of four steps, and of two and two in another trainer, and of two after one rank's two."""
    straight = loaded(folder, layout, rank, "float32", draft)
    taken(straight, range(1, 3))
    place, name = f"{home}/state-{layout or 'dp1'}", f"{Path(folder).name}-{draft}"
    straight.save(f"{place}-{name}")
    found = {"two": straight.master_digest()}
    taken(straight, range(3, 5))
    again = made(folder, layout, rank, "float32", draft)
    assert again.restore(f"{place}-{name}") == 2
    taken(again, range(3, 5))
    found["resumed"] = same(held(straight), held(again)) and same(of_the_draft(straight), of_the_draft(again))
    if layout:
        other = made(folder, layout, rank, "float32", draft)
        assert other.restore(f"{home}/state-dp1-{name}") == 2
        found["moved"] = other.master_digest()
    return found


def lose_the_last(folder: str, rank: int, home: Path) -> None:
    """A pipeline whose last stage ends while the draft learns: what the first one is told, and after how long."""
    trainer = loaded(folder, "pp2", rank, "float32", "eagle3", deadline=20.0)
    dist.barrier()
    begin = time.monotonic()
    if rank:
        trainer.draft.learn = lambda *args: os._exit(0)
    try:
        taken(trainer, range(1, 2))
    except RuntimeError as error:
        report = {"kind": type(error).__name__, "said": str(error), "seconds": time.monotonic() - begin}
        (home / "lost.json").write_text(json.dumps(report))
    os._exit(0)


def main(rank: int, which: str, home: Path) -> None:
    world, cases = LAYOUTS[which]
    store = dist.FileStore(str(home / f"store {which}"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    folders, found = json.loads((home / "plan.json").read_text()), {}
    try:
        for layout, model, draft in cases:
            begin = time.perf_counter()
            found[layout, model, draft] = trial(folders[model], str(home), layout, rank, draft)
            dist.barrier()
            parallel.teardown()
            print(f"{time.perf_counter() - begin:6.2f} s {layout} {model} {draft}", flush=True)
        torch.save(found, home / f"{which}-{rank}.pt")
        if which == "two":
            lose_the_last(folders["qwen3"], rank, home)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
