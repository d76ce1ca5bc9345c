"""Estimators of divergence, the mismatch of trainer and engine, and distillation from the teacher's top tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops.policy.distillation import top_k_reverse_kl
from furlong.ops.policy.divergence import effective_share, estimate, mismatch
from furlong.ops.policy.loss import NonFiniteError

LOG2 = math.log(2)
gaps = st.lists(st.floats(-5, 5), min_size=1, max_size=20)


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [("k1", LOG2, 1.0), ("k2", LOG2**2 / 2, LOG2), ("k3", 0.5 - 1 + LOG2, 0.5)],
)
def test_estimators_by_hand(name, value, slope):
    """A token twice as likely under the policy as under the reference."""
    x = float64([LOG2]).requires_grad_()
    got = estimate(name, x)
    got.sum().backward()
    assert (got.item(), x.grad.item()) == (pytest.approx(value), pytest.approx(slope))


def test_an_unknown_estimator_is_an_error():
    with pytest.raises(ValueError, match="k1, k2 or k3"):
        estimate("k4", float64([0.0]))


@given(gaps)
def test_estimators_against_plain_python(values):
    for name, plain in {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: math.exp(-x) - 1 + x}.items():
        # exp(5) - 1 in double precision, and what the plain form loses to cancellation near 0.
        assert estimate(name, float64(values)).tolist() == pytest.approx(
            [plain(x) for x in values], rel=1e-13, abs=1e-13
        )
    assert bool((estimate("k3", float64(values)) >= 0).all())


def test_k1_and_k3_are_unbiased_and_the_gradients_are_whose_they_are_said_to_be():
    """Expectations over a whole vocabulary of 5, so without sampling noise."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    reference = torch.log_softmax(reference, 0)
    logits.requires_grad_()
    logp = torch.log_softmax(logits, 0)
    p = logp.detach().exp()
    kl = (logp.exp() * (logp - reference)).sum()
    backwards = (reference.exp() * (reference - logp)).sum()
    for name in ("k1", "k3"):
        assert (p * estimate(name, logp - reference)).sum().item() == pytest.approx(kl.item(), rel=1e-12)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    means = {name: gradient((p * estimate(name, logp - reference)).sum()) for name in ("k1", "k2", "k3")}
    torch.testing.assert_close(means["k1"], torch.zeros(5, dtype=torch.float64), rtol=0, atol=1e-14)
    torch.testing.assert_close(means["k2"], gradient(kl), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(means["k3"], gradient(backwards), rtol=1e-12, atol=1e-14)


def test_mismatch_by_hand():
    gap = mismatch(float64([-1.0, -1.0 - LOG2]), float64([-1.0, -1.0]), ["a", "b"])
    assert gap.mean == pytest.approx(LOG2 / 2)
    assert gap.max == gap.p99 == pytest.approx(LOG2)
    assert gap.k3 == pytest.approx((0.5 - 1 + LOG2) / 2)
    assert gap.ess == pytest.approx(1.5**2 / (2 * 1.25))


def test_k3_of_the_mismatch_is_the_divergence_of_the_engine_from_the_trainer():
    """Expectation over tokens drawn from the engine."""
    engine = torch.log_softmax(float64([0.0, 1.0, 2.0]), 0)
    trainer = torch.log_softmax(float64([0.5, 1.5, 1.0]), 0)
    d = trainer - engine
    mean = (engine.exp() * (torch.exp(d) - 1 - d)).sum()
    assert float(mean) == pytest.approx(float((engine.exp() * (engine - trainer)).sum()), rel=1e-12)
    assert mismatch(trainer, engine, ["t"] * 3).k3 == pytest.approx(float((torch.exp(d) - 1 - d).mean()), rel=1e-12)


def test_p99_is_the_smallest_that_covers_99_percent():
    d = torch.arange(200, dtype=torch.float64).flip(0) / 1000
    assert mismatch(d, torch.zeros(200).double(), ["t"] * 200).p99 == 0.197
    assert mismatch(d[:1], torch.zeros(1).double(), ["t"]).p99 == 0.199


def test_equal_sides_have_no_mismatch():
    x = torch.tensor([-1.5, -0.25])
    gap = mismatch(x, x.clone(), ["a", "b"])
    assert (gap.mean, gap.max, gap.p99, gap.k3, gap.ess) == (0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_mismatch_names_the_trajectory(side, value):
    sides = [torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0])]
    sides[side][1] = value
    with pytest.raises(NonFiniteError, match=r"in trajectory second;") as raised:
        mismatch(*sides, ["first", "second", "third"])
    assert "first," not in str(raised.value).split("in trajectory")[1]


def test_mismatch_whose_ratio_overflows_is_an_error():
    with pytest.raises(NonFiniteError, match="ratio"):
        mismatch(torch.tensor([0.0]), torch.tensor([-800.0]), ["t"])


def test_an_empty_or_partial_comparison_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        mismatch(torch.zeros(0), torch.zeros(0), [])
    with pytest.raises((ValueError, TypeError)):  # TypeError where shapes are checked at the boundary
        mismatch(torch.zeros(2), torch.zeros(1), ["a", "b"])
    with pytest.raises(ValueError, match="same number"):
        mismatch(torch.zeros(2), torch.zeros(2), ["a"])
    with pytest.raises(ValueError, match="no tokens"):
        effective_share(torch.zeros(0))


@given(gaps)
def test_effective_share_against_plain_python(values):
    w = [math.exp(x) for x in values]
    want = sum(w) ** 2 / (len(w) * sum(x * x for x in w))
    assert effective_share(float64(values)) == pytest.approx(want, rel=1e-12)
    assert 0 < effective_share(float64(values)) <= 1 + 1e-12
    # 900 nat more everywhere, beyond what exp can hold; adding it rounds each number by 1e-13.
    assert effective_share(float64(values) + 900) == pytest.approx(want, rel=1e-10)


def test_top_k_by_hand():
    """p = (1/2, 1/4, rest 1/4), q = (1/4, 1/4, rest 1/2)."""
    student, teacher = float64([[0.5, 0.25]]).log(), float64([[0.25, 0.25]]).log()
    assert top_k_reverse_kl(student, teacher).tolist() == pytest.approx([0.5 * LOG2 + 0.25 * -LOG2])


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 6), st.integers(0, 10**6))
def test_top_k_against_plain_python_and_the_full_divergence(k, seed):
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.log_softmax(2 * torch.randn(2, 3, 6, generator=generator, dtype=torch.float64), -1)
    top = teacher.topk(k, -1).indices
    got = top_k_reverse_kl(student.gather(-1, top), teacher.gather(-1, top))
    full = (student.exp() * (student - teacher)).sum(-1)
    for row in range(3):
        p = [math.exp(student[row, i]) for i in top[row].tolist()]
        q = [math.exp(teacher[row, i]) for i in top[row].tolist()]
        want = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
        want += (1 - sum(p)) * math.log((1 - sum(p)) / (1 - sum(q))) if k < 6 else 0.0
        # What is left of 1 has an error of 1e-16 against at least 1e-5 or so.
        assert got[row].item() == pytest.approx(want, rel=1e-9, abs=1e-11)
        assert -1e-12 <= got[row].item() <= full[row].item() + 1e-11
    if k == 6:
        torch.testing.assert_close(got, full, rtol=1e-9, atol=1e-12)


def test_top_k_gradient_is_that_of_the_full_divergence_when_k_is_the_vocabulary():
    generator = torch.Generator().manual_seed(3)
    logits, teacher = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    student, teacher = torch.log_softmax(logits, -1), torch.log_softmax(teacher, -1)
    (got,) = torch.autograd.grad(top_k_reverse_kl(student, teacher).sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_a_student_with_mass_where_the_teacher_has_none_is_told():
    student, teacher = float64([[0.5, 0.25]]).log(), float64([[0.75, 0.25]]).log()
    assert top_k_reverse_kl(student, teacher).item() > 5


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, -math.inf, 0.5])
def test_top_k_refuses_what_is_no_distribution(side, bad):
    sides = [float64([[-1.0, -1.0]]), float64([[-1.0, -1.0]])]
    sides[side][0, 0] = bad
    with pytest.raises(ValueError, match=["student", "teacher"][side]):
        top_k_reverse_kl(*sides)
