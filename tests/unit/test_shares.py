"""How a step's rows are shared out over data-parallel ranks."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import make_batch

from furlong.ops.policy.packing import pack


def tokens_of(micro) -> list[tuple[int, int]]:
    return list(zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 500), budget=st.integers(16, 200), shares=st.integers(1, 5), size=st.integers(1, 12))
def test_shares_compute_the_same_tokens_in_as_few_rounds(seed, budget, shares, size):
    batch = make_batch(seed, (size, 2, size), letters=3)
    whole, shared = pack(batch, batch.masks, budget), pack(batch, batch.masks, budget, shares)
    every = [token for micro in shared for token in tokens_of(micro)]
    assert sorted(every) == sorted(token for micro in whole for token in tokens_of(micro))
    assert len(set(every)) == len(every)
    assert -(-len(shared) // shares) == -(-len(whole) // shares)
    largest = [max(micro.tokens.numel() for micro in micros) for micros in (shared, whole)]
    assert largest[0] <= largest[1] <= budget


def test_two_ranks_share_what_fits_into_one_micro_batch():
    batch = make_batch(3, (6, 6, 6, 6))
    assert len(pack(batch, batch.masks, 2048)) == 1
    one, other = (micro.tokens.numel() for micro in pack(batch, batch.masks, 2048, 2))
    assert one == other or min(one, other) > 0.4 * (one + other)


def test_one_share_is_what_one_rank_packs():
    batch = make_batch(3, (6, 6, 6))
    plain, one = pack(batch, batch.masks, 64), pack(batch, batch.masks, 64, 1)
    assert [tokens_of(micro) for micro in plain] == [tokens_of(micro) for micro in one]


def test_nothing_to_share():
    batch = make_batch(3)
    assert pack(batch, tuple((False,) * len(mask) for mask in batch.masks), 64, 3) == []
