"""Adapters trained over several processes, by both backends, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import lora_rank
import pytest
import torch
from lora_samples import adapted, base_of
from tiny_policy import make_batch, make_folder, make_tiny_moe, near_policy

from furlong.ops.policy.lora import policy_of
from furlong.ops.weights.digest import manifest

WORLDS = {"quick": 2, "one": 1, "two": 2, "four": 4}
CASES = {
    "quick": [("fsdp", "dp2", "llama"), ("megatron", "tp2", "llama")],
    "one": [("megatron", "dp1", "llama"), ("megatron", "dp1", "moe")],
    "two": [
        ("fsdp", "dp2", "moe"), ("megatron", "pp2", "llama"), ("megatron", "dp2", "llama"), ("megatron", "cp2", "llama"),
        ("megatron", "ep2-dp2", "moe"), ("megatron", "tp2-ep2-sp", "moe"),
    ],
    "four": [("fsdp", "dp4", "llama"), ("megatron", "tp2-pp2", "llama"), ("megatron", "tp2-cp2-sp", "llama")],
}  # fmt: skip
ALL = [
    pytest.param(run, case, id="-".join(case), marks=[] if run == "quick" else [pytest.mark.slow])
    for run, cases in CASES.items()
    for case in cases
]
EXACT = 1e-11
"""Bound on gradients in float64, relative to the tensor's norm: sums of a few hundred products in another order."""
AFTER = 1e-6
"""Bound on adapters after a step in float64: AdamW divides by the gradient's own size, which magnifies rounding where a
gradient is next to nothing."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    home = tmp_path_factory.mktemp("lora")
    folders = {"llama": make_folder(home / "llama"), "moe": make_tiny_moe(home / "moe")}
    batches, published = {}, {}
    for name, folder in folders.items():
        trainer = lora_rank.trainer_of("fsdp", "dp1", 0, folder, "float64")
        trainer.load(folder)
        raw = [make_batch(step, (4, 1, 3), step=step) for step in (1, 2, 3)]
        batches[name] = [near_policy(batch, trainer.logprobs(batch)) for batch in raw]
        published[name] = adapted(base_of(folder), 7)
    made = {"home": home, "folders": folders, "batches": batches, "cases": CASES, "published": published}
    made |= {"states": {name: str(home / f"state-1-{name}") for name in folders}}
    torch.save(made, home / "plan.pt")
    return made


@pytest.fixture(scope="module")
def alone(plan):
    """Of a model: everything on one rank, in this process, which leaves its state after two steps behind."""

    @cache
    def run(model):
        return lora_rank.trial(plan, "fsdp", "dp1", model, 0, Path(plan["states"][model]))

    return run


@pytest.fixture(scope="module")
def ranks(plan, alone):
    """What each rank of a run found."""

    @cache
    def run(name):
        for _, _, model in CASES[name]:
            alone(model)
        command = [sys.executable, "-W", "ignore", lora_rank.__file__, name]
        world, environment = WORLDS[name], os.environ | {"OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*command, str(rank), str(world), str(plan["home"])], stderr=subprocess.PIPE, text=True, env=environment
            )
            for rank in range(world)
        ]
        try:
            said = [process.communicate(timeout=300)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        codes = [process.returncode for process in processes]
        assert codes == [0] * world, "\n".join(text[-3000:] for text in said)
        return [torch.load(plan["home"] / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)]

    return run


def apart(one, other) -> float:
    """Largest distance of two sets of tensors, each relative to its norm (a hundredth of all at least)."""
    assert one.keys() == other.keys()
    assert one
    norms = {name: other[name].double().norm() for name in other}
    whole = torch.stack(list(norms.values())).norm()
    assert whole > 0
    return max(float((one[n].double() - other[n].double()).norm() / max(norms[n], whole / 100)) for n in one)


def same_bits(one, two):
    return bool(one) and manifest(one) == manifest(two)


@pytest.mark.parametrize(("run", "case"), ALL)
def test_adapters_are_trained_alike_over_ranks(plan, alone, ranks, run, case):
    *_, model = case
    wanted, everyone = alone(model), [found[case] for found in ranks(run)]
    first = everyone[0]
    assert abs(first["first"].grad_norm / wanted["first"].grad_norm - 1) <= EXACT
    assert first["first"].tokens_reached == wanted["first"].tokens_reached
    assert sum(wanted["first"].tokens_reached) > 0
    for found in everyone:
        assert apart(found["gradients"], wanted["gradients"]) <= EXACT
        assert same_bits(found["gradients"], first["gradients"]), "every rank has the same sums"
        assert same_bits(found["three"], first["three"])
        assert apart(found["double"], wanted["double"]) <= AFTER
        assert found["same afterwards"]
        # Resuming is exact in one layout, and takes over what one process has written, to the bit.
        assert same_bits(found["restored"], found["two"])
        assert same_bits(found["three again"], found["three"])
        assert same_bits(found["from one rank"], wanted["two"])
    base = base_of(plan["folders"][model])
    assert same_bits(first["zero"], base)
    assert same_bits({name: first["version"][name] for name in base}, base)
    assert first["version"].keys() == wanted["version"].keys()
    assert same_bits(first["export from one rank"], wanted["version"])
    assert same_bits(first["export again"], first["export"])


@pytest.mark.parametrize(("run", "case"), ALL)
def test_ranks_compute_under_published_adapters(plan, alone, ranks, run, case):
    *_, model = case
    rows, wanted = ranks(run)[0][case]["under published"], alone(model)["under published"]
    torch.testing.assert_close(flat(rows), flat(wanted), rtol=0, atol=1e-9)
    policy = policy_of(plan["published"][model])
    trainer = lora_rank.trainer_of("fsdp", "dp1", 0, plan["folders"][model], "float64")
    trainer.load(plan["folders"][model])
    assert trainer.logprobs(plan["batches"][model][0], None, policy) == wanted


def flat(rows):
    return torch.tensor([value for row in rows for value in row])
