"""A trainer of a mixture of experts: it steps through the recorded experts, and holds its weights as the files do."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest
import torch
from expert_records import drawn, with_partial_records, with_records
from forced_experts import file_gradients, forced_logprobs, forced_model, own_choice
from safetensors.torch import load_file
from tiny_policy import make_batch, make_spec, make_tiny_moe

from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.parallel import Layout
from furlong.ops.policy.routing import RoutingError, decode
from furlong.ops.protocols import GenerateRequest, OtherLogprobs, TrainBatch
from furlong.resources.engines.local import LocalEngine
from furlong.resources.trainers.fsdp import FSDPTrainer

ALONE = OtherLogprobs()
ONE_RANK = Layout()
CLOSE = 1e-10
"""Relative; float64 against float64, as in `test_replay`, here through a ratio's exponential as well."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


def loaded(folder: str, layout: Layout = ONE_RANK, **settings: object) -> FSDPTrainer:
    trainer = FSDPTrainer(make_spec(folder, **{"compute": "float64", **settings}), 1, layout)
    trainer.load(folder)
    return trainer


def policy_loss(rows: list[torch.Tensor], batch: TrainBatch) -> torch.Tensor:
    """The clipped ratio to the engine's own log-probability (Schulman et al. 2017), each trajectory weighing the same."""
    loss, sequences = torch.zeros((), dtype=torch.float64), sum(any(mask) for mask in batch.masks)
    for row, engine, mask, advantage in zip(rows, batch.logprobs, batch.masks, batch.advantages, strict=True):
        on = torch.tensor(mask)
        ratio = torch.exp(row - torch.tensor(engine, dtype=torch.float64))[on]
        worse = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss = loss - (worse.mean() / sequences if len(worse) else 0.0)
    return loss


@pytest.mark.parametrize("layout", [Layout(), Layout(recompute=True)], ids=str)
@pytest.mark.parametrize("records", [with_records, with_partial_records])
def test_a_step_is_one_through_the_recorded_experts(folder, records, layout):
    batch = records(make_batch(3, letters=2))
    model = forced_model(folder)
    wanted = forced_logprobs(model, batch)
    engine = tuple(tuple(v + 0.1 * (-1) ** t for t, v in enumerate(row.tolist())) for row in wanted)
    batch = replace(batch, logprobs=engine)
    trainer = loaded(folder, layout, budget=40)
    for row, other in zip(trainer.logprobs(batch), wanted, strict=True):
        assert row == pytest.approx(other.tolist(), abs=CLOSE)
    metrics = trainer.step(batch, ALONE)
    loss = policy_loss(wanted, batch)
    loss.backward()
    assert metrics.loss == pytest.approx(loss.item(), abs=CLOSE)
    assert metrics.mismatch_max == pytest.approx(0.1, abs=CLOSE)
    assert metrics.tokens_reached == tuple(sum(mask) for mask in batch.masks)
    found, gradients = {name: w.grad for name, w in trainer.masters.weights.items()}, file_gradients(model)
    for name in gradients:
        bound = CLOSE * float(gradients[name].abs().max())
        torch.testing.assert_close(found[name], gradients[name], rtol=CLOSE, atol=bound, msg=name)


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_recomputing_changes_no_bit(folder, compute):
    batch = with_records(make_batch(3))
    weights = []
    for layout in (Layout(), Layout(recompute=True)):
        trainer = loaded(folder, layout, compute=compute, budget=40)
        weights.append((asdict(trainer.step(batch, ALONE)), trainer.master_digest()))
    assert weights[0] == weights[1]


def test_weights_are_those_of_the_files_by_name_and_bit(folder):
    trainer = loaded(folder, compute="float32")
    stored, exported = load_file(f"{folder}/model.safetensors"), trainer.export()
    assert exported.keys() == stored.keys() == read_architecture(folder).shapes().keys()
    assert all(torch.equal(exported[name], tensor.bfloat16()) for name, tensor in stored.items())


def test_a_saved_trainer_goes_on_bit_for_bit(folder, tmp_path):
    whole, half = loaded(folder, compute="bfloat16"), loaded(folder, compute="bfloat16")
    batches = [with_records(make_batch(seed, step=step), seed) for seed, step in ((3, 1), (4, 2), (5, 3))]
    for batch in batches[:2]:
        whole.step(batch, ALONE)
        half.step(batch, ALONE)
    half.save(str(tmp_path / "state"))
    other = FSDPTrainer(make_spec(folder, compute="bfloat16"), threads=1)
    assert other.restore(str(tmp_path / "state")) == 2
    assert asdict(other.step(batches[2], ALONE)) == asdict(whole.step(batches[2], ALONE))
    assert other.master_digest() == whole.master_digest()


def test_published_weights_are_scored_through_the_same_experts(folder):
    """The log-probabilities that a mismatch is measured on, under the weights that sampled."""
    trainer = loaded(folder)
    batch = with_records(make_batch(3))
    published = {name: weight.double() for name, weight in load_file(f"{folder}/model.safetensors").items()}
    before = trainer.logprobs(batch)
    trainer.step(batch, ALONE)
    assert trainer.logprobs(batch) != before
    assert trainer.logprobs(batch, weights=published) == before


def test_records_of_another_model_are_refused_and_nothing_changes(folder):
    trainer = loaded(folder)
    before = trainer.master_digest()
    batch = make_batch(3)
    for odd in (with_records(batch, experts=5), with_records(batch, layers=(0, 1)), with_records(batch, top_k=1)):
        with pytest.raises(RoutingError, match=r"trajectory trajectory-0: .*train the model that sampled"):
            trainer.step(odd, ALONE)
    long = drawn(random.Random(1), 0, 90)
    with pytest.raises(RoutingError, match="trajectory trajectory-0: experts are recorded for positions 0 to 90"):
        trainer.logprobs(replace(batch, routing=(long, *batch.routing[1:])))
    assert trainer.master_digest() == before
    assert trainer.completed == 0


def test_what_an_engine_recorded_is_replayed(folder):
    """End to end in bfloat16: a trainer of the same weights would choose otherwise for some token, and then be far off."""
    batch = sampled(folder)
    trainer = loaded(folder, compute="bfloat16")
    own = own_choice(trainer.module, batch).routing
    assert any((decode(mine) != decode(theirs)).any() for mine, theirs in zip(own, batch.routing, strict=True))
    replayed, free = (
        loaded(folder, compute="bfloat16").step(one, ALONE) for one in (batch, replace(batch, routing=(None,) * 16))
    )
    assert replayed.mismatch_mean < free.mismatch_mean
    assert replayed.mismatch_coverage == free.mismatch_coverage == 1.0


def sampled(folder: str) -> TrainBatch:
    """Two groups of eight replies, as the embedded engine draws and records them."""
    prompts = ((5, 3, 8, 1), (9, 2, 7))
    engine = LocalEngine(folder, 0, "bfloat16", 1, [3])
    try:
        asked = [GenerateRequest(f"t{i}", prompts[i // 8], i, 24, 1.0) for i in range(16)]
        samples = engine.generate(asked)
    finally:
        engine.close()
    return TrainBatch(
        step=1,
        temperature=1.0,
        prompts=prompts,
        group=(0,) * 8 + (1,) * 8,
        replies=tuple(s.tokens for s in samples),
        logprobs=tuple(s.logprobs for s in samples),
        masks=tuple((True,) * len(s.tokens) for s in samples),
        sampled_by=tuple((0,) * len(s.tokens) for s in samples),
        version=0,
        advantages=tuple(float(i % 3 - 1) for i in range(16)),
        rewards=(0.0,) * 16,
        routing=tuple(s.routing for s in samples),
        trajectory_ids=tuple(s.request_id for s in samples),
    )
