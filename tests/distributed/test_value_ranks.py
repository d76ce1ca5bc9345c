"""PPO's two models on several ranks, whatever the layout of the policy, against one rank, which
`tests/unit/test_value_model.py` compares with a float64 reference."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import value_rank
from tiny_policy import make_folder

EXACT = 1e-11
"""Bound on metrics and masters of three steps in float64, relative to their size or norm: another order of sums, which
AdamW magnifies where a gradient is near 0; 5e-14 was measured."""
AFTER = 1e-4
"""The same in float32, after four steps; 6e-8 was measured."""
CASES = [
    pytest.param(which, *case, marks=() if which == "two" else pytest.mark.slow)
    for which, (_, cases) in value_rank.LAYOUTS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    return {"home": str(home), "folder": make_folder(home / "llama")}


@pytest.fixture(scope="module")
def alone(plan):
    return value_rank.trial(plan, "fsdp", "dp1", 0)


@pytest.fixture(scope="module")
def ranks(plan, alone):
    """What each rank found, by key of LAYOUTS; they start when they are first asked for."""
    home, found, begun = plan["home"], {}, set()
    torch.save(plan | {"state": f"{home}/state-fsdp-dp1"}, f"{home}/plan.pt")

    def start(which: str) -> list[dict]:
        if which not in found:
            assert which not in begun, "these ranks have failed before"
            begun.add(which)
            world = value_rank.LAYOUTS[which][0]
            command = [sys.executable, "-W", "ignore", value_rank.__file__]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            processes = [
                subprocess.Popen([*command, str(rank), which, home], stderr=subprocess.PIPE, text=True, env=environment)
                for rank in range(world)
            ]
            try:
                said = [process.communicate(timeout=500)[1] for process in processes]
            finally:
                for process in processes:
                    process.kill()
            assert [p.returncode for p in processes] == [0] * world, "\n".join(text[-2000:] for text in said)
            found[which] = [torch.load(f"{home}/{which}-{rank}.pt", weights_only=False) for rank in range(world)]
        return found[which]

    return start


def apart(one: dict, other: dict) -> float:
    """Largest distance of two sets of tensors, each relative to its norm."""
    assert one.keys() == other.keys()
    assert any(name.startswith("value/") for name in one)
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


@pytest.mark.parametrize(("which", "backend", "layout"), CASES)
def test_every_layout_equals_one_rank(ranks, alone, plan, which, backend, layout):
    assert alone["metrics"][2]["value_grad_norm"] > 0.3, "clipped"
    for number, found in enumerate(mine[backend, layout] for mine in ranks(which)):
        for got, want in zip(found["metrics"], alone["metrics"], strict=True):
            for name, value in want.items():
                near = value if value is None else pytest.approx(value, rel=EXACT, abs=EXACT)
                assert got[name] == near, name
        if backend == "fsdp" or number == 0:
            assert apart(found["weights"], alone["weights"]) <= EXACT
            assert apart(found["after"], alone["after"]) <= AFTER, "from one rank's state"
            assert found["export"] == (alone["export"] if number == 0 else []), "nothing of it is published"
        assert found["straight"].keys() == found["resumed"].keys()
        assert any("value/exp_avg_sq/" in name for name in found["straight"])
        for name, tensor in found["straight"].items():
            assert torch.equal(tensor, found["resumed"][name]), name
    here = value_rank.made(plan["folder"], "fsdp", "dp1", 0, "float32")
    assert here.restore(f"{plan['home']}/state-{backend}-{layout}") == 2
    assert here.master_digest() == ranks(which)[0][backend, layout]["two"], "several ranks' state, read by one"


@pytest.mark.parametrize(("which", "backend", "layout"), CASES)
def test_a_bad_value_on_one_rank_stops_all_and_changes_nothing(ranks, which, backend, layout):
    found = [mine[backend, layout]["bad"] for mine in ranks(which)]
    assert len({one["said"] for one in found}) == 1
    assert found[0]["said"].startswith("value is not finite")
    assert "in trajectory trajectory-" in found[0]["said"]
    assert all(one["same"] for one in found)
