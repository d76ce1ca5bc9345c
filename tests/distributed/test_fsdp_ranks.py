"""The FSDP trainer on two and four processes against one, which `test_fsdp_trainer` compares with a float64 reference."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import fsdp_rank
import pytest
import torch
from tiny_policy import CONFIGS, make_batch, make_folder, make_spec, make_tiny_moe, near_policy

from furlong.ops.policy.parallel import Layout, parse_layout
from furlong.resources.trainers.fsdp import FSDPTrainer

EXACT = 1e-12
"""Bound on gradients and log-probabilities in float64, relative to the tensor's norm: a sum of a few hundred products in
another order errs by 1e-14 at most; 2e-15 was measured."""
AFTER = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""Bound on masters after five AdamW steps, relative to the tensor's norm. AdamW divides by the gradient's own size, so
what rounding makes of a gradient near zero is magnified, at most to the learning rate of 1e-3 a step."""
ONE = Layout()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    folders = {name: make_folder(home / name, name) for name in CONFIGS} | {"qwen3_moe": make_tiny_moe(home / "moe")}
    batches = {}
    for name, folder in folders.items():
        trainer = FSDPTrainer(make_spec(folder, "float64"), 1)
        trainer.load(folder)
        raw = [make_batch(step, step=step) for step in range(1, fsdp_rank.STEPS + 1)]
        batches[name] = [near_policy(batch, trainer.logprobs(batch)) for batch in raw]
    other = FSDPTrainer(make_spec(folders["llama"], "float64"), 1)
    other.load(folders["llama"])
    other.step(batches["llama"][0], fsdp_rank.ALONE)
    made = {"home": str(home), "folders": folders, "batches": batches, "other": other.export()}
    torch.save(made, home / "plan.pt")
    return made


@pytest.fixture(scope="module")
def alone(plan):
    """Everything on one rank, in this process."""
    return {name: check(plan, ONE, 0) for name, check in fsdp_rank.CHECKS.items() if name != "spoilt"}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request, plan, alone):
    """Everything on several ranks: what each of them found."""
    home, world = Path(plan["home"]), request.param
    command = [sys.executable, fsdp_rank.__file__]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(home)], stderr=subprocess.PIPE, text=True, env=environment
        )
        for rank in range(world)
    ]
    try:
        said = [process.communicate(timeout=250)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, "\n".join(text[-2000:] for text in said)
    return [torch.load(home / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]


def apart(one, other) -> float:
    """Largest distance of two sets of tensors, each relative to its norm (a hundredth of all at least)."""
    assert one.keys() == other.keys()
    assert one
    norms = {name: other[name].double().norm() for name in other}
    whole = torch.stack(list(norms.values())).norm()
    assert whole > 0
    return max(float((one[n].double() - other[n].double()).norm() / max(norms[n], whole / 100)) for n in one)


@pytest.mark.parametrize("loss", list(fsdp_rank.LOSSES))
@pytest.mark.parametrize("architecture", [*CONFIGS, "qwen3_moe"])
def test_first_step_equals_one_ranks(ranks, alone, architecture, loss):
    want, want_gradients, want_logprobs = alone["first"][architecture, loss]
    assert want.grad_norm > 0.01
    assert sum(want.tokens_reached) > 0
    for found in ranks:
        metrics, gradients, logprobs = found["first"][architecture, loss]
        assert apart(gradients, want_gradients) <= EXACT
        for row, expected in zip(logprobs, want_logprobs, strict=True):
            assert row == pytest.approx(expected, rel=EXACT, abs=EXACT)
        for name, value in asdict(want).items():
            near = value if value is None else pytest.approx(value, rel=1e-11, abs=EXACT)
            assert getattr(metrics, name) == near, name


@pytest.mark.parametrize("compute", fsdp_rank.FORMATS)
def test_five_steps_end_at_the_same_weights(ranks, alone, compute):
    want = alone["more"][compute]
    assert max(want["norms"]) > 0.5, "some step must be clipped"
    for found in ranks:
        got = found["more"][compute]
        assert apart(got["masters"], want["masters"]) <= AFTER[compute]
        assert got["norms"] == pytest.approx(want["norms"], rel=max(AFTER[compute] * 10, 1e-9))
        assert got["digest"] == ranks[0]["more"][compute]["digest"]


def test_recomputed_activations_change_no_bit(ranks):
    for found in ranks:
        assert found["recompute"].keys() == found["first"].keys()
        for key, (metrics, gradients, logprobs) in found["first"].items():
            again = found["recompute"][key]
            assert (again[0], again[2]) == (metrics, logprobs)
            assert all(torch.equal(again[1][name], gradient) for name, gradient in gradients.items())


def test_two_and_two_steps_equal_four_bitwise(ranks):
    for found in ranks:
        resume = found["resume"]
        assert resume["again"]["done"] == 2
        assert resume["again"]["digest"] == resume["two"]
        assert resume["again"]["held"].keys() == resume["held"].keys()
        for name, tensor in resume["held"].items():
            assert torch.equal(resume["again"]["held"][name], tensor), name


def test_state_goes_over_to_another_number_of_ranks(ranks, plan, alone):
    world = len(ranks)
    for found in ranks:
        assert found["resharded"]["digest"] == alone["resume"]["two"], "one rank's masters, read by several"
        assert apart(found["resharded"]["masters"], alone["resume"]["again"]["masters"]) <= AFTER["float32"]
    here = fsdp_rank.resumed(plan, ONE, 0, Path(plan["home"]) / f"state-{world}")
    assert here["digest"] == ranks[0]["resume"]["two"], "several ranks' masters, read by one"
    assert apart(here["masters"], alone["resume"]["again"]["masters"]) <= AFTER["float32"]


def test_published_weights_are_only_visiting(ranks, alone):
    want = alone["published"]
    assert want["other"] != want["own"]
    for found in [*ranks, alone]:
        got = found["published"]
        assert got["own"] == got["own again"]
        assert all(torch.equal(got["before"][name], tensor) for name, tensor in got["after"].items())
        for name in ("own", "other"):
            for row, expected in zip(got[name], want[name], strict=True):
                assert row == pytest.approx(expected, rel=EXACT, abs=EXACT, nan_ok=True)


@pytest.mark.parametrize("what", ["gradient", "log-probability"])
def test_bad_numbers_on_one_rank_stop_all_and_change_nothing(ranks, what):
    said = {found["spoilt"][what]["said"] for found in ranks}
    assert len(said) == 1
    assert said.pop().startswith(
        {
            "gradient": "NonFiniteError: gradient of model.embed_tokens.weight is not finite",
            "log-probability": "NonFiniteError: log-probability of the trainer is not finite",
        }[what]
    )
    for found in ranks:
        assert found["spoilt"][what]["same"]
        assert found["spoilt"][what]["next"] == ranks[0]["spoilt"]["gradient"]["next"]
        assert found["spoilt"][what]["digest"] == ranks[0]["spoilt"]["gradient"]["digest"]


@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2", "tp2-sp", "dp2-ep2"])
def test_layouts_of_other_backends_are_refused(plan, text):
    with pytest.raises(ValueError, match=r"not \w+.*trainer.backend=megatron"):
        FSDPTrainer(make_spec(plan["folders"]["llama"]), 1, parse_layout(text))
