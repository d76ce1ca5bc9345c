"""The draft's loss: equal to the formulas, chunk by chunk, with no block of logits larger than asked for."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from furlong.ops.draft.draft_loss import Pairs, draft_loss, tv_share

HIDDEN, VOCAB, ROWS, STATES = 6, 23, 7, 18


def samples(pairs=15, dtype=torch.float64, reduced=False, seed=0):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randperm(VOCAB, generator=draw)[:11].sort().values if reduced else None

    def normal(*size):
        return torch.randn(size, generator=draw, dtype=torch.float64)

    teacher, policy_head = normal(ROWS, HIDDEN), normal(VOCAB, HIDDEN)
    of = torch.randint(ROWS, (pairs,), generator=draw).sort().values
    pair = Pairs(torch.randperm(STATES, generator=draw)[:pairs], of, torch.randint(4, (pairs,), generator=draw))
    # Near enough to the policy to agree with it now and then.
    head = policy_head if ids is None else policy_head[ids]
    student = normal(STATES, HIDDEN).index_add(0, pair.student, teacher[of])
    made = {
        "student": student,
        "head": head + 0.2 * normal(*head.shape),
        "teacher": teacher,
        "policy_head": policy_head,
    }
    made = {name: x.to(dtype) for name, x in made.items()}
    return made | {"pairs": pair, "weight": normal(pairs).abs()}, {"temperature": 0.8, "ids": ids}


def literal(student, head, teacher, policy_head, pairs, weight, temperature, tv, ids):
    """All logits at once, autograd's gradients."""
    full = (teacher.double() @ policy_head.double().T / temperature).softmax(1)[pairs.teacher]
    p = full if ids is None else full[:, ids]
    log_q = (student.double()[pairs.student] @ head.double().T / temperature).log_softmax(1)
    ce = -(p / p.sum(1, keepdim=True) * log_q).sum(1)
    accepted = torch.minimum(p, log_q.exp()).sum(1)
    best = log_q.argmax(1) if ids is None else ids[log_q.argmax(1)]
    loss = (weight * ((1 - tv) * ce + tv * (1 - accepted))).sum()
    return loss, (ce, accepted, best == full.argmax(1), 1 - p.sum(1))


def solved(function, made, **options):
    leaves = {name: made[name].clone().requires_grad_() for name in ("student", "head")}
    loss, measured = function(**(made | leaves), **options)
    loss.backward()
    return loss.detach(), measured, leaves["student"].grad, leaves["head"].grad


@pytest.mark.parametrize("tv", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduced", [False, True])
def test_it_is_the_formula(tv, reduced):
    made, options = samples(reduced=reduced)
    loss, measured, *grads = solved(draft_loss, made, tv=tv, **options)
    wanted, values, *slopes = solved(literal, made, tv=tv, **options)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-12)
    for got, want in zip(
        (measured.ce, measured.accepted, measured.agreed, measured.lost, *grads), (*values, *slopes), strict=True
    ):
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-12)
    assert bool((measured.lost > 0.01).any()) == reduced
    assert 0 < int(measured.agreed.sum()) < len(measured.agreed)


@pytest.mark.parametrize("tv", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("reduced", [False, True])
def test_gradcheck(tv, reduced):
    made, options = samples(reduced=reduced)
    rest = {name: made[name] for name in ("teacher", "policy_head", "pairs", "weight")}

    def loss(student, head):
        return draft_loss(student, head, **rest, **options, tv=tv, logit_bytes=4 * VOCAB * 8)[0]

    leaves = (made["student"].requires_grad_(), made["head"].requires_grad_())
    # 1e-8 as for the kernels: a central difference at 1e-6 has an error near 1e-9 where nothing is kinked.
    assert torch.autograd.gradcheck(loss, leaves, eps=1e-6, atol=1e-8, rtol=1e-6)


def test_total_variation_is_one_minus_the_acceptance_and_the_distance_of_the_two():
    made, options = samples()
    weight = torch.ones(15, dtype=torch.float64)
    loss, measured = draft_loss(**(made | {"weight": weight}), **options, tv=1.0)
    torch.testing.assert_close(loss, (1 - measured.accepted).sum(), rtol=0, atol=1e-12)
    p = (made["teacher"] @ made["policy_head"].T / 0.8).softmax(1)[made["pairs"].teacher]
    q = (made["student"] @ made["head"].T / 0.8).softmax(1)[made["pairs"].student]
    torch.testing.assert_close(loss, (p - q).abs().sum() / 2, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 5, 14])
def test_chunks_change_nothing(rows):
    made, options = samples(reduced=True)
    whole = solved(draft_loss, made, tv=0.4, **options)
    parts = solved(draft_loss, made, tv=0.4, **options, logit_bytes=rows * VOCAB * 8)
    for got, want in zip((parts[0], *parts[2:]), (whole[0], *whole[2:]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    for name in ("ce", "accepted", "agreed", "lost"):
        torch.testing.assert_close(getattr(parts[1], name), getattr(whole[1], name), rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):
    """The most bytes that one tensor made in it takes, and the products of matrices."""

    def __init__(self):
        super().__init__()
        self.bytes, self.products = 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            if isinstance(made, torch.Tensor):
                self.bytes = max(self.bytes, made.numel() * made.element_size())
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
            self.products.append(tuple(out.shape))
        return out


def many(vocab, pairs):
    draw = torch.Generator().manual_seed(1)
    rows = pairs // 4
    teacher = torch.arange(rows).repeat_interleave(4)
    return {
        "student": torch.randn(pairs, 4, generator=draw).requires_grad_(),
        "head": torch.randn(vocab, 4, generator=draw).requires_grad_(),
        "teacher": torch.randn(rows, 4, generator=draw),
        "policy_head": torch.randn(vocab, 4, generator=draw),
        "pairs": Pairs(torch.arange(pairs), teacher, torch.arange(pairs) % 4),
        "weight": torch.ones(pairs),
    }


def test_logits_never_exist_whole():
    vocab, pairs, limit = 1000, 400, 16 * 1000 * 4
    with Largest() as largest:
        loss, _ = draft_loss(**many(vocab, pairs), temperature=1.0, tv=0.5, logit_bytes=limit)
        loss.backward()
    assert largest.bytes == limit
    with Largest() as whole:
        draft_loss(**many(vocab, pairs), temperature=1.0, tv=0.5, logit_bytes=2**40)
    assert whole.bytes == pairs * vocab * 4


def test_a_teachers_logits_are_made_once_for_all_depths():
    with Largest() as seen:
        draft_loss(**many(100, 64), temperature=1.0, tv=0.0)
    assert seen.products == [(16, 100), (64, 100), (64, 4), (100, 4)]


def test_without_pairs_the_loss_is_zero_and_still_has_a_gradient():
    made, options = samples()
    none = torch.zeros(0, dtype=torch.int64)
    made |= {"pairs": Pairs(none, none, none), "weight": torch.zeros(0, dtype=torch.float64)}
    loss, measured, *grads = solved(draft_loss, made, tv=0.5, **options)
    assert loss == 0
    assert len(measured.ce) == 0
    assert all(grad is not None and not grad.any() for grad in grads)


def test_float32_is_as_near_as_its_rounding():
    """Sums of 23 terms and 15 pairs of values near 1 with 24 bits: 1e-5 leaves a factor of 10."""
    made, options = samples(reduced=True)
    wide = solved(draft_loss, made, tv=0.5, **options)
    narrow, _ = samples(reduced=True, dtype=torch.float32)
    found = solved(draft_loss, narrow, tv=0.5, **options)
    for got, want in zip((found[0], *found[2:]), (wide[0], *wide[2:]), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_extreme_logits_stay_finite():
    made, options = samples()
    made["student"], made["teacher"] = made["student"] * 1e4, made["teacher"] * 1e4
    loss, measured, *grads = solved(draft_loss, made, tv=0.5, **options)
    assert all(bool(torch.isfinite(x).all()) for x in (loss, measured.ce, measured.accepted, *grads))


def test_a_perfect_draft_is_always_accepted_and_gets_no_gradient():
    made, options = samples()
    made["student"] = made["teacher"][torch.arange(STATES) % ROWS]
    made["head"] = made["policy_head"]
    student = torch.arange(ROWS)
    made |= {"pairs": Pairs(student, student, student % 4), "weight": torch.ones(ROWS, dtype=torch.float64)}
    _, measured, *grads = solved(draft_loss, made, tv=0.0, **options)
    torch.testing.assert_close(measured.accepted, torch.ones(ROWS, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool(measured.agreed.all())
    assert max(float(grad.abs().max()) for grad in grads) < 1e-12


def test_the_schedule_of_the_mix():
    assert [tv_share("mixed", x) for x in (-1.0, 0.0, 0.25, 1.0, 2.0)] == [0.0, 0.0, 0.25, 1.0, 1.0]
    assert (tv_share("ce", 0.9), tv_share("tv", 0.0)) == (0.0, 1.0)
    assert not math.isnan(tv_share("mixed", 0.5))
