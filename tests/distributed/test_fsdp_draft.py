"""Ranks that share a step's micro-batches learn the same draft as one, and none of them moves a bit of the policy by it."""

import os
import subprocess
import sys

import fsdp_draft_rank
import pytest
import torch
from tiny_policy import make_folder

EXACT = 1e-11
"""Bound on metrics and masters of three steps in float64, relative to their size or norm: another order of sums, which
AdamW magnifies where a gradient is near 0; 1e-15 was measured."""
AFTER = 1e-4
"""The same in float32, after four steps; 7e-8 was measured."""
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    return {"home": str(home), "folder": make_folder(home / "llama")}


@pytest.fixture(scope="module")
def alone(plan):
    return fsdp_draft_rank.trial(plan, 0, 1)


@pytest.fixture(scope="module")
def ranks(plan, alone):
    """What each rank of a world found; they start when they are first asked for."""
    home, found, begun = plan["home"], {}, set()
    torch.save(plan, f"{home}/plan.pt")

    def start(world: int) -> list[dict]:
        if world not in found:
            assert world not in begun, "these ranks have failed before"
            begun.add(world)
            command = [sys.executable, "-W", "ignore", fsdp_draft_rank.__file__]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            processes = [
                subprocess.Popen(
                    [*command, str(rank), str(world), home], stderr=subprocess.PIPE, text=True, env=environment
                )
                for rank in range(world)
            ]
            try:
                said = [process.communicate(timeout=500)[1] for process in processes]
            finally:
                for process in processes:
                    process.kill()
            assert [p.returncode for p in processes] == [0] * world, "\n".join(text[-2000:] for text in said)
            found[world] = [torch.load(f"{home}/found-{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        return found[world]

    return start


def apart(one: dict, other: dict) -> float:
    """Largest distance of two sets of tensors, each relative to its norm."""
    assert one.keys() == other.keys()
    assert any(name.startswith("draft/") for name in one)
    gaps = [float((one[name] - other[name]).norm() / other[name].norm().clamp_min(1e-9)) for name in one]
    assert all(gap == gap for gap in gaps)
    return max(gaps)


def same(one: dict, other: dict) -> bool:
    return bool(one) and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("policy", fsdp_draft_rank.POLICIES)
def test_not_a_bit_of_the_policy_depends_on_the_draft(ranks, world, policy):
    for found in ranks(world):
        without, beside = (found["policies"][policy, draft] for draft in (False, True))
        assert without[0] == beside[0]
        assert without[0][1]["grad_norm"] > 0
        assert without[1].keys() == beside[1].keys()
        assert all(torch.equal(without[1][name], beside[1][name]) for name in without[1])
        assert torch.equal(without[2], beside[2])
    assert any(name for found in ranks(world) for name in found["policies"][policy, True][1])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_every_world_equals_one_rank(ranks, alone, world, kind):
    for number, found in enumerate(mine[kind] for mine in ranks(world)):
        for got, want in zip(found["metrics"], alone[kind]["metrics"], strict=True):
            assert want["draft_loss"] > 0
            for name, value in fsdp_draft_rank.without_time(want).items():
                assert got[name] == (value if value is None else pytest.approx(value, rel=EXACT, abs=EXACT)), name
        assert apart(found["weights"], alone[kind]["weights"]) <= EXACT
        assert same(found["held"], ranks(world)[0][kind]["held"]), "all ranks hold the same"
        assert found["export"] == (alone[kind]["export"] if number == 0 else {})
    assert alone["eagle3"]["metrics"][2]["draft_grad_norm"] > 0.3, "clipped"


@pytest.mark.parametrize("world", WORLDS)
def test_a_saved_draft_moves_between_worlds_and_goes_on(ranks, alone, plan, world):
    for found in ranks(world):
        assert found["goes on"]
        assert same(found["straight"], found["again"])
        assert found["moved"] == alone["two"], "one rank's state, read by several"
        assert apart(found["after"], alone["after"]) <= AFTER
    first = ranks(world)[0]
    assert first["four"] == first["resumed"] != first["two"]
    here = fsdp_draft_rank.made(plan["folder"], 0, 1, "float32", fsdp_draft_rank.DRAFT)
    assert here.restore(f"{plan['home']}/state-{world}") == 2
    assert here.master_digest() == first["two"], "several ranks' state, read by one"


@pytest.mark.parametrize("world", WORLDS)
def test_a_bad_gradient_on_one_rank_costs_all_the_drafts_step_alone(ranks, world):
    found = [mine["bad"] for mine in ranks(world)]
    assert {one["told"]["draft_skipped"] for one in found} == {found[0]["told"]["draft_skipped"]}
    assert found[0]["told"]["draft_skipped"].startswith("of the draft, gradient of ")
    assert all(one["same"] and one["told"]["grad_norm"] > 0 for one in found)
    assert all(one["next"]["draft_skipped"] is None and one["next"]["draft_loss"] > 0 for one in found)
    assert all(same(one["held"], found[0]["held"]) for one in found)
