"""The backends flex and flash as far as a machine without a GPU can tell: masks, the way back through the merge, and
what they refuse. Their kernels run in tests/gpu."""

import importlib.metadata

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention

from furlong.kernels import branches as kinds
from furlong.kernels import flash_backend, flex_backend
from furlong.kernels.backends import backend_of
from furlong.kernels.branches import BranchLayout
from furlong.kernels.layout import Rows, zigzag_layout
from furlong.kernels.reference_backend import ReferenceBackend
from furlong.kernels.trunk import Tile, TrunkPlan, plan_trunk

CPU = torch.device("cpu")
INF = float("inf")


def rows_of(*lengths: int, padding: int = 0) -> Rows:
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    return Rows(document, torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.long)]))


def cases() -> dict[str, tuple[BranchLayout, Rows]]:
    """Branches and the keys that are at hand; 128 is FlexAttention's block."""
    rng = torch.Generator().manual_seed(0)
    long, short = rows_of(150, 1, 140, padding=3), rows_of(3, 1, 5)
    mixed = torch.randperm(len(long.document), generator=rng)
    zigzag = zigzag_layout(torch.tensor([0, 300, 301, 420]), 2)
    blocks = torch.randperm(290, generator=rng)[:40]
    return {
        "passes": (kinds.test_time_training(long, 3), long),
        "keys out of order": (kinds.unrolled(long, 2), Rows(long.document[mixed], long.position[mixed])),
        "another rank's keys": (kinds.test_time_training(zigzag.rows(0), 2), zigzag.rows(1)),
        "blocks": (kinds.block_draft(long, blocks, 5, causal=False), long),
        "nothing to see": (kinds.block_draft(short, torch.tensor([0, 3]), 2, causal=True), short),
        "full blocks": (kinds.test_time_training(rows_of(256, 128), 1), rows_of(256, 128)),
    }


CASES = cases()


def dense_attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    """What FlexAttention computes of a block mask, differentiable in float64: flex_attention itself is not on a CPU."""
    seen = create_mask(mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~seen, -INF)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp() @ v, lse


def unfused_attend(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> tuple[Tensor, Tensor]:
    out, aux = flex_attention(q, k, v, block_mask=mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def listed(number: Tensor, indices: Tensor) -> Tensor:
    """A block mask's lists as a table of booleans."""
    table = torch.zeros(indices.shape[2:], dtype=torch.bool)
    for row, count in enumerate(number[0, 0].tolist()):
        table[row, indices[0, 0, row, :count].long()] = True
    return table


def tensors(layout: BranchLayout, rows: Rows) -> list[Tensor]:
    rng = torch.Generator().manual_seed(7)
    shapes = [(layout.branches, layout.queries, 4, 16)] * 2
    shapes += [(len(rows.document), 2, 16)] * 2 + [(layout.branches, layout.entries, 2, 16)] * 2
    return [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]


def gap(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x == -INF, y == -INF)
    pairs = [(x.nan_to_num(nan=INF, neginf=0.0), y.nan_to_num(neginf=0.0)) for x, y in zip(found, wanted, strict=True)]
    return max(float((x - y).abs().max() / y.abs().max().clamp_min(1e-3)) for x, y in pairs if x.numel())


@pytest.mark.parametrize("case", CASES)
def test_blocks_of_the_masks_are_those_of_the_dense_mask(case):
    layout, rows = CASES[case]
    document, cutoff = layout.main_view()
    plan = plan_trunk(document, cutoff, rows)
    if case == "nothing to see":
        assert not plan.tiles or plan.pairs < plan.queries * plan.keys
    seen = (document[:, None] == rows.document) & (document >= 0)[:, None] & (rows.position < cutoff[:, None])
    seen = plan.sorted_keys(plan.sorted_queries(seen).T).T
    own = torch.arange(layout.branches).repeat_interleave(layout.queries)[:, None]
    own = own == torch.arange(layout.branches).repeat_interleave(layout.entries)
    own &= layout.sees.repeat(layout.branches, layout.branches)
    pairs = [(flex_backend.branch_mask(layout.branches, layout.sees), own)]
    pairs += [(flex_backend.trunk_mask(plan, CPU), seen)] if plan.tiles else []
    for mask, dense in pairs:
        assert torch.equal(create_mask(mask.mask_mod, 1, 1, *dense.shape, device="cpu")[0, 0], dense)
        wanted = create_block_mask(lambda b, h, q, k, dense=dense: dense[q, k], None, None, *dense.shape, device="cpu")
        some = listed(mask.kv_num_blocks, mask.kv_indices)
        full = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        wanted_some = listed(wanted.kv_num_blocks, wanted.kv_indices)
        wanted_full = listed(wanted.full_kv_num_blocks, wanted.full_kv_indices)
        assert torch.equal(full, wanted_full if mask is not pairs[0][0] else torch.zeros_like(full))
        assert torch.equal(some | full, wanted_some | wanted_full)


@pytest.mark.parametrize("case", CASES)
def test_the_way_back_through_the_merge_is_the_joint_backward(case):
    """In float64, where the joint gradient of a part is known exactly: both parts, and both together."""
    layout, rows = CASES[case]
    q, grad, k, v, kb, vb = tensors(layout, rows)
    plan, reference = plan_trunk(*layout.main_view(), rows), ReferenceBackend()
    backend, unfused = flex_backend.FlexBackend(dense_attend), flex_backend.FlexBackend(unfused_attend)
    flat, scale = q.flatten(0, 1), 0.3
    part = backend.trunk_forward(flat, k, v, plan, scale)
    wanted = reference.trunk_forward(flat, k, v, plan, scale)
    assert gap(part, wanted) < 1e-12
    assert gap(unfused.trunk_forward(flat, k, v, plan, scale), wanted) < 2e-6  # its log-sum-exp is float32
    wanted = reference.branch_forward(q, kb, vb, layout.sees, scale)
    other = backend.branch_forward(q, kb, vb, layout.sees, scale)
    assert gap(other, wanted) < 1e-12
    assert gap(unfused.branch_forward(q, kb, vb, layout.sees, scale), wanted) < 2e-6
    lse = torch.logaddexp(part[1], other[1].flatten(0, 1))
    share = [(x - lse.masked_fill(lse == -INF, 0.0)).exp()[..., None] for x in (part[1], other[1].flatten(0, 1))]
    out = part[0] * share[0] + other[0].flatten(0, 1) * share[1]
    trunk = grad.flatten(0, 1), flat, k, v, out, lse, plan, scale
    wanted = reference.trunk_backward(*trunk)
    assert gap(backend.trunk_backward(*trunk), wanted) < 1e-12
    joint = [x.view(*q.shape[:2], *x.shape[1:]) for x in (out, lse)]
    branch = grad, q, kb, vb, *joint, layout.sees, scale
    wanted = reference.branch_backward(*branch)
    assert gap(backend.branch_backward(*branch), wanted) < 1e-12
    if plan.tiles and layout.entries:
        # The part's own output and log-sum-exp in place of the joint ones is the fault that the bound must find.
        alone = backend.branch_backward(*branch[:4], *other, layout.sees, scale)
        seen = part[1].view(q.shape[:3]) > -INF
        assert not seen.any() or gap(alone, wanted) > 1e-3


def test_a_mask_is_made_once_per_plan():
    rows = rows_of(20)
    plan = plan_trunk(rows.document, rows.position + 1, rows)
    assert flex_backend.trunk_mask(plan, CPU) is flex_backend.trunk_mask(plan, CPU)
    other = plan_trunk(rows.document, rows.position, rows)
    assert flex_backend.trunk_mask(other, CPU) is not flex_backend.trunk_mask(plan, CPU)


def test_nothing_to_attend_to_is_zero():
    backend, rows = flex_backend.FlexBackend(), rows_of(4)
    plan = plan_trunk(rows.document, torch.zeros(4, dtype=torch.long), rows)
    q, k = torch.ones(4, 2, 16, dtype=torch.bfloat16), torch.ones(4, 1, 16, dtype=torch.bfloat16)
    out, lse = backend.trunk_forward(q, k, k, plan, 1.0)
    assert out.dtype == lse.dtype == torch.float32
    assert not out.any()
    assert (lse == -INF).all()
    assert not any(x.any() for x in backend.trunk_backward(q, q, k, k, out, lse, plan, 1.0))
    sees = torch.ones(1, 0, dtype=torch.bool)
    out, lse = backend.branch_forward(q[:, None], k[:, None][:, :0], k[:, None][:, :0], sees, 1.0)
    assert not out.any()
    assert (lse == -INF).all()


def test_flex_on_a_cpu_says_that_it_cannot():
    rows, sees = rows_of(4), torch.ones(1, 2, dtype=torch.bool)
    plan = plan_trunk(rows.document, rows.position + 1, rows)
    q, k, kb = torch.ones(4, 1, 2, 16), torch.ones(4, 1, 16), torch.ones(4, 2, 1, 16)
    backend = backend_of("flex")
    for call in (
        lambda: backend.trunk_forward(q[:, 0], k, k, plan, 1.0),
        lambda: backend.trunk_backward(q[:, 0], q[:, 0], k, k, q[:, 0], q[:, 0, :, 0], plan, 1.0),
        lambda: backend.branch_forward(q, kb, kb, sees, 1.0),
        lambda: backend.branch_backward(q, q, kb, kb, q, q[..., 0], sees, 1.0),
    ):
        with pytest.raises(NotImplementedError, match="choose the backend cpu or reference"):
            call()


@pytest.mark.slow
def test_pytorch_still_compiles_no_log_sum_exp_on_a_cpu():
    """If this fails, the backend flex can do more than it says."""
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
    x = torch.ones(1, 1, 128, 16)
    with pytest.raises(Exception, match="return_lse"):
        torch.compile(unfused_attend, fullgraph=True)(x, x, x, mask, 1.0)
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        unfused_attend(x.clone().requires_grad_(), x, x, mask, 1.0)


def test_without_flash_attn_the_backend_says_what_to_install(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(flash_backend, "version", missing)
    with pytest.raises(ImportError, match=r"not installed: install flash-attn 2\.7\.x or 2\.8\.x"):
        backend_of("flash")
    for release in ("2.6.3", "2.9.0", "3.0.0b1", "2.70.1"):
        monkeypatch.setattr(flash_backend, "version", lambda name, release=release: release)
        with pytest.raises(ImportError, match=f"release {release}"):
            backend_of("flash")


def test_flash_refuses_what_it_has_no_kernel_for(monkeypatch):
    monkeypatch.setattr(flash_backend, "version", lambda name: "2.8.3")
    backend, rows = backend_of("flash"), rows_of(4)
    plan, q = plan_trunk(rows.document, rows.position + 1, rows), torch.ones(4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="on cpu"):
        backend.trunk_forward(q, q, q, plan, 1.0)
    sees = torch.tensor([[True, False], [True, True], [True, True]])
    with pytest.raises(NotImplementedError, match="neither full nor causal"):
        flash_backend.branch_call(3, sees)
    masked = Tile(slice(0, 2), slice(0, 4), "masked", torch.tensor([1, 4]))
    with pytest.raises(NotImplementedError, match="choose the backend flex or triton"):
        flash_backend.calls((masked,))


@pytest.mark.parametrize("case", ["passes", "another rank's keys", "full blocks"])
def test_flash_is_called_with_every_pair_once(case):
    """The launches' sequences, expanded, are the dense mask; and no row occurs twice in one launch."""
    layout, rows = CASES[case]
    document, cutoff = layout.main_view()
    plan: TrunkPlan = plan_trunk(document, cutoff, rows)
    count = torch.zeros(plan.queries, plan.keys, dtype=torch.int)
    found = flash_backend.calls(plan.tiles)
    for call in found:
        assert len(call.rows(CPU).unique()) == len(call.rows(CPU))
        assert len(call.cols(CPU).unique()) == len(call.cols(CPU))
        for at, keys in zip(call.queries, call.keys, strict=True):
            square = torch.ones(at.stop - at.start, keys.stop - keys.start, dtype=torch.int)
            assert not call.causal or square.shape[0] == square.shape[1]
            count[at, keys] += square.tril() if call.causal else square
    seen = (document[:, None] == rows.document) & (document >= 0)[:, None] & (rows.position < cutoff[:, None])
    assert torch.equal(count, plan.sorted_keys(plan.sorted_queries(seen.int()).T).T)
    assert len(found) <= 3
    branch = flash_backend.branch_call(layout.branches, layout.sees)
    assert (len(branch.queries), branch.causal) == (layout.branches, False)
    assert flash_backend.branch_call(2, torch.ones(3, 3, dtype=torch.bool).tril()).causal
