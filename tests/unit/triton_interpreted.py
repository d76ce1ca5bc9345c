"""Tests of the Triton kernels that need TRITON_INTERPRET=1 before triton is imported.

`test_triton_branch.py` runs this file in a process of its own; by hand:

    TRITON_INTERPRET=1 python -m pytest tests/unit/triton_interpreted.py
"""

import pytest
import torch
from torch import Tensor

from furlong.kernels import triton_branch
from furlong.kernels.backends import backend_of
from furlong.kernels.branch_attention import branch_attention
from furlong.kernels.branches import BranchLayout, block_draft, test_time_training, unrolled
from furlong.kernels.dense import dense_branch_attention
from furlong.kernels.layout import Rows
from furlong.kernels.merge import merge
from furlong.kernels.trunk import plan_trunk

assert triton_branch.INTERPRETED, "these tests run the kernels on the CPU: set TRITON_INTERPRET=1"
test_time_training.__test__ = False  # the function's name would be collected as a test

BOUND = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}
"""Relative to the largest number. bfloat16 inputs are read exactly and never rounded again, so float32's bound holds."""

INF = float("inf")
QUICK = [  # branches, queries, entries, heads, kv heads, head dim
    (5, 1, 1, 2, 2, 32),
    (3, 1, 4, 4, 2, 80),
    (2, 3, 3, 6, 2, 96),
    (9, 2, 5, 2, 1, 48),
    (1, 1, 1, 1, 1, 40),
]
EMPTY = [(0, 3, 2, 2, 2, 32), (3, 0, 2, 2, 2, 32), (3, 2, 0, 2, 2, 32)]
LARGE = [
    (3, 1, 8, 2, 1, 32),
    (2, 8, 8, 2, 1, 64),
    (1, 16, 16, 2, 2, 128),
    (5, 1, 4, 8, 1, 256),
    (2, 7, 7, 3, 1, 160),
    (3, 4, 9, 2, 2, 192),
    (40, 1, 2, 4, 4, 33),
]


def close(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> float:
    """Largest difference over the bound; infinities have to agree."""
    assert found.shape == wanted.shape
    if not found.numel():
        return 0.0
    assert torch.equal(found == -INF, wanted == -INF)
    assert found.nan_to_num(neginf=0.0).isfinite().all()
    found, wanted = (x.detach().double().nan_to_num(neginf=0.0) for x in (found, wanted))
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-3) / BOUND[dtype])


class Case:
    """Branches beside a trunk whose keys all queries see, or, every fifth, see none of; and the dense float64 truth."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sees: Tensor | None = None) -> None:
        self.branches, self.queries, self.entries, heads, kv_heads, dim = shape
        rng = torch.Generator().manual_seed(sum(shape))

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=rng, dtype=torch.float64).to(dtype)

        self.dtype, self.scale = dtype, 1.3 * dim**-0.5
        self.q = normal(self.branches, self.queries, heads, dim)
        self.k, self.v = (normal(self.branches, self.entries, kv_heads, dim) for _ in range(2))
        self.grad = normal(*self.q.shape)
        self.sees = torch.rand(self.queries, self.entries, generator=rng) < 0.7 if sees is None else sees
        self.trunk_k, self.trunk_v = (normal(6, kv_heads, dim) for _ in range(2))
        self.inputs = [x.double().clone().requires_grad_() for x in (self.q, self.k, self.v)]
        self.trunk, self.branch, self.joint = (self.dense(*parts) for parts in ((1, 0), (0, 1), (1, 1)))
        loss = (self.joint[0] * self.grad.double()).sum()
        # All of it hangs off the trunk's keys too; the branch's own share of dq is what its keys contribute.
        self.dk, self.dv = torch.autograd.grad(loss, self.inputs[1:], retain_graph=True, materialize_grads=True)
        self.dq = self.share_of_queries()

    def scores(self, k: Tensor, mask: Tensor) -> Tensor:
        group = self.q.shape[2] // k.shape[-2]
        k = k.repeat_interleave(group, -2)
        form = "bqhd,behd->bqhe" if k.ndim == 4 else "bqhd,ehd->bqhe"
        return (torch.einsum(form, self.inputs[0], k) * self.scale).masked_fill(~mask, -INF)

    def dense(self, with_trunk: int, with_branch: int) -> tuple[Tensor, Tensor]:
        """One softmax over the chosen keys: (out, lse)."""
        group = self.q.shape[2] // self.k.shape[2]
        seen = (torch.arange(self.branches) % 5 != 4)[:, None, None, None].expand(-1, 1, 1, len(self.trunk_k))
        scores = torch.cat(
            (
                self.scores(self.trunk_k.double(), seen & bool(with_trunk)),
                self.scores(self.inputs[1], self.sees[None, :, None, :] & bool(with_branch)),
            ),
            -1,
        )
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp()
        out = torch.einsum("bqhe,ehd->bqhd", weights[..., : len(self.trunk_k)],
                           self.trunk_v.double().repeat_interleave(group, 1))  # fmt: skip
        out = out + torch.einsum("bqhe,behd->bqhd", weights[..., len(self.trunk_k) :],
                                 self.inputs[2].repeat_interleave(group, 2))  # fmt: skip
        return out, lse

    def share_of_queries(self) -> Tensor:
        """dq without the trunk keys' share: the trunk's scores are held fixed."""
        group = self.q.shape[2] // self.k.shape[2]
        out, lse = (x.detach() for x in self.joint)
        with torch.no_grad():
            scores = self.scores(self.inputs[1], self.sees[None, :, None, :])
            weights = (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp()
            k, v = (x.double().repeat_interleave(group, 2) for x in (self.k, self.v))
            inner = torch.einsum("bqhd,behd->bqhe", self.grad.double(), v)
            inner = inner - (self.grad.double() * out).sum(-1, keepdim=True)
            return torch.einsum("bqhe,behd->bqhd", weights * inner, k) * self.scale

    def state(self, part: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A part's (out, lse) as the kernels get them: wide."""
        dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        return part[0].detach().to(dtype), part[1].detach().to(dtype)

    def backward_errors(self, out: Tensor, lse: Tensor, sees: Tensor | None = None) -> list[float]:
        sees = self.sees if sees is None else sees
        found = triton_branch.branch_backward(self.grad, self.q, self.k, self.v, out, lse, sees, self.scale)
        return [close(x, y, self.dtype) for x, y in zip(found, (self.dq, self.dk, self.dv), strict=True)]


def check(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case(shape, dtype)
    arguments = case.q, case.k, case.v, case.sees, case.scale
    alone = triton_branch.branch_forward(*arguments)
    assert alone[0].dtype == alone[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert max(close(x, y, dtype) for x, y in zip(alone, case.branch, strict=True)) <= 1
    joint = triton_branch.branch_forward(*arguments, case.state(case.trunk))
    assert max(close(x, y, dtype) for x, y in zip(joint, case.joint, strict=True)) <= 1
    in_two = triton_branch.merge(*case.state(case.trunk), *alone)
    assert max(close(x, y, dtype) for x, y in zip(in_two, case.joint, strict=True)) <= 1
    assert max(case.backward_errors(*joint)) <= 1


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", QUICK + EMPTY, ids=str)
def test_kernels_give_the_dense_result(shape, dtype):
    check(shape, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_kernels_give_the_dense_result_at_every_head_dim(shape, dtype):
    check(shape, dtype)


def test_merge_is_the_merge_of_torch():
    rng = torch.Generator().manual_seed(3)
    out = torch.randn(2, 5, 3, 40, generator=rng, dtype=torch.float64)
    lse = torch.tensor([[0.0, -INF, 1e4, -1e4, 3.0], [1.0, 2.0, -1e4, 1e4, -INF]], dtype=torch.float64)
    lse = lse[..., None].expand(-1, -1, 3).clone()
    lse[:, 1] = -INF
    out[lse == -INF] = 0.0
    found, wanted = (join(out[0], lse[0], out[1], lse[1]) for join in (triton_branch.merge, merge))
    assert max(close(x, y, torch.float64) for x, y in zip(found, wanted, strict=True)) <= 1
    assert (found[1][1] == -INF).all()
    assert not found[0][1].any()


def test_a_branch_knows_nothing_of_another():
    case = Case((6, 2, 3, 4, 2, 40), torch.float32)
    before = triton_branch.branch_forward(case.q, case.k, case.v, case.sees, case.scale)
    gradients = triton_branch.branch_backward(case.grad, case.q, case.k, case.v, *before, case.sees, case.scale)
    k, v = case.k.clone(), case.v.clone()
    k[2], v[2] = k[2] * -3 + 1, float("nan")
    after = triton_branch.branch_forward(case.q, k, v, case.sees, case.scale)
    changed = triton_branch.branch_backward(case.grad, case.q, k, v, *after, case.sees, case.scale)
    others = torch.arange(6) != 2
    for x, y in zip(before + gradients, after + changed, strict=True):
        assert torch.equal(x[others], y[others])
    assert after[0][2].isnan().any()  # and a NaN does not come out as a number


def test_an_entry_that_nobody_sees_is_never_read():
    case = Case((3, 2, 4, 2, 1, 32), torch.float64)
    case.sees[:, 1] = False
    case.k[:, 1], case.v[:, 1] = float("nan"), INF
    out, lse = triton_branch.branch_forward(case.q, case.k, case.v, case.sees, case.scale)
    dq, dk, dv = triton_branch.branch_backward(case.grad, case.q, case.k, case.v, out, lse, case.sees, case.scale)
    assert all(x.nan_to_num(neginf=0.0).isfinite().all() and not x.isnan().any() for x in (out, lse, dq, dk, dv))
    assert not dk[:, 1].any()
    assert not dv[:, 1].any()


def test_rows_with_gaps_give_the_same_bits():
    case = Case((3, 2, 3, 4, 2, 40), torch.float32)
    spread = [torch.stack((x, x), -2)[..., 0, :] for x in (case.q, case.k, case.v)]
    assert not spread[0].is_contiguous()
    one = triton_branch.branch_forward(case.q, case.k, case.v, case.sees, case.scale)
    two = triton_branch.branch_forward(*spread, case.sees, case.scale)
    assert all(map(torch.equal, one, two))


def shifted(sees: Tensor) -> Tensor:
    return sees.roll(1, -1)


def no_own_entry(sees: Tensor) -> Tensor:
    return sees & ~torch.eye(len(sees), dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_mutants_are_found(dtype):
    """The faults that the bounds above are there for are far outside of them."""
    case = Case((3, 3, 3, 4, 2, 32), dtype, torch.ones(3, 3, dtype=torch.bool).tril())
    (out, lse), (trunk_out, trunk_lse) = case.state(case.joint), case.state(case.trunk)
    assert max(case.backward_errors(out, lse)) <= 1
    for wrong in ((out, trunk_lse), (trunk_out, trunk_lse), (trunk_out, lse)):
        assert max(case.backward_errors(*wrong)) > 1e3
    for mutant in (shifted, no_own_entry):
        sees = mutant(case.sees)
        assert max(case.backward_errors(out, lse, sees)) > 1e3
        found = triton_branch.branch_forward(case.q, case.k, case.v, sees, case.scale, (trunk_out, trunk_lse))
        assert close(found[0], case.joint[0], dtype) > 1e3
    backwards = triton_branch.branch_forward(case.q.flip(2), case.k, case.v, case.sees, case.scale)[0].flip(2)
    assert close(backwards, case.branch[0], dtype) > 1e3  # heads on the wrong key head


def test_shapes_that_do_not_fit_are_refused():
    case = Case((3, 2, 3, 4, 2, 40), torch.float32)
    good = case.q, case.k, case.v, case.sees
    bad = [
        (case.q, case.k[:2], case.v[:2], case.sees),
        (case.q, case.k, case.v[:, :2], case.sees),
        (case.q[..., :32], case.k, case.v, case.sees),
        (case.q[:, :, :3], case.k, case.v, case.sees),
        (case.q, case.k, case.v, case.sees[:, :2]),
        (case.q, case.k[:, :, :0], case.v[:, :, :0], case.sees),
    ]
    out, lse = triton_branch.branch_forward(*good, case.scale)
    for q, k, v, sees in bad:
        with pytest.raises(ValueError, match="branch attention got"):
            triton_branch.branch_forward(q, k, v, sees, case.scale)
        with pytest.raises(ValueError, match="branch attention got"):
            triton_branch.branch_backward(case.grad, q, k, v, out, lse, sees, case.scale)
    with pytest.raises(ValueError, match="do not fit q"):
        triton_branch.branch_backward(case.grad, *good[:3], out, lse[:, :1], case.sees, case.scale)
    with pytest.raises(ValueError, match="trunk's out"):
        triton_branch.branch_forward(*good, case.scale, (out[:2], lse[:2]))
    with pytest.raises(ValueError, match="cannot be merged"):
        triton_branch.merge(out, lse, out[:2], lse[:2])


def layouts() -> tuple[list[BranchLayout], Rows]:
    rows = Rows(torch.tensor([0] * 5 + [1] + [2] * 6 + [-1]), torch.tensor([*range(5), 0, *range(6), 0]))
    blocks = block_draft(rows, torch.tensor([0, 3, 5, 11]), 4, causal=False)
    return [test_time_training(rows, 3), unrolled(rows, 3), blocks], rows


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_branch_attention_and_its_gradients_are_the_dense_ones(dtype):
    some, rows = layouts()
    rng = torch.Generator().manual_seed(5)
    for layout in some:
        main, entries = (len(rows.position), 2, 16), (layout.branches, layout.entries, 2, 16)
        shapes = (layout.branches, layout.queries, 4, 16), main, main, entries, entries
        inputs = [torch.randn(x, generator=rng, dtype=torch.float64).to(dtype).requires_grad_() for x in shapes]
        truth = [x.detach().double().requires_grad_() for x in inputs]
        out = branch_attention(*inputs, rows=rows, branches=layout, backend="triton+cpu")
        wanted = dense_branch_attention(*truth, rows=rows, branches=layout)
        weights = torch.randn(out.shape, generator=rng, dtype=torch.float64)
        found = torch.autograd.grad((out.double() * weights).sum(), inputs)
        grads = torch.autograd.grad((wanted * weights).sum(), truth)
        assert max(close(x, y, dtype) for x, y in zip((out, *found), (wanted, *grads), strict=True)) <= 1


@pytest.mark.parametrize("trunk", ["reference", "cpu"])
def test_the_backend_names_both_its_parts_and_gives_the_trunks_own_bits(trunk):
    some, rows = layouts()
    backend, other = backend_of(f"triton+{trunk}"), backend_of(trunk)
    assert backend.name == f"triton+{trunk}"
    rng = torch.Generator().manual_seed(1)
    for layout in some:
        q = torch.randn(layout.branches, layout.queries, 4, 16, generator=rng, dtype=torch.float64)
        k, v = (torch.randn(len(rows.position), 2, 16, generator=rng, dtype=torch.float64) for _ in range(2))
        kb, vb = (torch.randn(layout.branches, layout.entries, 2, 16, generator=rng, dtype=torch.float64)
                  for _ in range(2))  # fmt: skip
        plan = plan_trunk(*layout.main_view(), rows)
        part = backend.trunk_forward(q.flatten(0, 1), k, v, plan, 0.25)
        assert all(map(torch.equal, part, other.trunk_forward(q.flatten(0, 1), k, v, plan, 0.25)))
        part = [x.unflatten(0, q.shape[:2]) for x in part]
        joint = backend.merged_branch_forward(*part, q, kb, vb, layout.sees, 0.25)
        in_two = merge(*part, *other.branch_forward(q, kb, vb, layout.sees, 0.25))
        assert max(close(x, y, torch.float64) for x, y in zip(joint, in_two, strict=True)) <= 1
        grads = [b.branch_backward(q.cos(), q, kb, vb, *joint, layout.sees, 0.25) for b in (backend, other)]
        assert max(close(x, y, torch.float64) for x, y in zip(*grads, strict=True)) <= 1
