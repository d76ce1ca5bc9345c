"""The backends flex, flash and triton on a GPU: against float64, and timed. One GPU, under ten minutes.

    python -m pytest tests/gpu -m gpu -s

bfloat16 is held to a relative bound: a backend's error against float64 may be twice that of plain flash attention
(PyTorch's own, over the trunk alone) on the same numbers, instead of a fixed tolerance that would hide a wrong factor.
C ranks run one after another on the one GPU, each over the shards that would come round the ring to it: the kernels and
plans of C = 2 to 8 without a network. Times are printed, not asserted, as they depend on the GPU.

Where no GPU is, the same functions run on the CPU at toy sizes with the backend cpu, and with triton's kernels where
TRITON_INTERPRET=1, so that the script itself is tested.
"""

import importlib.metadata
import os
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from furlong.kernels import branches as kinds
from furlong.kernels.backends import backend_of, wide
from furlong.kernels.branch_attention import branch_attention, causal_attention
from furlong.kernels.branches import BranchLayout
from furlong.kernels.dense import dense_branch_attention, dense_causal_attention
from furlong.kernels.layout import NOBODY, ContextLayout, Rows, zigzag_layout, zigzag_merge, zigzag_split
from furlong.kernels.merge import merge
from furlong.kernels.trunk import plan_trunk

HEADS, KV_HEADS = 8, 2


def flash_is_installed() -> bool:
    try:
        importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


BACKENDS = ["flex", "triton", *(["flash", "triton+flash"] if flash_is_installed() else [])]


def rows_of(lengths: list[int], device: str) -> Rows:
    document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    return Rows(document.to(device), torch.cat([torch.arange(n) for n in lengths]).to(device))


def layouts(rows: Rows, lengths: list[int]) -> dict[str, BranchLayout]:
    anchors = torch.arange(0, sum(lengths), max(1, sum(lengths) // 50), device=rows.document.device)
    return {
        "passes": kinds.test_time_training(rows, 4),
        "unrolled": kinds.unrolled(rows, 3),
        "blocks": kinds.block_draft(rows, anchors, 8, causal=False),
    }


def inputs_of(layout: BranchLayout, rows: Rows, dim: int, dtype: torch.dtype) -> list[Tensor]:
    device = rows.document.device
    rng = torch.Generator(device).manual_seed(dim)
    main = (len(rows.document), KV_HEADS, dim)
    entries = (layout.branches, layout.entries, KV_HEADS, dim)
    shapes = [(layout.branches, layout.queries, HEADS, dim), main, main, entries, entries]
    made = [torch.randn(shape, generator=rng, device=device, dtype=torch.float32).to(dtype) for shape in shapes]
    return [x.requires_grad_() for x in made]


def results(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Output and all gradients, in float64, for a fixed gradient of the output."""
    out = function(*inputs)
    rng = torch.Generator(out.device).manual_seed(9)
    grad = torch.randn(out.shape, generator=rng, device=out.device, dtype=torch.float32).to(inputs[0].dtype)
    return [x.double() for x in (out.detach(), *torch.autograd.grad(out, inputs, grad.to(out.dtype)))]


def errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Of each tensor, root mean square relative to the truth's; NaN is infinitely wrong."""
    pairs = [(x.detach(), y.detach()) for x, y in zip(found, truth, strict=True)]
    sizes = [(x - y).square().mean().sqrt() / y.square().mean().sqrt() for x, y in pairs]
    return [float(x) if x.isfinite() else float("inf") for x in sizes]


def doubled(inputs: list[Tensor]) -> list[Tensor]:
    return [x.detach().double().requires_grad_() for x in inputs]


def flash_errors(lengths: list[int], dim: int, dtype: torch.dtype, device: str) -> list[float]:
    """Of PyTorch's own flash attention, plain and causal, over the same documents: (out, dq, dk, dv)."""
    rows = rows_of(lengths, device)
    rng = torch.Generator(device).manual_seed(dim)
    shapes = [(len(rows.document), heads, dim) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(x, generator=rng, device=device).to(dtype).requires_grad_() for x in shapes]

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        for chunk in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
            batch = (x.transpose(0, 1)[None] for x in chunk)
            part = torch.nn.functional.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)
            parts.append(part[0].transpose(0, 1))
        return torch.cat(parts)

    truth = results(lambda q, k, v: dense_causal_attention(q, k, v, rows=rows), doubled(inputs))
    return errors(results(plain, inputs), truth)


def check(backend: str, kind: str, lengths: list[int], dim: int, dtype: torch.dtype, device: str) -> None:
    rows = rows_of(lengths, device)
    layout = layouts(rows, lengths)[kind]
    inputs = inputs_of(layout, rows, dim, dtype)
    found = results(lambda *x: branch_attention(*x, rows=rows, branches=layout, backend=backend), inputs)
    truth = results(lambda *x: dense_branch_attention(*x, rows=rows, branches=layout), doubled(inputs))
    if dtype == torch.float32:
        bounds = [1e-5] * 6  # matrix products in float32 of up to some thousand terms
    else:
        out, dq, dk, dv = flash_errors(lengths, dim, dtype, device)
        bounds = [2 * x for x in (out, dq, dk, dv, dk, dv)]
    measured = errors(found, truth)
    assert all(x <= bound for x, bound in zip(measured, bounds, strict=True)), (measured, bounds)


def loopback(backend: str, lengths: list[int], ranks: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """Every rank of a ring in turn, its messages being copies, against the whole batch in float64."""
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    layout: ContextLayout = zigzag_layout(cu, ranks)
    rows, whole = rows_of(lengths, device), kinds.test_time_training(rows_of(lengths, device), 3)
    inputs = inputs_of(whole, rows, dim, dtype)
    rng = torch.Generator(device).manual_seed(2)
    grad = torch.randn(inputs[0].shape, generator=rng, device=device).to(dtype)
    computes, scale = backend_of(backend), dim**-0.5
    shards = [[zigzag_split(x.detach().cpu(), layout, r).to(device) for x in (*inputs, grad)] for r in range(ranks)]
    found = [[torch.zeros(x.shape, dtype=wide(dtype), device=device) for x in shard] for shard in shards]
    for rank, (q, _, _, kb, vb, dout) in enumerate(shards):
        own = layout.rows(rank)
        mine = kinds.test_time_training(Rows(own.document.to(device), own.position.to(device)), 3)
        plans = [plan_trunk(*mine.main_view(), layout.rows(source)) for source in range(ranks)]
        flat = q.flatten(0, 1)
        part = computes.branch_forward(q, kb, vb, mine.sees, scale)
        out, lse = (x.flatten(0, 1) for x in part)
        for step in range(ranks):
            source = (rank - step) % ranks
            out, lse = merge(out, lse, *computes.trunk_forward(flat, *shards[source][1:3], plans[source], scale))
        joint = out.view(q.shape), lse.view(q.shape[:-1])
        dq, found[rank][3], found[rank][4] = computes.branch_backward(dout, q, kb, vb, *joint, mine.sees, scale)
        for step in range(ranks):
            source = (rank - step) % ranks
            key, value = shards[source][1:3]
            more = computes.trunk_backward(dout.flatten(0, 1), flat, key, value, out, lse, plans[source], scale)
            dq = dq + more[0].view(q.shape)
            found[source][1] += more[1]
            found[source][2] += more[2]
        found[rank][0], found[rank][5] = dq, joint[0]
        padding = own.document.to(device) == NOBODY
        for x in found[rank]:
            x[padding] = 0
    together = [zigzag_merge([f[i].cpu() for f in found], layout).to(device).double() for i in (5, 0, 1, 2, 3, 4)]

    def truth(*x: Tensor) -> Tensor:
        return dense_branch_attention(*x, rows=rows, branches=whole)

    exact = doubled(inputs)
    out = truth(*exact)
    wanted = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
    if dtype == torch.bfloat16:
        out_error, dq_error, dk_error, dv_error = flash_errors(lengths, dim, dtype, device)
        bounds = [2 * x for x in (out_error, dq_error, dk_error, dv_error, dk_error, dv_error)]
    else:
        bounds = [1e-5] * 6
    measured = errors(together, wanted)
    assert all(x <= bound for x, bound in zip(measured, bounds, strict=True)), (measured, bounds)


def timed(work: Callable[[], object], device: str, times: int) -> float:
    """Median seconds of a call, after one that compiles."""
    took = []
    for _ in range(times + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return sorted(took[1:])[times // 2]


def times_of(function: Callable[..., Tensor], inputs: list[Tensor], device: str, times: int = 5) -> tuple[float, float]:
    """(forward, forward and backward)."""

    def both() -> None:
        out = function(*inputs)
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    with torch.no_grad():
        forward = timed(lambda: function(*inputs), device, times)
    return forward, timed(both, device, times)


def dense_mask_attention(rows: Rows, layout: BranchLayout) -> Callable[..., Tensor]:
    """The baseline that holds one mask over main keys and every branch's entries, in the inputs' dtype."""
    from furlong.kernels.dense import dense_mask

    mask = dense_mask(rows, layout)

    def attend(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        keys, values = (torch.cat((x, y.flatten(0, 1))).transpose(0, 1)[None] for x, y in ((k, kb), (v, vb)))
        query = q.flatten(0, 1).transpose(0, 1)[None]
        out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(q.shape)

    return attend


def report_times(
    backends: list[str], tokens: int, depth: int, dim: int, device: str, times: int = 5
) -> dict[str, tuple]:
    """Seconds of each backend and of the dense mask at one size, printed."""
    rows = rows_of([tokens], device)
    layout = kinds.test_time_training(rows, depth)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs = inputs_of(layout, rows, dim, dtype)
    found = {
        name: times_of(lambda *x, name=name: branch_attention(*x, rows=rows, branches=layout, backend=name),
                       inputs, device, times)
        for name in backends
    }  # fmt: skip
    found["dense mask"] = times_of(dense_mask_attention(rows, layout), inputs, device, times)
    for name, (forward, both) in found.items():
        print(f"\n{tokens} tokens, depth {depth}, head dim {dim}, {name}: "
              f"forward {forward * 1e3:.2f} ms, with backward {both * 1e3:.2f} ms", end="")  # fmt: skip
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dim"), [("passes", 64), ("passes", 80), ("passes", 256), ("unrolled", 128), ("blocks", 128)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_is_as_near_to_float64_as_flash_attention(backend, kind, dim):
    if "flash" in backend and kind == "blocks":
        pytest.skip("flash-attn has no kernel for cutoffs of blocks; that it says so is tested without a GPU")
    check(backend, kind, [700, 1, 323], dim, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["flex", "triton"])
def test_float32(backend):
    check(backend, "passes", [300, 1, 83], 64, torch.float32, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_one_after_another_give_the_whole_batch(backend, ranks):
    loopback(backend, [700, 5, 319], ranks, 64, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_input_gives_the_same_bits(backend):
    rows = rows_of([500, 13], "cuda")
    layout = kinds.test_time_training(rows, 4)
    inputs = inputs_of(layout, rows, 64, torch.bfloat16)
    one, two = (results(lambda *x: branch_attention(*x, rows=rows, branches=layout, backend=backend), inputs)
                for _ in range(2))  # fmt: skip
    assert all(map(torch.equal, one, two))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4096, 8192])
def test_times(tokens):
    assert report_times(BACKENDS, tokens, 4, 128, "cuda")


@pytest.mark.gpu
def test_times_of_one_rank_of_eight_at_256k():
    """Compute and memory of one rank, no communication: 32K rows against every other rank's keys in turn."""
    ranks, tokens, dim = 8, 262144, 128
    layout = zigzag_layout(torch.tensor([0, tokens]), ranks)
    own = Rows(layout.rows(3).document.cuda(), layout.rows(3).position.cuda())
    mine = kinds.test_time_training(own, 4)
    plans = [plan_trunk(*mine.main_view(), layout.rows(source)) for source in range(ranks)]
    q, k, v, kb, vb = (x.detach() for x in inputs_of(mine, own, dim, torch.bfloat16))
    for name in BACKENDS:
        backend = backend_of(name)

        def forward(backend=backend) -> Tensor:
            out, lse = (x.flatten(0, 1) for x in backend.branch_forward(q, kb, vb, mine.sees, dim**-0.5))
            for plan in plans:
                out, lse = merge(out, lse, *backend.trunk_forward(q.flatten(0, 1), k, v, plan, dim**-0.5))
            return out

        torch.cuda.reset_peak_memory_stats()
        took = timed(forward, "cuda", 3)
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"\n{tokens} tokens, one rank of {ranks}, {name}: forward {took * 1e3:.1f} ms, peak {peak:.2f} GiB", end=""
        )
        assert forward().isfinite().all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests above do this on the GPU")
@pytest.mark.parametrize("backend", ["cpu"] if os.environ.get("TRITON_INTERPRET") != "1" else ["triton+cpu"])
def test_this_script_on_a_cpu(backend):
    """Toy sizes, another backend in place of the GPU's: what the tests above call is right before a GPU is paid for."""
    for kind in ("passes", "unrolled", "blocks"):
        check(backend, kind, [10, 1, 5], 32, torch.float32, "cpu")
    check(backend, "passes", [10, 1, 5], 32, torch.bfloat16, "cpu")
    loopback(backend, [12, 3, 5], 2, 32, torch.float32, "cpu")
    loopback(backend, [12, 3, 5], 4, 32, torch.bfloat16, "cpu")
    found = report_times([backend], 32, 2, 32, "cpu", times=1)
    assert set(found) == {backend, "dense mask"}
    rows = rows_of([5, 2], "cpu")
    inputs = inputs_of(kinds.test_time_training(rows, 1), rows, 32, torch.float32)
    layout = kinds.test_time_training(rows, 1)
    one = dense_mask_attention(rows, layout)(*inputs)
    two = dense_branch_attention(*inputs, rows=rows, branches=layout)
    assert errors([one.double()], [two])[0] < 1e-6
    assert errors([torch.full_like(two, float("nan"))], [two]) == [float("inf")]
    plain = causal_attention(inputs[0][:, 0], *inputs[1:3], rows=rows, backend="cpu")
    assert plain.shape == inputs[0][:, 0].shape
