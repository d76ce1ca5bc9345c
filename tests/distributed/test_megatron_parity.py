"""The megatron trainer against a float64 reference, and its layouts against one another.

What is compared is printed as a table (`pytest -rP`): for each layout the largest difference of a gradient.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
sys.path.insert(0, str(Path(__file__).parent))
from megatron_trainers import ALONE, BUDGET, CLIPS, batch_at
from test_megatron_model import compute_in_float64
from tiny_policy import EXPERTS, SHAPE, make_spec, reference

from furlong.ops.policy.objective import Objective
from furlong.ops.weights.digest import tensor_digest, weights_digest

EXACT = 1e-12
"""Bound on float64 loss, log-probabilities and gradients (these relative to each tensor's norm): rounding is 1e-16 a
product, and four layers of sums over up to 60 terms add some of them up; at most 2e-14 was measured."""
DRIFT = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.6}
"""Bound on weights after five AdamW steps at rate 1e-3, relative to what the steps changed in the tensor; at most 3e-11,
2e-5 and 0.34 were measured. AdamW divides by the gradient's own size, so that an element whose gradient nearly cancels
moves as far as any other, and its rounding decides which way: in bfloat16 that is so for some, and some tokens of a model
with experts go to others."""
FOUR = SHAPE | {"num_hidden_layers": 4}
MOE = EXPERTS | {"num_experts": 8}
MODELS = {
    "llama": LlamaConfig(**FOUR, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**FOUR, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**FOUR, head_dim=12, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(**FOUR, **MOE, head_dim=12, mlp_only_layers=[1], tie_word_embeddings=False),
}
PARITY = {
    1: {"dp1": ("llama", "qwen2", "qwen3", "moe"), "recompute": ("llama", "moe")},
    2: {
        "tp2": ("llama", "qwen3"),
        "tp2-sp": ("moe",),
        "pp2": ("llama", "qwen3"),
        "pp2-vpp2": ("llama", "moe"),
        "cp2": ("llama", "moe"),
        "dp2": ("qwen3",),
        "ep2-dp2": ("moe",),
        "pp2-recompute": ("qwen2",),
    },
    4: {
        "tp2-pp2": ("llama", "qwen2", "qwen3"),
        "tp2-cp2-sp": ("llama", "qwen3", "moe"),
        "tp2-dp2": ("qwen2",),
        "pp4": ("llama", "qwen3", "moe"),
        "pp2-dp2": ("llama",),
        "pp2-cp2": ("qwen3",),
        "cp2-dp2": ("llama",),
        "cp4": ("qwen3",),
        "dp4": ("qwen2",),
        "ep4-dp4": ("moe",),
        "ep2-dp2-pp2": ("moe",),
        "ep2-cp2-dp2": ("moe",),
        "tp2-ep2-dp2-sp": ("moe",),
        "tp2-ep4-dp2-sp": ("moe",),
        "tp2-pp2-vpp2-sp-recompute": ("llama", "moe"),
        "pp2-vpp2-cp2": ("llama",),
        "pp2-vpp2-dp2": ("qwen3",),
    },
}
"""Number of ranks -> layout -> models whose step is compared with the reference."""
STEPS = {
    1: {("dp1", model): ("float64", "float32", "bfloat16") for model in ("llama", "moe")},
    2: {
        ("tp2", "llama"): ("float64",),
        ("pp2-vpp2", "llama"): ("float64",),
        ("cp2", "llama"): ("float64",),
        ("dp2", "llama"): ("float64", "float32", "bfloat16"),
        ("ep2-dp2", "moe"): ("float64", "bfloat16"),
    },
    4: {
        ("tp2-pp2", "llama"): ("float64", "float32", "bfloat16"),
        ("tp2-cp2-sp", "llama"): ("float64", "float32", "bfloat16"),
        ("pp2-vpp2-dp2", "llama"): ("float64", "float32"),
        ("tp2-ep2-dp2-sp", "moe"): ("float64", "bfloat16"),
    },
}
"""(layout, model) -> number formats in which five steps are compared with those of one rank."""
RESUMED = {
    1: (("dp1", "llama", "bfloat16"),),
    2: (("dp2", "llama", "bfloat16"), ("pp2-vpp2", "llama", "float32"), ("ep2-dp2", "moe", "float64")),
    4: (("tp2-pp2", "llama", "bfloat16"), ("tp2-ep2-dp2-sp", "moe", "float64")),
}
CONTINUED = {
    1: (),
    2: (("tp2", *RESUMED[2][0]), ("cp2", *RESUMED[2][1]), ("tp2-sp", *RESUMED[2][2])),
    4: (("pp2-dp2", *RESUMED[4][0]), ("pp2-cp2", *RESUMED[4][1])),
}
"""The layout that takes over, and whose state."""
EXCHANGED = {
    1: (("dp1", "qwen3", "bfloat16"),),
    2: (("ep2-dp2", "moe", "float32"),),
    4: (("tp2-pp2", "llama", "bfloat16"), ("tp2-cp2-sp", "qwen3", "float64")),
}
EVERY = {1: "dp1", 2: "pp2", 4: "tp2-pp2"}
"""Layouts for what must hold in all of them: where an error is noticed on one rank only."""


def plan(world: int, home: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    trials: dict[str, tuple[str, dict[str, Any]]] = {}

    def add(trial: str, layout: str, model: str, label: str = "", **settings: Any) -> None:
        own = {"folder": str(home / model), "layout": "" if layout == "dp1" else layout}
        trials["/".join(filter(None, (trial, layout, model, label)))] = trial, own | settings

    for layout, models in PARITY[world].items():
        for model in models:
            add("first_step", layout, model)
    for (layout, model), computes in STEPS[world].items():
        for compute in computes:
            add("steps", layout, model, compute, compute=compute)
    for layout, model, compute in RESUMED[world]:
        add("resumed", layout, model, compute, compute=compute, home=str(home))
    for layout, before, model, compute in CONTINUED[world]:
        state = str(home / f"state-{before}-{compute}-{model}")
        add("continued", layout, model, compute, compute=compute, state=state)
    for layout, model, compute in EXCHANGED[world]:
        add("exchanged", layout, model, compute, compute=compute, home=str(home))
    add("poisoned", EVERY[world], "llama")
    add("overflowing", EVERY[world], "llama")
    add("damaged", EVERY[world], "llama", home=str(home))
    add("nothing_to_train", EVERY[world], "llama")
    add("other_weights", {1: "dp1", 2: "dp2", 4: "tp2-pp2"}[world], "qwen3", "float32", compute="float32")
    add("other_weights", {1: "dp1", 2: "cp2", 4: "pp2-vpp2-dp2"}[world], "llama", "bfloat16", compute="bfloat16")
    # A loss that compares the tokens of a reply, where layouts part them most.
    add("first_step", {1: "dp1", 2: "cp2", 4: "pp2-dp2"}[world], "qwen3", "gspo", name="gspo")
    return trials


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models, and what to try with them."""
    home = tmp_path_factory.mktemp("megatron")
    for name, config in MODELS.items():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(home / name)
    (home / "plan.json").write_text(json.dumps({world: plan(world, home) for world in PARITY}))
    return home


def run(world: int, home: Path) -> dict[str, Any]:
    """What a number of ranks found, all trials one after another in the same processes."""
    script = Path(__file__).with_name("megatron_trainers.py")
    logs = [home / f"{world}.{rank}.log" for rank in range(world)]
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(world), str(home)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=280) for process in started]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * world, "\n".join(log.read_text()[-4000:] for log in logs)
    return torch.load(home / f"{world}.pt", weights_only=False)


@pytest.fixture(scope="module")
def alone(home: Path) -> dict[str, Any]:
    """What one rank found, with which others are compared."""
    return run(1, home)


@pytest.fixture(scope="module", params=[1, 2, pytest.param(4, marks=pytest.mark.slow)])
def world(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def tried(world: int, home: Path, alone: dict[str, Any]) -> dict[str, Any]:
    """What so many ranks found."""
    return alone if world == 1 else run(world, home)


def of(found: dict[str, Any], trial: str) -> dict[tuple[str, ...], Any]:
    """(layout, model, ...) -> what it found; there is always some."""
    results = {tuple(name.split("/")[1:]): result for name, result in found.items() if name.startswith(f"{trial}/")}
    assert results
    return results


@pytest.fixture(scope="module")
def expected(home: Path) -> Any:
    """Loss, log-probabilities and gradients of a model's first step."""
    return cache(lambda model: _expected(str(home / model)))


def _expected(folder: str) -> tuple[float, list[list[float]], dict[str, Tensor]]:
    def mend(model: nn.Module) -> None:
        if hasattr(model.config, "num_experts"):
            model.set_experts_implementation("eager")
        compute_in_float64(model)

    loss, logprobs, gradients = reference(folder, batch_at(1), 1 - 0.1, CLIPS["clip_high"], mend=mend)
    return loss, logprobs, {name: tensor for pair in gradients.items() for name, tensor in _as_stored(*pair)}


def _as_stored(name: str, gradient: Tensor) -> list[tuple[str, Tensor]]:
    """transformers keeps all experts of a layer in one tensor; files, and everybody else, have one tensor each."""
    at, _, part = name.rpartition(".")
    if part not in ("gate_up_proj", "down_proj") or not at.endswith("experts"):
        return [(name, gradient)]
    if part == "down_proj":
        return [(f"{at}.{expert}.{part}.weight", own) for expert, own in enumerate(gradient)]
    halves = [own.chunk(2, 0) for own in gradient]
    return [
        (f"{at}.{expert}.{half}_proj.weight", own[index])
        for expert, own in enumerate(halves)
        for index, half in enumerate(("gate", "up"))
    ]


def gaps(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float, str]:
    """Largest absolute difference; largest of a tensor relative to its norm, and whose that is."""
    assert found.keys() == wanted.keys()
    largest = max(float((found[name] - wanted[name]).abs().max()) for name in wanted)
    relative = {name: _relative(found[name], wanted[name]) for name in wanted}
    worst = max(relative, key=relative.__getitem__)
    return largest, relative[worst], worst


def _relative(found: Tensor, wanted: Tensor) -> float:
    """0 for an expert that no token went to, when it has no gradient on either side."""
    gap, norm = float((found - wanted).norm()), float(wanted.norm())
    return gap / norm if norm else (0.0 if gap == 0 else math.inf)


def test_loss_and_every_gradient_equal_the_reference(tried, expected):
    print(f"\n{'layout':28}{'model':8}{'loss':>10}{'logprob':>10}{'gradient':>10}{'relative':>10}")
    for (layout, model, *label), found in of(tried, "first_step").items():
        if label:
            continue
        loss, logprobs, gradients = expected(model)
        apart = [
            abs(a - b)
            for got, want in zip(found["logprobs"], logprobs, strict=True)
            for a, b in zip(got, want, strict=True)
        ]
        off = abs(found["metrics"]["loss"] - loss)
        largest, relative, worst = gaps(found["gradients"], gradients)
        print(f"{layout:28}{model:8}{off:10.1e}{max(apart):10.1e}{largest:10.1e}{relative:10.1e}  {worst}")
        assert all(gap <= EXACT for gap in (off, *apart)), (layout, model)
        assert relative <= EXACT, (layout, model, worst)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        assert found["metrics"]["grad_norm"] == pytest.approx(norm, rel=EXACT)


def test_metrics_and_witness_do_not_depend_on_the_layout(tried, alone, home, expected):
    alone = of(alone, "first_step")
    for (layout, model, *label), found in of(tried, "first_step").items():
        metrics, wanted = found["metrics"], alone["dp1", model, *label]["metrics"]
        assert metrics.keys() == wanted.keys()
        for name, value in metrics.items():
            close = isinstance(value, float | tuple) and value == pytest.approx(wanted[name], rel=EXACT, abs=EXACT)
            assert close or value == wanted[name], (layout, model, name)
        assert gaps(found["gradients"], alone["dp1", model, *label]["gradients"])[1] <= EXACT
        if not label:
            assert metrics["tokens_reached"] == reached(str(home / model), expected(model)[1])
            assert 0 < sum(metrics["tokens_reached"]) < metrics["tokens_trained"]
            assert 0 < metrics["clip_fraction"] < 1


def reached(folder: str, logprobs: list[list[float]]) -> tuple[int, ...]:
    """The trained tokens of each trajectory that the loss gives a slope."""
    batch = batch_at(1)
    objective = Objective(batch, make_spec(folder, "float64", BUDGET, **CLIPS), ALONE)
    trained = torch.tensor(
        [v for row, mask in zip(logprobs, batch.masks, strict=True) for v, on in zip(row, mask, strict=True) if on]
    )
    slope = objective.slopes(torch.arange(objective.tokens), trained).slope
    return tuple(torch.bincount(objective.trajectory[slope != 0], minlength=len(batch.replies)).tolist())


def test_weights_after_five_steps_agree_across_layouts(tried, alone):
    alone = of(alone, "steps")
    for (layout, model, compute), found in of(tried, "steps").items():
        wanted = alone["dp1", model, compute]
        moved = {name: wanted["weights"][name] - wanted["start"][name] for name in wanted["weights"]}
        _, relative, worst = gaps({name: found["weights"][name] - wanted["start"][name] for name in moved}, moved)
        print(f"{layout:28}{model:8}{compute:10}{relative:10.1e}  {worst}")
        assert relative <= DRIFT[compute], (layout, model, compute, worst)
        assert found["rounded"]
        assert found["digest"] == weights_digest({name: tensor_digest(w) for name, w in found["weights"].items()})
        assert found["weights"].keys() == found["export"].keys()
        for name, weight in found["weights"].items():
            assert torch.equal(found["export"][name], weight.bfloat16())
        assert [step["learning_rate"] for step in found["metrics"]] == [5e-4, 1e-3, 1e-3, 1e-3, 1e-3]


def test_training_in_bfloat16_follows_float32(tried, alone):
    alone = of(alone, "steps")
    rough = {key: found for key, found in of(tried, "steps").items() if key[2] == "bfloat16"}
    assert rough
    for (_, model, _), found in rough.items():
        fine = alone["dp1", model, "float32"]["metrics"]
        assert {weight.dtype for weight in found["weights"].values()} == {torch.float32}
        # 8 bits of mantissa through four layers; the norm is a sum of large terms.
        assert [m["grad_norm"] for m in found["metrics"]] == pytest.approx([m["grad_norm"] for m in fine], rel=0.15)
        assert [m["loss"] for m in found["metrics"]] == pytest.approx([m["loss"] for m in fine], abs=0.1)


def test_two_and_two_steps_equal_four_bitwise(tried):
    for case, found in of(tried, "resumed").items():
        assert found["restored"] == found["halfway"], case
        assert found["resumed"] == found["straight"], case
        assert found["halfway"]["master"] != found["straight"]["master"]
        assert (found["straight"]["updates"], found["straight"]["step"]) == ("4", "4")


def test_another_layout_continues(world, tried):
    if world == 1:
        pytest.skip("one rank has one layout")
    states = {(model, compute): found for (_, model, compute), found in of(tried, "resumed").items()}
    for (layout, model, compute), found in of(tried, "continued").items():
        before = states[model, compute]
        assert found["restored"] == before["halfway"], "reading other pieces changes no bit"
        moved = {name: before["weights"][name] - before["middle"][name] for name in before["weights"]}
        _, relative, worst = gaps({name: found["weights"][name] - before["middle"][name] for name in moved}, moved)
        print(f"{layout:28}{model:8}{compute:10}{relative:10.1e}  {worst}")
        assert relative <= DRIFT[compute], (layout, model, worst)


def test_states_go_to_the_fsdp_backend_and_back(tried):
    for (layout, model, compute), found in of(tried, "exchanged").items():
        for digests in (found["base"], found["halfway"], found["after"]):
            assert len(set(digests)) == 1, (layout, model)
        _, relative, worst = gaps(found["megatron"], found["fsdp"])
        # Three steps at 1e-3 move a weight by at most 3e-3; both backends round their sums in other orders.
        print(f"{layout:28}{model:8}{compute:10}{relative:10.1e}  {worst}")
        assert relative <= {"float64": 1e-6, "float32": 1e-5, "bfloat16": 1e-3}[compute], (layout, model, worst)


def test_a_gradient_that_is_not_finite_stops_every_rank(world, tried):
    for _, found in of(tried, "poisoned").items():
        assert len(found["said"]) == world
        assert len(set(found["said"])) == 1
        assert found["said"][0].startswith("gradient of ")
        assert "is not finite" in found["said"][0]
        assert "model.layers." in found["said"][0]
        assert found["before"] == found["after"]
        assert found["next"] == found["clean"], "the failed step left no trace"


def test_a_loss_or_weight_that_is_not_finite_stops_every_rank(world, tried):
    for _, found in of(tried, "overflowing").items():
        assert len(found["said"]) == len(found["weight"]) == world
        assert len(set(found["said"])) == len(set(found["weight"])) == 1
        assert "ratio" in found["said"][0]
        assert found["trajectory"] in found["said"][0]
        assert found["before"] == found["after"]
        assert (
            found["weight"][0].startswith("log-probability of the trainer is not finite")
            or "master weight" in found["weight"][0]
        )


def test_a_state_that_cannot_be_used_changes_nothing(world, tried):
    for found in of(tried, "damaged").values():
        assert {case: len(said) for case, said in found["said"].items()} == dict.fromkeys(found["said"], world)
        assert all(len(set(said)) == 1 for said in found["said"].values())
        assert "does not fit the model, the algorithm or trainer.compute_dtype" in found["said"]["dtype"][0]
        assert "holds no readable state" in found["said"]["absent"][0]
        assert "was damaged" in found["said"]["damaged"][0]
        assert "was damaged" in found["said"]["fresh"][0]
        assert found["before"] == found["after"]


def test_a_step_without_a_trained_token_counts_and_changes_nothing(tried):
    for _, found in of(tried, "nothing_to_train").items():
        assert found["before"] | {"step": "1"} == found["after"]
        assert found["metrics"]["tokens_trained"] == sum(found["metrics"]["tokens_reached"]) == 0
        assert found["updates"] == 1


def test_other_weights_are_only_borrowed(tried):
    for (_, _, compute), found in of(tried, "other_weights").items():
        assert found["before"] == found["after"]
        for row, own, now, mask in zip(found["some"], found["own"], found["now"], found["masks"], strict=True):
            assert [math.isnan(value) for value in row] == [not on for on in mask]
            for value, first, on in zip(row, own, mask, strict=True):
                # Another packing adds up in another order.
                assert not on or value == pytest.approx(first, abs={"float32": 2e-5, "bfloat16": 0.1}[compute])
            assert not row or own != now
        assert all(math.isnan(value) for row in found["none"] for value in row)
        assert any(not math.isnan(value) for row in found["some"] for value in row)
