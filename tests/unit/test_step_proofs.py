"""What is proved of a step: gradients of the trajectories it names, and a mismatch between numbers of the same version."""

import math
from dataclasses import replace

import pytest
from tiny_policy import make_batch, make_folder, make_spec

from furlong.ops.protocols import OtherLogprobs
from furlong.ops.stages.context import StageError, StepKey
from furlong.ops.stages.weight_publish import _witnessed
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.others import OtherWeights

KEY = StepKey("quick", 1)


def step_record(**outcome):
    row = {"trajectory_id": "t", "disposition": "trained", "advantage": 0.5, "tokens_trained": 3, "tokens_reached": 3}
    return {"clip_fraction": 0.0, "rejected_fraction": 0.0, "outcomes": [row | outcome]}


@pytest.mark.parametrize(
    ("outcome", "step"),
    [
        ({}, {}),
        ({"tokens_reached": 1}, {"clip_fraction": 0.1}),
        ({"tokens_reached": 0}, {"rejected_fraction": 0.1}),
        ({"tokens_reached": 0, "advantage": 0.0}, {}),
        ({"tokens_reached": 0, "tokens_trained": 0}, {}),
    ],
)
def test_gradients_that_arrived_as_recorded_may_be_published(outcome, step):
    _witnessed(KEY, step_record(**outcome) | step)


@pytest.mark.parametrize(
    ("outcome", "step"),
    [
        ({"tokens_reached": 2}, {}),
        ({"tokens_reached": 0}, {}),
        ({"tokens_trained": 0, "advantage": 0.0, "disposition": "zero_variance"}, {}),
        ({"tokens_reached": 4}, {"clip_fraction": 0.1}),
    ],
)
def test_gradients_that_are_missing_or_come_from_elsewhere_stop_the_publication(outcome, step):
    with pytest.raises(StageError, match="trajectory t"):
        _witnessed(KEY, step_record(**outcome) | step)


@pytest.fixture
def stale(tmp_path):
    """A trainer one step on, the weights of both versions, and a batch whose replies the older and the newer drew."""
    spec = make_spec(make_folder(tmp_path / "model")).model_copy(update={"staleness": 2})
    trainer = FSDPTrainer(spec, 1)
    trainer.load(spec.model.source)
    old = trainer.export()
    first = make_batch(1)
    trainer.step(replace(first, logprobs=tuple(map(tuple, trainer.logprobs(first)))), OtherLogprobs())
    batch = make_batch(2, step=2)
    halves = tuple(tuple(4 + (t > 1) for t in range(len(reply))) for reply in batch.replies)
    others = OtherWeights(None, "quick", spec, spec.model.source)
    others.remember(4, old)
    return trainer, others, replace(batch, sampled_by=halves, version=5), old


def test_tokens_of_older_weights_are_compared_under_those_weights(stale):
    trainer, others, batch, old = stale
    found = others.logprobs(trainer, KEY, batch, measure=True).sampling
    under_old, under_new = trainer.logprobs(batch, None, old), trainer.logprobs(batch)
    compared = 0
    for row, versions, mask, was, now in zip(found, batch.sampled_by, batch.masks, under_old, under_new, strict=True):
        for value, version, on, a, b in zip(row, versions, mask, was, now, strict=True):
            assert math.isnan(value) == (not on or version != 4)
            if not math.isnan(value):
                compared += 1
                assert value == pytest.approx(a, abs=1e-5), "float32, packed with other trajectories"
                assert abs(value - b) > 1e-4, "the two versions differ, so the comparison can tell them apart"
    assert compared > 3


def test_a_bounded_part_of_the_stale_tokens_is_compared_and_the_same_part_every_time(stale):
    trainer, _, batch, old = stale
    spec = trainer.spec.model_copy(
        update={"trainer": trainer.spec.trainer.model_copy(update={"micro_batch_tokens": 16})}
    )
    few = OtherWeights(None, "quick", spec, spec.model.source)
    few.remember(4, old)
    one, other = (few.logprobs(trainer, KEY, batch, measure=True).sampling for _ in range(2))
    rows = [index for index, row in enumerate(one) if not all(map(math.isnan, row))]
    assert 0 < len(rows) < len(batch.replies)
    assert str(one) == str(other)


def test_versions_beyond_the_bound_are_forgotten_and_a_synchronous_run_keeps_none(stale):
    _, others, _, old = stale
    for version in (5, 6):
        others.remember(version, old)
    assert sorted(others._recent) == [5, 6]
    calm = OtherWeights(None, "quick", others.spec.model_copy(update={"staleness": 0}), "")
    calm.remember(1, old)
    assert not calm._recent
