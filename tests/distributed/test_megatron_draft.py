"""A draft that learns beside a policy under megatron-core, in any layout: the same draft, and a policy that notices nothing.

That what one rank learns is right is shown by `tests/unit/test_draft_training.py`, for the other backend, which is compared
with this one here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import megatron_draft_rank
import pytest
import torch
from tiny_policy import EXPERTS, SHAPE
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from furlong.resources.trainers.megatron import parallel

EXACT = 1e-11
"""Bound on metrics and masters of three steps in float64, relative to their size or norm: sums in another order, in the
policy and in the draft, which AdamW magnifies where a gradient is near 0; 2e-14 was measured."""
BACKENDS = 1e-4
"""Bound between the backends: transformers has its norms in float32, whatever the policy's dtype."""
FOUR = SHAPE | {"num_hidden_layers": 4, "eos_token_id": 0}
MODELS = {
    "llama": LlamaConfig(**FOUR, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**FOUR, head_dim=12, tie_word_embeddings=False),
    "moe": Qwen3MoeConfig(
        **FOUR, **(EXPERTS | {"num_experts": 8}), head_dim=12, mlp_only_layers=[1], tie_word_embeddings=False
    ),
}
CASES = [
    pytest.param(which, case, id="-".join(case), marks=() if which == "two" else pytest.mark.slow)
    for which, (_, cases) in megatron_draft_rank.LAYOUTS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("ranks")
    for name, config in MODELS.items():
        torch.manual_seed(7)
        AutoModelForCausalLM.from_config(config).save_pretrained(home / name)
    (home / "plan.json").write_text(json.dumps({name: str(home / name) for name in MODELS}))
    return home


@pytest.fixture(scope="module")
def alone(home):
    """What one rank finds, by model and draft; it leaves its state for the others."""
    found = {}

    def find(model: str, draft: str) -> dict:
        if (model, draft) not in found:
            try:
                found[model, draft] = megatron_draft_rank.trial(str(home / model), str(home), "", 0, draft)
            finally:
                parallel.teardown()
        return found[model, draft]

    return find


@pytest.fixture(scope="module")
def ranks(home, alone):
    """What each rank found, by key of LAYOUTS; they start when they are first asked for."""
    found, begun = {}, set()

    def start(which: str) -> list[dict]:
        if which not in found:
            assert which not in begun, "these ranks have failed before"
            begun.add(which)
            world, cases = megatron_draft_rank.LAYOUTS[which]
            for _, model, draft in cases:
                alone(model, draft)
            command = [sys.executable, "-W", "ignore", megatron_draft_rank.__file__]
            open_ = partial(
                subprocess.Popen, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
            processes = [open_([*command, str(rank), which, str(home)]) for rank in range(world)]
            try:
                said = [process.communicate(timeout=500)[1] for process in processes]
            finally:
                for process in processes:
                    process.kill()
            assert [p.returncode for p in processes] == [0] * world, "\n".join(text[-2000:] for text in said)
            found[which] = [torch.load(home / f"{which}-{rank}.pt", weights_only=False) for rank in range(world)]
        return found[which]

    return start


def apart(one: dict, other: dict) -> float:
    """Largest distance of two sets of tensors, each relative to its norm."""
    assert one.keys() == other.keys()
    assert "fc.weight" in one
    return max(float((one[name] - other[name]).norm() / other[name].norm()) for name in one)


@pytest.mark.parametrize(("which", "case"), CASES)
def test_every_layout_trains_the_draft_of_one_rank(ranks, alone, which, case):
    truth, worst = alone(*case[1:]), 0.0
    assert len(truth["metrics"]) == 3
    for found in (mine[case] for mine in ranks(which)):
        for got, want in zip(found["metrics"], truth["metrics"], strict=True):
            assert want["draft_tokens"] > 0
            assert want["draft_loss"] > 0
            for name, value in want.items():
                near = value if value is None else pytest.approx(value, rel=EXACT, abs=EXACT)
                assert got[name] == near, name
        worst = max(worst, apart(found["masters"], truth["masters"]))
    print(f"{'-'.join(case):40} {worst:.1e}")
    assert worst <= EXACT
    assert all(one["masters"][name].equal(tensor) for name, tensor in ranks(which)[0][case]["masters"].items()
               for one in (mine[case] for mine in ranks(which))), "replicas"  # fmt: skip
    seconds = [mine[case]["seconds"] for mine in ranks(which)]
    assert seconds[1:] == seconds[:-1], "that of the stage where the draft is"
    assert min(seconds[0]) > 0
    assert any(name.startswith("draft.") for name in truth["exported"])
    assert [mine[case]["exported"] for mine in ranks(which)] == [truth["exported"], *[[]] * (len(ranks(which)) - 1)]


@pytest.mark.parametrize(("which", "case"), CASES)
def test_not_a_bit_of_the_policy_depends_on_the_draft(ranks, which, case):
    for found in (mine[case] for mine in ranks(which)):
        assert found["policy metrics"]
        assert found["policy"]


@pytest.mark.parametrize(("which", "case"), CASES)
def test_a_state_is_resumed_exactly_and_by_every_layout(ranks, alone, home, which, case):
    layout, model, draft = case
    found = [mine[case] for mine in ranks(which)]
    assert all(one["resumed"] for one in found)
    truth = alone(model, draft)
    assert truth["resumed"]
    assert truth["two"]
    assert found[0]["moved"] == truth["two"], "one rank's state, read by several"
    try:
        here = megatron_draft_rank.made(str(home / model), "", 0, "float32", draft)
        assert here.restore(f"{home}/state-{layout}-{model}-{draft}") == 2
        assert here.master_digest() == found[0]["two"], "several ranks' state, read by one"
    finally:
        parallel.teardown()


@pytest.mark.parametrize(("which", "case"), CASES)
def test_a_draft_that_fails_stops_all_ranks_and_changes_nothing(ranks, which, case):
    for found in (mine[case] for mine in ranks(which)):
        assert found["refused"] == {"said": "the draft cannot learn this", "same": True}
        assert found["after the refusal"]


def test_a_stage_that_is_lost_while_the_draft_learns_is_named(ranks, home):
    ranks("two")
    lost = json.loads((home / "lost.json").read_text())
    assert lost["kind"] == "TapPeerLost", lost
    assert "stage 1 ended" in lost["said"]
    assert lost["seconds"] < 10


@pytest.mark.parametrize(
    "draft", ["eagle3", *(pytest.param(draft, marks=pytest.mark.slow) for draft in ("reduced", "block"))]
)
def test_both_backends_train_the_same_draft(alone, home, draft):
    theirs = megatron_draft_rank.loaded(str(home / "qwen3"), "", 0, "float64", draft, fsdp=True)
    metrics = megatron_draft_rank.of_draft(megatron_draft_rank.taken(theirs, range(1, 4)))
    for got, want in zip(metrics, alone("qwen3", draft)["metrics"], strict=True):
        for name, value in want.items():
            near = value if value is None else pytest.approx(value, rel=BACKENDS)
            assert got[name] == near, name
