"""PPO's value model in one process: its step, its state, and what goes wrong."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lora_samples import with_adapters
from test_fsdp_trainer import assert_bitwise, everything, folder, folders  # noqa: F401 - fixtures
from tiny_policy import make_batch, make_folder, make_spec, make_tiny_moe, near_policy
from value_reference import Ppo

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs, TrainBatch
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.snapshots import SnapshotError

ALONE = OtherLogprobs()
EXACT = 1e-12
"""Bound between two float64 computations, relative: sums of a few hundred products in another order, whose gradients AdamW
divides by their own size; 4e-15 was measured."""
VALUE = ("value_loss", "value_explained", "value_grad_norm")


def loaded(folder: str, compute: str = "float64", critic: dict[str, Any] | None = None, **more: Any) -> FSDPTrainer:  # noqa: F811
    spec = make_spec(folder, compute, name="ppo", critic=critic or {}, **more)
    trainer = FSDPTrainer(spec, threads=1)
    trainer.load(folder)
    return trainer


def batch_at(step: int, seed: int = 1, sizes: tuple[int, ...] = (4, 1, 3), letters: int = 4) -> TrainBatch:
    """PPO's advantages of trajectories are their rewards."""
    batch = make_batch(seed + step, sizes, step, letters)
    return replace(batch, advantages=batch.rewards)


def state_of(trainer: FSDPTrainer) -> dict[str, torch.Tensor]:
    return everything(trainer) | {piece.name: tensor.clone() for piece, tensor in trainer.critic.state().items()}


def reference_rows(batch: TrainBatch) -> OtherLogprobs:
    """What some other model says, unlike the engine."""
    return OtherLogprobs(
        reference=tuple(tuple(value + 0.3 * math.sin(9 * value) for value in row) for row in batch.logprobs)
    )


@pytest.mark.parametrize("updates", [1, 3])
def test_steps_of_policy_and_value_equal_the_unpacked_reference(folder, updates):  # noqa: F811
    """Splits, shared beginnings, one-token replies, masked tokens, a penalty for divergence, clips of both norms, values
    that are stopped by their own clip, warm-up, decay of weights."""
    critic = {"learning_rate": 5e-3, "warmup_steps": 2, "max_grad_norm": 0.2, "gamma": 0.9, "lam": 0.8, "clip": 0.01}
    rule = {"kl_coef": 0.1, "max_grad_norm": 0.5, "weight_decay": 0.1, "betas": (0.7, 0.9)}
    trainer = loaded(folder, critic=critic | {"updates": updates}, budget=30, **rule)
    slow = Ppo(folder, trainer.spec.algorithm, 0.9, 0.8, 0.01, updates)
    for step, rate in ((1, 2.5e-3), (2, 5e-3), (3, 5e-3)):
        batch = near_policy(batch_at(step), trainer.logprobs(batch_at(step)))
        others = reference_rows(batch)
        metrics = trainer.step(batch, others)
        for name, want in slow.step(batch, others, 1e-3, rate, 0.2).items():
            assert getattr(metrics, name) == pytest.approx(want, rel=EXACT, abs=EXACT), (step, name)
        assert metrics.value_grad_norm > 0.2
        for which, masters in (("policy", trainer.masters), ("value", trainer.critic.masters)):
            named = slow.named(which)
            assert named.keys() == masters.weights.keys()
            for name, weight in masters.weights.items():
                gap = float((weight - named[name]).detach().norm() / named[name].detach().norm())
                assert gap <= EXACT, (step, which, name, gap)
    assert metrics.value_explained != 0.0


@settings(deadline=None, max_examples=8)
@given(seed=st.integers(0, 1000), budget=st.integers(16, 300), data=st.data())
def test_no_number_depends_on_split_order_or_masked_rows(folder, seed, budget, data):  # noqa: F811
    batch = batch_at(1, seed, (3, 2, 4))
    order = data.draw(st.permutations(range(len(batch.replies))))
    rows = {name: tuple(getattr(batch, name)[i] for i in order)
            for name in ("group", "replies", "logprobs", "masks", "sampled_by", "advantages", "rewards", "routing",
                         "trajectory_ids")}  # fmt: skip
    extra = {"group": 0, "replies": (1, 2), "logprobs": (math.nan,) * 2, "masks": (False,) * 2, "sampled_by": (0, 0),
             "advantages": 7.0, "rewards": 7.0, "routing": None, "trajectory_ids": "masked"}  # fmt: skip
    moved = replace(batch, **{name: (*row, extra[name]) for name, row in rows.items()})
    found = []
    for one, split in ((batch, 512), (moved, budget)):
        trainer = loaded(folder, budget=split, critic={"updates": 2})
        metrics = trainer.step(one, ALONE)
        found.append(([getattr(metrics, n) for n in ("loss", "grad_norm", *VALUE)], state_of(trainer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-10, abs=EXACT)
    for name, tensor in found[0][1].items():
        # AdamW divides gradients by their size, so that the rounding of one near zero is magnified: to 1e-9 at most.
        torch.testing.assert_close(tensor, found[1][1][name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_two_and_two_steps_equal_four_bitwise(folder, tmp_path, compute):  # noqa: F811
    straight = loaded(folder, compute, {"updates": 2}, warmup_steps=3)
    for step in (1, 2, 3, 4):
        straight.step(batch_at(step), ALONE)
        if step == 2:
            straight.save(str(tmp_path / "two"))
            halfway = straight.master_digest()
    other = FSDPTrainer(straight.spec, threads=1)
    assert other.restore(str(tmp_path / "two")) == 2
    assert other.master_digest() == halfway
    for step in (3, 4):
        other.step(batch_at(step), ALONE)
    assert_bitwise(state_of(other), state_of(straight))
    assert {name.split("/")[0] for name in state_of(other)} >= {"value", "master", "exp_avg"}


def test_the_value_model_is_saved_and_digested_but_never_published(folder, tmp_path):  # noqa: F811
    trainer, plain = loaded(folder, "float32"), FSDPTrainer(make_spec(folder), threads=1)
    plain.load(folder)
    assert trainer.export().keys() == plain.export().keys()
    assert all(torch.equal(tensor, plain.export()[name]) for name, tensor in trainer.export().items())
    before, published = trainer.master_digest(), trainer.export()
    with torch.no_grad():
        trainer.critic.masters.weights["lm_head.weight"].add_(1.0)
    assert trainer.master_digest() != before
    assert all(torch.equal(tensor, published[name]) for name, tensor in trainer.export().items())
    for one, other in ((trainer, plain), (plain, trainer)):
        one.save(str(tmp_path / "state"))
        with pytest.raises(SnapshotError, match="value/"):
            other.restore(str(tmp_path / "state"))


def test_a_value_that_is_not_a_number_names_its_trajectory_and_changes_nothing(folder):  # noqa: F811
    """Before the step, or only in its second update, when the first has already moved the value model."""
    for bad_call in (1, 3):
        trainer = loaded(folder, critic={"updates": 2})
        trainer.step(batch_at(1), ALONE)
        batch, before, calls = batch_at(2), state_of(trainer), []
        name = next(i for i, mask in enumerate(batch.masks) if i > 2 and any(mask))

        def spoil(module, args, out, calls=calls, bad_call=bad_call, name=name):
            calls.append(1)
            return out.masked_fill(args[0].trajectory == name, math.nan) if len(calls) == bad_call else out

        hook = trainer.critic.module.register_forward_hook(spoil)
        with pytest.raises(NonFiniteError, match=rf"value is not finite .* in trajectory trajectory-{name};"):
            trainer.step(batch, ALONE)
        hook.remove()
        assert len(calls) == bad_call, "one micro-batch a pass"
        assert_bitwise(state_of(trainer), before)
        clean = loaded(folder, critic={"updates": 2})
        clean.step(batch_at(1), ALONE)
        assert clean.step(batch, ALONE) == trainer.step(batch, ALONE)
        assert clean.master_digest() == trainer.master_digest()


def test_a_bad_weight_or_gradient_of_the_value_model_is_named(folder):  # noqa: F811
    trainer = loaded(folder)
    before = state_of(trainer)
    hook = trainer.critic.module.register_forward_hook(
        lambda module, args, out: (out.requires_grad and out.register_hook(lambda g: g * math.inf) and None) or None
    )
    with pytest.raises(NonFiniteError, match=r"gradient of .* is not finite"):
        trainer.step(batch_at(1), ALONE)
    hook.remove()
    assert_bitwise(state_of(trainer), before)
    with torch.no_grad():
        trainer.critic.masters.weights["model.norm.weight"][0] = math.nan
    trainer.critic.masters.round()
    with pytest.raises(NonFiniteError, match=r"master weight value/model\.norm\.weight .* so: value is not finite"):
        trainer.step(batch_at(1), ALONE)


def test_a_step_without_a_trained_token_leaves_the_value_model(folder):  # noqa: F811
    trainer = loaded(folder)
    trainer.step(batch_at(1), ALONE)
    before, batch = state_of(trainer), batch_at(2)
    metrics = trainer.step(replace(batch, masks=tuple((False,) * len(mask) for mask in batch.masks)), ALONE)
    assert [getattr(metrics, name) for name in VALUE] == [None] * 3
    assert_bitwise(state_of(trainer) | {"step": before["step"]}, before)


def test_equal_rewards_teach_the_value_model_alone(folder):  # noqa: F811
    """All advantages are equal, so whitened they are 0."""
    trainer = loaded(folder, critic={"lam": 1.0})
    batch = batch_at(1)
    metrics = trainer.step(replace(batch, advantages=(1.0,) * len(batch.replies)), ALONE)
    assert metrics.grad_norm == 0.0
    assert sum(metrics.tokens_reached) == 0
    assert metrics.value_loss == pytest.approx(0.5)
    assert metrics.value_grad_norm > 0
    assert metrics.value_explained is None


def test_recomputing_activations_changes_no_bit(folder):  # noqa: F811
    one, other = (FSDPTrainer(make_spec(folder, name="ppo"), 1, Layout(recompute=again)) for again in (False, True))
    for trainer in (one, other):
        trainer.load(folder)
        for step in (1, 2):
            trainer.step(batch_at(step), ALONE)
    assert_bitwise(state_of(one), state_of(other))


def with_trainer(spec, **changes):
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update=changes)})


@pytest.mark.parametrize("kind", ["adapters", "exact", "experts", "untied"])
def test_beside_every_kind_of_policy(tmp_path, kind):
    """It learns to foretell the rewards of a batch that it sees again and again."""
    home = make_tiny_moe(tmp_path / "m") if kind == "experts" else make_folder(
        tmp_path / "m", "qwen3" if kind == "untied" else "llama"
    )  # fmt: skip
    spec = make_spec(home, "float32", name="ppo", critic={"learning_rate": 1e-2, "lam": 1.0})
    if kind == "adapters":
        spec = with_adapters(spec, dtype="float32")
    if kind == "exact":
        spec = with_trainer(
            spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": "float32"})}), exact=True
        )
    trainer = FSDPTrainer(spec, 1)
    trainer.load(home)
    losses = [trainer.step(replace(batch_at(1), step=step), ALONE).value_loss for step in range(1, 9)]
    assert losses[-1] < losses[0] / 2, losses
