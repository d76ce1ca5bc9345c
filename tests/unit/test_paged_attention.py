"""Attention over pages against float64, and what keeps a token's bits the same: sums, threads and dtypes."""

import pytest
import torch

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.gated import gated
from furlong.ops.policy.kv_cache import PAGE, KVCache
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.row_bits import alone, row_bits, threads_for_products

HEADS, KV_HEADS, DIM = 6, 2, 12
SHAPE = Architecture("llama", 64, 72, 1, HEADS, KV_HEADS, DIM, 64, 1e-5, 1e4, 4096, True)


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    try:
        yield request.param
    finally:
        torch.set_num_threads(before)


def rows_of(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, HEADS + 2 * KV_HEADS, DIM, generator=generator) * 2 for n in lengths]


def attend(rows, chunks, dtype):
    """Each reply's rows fed in its chunks, all replies' next chunks in one step: what each token saw."""
    cache = KVCache(SHAPE, dtype, 64 * 2**20)
    held, fed = [cache.open() for _ in rows], [0] * len(rows)
    seen = [torch.zeros(0, HEADS * DIM) for _ in rows]
    plans = [list(some) for some in chunks]
    while any(plans):
        now = sorted((i for i, some in enumerate(plans) if some), key=lambda i: plans[i][0] > 1)
        spans = []
        for i in now:
            count = plans[i].pop(0)
            cache.extend(held[i], fed[i] + count)
            spans.append(Span(held[i], fed[i], count))
        x = torch.cat([rows[i][span.first : span.first + span.count] for i, span in zip(now, spans, strict=True)])
        out = Plan(spans, cache).attend(0, x[:, :HEADS], x[:, HEADS:])
        for i, part in zip(now, out.split([span.count for span in spans]), strict=True):
            seen[i] = torch.cat([seen[i], part])
            fed[i] += len(part)
    assert fed == [len(row) for row in rows]
    return seen


def exact(row, dtype):
    """softmax(ln 2 Q K^T) V in float64, of keys and values as the cache keeps them."""
    q, k, v = row.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    k, v = (x.to(dtype).double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q.double(), k) * torch.log(torch.tensor(2.0, dtype=torch.float64))
    scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("nqk,knd->qnd", torch.softmax(scores, -1), v).flatten(1)


def odd_chunks(total):
    found = []
    for count in (1, 17, 2, 16, 31, 1, 64, 1, total):
        found.append(min(count, total - sum(found)))
    return [count for count in found if count]


LENGTHS = (1, 3, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE + 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_matches_float64(dtype, threads):
    """Scores reach 100, so rounding them to 2^-17 is what limits agreement: 1e-4 of values of size 2, measured 1e-5."""
    rows = rows_of(LENGTHS, 1)
    for row, got in zip(rows, attend(rows, [[len(row)] for row in rows], dtype), strict=True):
        assert (got.double() - exact(row, dtype)).abs().max() <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_the_same_in_chunks_and_company(dtype, threads):
    rows = rows_of(LENGTHS, 2)
    alone_ = [attend([row], [[len(row)]], dtype)[0] for row in rows]
    one_by_one = attend(rows, [[1] * len(row) for row in rows], dtype)
    odd = [odd_chunks(len(row)) for row in rows]
    in_chunks = attend(rows, odd, dtype)
    for want, *others in zip(alone_, one_by_one, in_chunks, strict=True):
        assert all(torch.equal(other, want) for other in others)


def test_far_scores_leave_zero_and_nothing_else(threads):
    """A key 2^-20000 as likely as another, in another page and masked ones beside it: no NaN, and exact values."""
    row = torch.zeros(PAGE + 2, HEADS + 2 * KV_HEADS, DIM)
    row[:, :HEADS] = 10.0
    row[0, HEADS : HEADS + KV_HEADS], row[0, HEADS + KV_HEADS :] = 100.0, 3.0
    row[1:, HEADS : HEADS + KV_HEADS], row[1:, HEADS + KV_HEADS :] = -100.0, 5.0
    for got in attend([row, row], [[len(row)], [1] * len(row)], torch.float32):
        assert torch.equal(got, torch.full_like(got, 3.0))


def test_a_nan_stays_with_its_reply(threads):
    rows = rows_of((70, 70, 5), 3)
    want = attend(rows, [[len(row)] for row in rows], torch.float32)
    broken = [rows[0], torch.full_like(rows[1], float("nan")), rows[2]]
    for how in ([[len(row)] for row in rows], [[1] * len(row) for row in rows]):
        got = attend(broken, how, torch.float32)
        assert bool(got[1].isnan().all())
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[2], want[2])


def test_sums_over_pages_are_taken_in_order():
    """What the sums over pages are built on: from zero, one after the other, whatever bags are beside it."""
    generator = torch.Generator().manual_seed(4)
    for width in (1, 24, 768):
        terms = torch.randn(60, width, generator=generator)
        order = torch.randperm(60, generator=generator)
        for sizes in ([1, 59], [20, 20, 20], [3, 1, 40, 16]):
            starts = torch.tensor([0, *sizes[:-1]]).cumsum(0)
            found = torch.embedding_bag(terms, order, starts)[0]
            for at, size, got in zip(starts.tolist(), sizes, found, strict=True):
                want = torch.zeros(width)
                for term in terms[order[at : at + size]]:
                    want = want + term
                assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [20, 64, 80, 1536])
def test_the_activation_has_the_same_bits_for_any_rows_and_threads(dtype, width, threads):
    both = torch.randn(101, 2 * width, generator=torch.Generator().manual_seed(5)).to(dtype) * 4
    whole = gated(both)
    for count in (1, 2, 3, 16, 33):
        assert torch.equal(torch.cat([gated(part) for part in both.split(count)]), whole)
    gate, up = both.double().chunk(2, -1)
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    assert ((whole - torch.nn.functional.silu(gate) * up) / (1 + (gate * up).abs())).abs().max() <= bound


def test_thread_counts_are_put_back(threads):
    def fail():
        raise ArithmeticError

    assert alone(torch.get_num_threads) == 1
    for within in (lambda: alone(fail), lambda: _products_fail(fail)):
        with pytest.raises(ArithmeticError):
            within()
        assert torch.get_num_threads() == threads


def _products_fail(fail):
    with row_bits(True), threads_for_products():
        assert torch.get_num_threads() == 1
        fail()
