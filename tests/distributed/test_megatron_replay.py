"""Recorded experts are replayed in every layout: each token's, in each layer, in each pass, with the router's gradient."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parent))
from replay_ranks import EXPERTS, LAYERS, batch_of
from tiny_policy import make_tiny_moe

CLOSE = 1e-10
"""Relative to a tensor's largest entry, in float64: sums in another order, through four layers and an exponential."""
LAYOUTS = {
    1: ("dp1", "recompute"),
    2: ("tp2-sp", "pp2", "pp2-vpp2-recompute", "cp2", "cp2-recompute", "ep2-dp2", "dp2"),
    4: ("tp2-cp2-sp", "tp2-pp2-sp-recompute", "pp2-vpp2-ep2-dp2-recompute", "tp2-ep4-dp2-sp", "cp2-ep2-dp2", "cp4"),
}
PARTIAL = {1: ("dp1",), 2: ("tp2-sp", "pp2-vpp2-recompute", "cp2"), 4: LAYOUTS[4]}
"""Those that are tried with records of some trajectories, and of parts of them, as well."""
STRAYING = {1: ("dp1",), 2: ("tp2-sp", "cp2"), 4: ()}
WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]


def trials(world: int) -> list[tuple[str, str, str]]:
    found = [("megatron", layout, "all") for layout in LAYOUTS[world]]
    found += [("megatron", layout, "some") for layout in PARTIAL[world]]
    found += [("fsdp", f"dp{world}", records) for records in ("all", "some")]
    return found + [("straying", layout, "all") for layout in STRAYING[world]]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("replay")
    folder = make_tiny_moe(home, num_hidden_layers=4, num_experts=EXPERTS, initializer_range=0.2)
    (home / "plan.json").write_text(json.dumps({"folder": folder, "trials": {w: trials(w) for w in LAYOUTS}}))
    return home


@pytest.fixture(scope="module")
def results(home):
    """World -> what its ranks found; each world runs once, when first asked for."""
    known: dict[int, dict[tuple[str, str, str], dict[str, Any]]] = {}

    def of(world: int) -> dict[tuple[str, str, str], dict[str, Any]]:
        if world not in known:
            launch(world, home)
            known[world] = torch.load(home / f"{world}.pt")
        return known[world]

    return of


def launch(world: int, home: Path) -> None:
    program = str(Path(__file__).with_name("replay_ranks.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    logs = [home / f"{world}.{rank}.log" for rank in range(world)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, program, str(rank), str(world), str(home)]
            with log.open("w") as out:
                ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
        for rank, log in zip(ranks, logs, strict=True):
            assert rank.wait(timeout=240) == 0, log.read_text()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def close(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(
        found, wanted, rtol=0, atol=CLOSE * float(wanted.abs().max()), msg=lambda m: f"{name}: {m}"
    )


@pytest.mark.parametrize("records", ["all", "some"])
@pytest.mark.parametrize("world", WORLDS)
def test_every_token_goes_through_the_recorded_experts_in_every_pass(results, world, records):
    """The ranks compare each token's set with the record; here, that none was left out."""
    batch = batch_of(records)
    for layout in LAYOUTS[world] if records == "all" else PARTIAL[world]:
        passes = results(world)["megatron", layout, records]["passes"]
        for index, (reply, mask, record) in enumerate(zip(batch.replies, batch.masks, batch.routing, strict=True)):
            last = max((t for t, on in enumerate(mask) if on), default=-1)
            fed = len(batch.prompts[batch.group[index]]) + last if last >= 0 else 0
            recorded = 0 if record is None else max(0, min(record.first + record.rows, fed) - record.first)
            assert len(reply) == len(mask)
            assert passes["logprobs"][index] == recorded * len(LAYERS), (layout, index)
            again = 2 if "recompute" in layout else 1
            assert passes["step"][index] == again * recorded * len(LAYERS), (layout, index)


@pytest.mark.parametrize("records", ["all", "some"])
@pytest.mark.parametrize("world", WORLDS)
def test_log_probabilities_loss_and_gradients_are_those_of_one_process(results, world, records):
    """Which `tests/unit/test_replay.py` compares with transformers' own blocks under the forced choice."""
    wanted = results(1)["fsdp", "dp1", records]
    for layer in LAYERS:
        assert wanted["gradients"][f"model.layers.{layer}.mlp.gate.weight"].norm() > 1e-3, "routers must learn"
    for trial, layout, some in results(world):
        if trial == "straying" or some != records:
            continue
        found = results(world)[trial, layout, some]
        for row, other in zip(found["logprobs"], wanted["logprobs"], strict=True):
            assert row == pytest.approx(other, abs=CLOSE, nan_ok=True), layout
        assert found["loss"] == pytest.approx(wanted["loss"], abs=CLOSE), layout
        assert found["reached"] == wanted["reached"], layout
        assert found["gradients"].keys() == wanted["gradients"].keys()
        for name, gradient in found["gradients"].items():
            close(gradient, wanted["gradients"][name], f"{trial} {layout} {name}")


@pytest.mark.parametrize("world", [1, 2])
def test_a_token_that_goes_elsewhere_is_named_on_every_rank(results, world):
    for layout in STRAYING[world]:
        said = results(world)["straying", layout, "all"]["said"]
        assert len(said) == world
        for words in said:
            assert words.startswith("layer 0, trajectory number "), words
            assert "of the batch, token " in words
            assert "recorded with experts [" in words
