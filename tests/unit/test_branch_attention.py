"""Branch attention on one rank, against a dense mask and autograd in float64.

Relative error: the largest absolute difference over the largest absolute value of the truth, per tensor.
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from furlong.kernels import branch_attention as module
from furlong.kernels import branches as make
from furlong.kernels.branch_attention import branch_attention, causal_attention
from furlong.kernels.branches import BranchLayout
from furlong.kernels.cpu_backend import CpuBackend
from furlong.kernels.dense import dense_branch_attention, dense_causal_attention, row_shifted_attention
from furlong.kernels.layout import NOBODY, Rows

BOUND = {torch.float64: 1e-12, torch.float32: 2e-6}
BACKENDS = ["cpu", "reference"]
NAMES = ("out", "q", "k_main", "v_main", "k_branch", "v_branch")


@dataclass
class Case:
    rows: Rows
    branches: BranchLayout
    inputs: list[Tensor]
    """q, k_main, v_main, k_branch, v_branch."""
    grad: Tensor

    def run(self, backend: str, **more: object) -> list[Tensor]:
        """Output and the five gradients."""
        inputs = [x.detach().requires_grad_() for x in self.inputs]
        out = branch_attention(*inputs, rows=self.rows, branches=self.branches, backend=backend, **more)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad)]

    def truth(self, **more: object) -> list[Tensor]:
        inputs = [x.detach().double().requires_grad_() for x in self.inputs]
        out = dense_branch_attention(*inputs, rows=self.rows, branches=self.branches, **more)
        return [out.detach(), *torch.autograd.grad(out, inputs, self.grad.double())]


def rows_of(*lengths: int, padding: int = 0) -> Rows:
    """Documents one after another, each followed by padding rows."""
    document = [of for i, n in enumerate(lengths) for of in [i] * n + [NOBODY] * padding]
    position = [at for n in lengths for at in [*range(n), *[0] * padding]]
    return Rows(torch.tensor(document, dtype=torch.long), torch.tensor(position, dtype=torch.long))


def case(
    rows: Rows,
    branches: BranchLayout,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> Case:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, head_dim, dtype=torch.float64, generator=draw).to(dtype)

    query = (branches.branches, branches.queries, heads[0])
    shapes = [query, *[(len(rows.position), heads[1])] * 2, *[(branches.branches, branches.entries, heads[1])] * 2]
    return Case(rows, branches, [normal(*shape) for shape in shapes], normal(*query))


def error(found: Tensor, true: Tensor) -> float:
    found, true = found.detach(), true.detach()
    assert found.shape == true.shape
    assert found.isfinite().all()
    if true.numel() == 0 or not true.any():
        return float(found.abs().sum())
    return float((found.double() - true).abs().max() / true.abs().max())


def errors(one: Case, backend: str, **more: object) -> dict[str, float]:
    pairs = zip(one.run(backend, **more), one.truth(**more), strict=True)
    return {name: error(*pair) for name, pair in zip(NAMES, pairs, strict=True)}


def check(one: Case, backend: str = "cpu", **more: object) -> None:
    found = errors(one, backend, **more)
    assert max(found.values()) <= BOUND[one.inputs[0].dtype], found


def branches_of(rows: Rows, kind: str, size: int, seed: int = 0) -> BranchLayout:
    draw = torch.Generator().manual_seed(seed)
    total = len(rows.position)
    if kind == "pass":
        return make.test_time_training(rows, size)
    if kind == "unrolled":
        return make.unrolled(rows, size)
    if kind in ("block", "causal block"):
        return make.block_draft(rows, torch.randperm(total, generator=draw)[: total // 2], size + 1, "causal" in kind)
    # Whatever a drafter may come up with: cutoffs in no order, beyond the document too, queries that see no entry.
    branches = total // 2
    cutoff = torch.randint(0, 50, (branches, size), generator=draw)
    of = torch.randint(0, max(total, 1), (branches,), generator=draw)
    return BranchLayout(rows.document[of], cutoff, torch.rand(size, 3, generator=draw) < 0.5)


KINDS = ["pass", "unrolled", "block", "causal block", "any"]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=4),
    padding=st.integers(0, 2),
    kind=st.sampled_from(KINDS),
    size=st.integers(0, 8),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1), (6, 2)]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    backend=st.sampled_from(["cpu", "cpu", "reference"]),
    seed=st.integers(0, 2**20),
)
def test_outputs_and_all_gradients(lengths, padding, kind, size, heads, dtype, backend, seed):
    rows = rows_of(*lengths, padding=padding)
    check(case(rows, branches_of(rows, kind, size, seed), heads, dtype=dtype, seed=seed), backend)


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_several_pieces(kind: str, dtype: torch.dtype):
    rows = rows_of(330, 1, 40, padding=1)
    check(case(rows, branches_of(rows, kind, 3), dtype=dtype))


@pytest.mark.parametrize("head_dim", [1, 32, 80, 128, 256])
@pytest.mark.parametrize("scale", [None, 0.05, 0.3])
def test_head_dims_and_scales(head_dim: int, scale: float | None):
    rows = rows_of(20, 3)
    for backend in BACKENDS:
        check(case(rows, make.unrolled(rows, 2), head_dim=head_dim), backend, scale=scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(), (1,), (0, 1, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_none_and_one(lengths: tuple[int, ...], kind: str, backend: str):
    rows = rows_of(*lengths)
    check(case(rows, branches_of(rows, kind, 2)), backend)
    check(case(rows, branches_of(rows, kind, 0)), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_anchor_at_the_start_sees_its_block_alone(backend: str):
    rows = rows_of(5)
    one = case(rows, make.block_draft(rows, torch.tensor([0, 3, 0]), 3, causal=False))
    check(one, backend)
    empty = BranchLayout(one.branches.document, torch.zeros(3, 3).long(), torch.zeros(3, 3).bool())
    assert not any(x.any() for x in case(rows, empty).run(backend))


@pytest.mark.parametrize("level", [30.0, -30.0])
@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
def test_one_part_far_above_the_other(level: float, dtype: torch.dtype):
    rows = rows_of(30)
    one = case(rows, make.test_time_training(rows, 2), dtype=dtype)
    one.inputs[0][..., 0] = 1.0
    one.inputs[3][..., 0] = level * 32**0.5
    found = errors(one, "cpu")
    # Scores are 30 higher, and so is what of them is lost to rounding.
    assert max(found.values()) <= 30 * BOUND[dtype], found


@pytest.mark.parametrize(("kind", "backend"), [("pass", "cpu"), ("block", "cpu"), ("unrolled", "reference")])
def test_gradcheck(kind: str, backend: str):
    rows = rows_of(2, 1, padding=1)
    one = case(rows, branches_of(rows, kind, 2), (2, 1), head_dim=2)

    def call(*inputs: Tensor) -> Tensor:
        return branch_attention(*inputs, rows=rows, branches=one.branches, backend=backend)

    inputs = [x.requires_grad_() for x in one.inputs]
    assert torch.autograd.gradcheck(call, inputs, atol=1e-8, rtol=1e-6)


def test_a_second_derivative_is_refused():
    rows = rows_of(3)
    one = case(rows, make.test_time_training(rows, 1))
    inputs = [x.requires_grad_() for x in one.inputs]
    out = branch_attention(*inputs, rows=rows, branches=one.branches, backend="cpu")
    (slope,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_bfloat16_is_no_worse_than_plain_flash_attention():
    rows = rows_of(300)
    one = case(rows, make.test_time_training(rows, 3), (4, 4), 64, torch.bfloat16)
    bare = make.test_time_training(rows, 0)
    trunk = case(rows, bare, (4, 4), 64, torch.bfloat16)
    q, k, v = (x.detach().reshape(1, 300, 4, 64).transpose(1, 2).requires_grad_() for x in trunk.inputs[:3])
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.grad_fn.name() == "ScaledDotProductFlashAttentionForCpuBackward0"
    plain = [out, *torch.autograd.grad(out, (q, k, v), trunk.grad.reshape(1, 300, 4, 64).transpose(1, 2))]
    plain = [x[0].transpose(0, 1).detach() for x in plain]
    allowed = [2 * error(x.view(y.shape), y) for x, y in zip(plain, trunk.truth(), strict=False)]
    ours, joint = errors(trunk, "cpu"), errors(one, "cpu")
    for name, bound in zip(NAMES, allowed, strict=False):
        assert 0 < ours[name] <= bound
        assert joint[name] <= bound
    assert max(joint["k_branch"], joint["v_branch"]) <= max(allowed)


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_attention(backend: str):
    rows, draw = rows_of(50, 1, 13, padding=2), torch.Generator().manual_seed(0)
    n = len(rows.position)
    inputs = [torch.randn(n, heads, 32, dtype=torch.float64, generator=draw).requires_grad_() for heads in (4, 2, 2)]
    grad = torch.randn(n, 4, 32, dtype=torch.float64, generator=draw)
    found, true = (
        (out, *torch.autograd.grad(out, inputs, grad))
        for out in (causal_attention(*inputs, rows=rows, backend=backend), dense_causal_attention(*inputs, rows=rows))
    )
    assert max(error(x, y) for x, y in zip(found, true, strict=True)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
def test_is_decoding_with_a_cache_at_every_depth(backend: str):
    """The query of depth d at anchor i is what a decoder computes whose cache holds main keys 0..i and entries 1..d."""
    rows, depths = rows_of(9, 1, 4), 4
    one = case(rows, make.unrolled(rows, depths))
    together = one.run(backend)[0]
    q, k, v, k_branch, v_branch = one.inputs
    starts = torch.arange(len(rows.position)) - rows.position
    for depth in range(1, depths + 1):
        passed = branch_attention(
            q[:, depth - 1 : depth],
            k,
            v,
            k_branch[:, :depth],
            v_branch[:, :depth],
            rows=rows,
            branches=make.test_time_training(rows, depth),
            backend=backend,
        )
        for i, start in enumerate(starts.tolist()):
            cache = [torch.cat([main[start : i + 1], own[i, :depth]]) for main, own in ((k, k_branch), (v, v_branch))]
            keys, values = (x.repeat_interleave(2, dim=1) for x in cache)
            shares = (torch.einsum("hd,khd->hk", q[i, depth - 1], keys) * 32**-0.5).softmax(-1)
            decoded = torch.einsum("hk,khd->hd", shares, values)
            assert error(passed[i, 0], decoded) <= 1e-12
            assert error(together[i, depth - 1], decoded) <= 1e-12


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_by_anchor_is_by_row_shifted(depth: int):
    rows = rows_of(11, 2, 6, 1)
    one = case(rows, make.test_time_training(rows, depth))
    n = len(rows.position)
    # Anchors whose state of this depth would lie past their document have no row in the other convention.
    lengths = torch.bincount(rows.document)[rows.document]
    kept = rows.position + depth < lengths
    one.grad[~kept] = 0.0

    def shifted(x: Tensor, by: int) -> Tensor:
        """Rows moved down by `by`; what is moved into another document is never seen."""
        return torch.cat([x.new_zeros(by, *x.shape[1:]), x[: n - by]])

    inputs = [x.detach().requires_grad_() for x in one.inputs]
    q, k, v, k_branch, v_branch = inputs
    passes = [[shifted(x[:, p - 1], p) for p in range(1, depth + 1)] for x in (k_branch, v_branch)]
    by_row = row_shifted_attention(shifted(q[:, 0], depth), k, v, *passes, rows=rows)
    back = torch.cat([by_row[depth:], by_row.new_zeros(depth, 4, 32)])[:, None]
    true = [
        back.detach(),
        *torch.autograd.grad(back, inputs, one.grad, allow_unused=True, materialize_grads=True),
    ]
    found = one.run("cpu")
    assert kept.any()
    assert error(found[0][kept], true[0][kept]) <= 1e-12
    # Of an anchor that is not kept, entries are still in rows of the document where no query of its own is.
    assert max(error(x, y) for x, y in zip(found[1:], true[1:], strict=True)) <= 1e-12


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["pass", "unrolled", "block"])
def test_documents_are_isolated_bitwise(kind: str, backend: str):
    rows = rows_of(40, 90, 7, padding=1)
    one, other = (case(rows, branches_of(rows, kind, 3), dtype=torch.float32) for _ in range(2))
    for x in (*other.inputs, other.grad):
        x[(rows if len(x) == len(rows.position) else other.branches).document == 1] += 1.0
    for x in (*other.inputs[0:1], *other.inputs[3:], other.grad):
        touched = other.branches.document == 1
        x[touched] = 3.0
    before, after = one.run(backend), other.run(backend)
    for name, x, y in zip(NAMES, before, after, strict=True):
        of = rows.document if "main" in name else one.branches.document
        assert torch.equal(x[of != 1], y[of != 1]), name
        assert not torch.equal(x[of == 1], y[of == 1]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_branches_are_isolated_bitwise(backend: str):
    rows = rows_of(60)
    one, other = (case(rows, make.unrolled(rows, 3), dtype=torch.float32) for _ in range(2))
    for x in (other.inputs[0], *other.inputs[3:], other.grad):
        x[20] *= 2.0
    for name, x, y in zip(NAMES, one.run(backend), other.run(backend), strict=True):
        apart = torch.arange(60) > 20 if "main" in name else torch.arange(60) != 20
        # Main keys up to anchor 20 do get another gradient: its queries see them.
        assert torch.equal(x[apart], y[apart]), name
        assert not torch.equal(x[20], y[20]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_in_padding_reaches_nothing(backend: str):
    rows = rows_of(33, 5, padding=2)
    one, dirty = (case(rows, make.unrolled(rows, 2), dtype=torch.float32) for _ in range(2))
    padding = rows.document == NOBODY
    for x in (*dirty.inputs, dirty.grad):
        x[padding] = float("nan")
    for name, x, y in zip(NAMES, one.run(backend), dirty.run(backend), strict=True):
        assert torch.equal(x, y), name
        assert not y[padding].any(), name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_meets_nothing_reaches_nothing(value: float, backend: str):
    rows = rows_of(12)
    # The last entry is seen by no query; the last query sees no entry, and off the first two anchors no main key either.
    sees = torch.tensor([[True, False, False], [True, True, False], [False, False, False]])
    cutoff = rows.position[:, None].repeat(1, 3)
    cutoff[:2, 2] = 0
    one, dirty = (case(rows, BranchLayout(rows.document, cutoff, sees)) for _ in range(2))
    dirty.inputs[3][:, 2] = dirty.inputs[4][:, 2] = value
    dirty.inputs[0][:2, 2] = dirty.grad[:2, 2] = value
    for name, x, y in zip(NAMES, one.run(backend), dirty.run(backend), strict=True):
        assert torch.equal(x, y), name
    seen = case(rows, one.branches)
    seen.inputs[4][5, 1, 0, 0] = value
    assert not seen.run(backend)[0][5, 1].isfinite().all(), "what is seen must not be hidden"


@pytest.mark.parametrize("kind", KINDS)
def test_same_call_same_bits(kind: str):
    rows = rows_of(300, 40)
    one = case(rows, branches_of(rows, kind, 3), dtype=torch.float32)
    for x, y in zip(one.run("cpu"), one.run("cpu"), strict=True):
        assert torch.equal(x, y)


def test_entries_one_by_one_are_kept_as_they_are():
    rows = rows_of(25, 6)
    one = case(rows, make.test_time_training(rows, 3))
    q, k, v, *stacked = (x.detach().requires_grad_() for x in one.inputs)
    listed = [[part.detach().clone().requires_grad_() for part in x.unbind(1)] for x in stacked]
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.data_ptr()) or x, lambda x: x):
        out = branch_attention(q, k, v, *listed, rows=rows, branches=one.branches, backend="cpu")
    ours = {x.data_ptr() for x in (q, k, v, out, *listed[0], *listed[1])}
    # All but the log-sum-exp are tensors of the caller's.
    assert len(set(kept) - ours) == 1
    assert ours <= set(kept)
    flat = [q, k, v, *listed[0], *listed[1]]
    found = torch.autograd.grad(out, flat, one.grad)
    true = one.run("cpu")
    assert torch.equal(out, true[0])
    rebuilt = (*found[:3], torch.stack(found[3:6], 1), torch.stack(found[6:], 1))
    assert all(torch.equal(x, y) for x, y in zip(rebuilt, true[1:], strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_do_not_matter(backend: str):
    rows = rows_of(40)
    one = case(rows, make.unrolled(rows, 2))
    strided = Case(rows, one.branches, [x.transpose(0, -1).contiguous().transpose(0, -1) for x in one.inputs], one.grad)
    strided.grad = one.grad.transpose(0, -1).contiguous().transpose(0, -1)
    assert strided.inputs[0].stride(-1) != 1
    assert max(error(x, y) for x, y in zip(strided.run(backend), one.run(backend), strict=True)) <= 1e-12
    one.grad = torch.ones(()).double().expand_as(one.grad)
    check(one, backend)


class TrunkAlone(CpuBackend):
    """Mutant: the trunk's backward with the trunk's own output and log-sum-exp."""

    def trunk_backward(self, grad, q, k, v, out, lse, plan, scale):
        return super().trunk_backward(grad, q, k, v, *self.trunk_forward(q, k, v, plan, scale), plan, scale)


class BranchAlone(CpuBackend):
    """Mutant: the branch's backward with the branch's own output and log-sum-exp."""

    def branch_backward(self, grad, q, k, v, out, lse, sees, scale):
        return super().branch_backward(grad, q, k, v, *self.branch_forward(q, k, v, sees, scale), sees, scale)


class OldOutput(CpuBackend):
    """Mutant: the joint log-sum-exp, but the trunk's output."""

    def trunk_backward(self, grad, q, k, v, out, lse, plan, scale):
        return super().trunk_backward(grad, q, k, v, self.trunk_forward(q, k, v, plan, scale)[0], lse, plan, scale)


@pytest.mark.parametrize(
    ("mutant", "wrong"),
    [
        (TrunkAlone, {"q", "k_main", "v_main"}),
        (BranchAlone, {"q", "k_branch", "v_branch"}),
        (OldOutput, {"q", "k_main"}),
    ],
)
def test_mutants_of_the_backward_are_caught(mutant: type[CpuBackend], wrong: set[str], monkeypatch: pytest.MonkeyPatch):
    rows = rows_of(30, 8)
    one = case(rows, make.test_time_training(rows, 3), dtype=torch.float32)
    check(one)
    monkeypatch.setattr(module, "backend_of", lambda name: mutant())
    found = errors(one, "cpu")
    assert {name for name, x in found.items() if x > 1e-2} == wrong, found
    assert {name for name, x in found.items() if x > BOUND[torch.float32]} == wrong, found


@pytest.mark.parametrize("off", ["cutoff late", "cutoff early", "own entry missing", "branch of the next row"])
def test_mutants_of_the_mask_are_caught(off: str):
    rows = rows_of(30, 8)
    one = case(rows, make.test_time_training(rows, 3), dtype=torch.float32)
    true = one.truth()
    cutoff, sees = one.branches.cutoff, one.branches.sees.clone()
    if off.startswith("cutoff"):
        cutoff = cutoff + (1 if off == "cutoff late" else -1)
    elif off == "own entry missing":
        sees[:, -1] = False
    else:
        one.inputs[3:] = [x.roll(-1, 0) for x in one.inputs[3:]]
    one.branches = BranchLayout(one.branches.document, cutoff, sees)
    found = [error(x, y) for x, y in zip(one.run("cpu"), true, strict=True)]
    assert min(found) > 1e-2, found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: lambda q: q[0]}, "branches queries heads head_dim"),
        ({0: lambda q: q[:, :, :3]}, "multiple of the 2 key heads"),
        ({0: lambda q: q[..., :16]}, "head_dim 32"),
        ({0: lambda q: q[1:]}, "with 9 branches"),
        ({0: lambda q: q.float()}, "make them alike"),
        ({1: lambda k: k[1:]}, "do not fit"),
        ({1: lambda k: k[:, :, None]}, "do not fit"),
        ({2: lambda v: v[:, :1]}, "do not fit"),
        ({1: lambda k: k[:, :0], 2: lambda v: v[:, :0]}, "no heads"),
        ({3: lambda k: k[:, :1]}, "one tensor per entry"),
        ({4: lambda v: v[..., :16]}, "one tensor per entry"),
        ({4: lambda v: v[0]}, "one tensor of 4"),
        ({3: lambda k: list(k.unbind(1))}, "not alike"),
        ({4: lambda v: list(v.unbind(1))}, "not alike"),
        ({3: lambda k: [k], 4: lambda v: [v]}, "sequence of tensors of 3"),
        ({3: lambda k: [], 4: lambda v: []}, "one tensor per entry"),
        ({3: lambda k: [k[:, 0]], 4: lambda v: [v[:, 0]]}, "one tensor per entry"),
        ({i: lambda x: x.half() for i in range(5)}, "cast it to one of"),
    ],
)
def test_wrong_tensors_are_named(change: dict, words: str):
    rows = rows_of(9)
    one = case(rows, make.test_time_training(rows, 2))
    inputs = [change[i](x) if i in change else x for i, x in enumerate(one.inputs)]
    with pytest.raises(ValueError, match=words):
        branch_attention(*inputs, rows=rows, branches=one.branches, backend="cpu")


def test_wrong_choices_are_named():
    rows = rows_of(9)
    one = case(rows, make.test_time_training(rows, 2))
    with pytest.raises(ValueError, match="choose one of reference, cpu"):
        one.run("gpu")
    for scale in (float("nan"), float("inf"), 0.0, -0.3):
        with pytest.raises(ValueError, match="finite one above 0"):
            one.run("cpu", scale=scale)
    with pytest.raises(ValueError, match="dimensions"):
        causal_attention(one.inputs[0], *one.inputs[1:3], rows=rows, backend="cpu")
    with pytest.raises(ValueError, match="choose flex, flash or triton"):
        CpuBackend().branch_forward(*(x.to("meta") for x in (one.inputs[0], *one.inputs[3:])), one.branches.sees, 1.0)
