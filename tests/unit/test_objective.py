"""One step's loss: against the literal formulas, and whatever must not change it."""

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import literal_loss, objective_of, random_step, spec_of, tokens_of

from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.objective import Objective
from furlong.ops.protocols import OtherLogprobs, StepMetrics
from furlong.ops.spec import SpecError

CASES = [
    {},
    {"loss_mean": "token", "kl_coef": 0.1, "kl_estimator": "k3"},
    {"kl_coef": 0.3, "kl_estimator": "k2", "correction": "none"},
    {"name": "dr_grpo", "clip_high": 0.2},
    {"name": "rloo", "correction": "none"},
    {"name": "reinforce_pp"},
    {"name": "reinforce_pp", "kl_coef": 0.2, "loss_mean": "token"},
    {"name": "reinforce_pp_baseline", "kl_coef": 0.1, "kl_estimator": "k2"},
    {"name": "ppo"},
    {"name": "ppo", "kl_coef": 0.2, "loss_mean": "token", "critic": {"gamma": 0.9, "lam": 0.7}},
    {"name": "ppo", "correction": "tis", "correction_options": {"high": 1.2}},
    {"name": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    {"name": "gspo", "correction": "mis", "correction_options": {"level": "geometric"}},
    {"name": "gspo", "correction": "icepop", "correction_options": {"low": 0.7, "high": 1.5}},
    {"name": "gspo", "correction_options": {"reject": "token", "reject_low": 0.7, "reject_high": 1.5}},
    {"name": "dpo", "kl_coef": 0.4},
    {"name": "sft", "kl_coef": 0.1, "loss_mean": "token"},
    {"name": "distill", "kl_coef": 0.5, "teacher": "a-folder"},
    {"correction": "ratio", "correction_options": {"veto": 0.4, "off_policy": 0.1}},
    {"correction": "tis", "correction_options": {"high": 1.2}, "kl_coef": 0.1},
    {"correction": "tis", "correction_options": {"level": "sequence", "reject": "geometric", "reject_low": 0.7}},
    {"correction": "icepop", "correction_options": {"low": 0.7, "high": 1.5}},
    {"correction": "mis", "correction_options": {"mode": "clip", "level": "sequence", "normalise": True}},
    {"correction": "mis", "correction_options": {"mode": "mask", "level": "token", "normalise": True, "veto": 0.3}},
    {"correction": "mis", "correction_options": {"mode": "truncate", "level": "geometric", "off_policy": 0.05}},
]
steps = st.tuples(st.sampled_from(CASES), st.integers(0, 10**6))
quick = settings(deadline=None, max_examples=60)


def made(case, seed):
    batch, others, trainer = random_step(seed, case.get("name", "grpo"))
    spec = spec_of(**case)
    return (
        batch,
        spec,
        others,
        objective_of(batch, spec, others),
        torch.tensor(list(trainer.values()), dtype=torch.float64),
    )


def whole_step(objective, x):
    return objective.slopes(torch.arange(objective.tokens), x)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", [0, 5, 6, 9])
def test_loss_and_slopes_are_those_of_the_literal_formula(case, seed):
    batch, spec, others, objective, x = made(case, seed)
    scalars = {token: value.clone().requires_grad_() for token, value in zip(tokens_of(batch), x, strict=True)}
    want = literal_loss(batch, spec, others, scalars)
    slopes = torch.autograd.grad(want, list(scalars.values()), allow_unused=True)
    slopes = torch.stack([torch.zeros((), dtype=torch.float64) if s is None else s for s in slopes])
    got = whole_step(objective, x)
    # A few dozen terms of size about 1 in double precision.
    assert float(got.loss.sum()) == pytest.approx(float(want.detach()), rel=1e-11, abs=1e-11)
    torch.testing.assert_close(got.slope, slopes, rtol=1e-10, atol=1e-11)
    assert objective.metrics(x, torch.zeros_like(x))["loss"] == float(got.loss.sum())


@pytest.mark.parametrize("case", CASES)
def test_the_cases_are_not_all_zero(case):
    assert any(float(whole_step(o, x).slope.abs().sum()) for *_, o, x in (made(case, seed) for seed in (0, 5, 6, 9)))


@pytest.mark.parametrize("case", [case for case in CASES if "correction_options" in case])
def test_a_rejected_token_has_no_loss_and_no_slope(case):
    found = [whole_step(objective, x) for *_, objective, x in (made(case, seed) for seed in range(12))]
    for step in found:
        assert not step.loss[step.rejected].any()
        assert not step.slope[step.rejected].any()


@quick
@given(steps, st.randoms(use_true_random=False))
def test_no_micro_batch_split_changes_anything(step, rng):
    *_, objective, x = made(*step)
    want, numbers = whole_step(objective, x), list(range(objective.tokens))
    rng.shuffle(numbers)
    cut = rng.randint(0, len(numbers))
    parts = [numbers] if objective.whole else [numbers[:cut], numbers[cut:]]
    for part in parts:
        index = torch.tensor(part, dtype=torch.long)
        got = objective.slopes(index, x[index])
        for name in ("loss", "slope", "clipped", "rejected", "weight"):
            assert torch.equal(getattr(got, name), getattr(want, name)[index]), name


@pytest.mark.parametrize("case", CASES)
def test_a_loss_that_compares_tokens_refuses_a_part(case):
    *_, objective, x = made(case, 3)
    assert objective.tokens > 1
    index = torch.arange(objective.tokens - 1)
    if objective.whole:
        with pytest.raises(ValueError, match="all tokens at once"):
            objective.slopes(index, x[index])
    else:
        assert len(objective.slopes(index, x[index]).loss) == len(index)
    with pytest.raises(ValueError, match="one token twice"):
        objective.slopes(torch.zeros(objective.tokens, dtype=torch.long), x)
    with pytest.raises((ValueError, TypeError)):  # TypeError where shapes are checked at the boundary
        objective.slopes(torch.arange(objective.tokens), x[1:])


FIELDS = ("group", "replies", "logprobs", "masks", "sampled_by", "advantages", "rewards", "routing", "trajectory_ids")


@quick
@given(steps, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(step, rng):
    batch, spec, others, objective, x = made(*step)
    order = list(range(len(batch.replies)))
    rng.shuffle(order)
    moved = replace(batch, **{name: tuple(getattr(batch, name)[i] for i in order) for name in FIELDS})
    rows = {name: tuple(getattr(others, name)[i] for i in order) for name in ("reference", "teacher")}
    of = dict(zip(tokens_of(batch), x.tolist(), strict=True))
    there = objective_of(moved, spec, OtherLogprobs(**rows))
    tokens = [(order[i], t) for i, t in tokens_of(moved)]
    got = whole_step(there, torch.tensor([of[token] for token in tokens], dtype=torch.float64))
    number = {token: n for n, token in enumerate(tokens_of(batch))}
    want = whole_step(objective, x).slope[[number[token] for token in tokens]]
    # Sums over the step are taken in another order.
    torch.testing.assert_close(got.slope, want, rtol=1e-12, atol=1e-12)


@quick
@given(steps, st.integers(1, 3))
def test_masked_rows_and_masked_tokens_are_never_read(step, extra):
    batch, spec, others, objective, x = made(*step)
    nan, count = math.nan, len(batch.replies)

    def longer(rows, blank):
        return (*(row + (blank,) * extra for row in rows), *((blank,) * 2 for _ in range(extra)))

    wider = replace(
        batch,
        prompts=(*batch.prompts, (1,)),
        group=(*batch.group, *(len(batch.prompts) * (i % 2) for i in range(extra))),
        replies=longer(batch.replies, 0),
        logprobs=longer(batch.logprobs, nan),
        masks=longer(batch.masks, False),
        sampled_by=longer(batch.sampled_by, -1),
        advantages=(*batch.advantages, *(nan for _ in range(extra))),
        rewards=(*batch.rewards, *(nan for _ in range(extra))),
        routing=(None,) * (count + extra),
        trajectory_ids=(*batch.trajectory_ids, *(f"masked-{i}" for i in range(extra))),
    )
    rows = {name: longer(getattr(others, name), nan) for name in ("reference", "teacher")}
    there = objective_of(wider, spec, OtherLogprobs(**rows))
    entropy = torch.ones_like(x)
    assert there.metrics(x, entropy) == objective.metrics(x, entropy)
    assert torch.equal(whole_step(there, x).slope, whole_step(objective, x).slope)


def poisoned(rows, token, value=math.nan):
    return tuple(tuple(value if (i, t) == token else v for t, v in enumerate(row)) for i, row in enumerate(rows))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["engine", "advantage", "reference", "teacher", "sampling", "trainer"])
def test_a_bad_number_at_a_trained_token_names_its_trajectory(what, value):
    if what == "sampling" and math.isnan(value):
        return  # there, a NaN says that the token was not compared
    case = {"name": "distill", "teacher": "x", "kl_coef": 0.1} if what == "teacher" else {"kl_coef": 0.1}
    batch, spec, others, _, x = made(case, 2)
    token = tokens_of(batch)[-1]
    if what == "engine":
        batch = replace(batch, logprobs=poisoned(batch.logprobs, token, value))
    elif what == "advantage":
        batch = replace(batch, advantages=tuple(value if i == token[0] else a for i, a in enumerate(batch.advantages)))
    elif what in ("reference", "teacher"):
        others = replace(others, **{what: poisoned(getattr(others, what), token, value)})
    elif what == "sampling":
        others = replace(others, sampling=poisoned(batch.logprobs, token, value))
    else:
        x[-1] = value
    with pytest.raises(NonFiniteError, match=rf"in trajectory {batch.trajectory_ids[token[0]]};"):
        whole_step(Objective(batch, spec, others), x)


def test_a_reference_that_is_not_used_may_be_anything():
    batch, spec, others, objective, x = made({}, 2)
    bad = replace(others, reference=poisoned(others.reference, tokens_of(batch)[0]), teacher=None)
    assert torch.equal(whole_step(Objective(batch, spec, bad), x).slope, whole_step(objective, x).slope)


def test_what_the_algorithm_needs_must_be_there():
    batch, others, _ = random_step(2)
    with pytest.raises(ValueError, match=r"OtherLogprobs\.reference"):
        Objective(batch, spec_of(kl_coef=0.1), replace(others, reference=None))
    with pytest.raises(ValueError, match=r"reference at \d+ of \d+"):
        Objective(batch, spec_of(kl_coef=0.1), replace(others, reference=others.reference[:-1]))
    with pytest.raises(SpecError, match="k2 or k3"):
        Objective(batch, spec_of(kl_coef=0.1, kl_estimator="k1"), others)


def test_a_ratio_that_overflows_is_an_error():
    *_, objective, x = made({}, 2)
    with pytest.raises(NonFiniteError, match="probability ratio"):
        whole_step(objective, x + 800)


def test_numbers_of_tokens():
    batch, *_, objective, _ = made({}, 5)
    tokens = tokens_of(batch)
    random.Random(0).shuffle(tokens)
    where = torch.tensor(tokens)
    numbers = objective.index(where[:, 0], where[:, 1])
    assert [sorted(tokens).index(token) for token in tokens] == numbers.tolist()
    off = next((i, t) for i, mask in enumerate(batch.masks) for t, on in enumerate(mask) if not on)
    with pytest.raises(ValueError, match="false mask"):
        objective.index(torch.tensor([off[0]]), torch.tensor([off[1]]))


def small_step(sampled_by, **changes):
    """One trajectory of four trained tokens; the engine's log-probabilities are all -1."""
    batch, *_ = random_step(1)
    batch = replace(
        batch, prompts=((1,),), group=(0,), replies=((1, 2, 3, 4),), logprobs=((-1.0,) * 4,), masks=((True,) * 4,),
        sampled_by=(tuple(sampled_by),), version=4, advantages=(1.0,), rewards=(1.0,), routing=(None,),
        trajectory_ids=("one",),
    )  # fmt: skip
    return replace(batch, **changes)


def test_metrics_by_hand():
    """Ratios 1, 2, 1/2, 1 to the engine; the second is clipped at 1.28 with an advantage of 1."""
    objective = Objective(small_step([4] * 4), spec_of(), OtherLogprobs())
    two = math.log(2)
    x = torch.tensor([-1.0, -1 + two, -1 - two, -1.0], dtype=torch.float64)
    got = objective.metrics(x, torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert StepMetrics(grad_norm=0.0, learning_rate=0.0, tokens_reached=(4,), **got)
    assert got["loss"] == pytest.approx(-(1 + 1.28 + 0.5 + 1) / 4)
    assert (got["clip_fraction"], got["rejected_fraction"], got["entropy"], got["kl"]) == (0.25, 0.0, 1.5, None)
    assert got["ess"] == got["mismatch_ess"] == pytest.approx(4.5**2 / (4 * 6.25))
    assert (got["mismatch_coverage"], got["mismatch_max"], got["mismatch_p99"]) == (
        1.0,
        pytest.approx(two),
        pytest.approx(two),
    )
    assert got["mismatch_mean"] == pytest.approx(two / 2)
    assert got["mismatch_k3"] == pytest.approx((2 - 1 - two + 0.5 - 1 + two) / 4)


def test_rejected_tokens_leave_the_sum_but_not_the_denominator():
    """IcePop keeps ratios within [0.5, 5]: of 1, 6, 1/4, 1 two stay."""
    objective = Objective(small_step([4] * 4), spec_of(correction="icepop"), OtherLogprobs())
    x = torch.tensor([-1.0, -1 + math.log(6), -1 - math.log(4), -1.0], dtype=torch.float64)
    got = objective.metrics(x, torch.zeros(4))
    assert (got["loss"], got["rejected_fraction"]) == (pytest.approx(-2 / 4), 0.5)
    step = whole_step(objective, x)
    assert step.slope.tolist() == pytest.approx([-0.25, 0.0, 0.0, -0.25])
    assert step.rejected.tolist() == [False, True, True, False]
    assert step.weight.tolist() == pytest.approx([1.0, 6.0, 0.25, 1.0])


def test_a_rejected_token_is_not_clipped_too():
    """Ratios 2, 1, 1 and 1/4 with an advantage of 1: the first is clipped, and the last takes all of them out."""
    x = torch.tensor([-1 + math.log(2), -1.0, -1.0, -1 - math.log(4)], dtype=torch.float64)
    for veto, clipped, rejected in ((0.2, 0.25, 0.0), (0.3, 0.0, 1.0)):
        spec = spec_of(correction_options={"veto": veto})
        got = Objective(small_step([4] * 4), spec, OtherLogprobs()).metrics(x, torch.zeros(4))
        assert (got["clip_fraction"], got["rejected_fraction"]) == (clipped, rejected)


def test_stale_tokens_are_compared_under_the_weights_that_sampled_them():
    """Version 3 sampled the first two; the step starts from 4. The trainer under 3 is known for the first only."""
    sampling = ((-1.5, math.nan, -9.0, -9.0),)
    objective = Objective(small_step([3, 3, 4, 4]), spec_of(), OtherLogprobs(sampling=sampling))
    x = torch.tensor([-7.0, -7.0, -1.25, -1.0], dtype=torch.float64)
    got = objective.metrics(x, torch.zeros(4))
    assert got["mismatch_coverage"] == 0.75
    assert got["mismatch_max"] == 0.5, "never the step's weights where older ones sampled, nor the reverse"
    assert got["mismatch_mean"] == 0.25


@pytest.mark.parametrize("sampled_by", [[3] * 4, [-1] * 4])
def test_nothing_to_compare_is_no_mismatch_of_zero(sampled_by):
    """A token that nobody sampled has no engine's log-probability, whatever stands there."""
    sampling = ((-1.0,) * 4,) if sampled_by[0] < 0 else None
    objective = Objective(small_step(sampled_by), spec_of(), OtherLogprobs(sampling=sampling))
    got = objective.metrics(torch.full((4,), -1.0), torch.zeros(4))
    assert got["mismatch_coverage"] == 0.0
    assert all(got[f"mismatch_{name}"] is None for name in ("mean", "max", "p99", "k3", "ess"))


@pytest.mark.parametrize("case", CASES)
def test_a_step_without_trained_tokens(case):
    batch = small_step([4] * 4, masks=((False,) * 4,))
    others = OtherLogprobs(reference=((-1.0,) * 4,), teacher=((-1.0,) * 4,))
    objective = Objective(batch, spec_of(**case), others)
    empty = torch.zeros(0)
    got = objective.metrics(empty, empty)
    assert len(whole_step(objective, empty).slope) == 0
    assert {name: value for name, value in got.items() if value} == {}
    assert got["kl"] is None


def test_divergence_is_reported():
    batch, others = small_step([4] * 4), OtherLogprobs(reference=((-2.0,) * 4,))
    objective = Objective(batch, spec_of(kl_coef=0.5, kl_estimator="k2"), others)
    assert objective.metrics(torch.full((4,), -1.0), torch.zeros(4))["kl"] == 0.5
