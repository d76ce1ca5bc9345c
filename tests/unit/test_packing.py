import random
from dataclasses import replace

import pytest
import torch
from expert_records import LAYERS, TOP_K, altered, drawn, with_partial_records, with_records
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import VOCABULARY, make_batch

from furlong.ops.policy import attention
from furlong.ops.policy.attention import prefix_tree_attention
from furlong.ops.policy.packing import PackingError, check_batch, empty_like, pack
from furlong.ops.policy.routing import RoutingError, decode
from furlong.ops.protocols import TrainBatch

fields = ("tokens", "positions", "visible", "places", "place", "target", "trajectory", "offset")


def batch_of(prompts, group, replies, masks=None, routing=None) -> TrainBatch:
    ones = (1.0,) * len(group)
    return TrainBatch(
        step=1,
        temperature=1.0,
        prompts=prompts,
        group=group,
        replies=replies,
        logprobs=tuple((0.0,) * len(reply) for reply in replies),
        masks=masks or tuple((True,) * len(reply) for reply in replies),
        sampled_by=tuple((0,) * len(reply) for reply in replies),
        version=0,
        advantages=ones,
        rewards=ones,
        routing=routing or (None,) * len(group),
        trajectory_ids=tuple(f"t{i}" for i in range(len(group))),
    )


def path_to(micro, token):
    """Row, and columns in order of position, that the position predicting this token attends to."""
    flat = int(micro.places[micro.place[token]])
    row, query = divmod(flat, micro.tokens.shape[1])
    keys = micro.visible[row, 0, query].nonzero().flatten()
    positions = micro.positions[row, keys]
    assert sorted(positions.tolist()) == list(range(len(keys))), "positions count on from the sequence's start"
    return row, keys[positions.argsort()]


def experts_of(batch, index, length):
    """The recorded experts of a trajectory's first tokens, worked out without the packing's own code."""
    experts = torch.full((length, len(LAYERS), TOP_K), -1)
    if (record := batch.routing[index]) is not None:
        for row, ids in enumerate(decode(record).tolist()):
            if record.first + row < length:
                experts[record.first + row] = torch.tensor(ids)
    return experts


def assert_faithful(batch, masks, budget):
    """Every wanted token is there once, sees exactly its own prefix, and nothing is larger than the budget."""
    found = []
    for micro in pack(batch, masks, budget):
        assert micro.tokens.numel() <= budget
        assert micro.visible.diagonal(dim1=2, dim2=3).all(), "a query without a key would be NaN"
        for token, (index, offset) in enumerate(zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True)):
            prompt, reply = batch.prompts[batch.group[index]], batch.replies[index]
            row, path = path_to(micro, token)
            assert tuple(micro.tokens[row, path].tolist()) == prompt + reply[:offset]
            if micro.experts is not None:
                assert torch.equal(micro.experts[row, path], experts_of(batch, index, len(path)))
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


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    budget=st.integers(16, 200),
    letters=st.sampled_from([1, 3, VOCABULARY]),
    records=st.sampled_from([with_records, with_partial_records]),
)
def test_each_token_has_its_own_record_of_experts(seed, sizes, budget, letters, records):
    batch = records(make_batch(seed, tuple(sizes), letters=letters), seed)
    assert_faithful(batch, batch.masks, budget)


def test_only_what_was_routed_alike_is_shared():
    rng = random.Random(1)
    one = drawn(rng, 0, 4)
    same = batch_of(((1, 2),), (0, 0), ((5, 6, 7), (5, 6, 8)), routing=(one, one))
    assert pack(same, same.masks, 100)[0].tokens.tolist() == [[1, 2, 5, 6]]
    other = altered(one, 1, 1, (5, 4))
    assert decode(one)[1, 1].tolist() != [5, 4]
    for routing in ((one, other), (one, None), (None, one)):
        (micro,) = pack(replace(same, routing=routing), same.masks, 100)
        # From the first token on that went elsewhere; without a record, from the first.
        assert micro.tokens.tolist() == [[1, 2, 5, 6, 2, 5, 6] if other in routing else [1, 2, 5, 6] * 2]
    apart = replace(same, routing=(one, altered(one, 0, 0, (5, 4))))
    assert pack(apart, same.masks, 100)[0].experts.shape == (1, 8, 2, 2)


def test_without_any_record_there_is_nothing_to_replay():
    batch = batch_of(((1, 2),), (0,), ((5,),))
    (micro,) = pack(batch, batch.masks, 100)
    assert micro.experts is None
    assert empty_like(micro).experts is None


def test_padding_and_the_empty_micro_batch_have_no_record():
    batch = with_records(batch_of(((1,), (2,)), (0, 1), ((5, 6, 7), (5, 6))))
    (micro,) = pack(batch, batch.masks, 100)
    assert micro.tokens.shape == (2, 3)
    assert (micro.experts[1, 2] == -1).all()
    assert (micro.experts[1, :2] >= 0).all()
    empty = empty_like(micro)
    assert empty.experts.tolist() == [[[[-1, -1], [-1, -1]]]]
    assert empty.tokens.shape == empty.positions.shape == (1, 1)
    assert bool(empty.visible.all())
    assert all(getattr(empty, name).numel() == 0 for name in ("places", "place", "target", "trajectory", "offset"))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            lambda rng: drawn(rng, 0, 4),
            "trajectory t1: experts are recorded for positions 0 to 4, but .* have 3 tokens",
        ),
        (lambda rng: drawn(rng, 3, 1), "trajectory t1: experts are recorded for positions 3 to 4"),
        (lambda rng: replace(drawn(rng, 0, 2), data=b"torn"), "trajectory t1: routing of positions 0 to 2: zstd"),
        (
            lambda rng: replace(drawn(rng, 0, 2), rows=1),
            r"trajectory t1: routing of positions 0 to 1: the data hold 8 by",
        ),
        (
            lambda rng: drawn(rng, 0, 2, layers=(0, 1)),
            r"trajectory t1: its experts were recorded as .*\(\(0, 1\), 2, 6\)",
        ),
        (lambda rng: drawn(rng, 0, 2, top_k=3), "trajectory t1: its experts were recorded as .*3, 6"),
        (lambda rng: drawn(rng, 0, 2, experts=7), "trajectory t1: its experts were recorded as .*2, 7"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(record, message):
    rng = random.Random(1)
    batch = batch_of(((1,), (2,)), (0, 1), ((5, 6), (5, 6)), routing=(drawn(rng, 0, 2), record(rng)))
    with pytest.raises(RoutingError, match=message):
        pack(batch, batch.masks, 100)


def test_a_record_may_cover_the_last_token_too():
    """Which is predicted, never fed: an engine that went on, or was asked to score, has routed it."""
    batch = batch_of(((1,),), (0,), ((5, 6),), routing=(drawn(random.Random(1), 0, 3),))
    (micro,) = pack(batch, batch.masks, 100)
    assert torch.equal(micro.experts[0], experts_of(batch, 0, 2))


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
        ({"rewards": ()}, "0 rewards for 2 trajectories"),
        ({"routing": (None,)}, "1 routing for 2 trajectories"),
        ({"sampled_by": ((0,), (0,))}, "trajectory t0: 2 tokens, 2 log-probabilities, 2 mask entries and 1 versions"),
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
