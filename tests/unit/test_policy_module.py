import json
import shutil

import pytest
import torch
from tiny_policy import CONFIGS, make_batch, make_folder, make_spec, near_policy

from furlong.ops.protocols import OtherLogprobs
from furlong.resources.trainers.fsdp import FSDPTrainer

ALONE = OtherLogprobs()
STEP = 1e-3
"""Central differences err by STEP^2 times the third derivative, about 1e-5 here, and by 1e-7 / STEP from rounding."""


@pytest.fixture(scope="module", params=list(CONFIGS))
def twins(request, tmp_path_factory):
    """The same weights twice: without a pad token, and with one that prompts and replies hold."""
    plain = make_folder(tmp_path_factory.mktemp("plain"), request.param)
    padded = str(tmp_path_factory.mktemp("made") / "padded")
    shutil.copytree(plain, padded)
    with open(f"{padded}/config.json") as file:
        config = json.load(file)
    with open(f"{padded}/config.json", "w") as file:
        json.dump(config | {"pad_token_id": pad_of(make_batch(1))}, file)
    return plain, padded


def pad_of(batch) -> int:
    """The first token that is fed, not only predicted, in a prompt."""
    return batch.prompts[0][0]


def stepped(folder, through=None) -> tuple[dict[str, torch.Tensor], FSDPTrainer]:
    trainer = FSDPTrainer(make_spec(folder), threads=1)
    trainer.load(folder)
    if through:
        trainer.save(str(through))
        trainer = FSDPTrainer(make_spec(folder), threads=1)
        trainer.restore(str(through))
    batch = near_policy(make_batch(1), trainer.logprobs(make_batch(1)))
    trainer.step(batch, ALONE)
    return {name: w.grad.clone() for name, w in trainer.masters.weights.items()}, trainer


@pytest.mark.parametrize("way", ["load", "restore"])
def test_a_pad_token_is_learnt_like_any_other(twins, tmp_path, way):
    """Chat models pad with a token that ends every turn: its embedding has a gradient, which torch would drop."""
    plain, padded = twins
    through = tmp_path / "state" if way == "restore" else None
    want, _ = stepped(plain)
    got, trainer = stepped(padded, through)
    row = want["model.embed_tokens.weight"][pad_of(make_batch(1))]
    assert row.norm() > 1e-3, "the token must matter, or this test shows nothing"
    assert trainer.module.causal.config.pad_token_id == pad_of(make_batch(1))
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_the_pad_tokens_gradient_is_the_slope_of_the_loss(twins):
    """Central difference of the step's loss along the gradient of that row, against the gradient itself."""
    _, padded = twins
    grads, _ = stepped(padded)
    pad = pad_of(make_batch(1))
    slope = grads["model.embed_tokens.weight"][pad]
    losses = []
    for sign in (1, -1):
        trainer = FSDPTrainer(make_spec(padded), threads=1)
        trainer.load(padded)
        batch = near_policy(make_batch(1), trainer.logprobs(make_batch(1)))
        with torch.no_grad():
            trainer.masters.weights["model.embed_tokens.weight"][pad] += sign * STEP * slope / slope.norm()
        trainer.masters.round()
        losses.append(trainer.step(batch, ALONE).loss)
    assert (losses[0] - losses[1]) / (2 * STEP) == pytest.approx(float(slope.norm()), rel=2e-2)
