"""Training adapters in one process."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from lora_samples import base_of, with_adapters
from tiny_policy import make_batch, make_folder, make_spec, make_tiny_moe, near_policy

from furlong.ops.policy.lora import SCALE, is_adapted, names_of, policy_of, start
from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.objective import Objective
from furlong.ops.protocols import GenerateRequest, OtherLogprobs
from furlong.ops.weights.delta import encode_and_digest
from furlong.ops.weights.digest import manifest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.fsdp_passes import share
from furlong.resources.trainers.module import load_module
from furlong.resources.trainers.snapshots import SnapshotError

ALONE = OtherLogprobs()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


def loaded(folder, compute="bfloat16", rank=3, **settings) -> FSDPTrainer:
    trainer = FSDPTrainer(with_adapters(make_spec(folder, compute, **settings), rank), threads=1)
    trainer.load(folder)
    return trainer


def near(trainer, step=1, seed=1):
    batch = make_batch(seed, step=step)
    return near_policy(batch, trainer.logprobs(batch))


def stir(trainer, seed=5, size=0.1):
    """Adapters that change something, so that A gets a gradient."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in trainer.masters.weights.items():
            if "lora_B" in name:
                weight.copy_(size * torch.randn(weight.shape, generator=draw))
    trainer.masters.round()


def same_bits(one, two):
    assert one
    assert one.keys() == two.keys()
    return manifest(one) == manifest(two)


def everything(trainer):
    return {piece.name: tensor.clone() for piece, tensor in trainer.masters.state().items()}


@pytest.mark.parametrize("which", ["folder", "moe"])
def test_gradients_are_those_of_autograd_through_base_and_adapters(request, which):
    folder = request.getfixturevalue(which)
    trainer = loaded(folder, "float64", budget=24)
    stir(trainer)
    batch = near(trainer)
    trainer.step(batch, ALONE)
    found = {name: weight.grad.clone() for name, weight in trainer.masters.weights.items()}
    again = loaded(folder, "float64", budget=24)
    stir(again)
    module = load_module(folder).double()
    module.widen()
    base = base_of(folder)
    leaves = {name: weight.detach().clone().requires_grad_() for name, weight in again.masters.weights.items()}
    weights = {}
    for name, tensor in base.items():
        weights[f"causal.{name}"] = tensor.double()
        if is_adapted(name):
            a, b = (leaves[part] for part in names_of(name))
            weights[f"causal.{name}"] = tensor.double() + 6.0 / 3 * (b @ a)
    objective, loss = Objective(batch, trainer.spec, ALONE), 0.0
    for micro in share(batch, batch.masks, 24, trainer.ranks):
        logprobs, _ = torch.func.functional_call(module, weights, (micro, batch.temperature), tie_weights=True)
        slopes = objective.slopes(objective.index(micro.trajectory, micro.offset), logprobs).slope
        loss = loss + (logprobs * slopes).sum()
    loss.backward()
    assert found.keys() == leaves.keys()
    for name, leaf in leaves.items():
        assert "experts" in name or leaf.grad.any(), name
        torch.testing.assert_close(found[name], leaf.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("which", ["folder", "moe"])
def test_the_base_stays_as_it_is_and_only_adapters_move(request, which):
    folder = request.getfixturevalue(which)
    trainer, base = loaded(folder, weight_decay=0.1), base_of(folder)
    assert same_bits(trainer.export(), base)
    batch = replace(near(trainer), masks=tuple(tuple(False for _ in reply) for reply in make_batch(1).replies))
    trainer.step(batch, ALONE)
    assert same_bits(trainer.export(), base), "nothing was moved, so nothing is added"
    assert {w for group in trainer.masters.adamw.param_groups for w in group["params"]} == set(
        trainer.masters.weights.values()
    )
    trainer.step(near(trainer, 2), ALONE)
    found = trainer.export()
    assert found.keys() == base.keys() | {SCALE} | {
        part for name in filter(is_adapted, base) for part in names_of(name)
    }
    assert same_bits({name: found[name] for name in base}, base)
    for name in filter(is_adapted, base):
        a, b = (found[part] for part in names_of(name))
        assert (a.dtype, b.dtype) == (torch.float32, torch.float32)
        assert "experts" in name or b.any(), name
    assert found[SCALE].item() == 2.0
    computing = {name: weight.detach() for name, weight in trainer.module.named_weights().items()}
    assert same_bits(computing, policy_of(found))
    later = trainer.step(near(trainer, 3), ALONE)
    assert later.grad_norm > 0
    moved = {name: tensor for name, tensor in trainer.export().items() if name not in base}
    assert not same_bits(moved, {name: found[name] for name in moved})


def test_engine_and_trainer_compute_with_the_same_weights(folder):
    trainer = loaded(folder)
    zero = trainer.export()
    trainer.step(near(trainer), ALONE)
    one = trainer.export()
    encoded = encode_and_digest(1, 0, "r", zero, one)
    assert set(encoded.rows["name"].to_pylist()) == one.keys() - zero.keys()
    engine = LocalEngine(folder, 0, "bfloat16", 1, [3])
    assert engine.stage(1, 0, encoded.rows, 1).tensors == encoded.digests
    engine.activate(1, 1)
    computing = {name: weight.detach() for name, weight in trainer.module.named_weights().items()}
    assert same_bits(engine._gate.live.decoder.served(), computing)
    trainer.step(near(trainer, 2), ALONE)
    encoded = encode_and_digest(2, 1, "r", one, trainer.export())
    names = set(encoded.rows["name"].to_pylist())
    assert names <= trainer.masters.weights.keys()
    assert engine.stage(2, 1, encoded.rows, 1).tensors == encoded.digests


def test_gradients_are_clipped_by_the_norm_of_the_adapters_gradients(folder):
    free = loaded(folder, "float32")
    stir(free)
    batch = near(free)
    norm = free.step(batch, ALONE).grad_norm
    wanted = math.sqrt(sum(float(w.grad.double().square().sum()) for w in free.masters.weights.values()))
    assert norm == pytest.approx(wanted, rel=1e-6)
    bound = loaded(folder, "float32", max_grad_norm=norm / 4)
    stir(bound)
    assert bound.step(batch, ALONE).grad_norm == norm
    for name, weight in bound.masters.weights.items():
        torch.testing.assert_close(weight.grad, free.masters.weights[name].grad / 4, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("compute", ["bfloat16", "float32", "float64"])
def test_resuming_is_exact(folder, tmp_path, compute):
    straight = loaded(folder, compute, budget=24)
    batches = [near(straight, step, step) for step in (1, 2, 3, 4)]
    for batch in batches[:2]:
        straight.step(batch, ALONE)
    straight.save(str(tmp_path / "saved"))
    held, digest = everything(straight), straight.master_digest()
    for batch in batches[2:]:
        straight.step(batch, ALONE)
    fresh = FSDPTrainer(straight.spec, threads=1)
    assert fresh.restore(str(tmp_path / "saved")) == 2
    assert same_bits(everything(fresh), held)
    assert fresh.master_digest() == digest
    for trainer in (fresh, straight):
        if trainer is straight:
            assert trainer.restore(str(tmp_path / "saved")) == 2
        for batch in batches[2:]:
            trainer.step(batch, ALONE)
    assert same_bits(everything(fresh), everything(straight))
    assert same_bits(fresh.export(), straight.export())
    assert len(fresh.export()) > len(base_of(folder))


def test_a_state_of_another_rank_or_without_adapters_is_refused(folder, tmp_path):
    trainer = loaded(folder)
    trainer.save(str(tmp_path / "saved"))
    plain = FSDPTrainer(make_spec(folder, "bfloat16"), threads=1)
    plain.load(folder)
    plain.save(str(tmp_path / "plain"))
    for other, place in ((loaded(folder, rank=4), "saved"), (plain, "saved"), (loaded(folder), "plain")):
        before = everything(other)
        with pytest.raises(SnapshotError, match="does not fit the model"):
            other.restore(str(tmp_path / place))
        assert same_bits(everything(other), before)


def test_log_probabilities_under_other_versions(folder):
    trainer = loaded(folder)
    batch = make_batch(1)
    versions, wanted = [], []
    for step in (1, 2, 3):
        versions.append(trainer.export())
        wanted.append(trainer.logprobs(batch))
        trainer.step(near(trainer, step), ALONE)
    assert len({str(row) for row in wanted}) == 3
    before, now = everything(trainer), trainer.logprobs(batch)
    for version, values in zip(versions, wanted, strict=True):
        assert trainer.logprobs(batch, None, version) == values
        assert trainer.logprobs(batch, None, policy_of(version)) == values
        assert trainer.logprobs(batch) == now
    assert same_bits(everything(trainer), before)
    with pytest.raises(ValueError, match=r"differ from the model in 1 tensors, first model\.norm\.weight"):
        trainer.logprobs(batch, None, {n: t for n, t in versions[2].items() if n != "model.norm.weight"})
    with pytest.raises(ValueError, match=r"adapter\.scale is missing"):
        trainer.logprobs(batch, None, {n: t for n, t in versions[2].items() if n != SCALE})
    assert trainer.logprobs(batch) == now


def test_a_gradient_that_is_not_finite_names_the_adapter_and_changes_nothing(folder):
    trainer = loaded(folder)
    batch, before = near(trainer), everything(trainer)
    layer = "model.layers.1.mlp.up_proj.weight"
    weight = trainer.module.named_weights()[layer]
    handle = weight.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
    with pytest.raises(NonFiniteError, match=r"gradient of adapter\.model\.layers\.1\.mlp\.up_proj\.lora_A\.weight"):
        trainer.step(batch, ALONE)
    handle.remove()
    assert same_bits(everything(trainer), before)
    assert trainer.step(batch, ALONE).grad_norm > 0


def test_a_base_or_an_adapter_that_is_not_finite_is_named(folder):
    trainer = loaded(folder)
    trainer.masters.weights[names_of("model.layers.0.mlp.up_proj.weight")[1]].data[0, 0] = float("inf")
    assert trainer.masters.bad_weight() == "adapter.model.layers.0.mlp.up_proj.lora_B.weight"
    base = trainer.export() | {"model.norm.weight": torch.full((32,), float("nan"))}
    trainer.masters.load_weights(lambda piece: base[piece.name])
    assert trainer.masters.bad_weight() == "model.norm.weight"


def test_adapters_learn(folder):
    """The reply that is rewarded becomes likelier, the other one less likely."""
    trainer = loaded(folder, learning_rate=2e-2)
    batch = make_batch(1, sizes=(2,))
    batch = replace(batch, advantages=(1.0, -1.0), masks=tuple(tuple(True for _ in reply) for reply in batch.replies))
    first = [sum(row) / len(row) for row in trainer.logprobs(batch)]
    for step in range(1, 7):
        now = tuple(map(tuple, trainer.logprobs(batch)))
        trainer.step(replace(batch, step=step, logprobs=now), ALONE)
    last = [sum(row) / len(row) for row in trainer.logprobs(batch)]
    assert last[0] > first[0] + 0.3
    assert last[1] < first[1] - 0.3


def test_the_start_is_the_seeds(folder):
    one, two = loaded(folder), loaded(folder)
    assert one.master_digest() == two.master_digest()
    other = FSDPTrainer(one.spec.model_copy(update={"seed": 1}), threads=1)
    other.load(folder)
    assert other.master_digest() != one.master_digest()
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(other.masters.weights[names_of(name)[0]].detach(), start(1, name, (16, 32), 3)[0])


def test_in_exact_mode_log_probabilities_are_the_engines_with_adapters(folder):
    spec = with_adapters(make_spec(folder, "bfloat16"))
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"exact": True})})
    trainer = FSDPTrainer(spec, threads=1)
    trainer.load(folder)
    zero = trainer.export()
    for step in (1, 2):
        trainer.step(near(trainer, step), ALONE)
    one = trainer.export()
    engine = LocalEngine(folder, 0, "bfloat16", 1, [3])
    engine.stage(1, 0, encode_and_digest(1, 0, "r", zero, one).rows, 1)
    engine.activate(1, 1)
    prompts = tuple(tuple(range(1, 4 + i)) for i in range(3))
    asked = [GenerateRequest(str(i), prompt, i, 12, 0.8) for i, prompt in enumerate(prompts)]
    drawn = engine.generate(asked)
    batch = replace(make_batch(1, (1, 1, 1)), prompts=prompts, replies=tuple(sample.tokens for sample in drawn))
    # As the lake has them, in float32.
    wanted = [np.float32(sample.logprobs).tolist() for sample in drawn]
    batch = replace(
        batch,
        logprobs=tuple(sample.logprobs for sample in drawn),
        masks=tuple((True,) * len(sample.tokens) for sample in drawn),
        sampled_by=tuple((1,) * len(sample.tokens) for sample in drawn),
    )
    assert trainer.logprobs(batch) == wanted
    assert trainer.logprobs(batch, None, one) == wanted
    assert trainer.logprobs(batch, None, zero) != wanted
