from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import VOCABULARY, make_batch

from furlong.ops.policy import attention
from furlong.ops.policy.attention import prefix_tree_attention
from furlong.ops.policy.packing import PackingError, check_batch, pack
from furlong.ops.protocols import TrainBatch

fields = ("tokens", "positions", "visible", "places", "place", "target", "trajectory", "offset")


def batch_of(prompts, group, replies, masks=None) -> TrainBatch:
    masks = masks or tuple((True,) * len(reply) for reply in replies)
    names = tuple(f"t{i}" for i in range(len(group)))
    zeros = tuple((0.0,) * len(reply) for reply in replies)
    return TrainBatch(1, 1.0, prompts, group, replies, zeros, masks, masks, (1.0,) * len(group), names)


def seen_by(micro, token):
    """The tokens that the position predicting this token attends to, in order of position."""
    flat = int(micro.places[micro.place[token]])
    row, query = divmod(flat, micro.tokens.shape[1])
    keys = micro.visible[row, 0, query].nonzero().flatten()
    positions = micro.positions[row, keys]
    assert sorted(positions.tolist()) == list(range(len(keys))), "positions count on from the sequence's start"
    return tuple(micro.tokens[row, keys[positions.argsort()]].tolist())


def assert_faithful(batch, masks, budget):
    """Every wanted token is there once, sees exactly its own prefix, and nothing is larger than the budget."""
    found = []
    for micro in pack(batch, masks, budget):
        assert micro.tokens.numel() <= budget
        assert micro.visible.diagonal(dim1=2, dim2=3).all(), "a query without a key would be NaN"
        for token, (index, offset) in enumerate(zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True)):
            prompt, reply = batch.prompts[batch.group[index]], batch.replies[index]
            assert seen_by(micro, token) == prompt + reply[:offset]
            assert int(micro.target[token]) == reply[offset]
            found.append((index, offset))
    wanted = [(i, t) for i, mask in enumerate(masks) for t, on in enumerate(mask) if on]
    assert sorted(found) == wanted


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    budget=st.integers(16, 200),
    letters=st.sampled_from([1, 2, 3, VOCABULARY]),
)
def test_each_token_sees_its_own_prefix(seed, sizes, budget, letters):
    batch = make_batch(seed, tuple(sizes), letters=letters)
    assert_faithful(batch, batch.masks, budget)


def test_prompt_and_common_beginnings_are_computed_once():
    batch = batch_of(((1, 2),), (0, 0, 0), ((5, 6, 7), (5, 6, 8), (9,)))
    (micro,) = pack(batch, batch.masks, 100)
    # Nodes: prompt 1 2, then 5 6; the last token of a reply is predicted, never fed.
    assert micro.tokens.tolist() == [[1, 2, 5, 6]]
    assert micro.positions.tolist() == [[0, 1, 2, 3]]
    assert micro.places.tolist() == [1, 2, 3]
    assert micro.place.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert micro.target.tolist() == [5, 6, 7, 5, 6, 8, 9]


def test_siblings_do_not_see_each_other():
    batch = batch_of(((1,),), (0, 0), ((5, 6), (7, 8)))
    (micro,) = pack(batch, batch.masks, 100)
    assert micro.tokens.tolist() == [[1, 5, 7]]
    assert micro.visible[0, 0].tolist() == [[True, False, False], [True, True, False], [True, False, True]]


def test_reply_is_cut_after_its_last_wanted_token_and_unwanted_trajectories_are_left_out():
    masks = ((True, False, False, False), (False,) * 3)
    batch = batch_of(((1, 2, 3),), (0, 0), ((5, 6, 7, 8), (9, 9, 9)), masks)
    (micro,) = pack(batch, masks, 100)
    assert micro.tokens.tolist() == [[1, 2, 3]]
    assert micro.trajectory.tolist() == [0]


def test_nothing_wanted_nothing_packed():
    batch = batch_of(((1,), (2,)), (0, 1), ((5,), ()), ((False,), ()))
    assert pack(batch, batch.masks, 100) == []


def test_group_larger_than_the_budget_is_spread_and_the_rest_fits():
    batch = make_batch(5, (6, 6), letters=VOCABULARY)
    rows = sum(micro.tokens.shape[0] for micro in pack(batch, batch.masks, 18))
    assert rows > 2
    assert_faithful(batch, batch.masks, 18)


def test_one_trajectory_larger_than_the_budget_is_an_error():
    batch = batch_of(((1, 2, 3),), (0,), ((5, 6, 7),))
    assert len(pack(batch, batch.masks, 5)) == 1
    with pytest.raises(PackingError, match=r"t0 needs 5 tokens.*micro_batch_tokens=4"):
        pack(batch, batch.masks, 4)


def test_longest_rows_first_and_the_same_every_time():
    batch = make_batch(11, (2, 5, 3, 4))
    one, two = (pack(batch, batch.masks, 40) for _ in range(2))
    widths = [micro.tokens.shape[1] for micro in one]
    assert widths == sorted(widths, reverse=True)
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantages": (1.0,)}, "1 advantages for 2 trajectories"),
        ({"logprobs": ((0.0,), (0.0,))}, "trajectory t0: 2 tokens, 1 log-probabilities"),
        ({"masks": ((True, True), ())}, "trajectory t1: 1 tokens, 1 log-probabilities, 0 mask"),
        ({"group": (0, 2)}, "trajectory t1: group 2 of 2"),
        ({"group": (0, -1)}, "trajectory t1: group -1 of 2"),
        ({"replies": ((1, VOCABULARY), (1,))}, "trajectory t0: a token outside"),
        ({"prompts": ((1,), ())}, "prompt of group 1 is empty"),
        ({"prompts": ((1,), (-1,))}, "prompt of group 1"),
        ({"prompts": ((1,) * 9, (1,))}, "trajectory t0: prompt and reply have 11 tokens, the model takes 10"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": float("nan")}, "temperature nan"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(change, message):
    good = batch_of(((1,), (2,)), (0, 1), ((3, 4), (5,)))
    check_batch(good, VOCABULARY, 10)
    with pytest.raises(PackingError, match=message):
        check_batch(replace(good, **change), VOCABULARY, 10)


def attention_case(width=6):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, n, width, 4, dtype=torch.float64, requires_grad=True) for n in (6, 2, 2))
    visible = torch.rand(2, 1, width, width) < 0.5
    visible |= torch.eye(width, dtype=torch.bool)
    return query, key, value, torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, float("-inf"))


@pytest.mark.parametrize("longest", [512, 1])
def test_attention_equals_one_head_at_a_time(monkeypatch, longest):
    monkeypatch.setattr(attention, "LONGEST_DENSE", longest)
    query, key, value, mask = attention_case()
    out, _ = prefix_tree_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.5)
    out.square().sum().backward()
    got = [out.detach(), *(x.grad for x in (query, key, value))]
    for x in (query, key, value):
        x.grad = None
    heads = [torch.softmax(0.5 * query[:, n] @ key[:, n // 3].mT + mask[:, 0], -1) @ value[:, n // 3] for n in range(6)]
    want = torch.stack(heads, 2)
    want.square().sum().backward()
    for one, other in zip(got, [want.detach(), *(x.grad for x in (query, key, value))], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("extra", [{"sliding_window": 4}, {"softcap": 30.0}, {"dropout": 0.1}])
def test_attention_refuses_what_it_would_have_to_ignore(extra):
    query, key, value, mask = attention_case()
    with pytest.raises(NotImplementedError, match=next(iter(extra))):
        prefix_tree_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.5, **extra)
