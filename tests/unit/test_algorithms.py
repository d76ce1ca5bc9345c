"""Each algorithm's loss and slope by hand, and which settings are refused."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import random_step, spec_of

from furlong.ops.policy.algorithms import ALGORITHMS, check, needs
from furlong.ops.policy.objective import Objective
from furlong.ops.policy.preference import preference_loss
from furlong.ops.policy.returns import returns_after_divergence, towards_teacher, whitened
from furlong.ops.protocols import OtherLogprobs
from furlong.ops.spec import AlgorithmSpec, SpecError

LN2 = math.log(2)


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def two_replies(advantages):
    """One group of two: replies of two tokens and of one, all trained; the engine's log-probabilities are -1."""
    batch, *_ = random_step(1)
    return replace(
        batch, prompts=((1,),), group=(0, 0), replies=((1, 2), (3,)), logprobs=((-1.0, -1.0), (-1.0,)),
        masks=((True, True), (True,)), sampled_by=((4, 4), (4,)), version=4, advantages=tuple(advantages),
        rewards=(1.0, 0.0), routing=(None, None), trajectory_ids=("a", "b"),
    )  # fmt: skip


def slopes(advantages, trainer, reference=None, **algorithm):
    objective = Objective(two_replies(advantages), spec_of(**algorithm), OtherLogprobs(reference=reference))
    return objective.slopes(torch.arange(3), float64(trainer))


# The first reply's tokens are 2 and 1/2 times as likely as when drawn, the second's 4 times.
MOVED = [-1 + LN2, -1 - LN2, -1 + 2 * LN2]


def test_grpo_by_hand():
    step = slopes([1.0, -1.0], MOVED)
    assert step.loss.tolist() == pytest.approx([-1.28 / 4, -0.5 / 4, 4 / 2])
    assert step.slope.tolist() == pytest.approx([0.0, -0.5 / 4, 4 / 2])
    assert step.clipped.tolist() == [True, False, False]


def test_dapo_is_grpo_with_a_token_mean():
    step = slopes([1.0, -1.0], MOVED, loss_mean="token", clip_low=0.2, clip_high=0.28)
    assert step.loss.tolist() == pytest.approx([-1.28 / 3, -0.5 / 3, 4 / 3])


def test_dr_grpo_divides_by_a_constant_by_hand():
    step = slopes([1.0, -1.0], MOVED, name="dr_grpo")
    assert spec_of().sampling.max_new_tokens == 8
    assert step.loss.tolist() == pytest.approx([-1.28 / 16, -0.5 / 16, 4 / 16])


def test_a_weight_that_float32_cannot_hold_is_counted_as_rejected():
    """The first reply's ratio is exp(-120) as a whole, which would leave a slope of 0 in the trainer's number format."""
    step = slopes([1.0, 1.0], [-61.0, -61.0, -1.0], correction="tis", correction_options={"level": "sequence"})
    assert step.rejected.tolist() == [True, True, False]
    assert step.slope.float().tolist() == [0.0, 0.0, -0.5]
    assert step.loss.tolist() == [0.0, 0.0, -0.5]


def test_gspo_by_hand():
    """The first reply's geometric mean ratio is 1, so nothing of it is clipped; the second's is 4."""
    step = slopes([1.0, 1.0], MOVED, name="gspo")
    assert step.loss.tolist() == pytest.approx([-1 / 4, -1 / 4, -1.28 / 2])
    assert step.slope.tolist() == pytest.approx([-1 / 4, -1 / 4, 0.0])
    assert step.clipped.tolist() == [False, False, True]


def test_reinforce_pp_by_hand():
    """Divergences ln 2, ln 2 and 0 at kl_coef 1/ln 2: returns 2 - 2, 2 - 1 and -1, so mean 0 and deviation sqrt(2/3)."""
    reference = ((-1 - LN2, -1 - LN2), (-1.0,))
    step = slopes([2.0, -1.0], [-1.0] * 3, reference, name="reinforce_pp", kl_coef=1 / LN2)
    root = math.sqrt(2 / 3)
    assert step.slope.tolist() == pytest.approx([0.0, -1 / root / 4, 1 / root / 2])


def test_reinforce_pp_baseline_by_hand():
    """Advantages 1, 1, -2 over the tokens have mean 0 and deviation sqrt(2)."""
    step = slopes([1.0, -2.0], [-1.0] * 3, name="reinforce_pp_baseline")
    assert step.slope.tolist() == pytest.approx([-1 / math.sqrt(2) / 4] * 2 + [2 / math.sqrt(2) / 2])


def test_ppo_by_hand():
    """Values 1, 0 and 1, rewards 2 and 1, gamma 1 and lam 1/2, and a divergence of ln 2 at the second token: errors -1,
    2 - 1/2 and 0, advantages -1 + 3/4, 3/2 and 0, of mean 5/12."""
    reference = ((-1.0, -1 - LN2), (-1.0,))
    batch, spec = two_replies([2.0, 1.0]), spec_of(name="ppo", kl_coef=0.5 / LN2, critic={"lam": 0.5})
    objective = Objective(batch, spec, OtherLogprobs(reference=reference))
    with pytest.raises(ValueError, match=r"Objective\.value first"):
        objective.slopes(torch.arange(3), float64([-1.0] * 3))
    with pytest.raises(ValueError, match="2 values for 3 trained tokens"):
        objective.value(float64([1.0, 0.0]))
    objective.value(float64([1.0, 0.0, 1.0]))
    step = objective.slopes(torch.arange(3), float64([-1.0] * 3))
    gaps = float64([-1 / 4 - 5 / 12, 3 / 2 - 5 / 12, -5 / 12])
    white = gaps / gaps.square().mean().sqrt()
    assert step.slope.tolist() == pytest.approx((-white / float64([4, 4, 2])).tolist())
    assert objective.targets(float64([-1.0] * 3)).tolist() == pytest.approx([3 / 4, 3 / 2, 1.0])


def test_dpo_by_hand():
    """Margins 2 ln 2 and 0 at beta 1/2: the pair is right with probability 2/3."""
    reference = ((-1 - LN2, -1 - LN2), (-1.0,))
    step = slopes([1.0, -1.0], [-1.0] * 3, reference, name="dpo", kl_coef=0.5)
    assert step.loss.tolist() == pytest.approx([-math.log(2 / 3) / 3] * 3)
    assert step.slope.tolist() == pytest.approx([-0.5 / 3, -0.5 / 3, 0.5 / 3])


def test_sft_by_hand():
    step = slopes([1.0, 1.0], [-1.0, -2.0, -3.0], name="sft")
    assert step.loss.tolist() == pytest.approx([1 / 4, 2 / 4, 3 / 2])
    assert step.slope.tolist() == [-0.25, -0.25, -0.5]


def test_distillation_by_hand():
    """The teacher finds the first token e^2 times as likely: half of that is added to the reward's advantage of 1."""
    teacher = ((1.0, -1.0), (-2.0,))
    objective = Objective(
        two_replies([1.0, 0.0]), spec_of(name="distill", teacher="folder", kl_coef=0.5), OtherLogprobs(teacher=teacher)
    )
    got = objective.slopes(torch.arange(3), float64([-1.0] * 3))
    assert got.slope.tolist() == pytest.approx([-2 / 4, -1 / 4, 0.5 / 2])
    assert objective.metrics(float64([-1.0] * 3), torch.zeros(3))["kl"] == pytest.approx(
        ((math.e**2 - 1 - 2) + 0 + (math.exp(-1) - 1 + 1)) / 3
    )


@pytest.mark.parametrize(("estimator", "loss", "slope"), [("k2", LN2**2 / 2, LN2), ("k3", LN2 - 0.5, 0.5)])
def test_divergence_in_the_loss_by_hand(estimator, loss, slope):
    reference = ((-1 - LN2, -1.0), (-1.0,))
    step = slopes([0.0, 0.0], [-1.0] * 3, reference, kl_coef=0.1, kl_estimator=estimator)
    assert step.loss.tolist() == pytest.approx([0.1 * loss / 4, 0.0, 0.0])
    assert step.slope.tolist() == pytest.approx([0.1 * slope / 4, 0.0, 0.0])


def test_without_a_ratio_to_the_engine_the_weight_alone_corrects():
    """Ratios 2, 1/2 and 4 to the engine; the ratio to the trainer itself is 1, and never clipped."""
    none = slopes([1.0, -1.0], MOVED, correction="none")
    assert none.slope.tolist() == pytest.approx([-1 / 4, -1 / 4, 1 / 2])
    tis = slopes([1.0, -1.0], MOVED, correction="tis", correction_options={"high": 3.0})
    assert tis.slope.tolist() == pytest.approx([-2 / 4, -0.5 / 4, 3 / 2])
    assert not tis.clipped.any()


def test_pairs_are_made_within_groups_and_branches_of_a_sample_add_up():
    """Group 0: two trajectories on the better side. Group 1: one side only, so no pair."""
    logprobs = float64([0.0, LN2, LN2, 5.0]).requires_grad_()
    group = torch.tensor([0, 0, 0, 1])
    loss = preference_loss(logprobs, torch.zeros(4).double(), float64([1.0, 1.0, -1.0, 1.0]), group, 1.0)
    assert loss.tolist() == pytest.approx([LN2 / 3] * 3 + [0.0])
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert slope.tolist() == pytest.approx([-0.5, -0.5, 0.5, 0.0])


def test_returns_by_hand():
    made = returns_after_divergence(
        float64([1.0, 1.0, 1.0, 5.0]), float64([1.0, 2.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 2]), 0.5
    )
    assert made.tolist() == [1 - 3.0, 1 - 2.5, 1 - 1.5, 5 - 2.0]
    assert towards_teacher(float64([1.0]), float64([-1.0]), float64([-3.0]), 0.5).tolist() == [0.0]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=20))
def test_whitened_tokens_have_mean_zero_and_deviation_one(values):
    made = whitened(float64(values))
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
    # Rounding of the mean, 1e-15, over the floor of 1e-8 where all are equal.
    assert made.tolist() == pytest.approx([(v - mean) / (deviation + 1e-8) for v in values], abs=1e-6, rel=1e-6)
    assert float(made.mean()) == pytest.approx(0.0, abs=1e-6)
    assert len(whitened(float64([]))) == 0


def test_every_name_of_the_spec_is_an_algorithm():
    assert set(ALGORITHMS) == set(AlgorithmSpec.model_fields["name"].annotation.__args__)


def test_what_each_needs():
    assert needs(spec_of().algorithm) == frozenset()
    for name in ("grpo", "rloo", "reinforce_pp", "ppo", "gspo", "sft", "dpo"):
        assert needs(spec_of(name=name, kl_coef=0.1).algorithm) == {"reference"}, name
    assert needs(spec_of(name="distill", teacher="folder", kl_coef=0.1).algorithm) == {"teacher"}


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"name": "dpo"}, "learns nothing with kl_coef=0"),
        ({"name": "distill", "teacher": "folder"}, "learns nothing with kl_coef=0"),
        ({"kl_coef": 0.1, "kl_estimator": "k1"}, "set k2 or k3"),
        ({"critic": {"lam": 0.9}}, "which grpo has none of; set name: ppo"),
        ({"name": "ppo", "critic": {"updates": 0}}, "updates 1 or more"),
        ({"name": "sft", "correction": "tis"}, "leave it at ratio"),
        ({"name": "dpo", "kl_coef": 0.1, "correction": "mis"}, "leave it at ratio"),
        ({"name": "sft", "correction_options": {"veto": 0.1}}, "do nothing for sft"),
        ({"correction": "mis", "correction_options": {"hihg": 1.0}}, "did you mean 'high'"),
    ],
)
def test_settings_that_are_refused(settings, told):
    with pytest.raises(SpecError, match=told):
        spec_of(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"name": "reinforce_pp", "kl_coef": 0.1, "kl_estimator": "k1"},
        {"name": "dpo", "kl_coef": 0.1, "correction": "none"},
        {"name": "ppo", "kl_coef": 0.1, "kl_estimator": "k1", "critic": {"gamma": 1, "lam": 0, "updates": 4}},
        {"correction": "ratio", "correction_options": {"reject": "sequence", "reject_low": 0.1, "reject_high": 10.0}},
    ],
)
def test_settings_that_are_taken(settings):
    check(spec_of(**settings).algorithm)
