"""What is proved of a step: gradients of the trajectories it names, and a mismatch between numbers of the same version."""

import math
from dataclasses import replace

import pytest
from loss_cases import spec_of
from tiny_policy import make_batch, make_folder, make_spec

from furlong.ops.protocols import OtherLogprobs
from furlong.ops.stages.context import StageError, StepKey
from furlong.ops.stages.weight_publish import _witnessed
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.others import OtherWeights

KEY = StepKey("quick", 1)


def step_record(*outcomes, clipped=0, rejected=0):
    """A record of these outcomes, each given by what differs from a whole trajectory of three tokens."""
    whole = {"group_id": "g", "advantage": 0.5, "tokens_trained": 3, "tokens_reached": 3}
    rows = [{"trajectory_id": "tuv"[n]} | whole | outcome for n, outcome in enumerate(outcomes)]
    tokens = sum(row["tokens_trained"] for row in rows)
    parts = {"clip_fraction": clipped / max(tokens, 1), "rejected_fraction": rejected / max(tokens, 1)}
    return {"tokens_trained": tokens, "outcomes": rows} | parts


def algorithm(name="grpo", **settings):
    return spec_of(name=name, **settings).algorithm


@pytest.mark.parametrize(
    "step",
    [
        step_record({}),
        step_record({"tokens_reached": 1}, clipped=2),
        step_record({"tokens_reached": 0}, clipped=1, rejected=2),
        step_record({"tokens_reached": 2}, {"tokens_reached": 2}, {}, clipped=2),
        step_record({"tokens_reached": 0, "advantage": 0.0}),
        step_record({"tokens_reached": 0, "tokens_trained": 0}),
        step_record(),
    ],
)
def test_gradients_that_arrived_as_recorded_may_be_published(step):
    _witnessed(KEY, step, algorithm())


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (step_record({"tokens_reached": 2}), "t"),
        (step_record({"tokens_reached": 0}), "t"),
        (step_record({"tokens_trained": 0, "advantage": 0.0}), "t"),
        (step_record({"tokens_reached": 4}, clipped=1), "t"),
        (step_record({"tokens_reached": 1}, clipped=1), "t"),
        (step_record({}, {"tokens_reached": 0}, {}, clipped=1, rejected=1), "u"),
        (step_record({"tokens_reached": 2}, {"tokens_reached": 2}, {"tokens_reached": 2}, clipped=2), "v"),
    ],
)
def test_gradients_that_are_missing_or_come_from_elsewhere_stop_the_publication(step, name):
    with pytest.raises(StageError, match=f"trajectory {name} "):
        _witnessed(KEY, step, algorithm())


def test_replies_at_the_mean_of_a_whitened_step_have_no_gradient_and_the_others_have():
    silent = {"tokens_reached": 0}
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        _witnessed(KEY, step_record({"advantage": 1.0} | silent, {"advantage": 1.0} | silent), algorithm(name))
        _witnessed(
            KEY, step_record({"advantage": 0.0}, {"advantage": 0.5} | silent, {"advantage": 1.0}), algorithm(name)
        )
        with pytest.raises(StageError, match="trajectory t "):
            _witnessed(KEY, step_record({"advantage": 0.0} | silent, {"advantage": 1.0}), algorithm(name))


def test_where_values_differ_every_reply_has_a_gradient():
    """Whatever its reward is beside the others'; where they are all the same, some advantages may be."""
    step = step_record({"tokens_reached": 0}, {"advantage": 1.0})
    with pytest.raises(StageError, match="trajectory t "):
        _witnessed(KEY, step | {"value_explained": -0.25}, algorithm("ppo"))
    for same in (0.0, None):
        _witnessed(KEY, step | {"value_explained": same}, algorithm("ppo"))
        with pytest.raises(StageError, match="trajectory u "):
            _witnessed(KEY, step_record({}, {"tokens_reached": 4}) | {"value_explained": same}, algorithm("ppo"))


def test_a_preference_without_its_other_side_has_no_gradient():
    better, worse = {"advantage": 1.0}, {"advantage": -1.0}
    empty, silent = {"tokens_trained": 0, "tokens_reached": 0}, {"tokens_reached": 0}
    dpo = algorithm("dpo", kl_coef=0.1)
    _witnessed(KEY, step_record(better | silent, worse | empty), dpo)
    _witnessed(KEY, step_record(better, better | {"group_id": "h"} | silent, worse), dpo)
    with pytest.raises(StageError, match="trajectory t "):
        _witnessed(KEY, step_record(better | silent, worse), dpo)


@pytest.mark.parametrize("case", [{"name": "reinforce_pp"}, {"name": "dpo", "kl_coef": 0.5}, {"name": "gspo"}])
def test_steps_without_a_gradient_are_such_that_may_be_published(tmp_path, case):
    """What the trainer itself counts, of rewards that are all equal or have no counterpart."""
    spec = make_spec(make_folder(tmp_path / "model"), **case)
    trainer = FSDPTrainer(spec, 1)
    trainer.load(spec.model.source)
    batch = replace(make_batch(1), advantages=(1.0,) * 8)
    batch = replace(batch, logprobs=tuple(map(tuple, trainer.logprobs(batch))))
    metrics = trainer.step(batch, OtherLogprobs(reference=batch.logprobs))
    assert (sum(metrics.tokens_reached) == 0) == (case["name"] != "gspo")
    outcomes = [
        {
            "trajectory_id": name,
            "group_id": str(group),
            "advantage": 1.0,
            "tokens_trained": sum(mask),
            "tokens_reached": n,
        }
        for name, group, mask, n in zip(
            batch.trajectory_ids, batch.group, batch.masks, metrics.tokens_reached, strict=True
        )
    ]
    shares = {name: getattr(metrics, name) for name in ("tokens_trained", "clip_fraction", "rejected_fraction")}
    _witnessed(KEY, {"outcomes": outcomes} | shares, spec.algorithm)


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
