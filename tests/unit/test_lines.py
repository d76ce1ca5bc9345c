"""Lines hold every wanted token once, each document by itself, whatever the budget and the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import make_batch

from furlong.ops.policy.lines import NOBODY, empty_line, pack_lines
from furlong.ops.policy.packing import PackingError, pack
from furlong.ops.policy.routing import encode


def sequence(batch, index):
    return batch.prompts[batch.group[index]] + batch.replies[index]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), budget=st.integers(16, 90), multiple=st.sampled_from([1, 2, 4, 8, 12]))
def test_every_wanted_token_has_its_own_prefix(seed, budget, multiple):
    batch = make_batch(seed, (3, 1, 4), letters=5)
    if budget // multiple * multiple < 16:
        return
    lines = pack_lines(batch, batch.masks, budget, multiple)
    found = []
    for line in lines:
        width = line.tokens.shape[1]
        assert width % multiple == 0
        assert width <= budget
        assert len(line.places) == len(set(line.places.tolist())) == len(line.target)
        for at, target, index, offset in zip(
            line.places[line.place].tolist(),
            *(x.tolist() for x in (line.target, line.trajectory, line.offset)),
            strict=True,
        ):
            mine = (line.documents[0] == line.documents[0, at]) & (line.positions[0] <= line.positions[0, at])
            order = line.positions[0][mine].argsort()
            seen = len(batch.prompts[batch.group[index]]) + offset
            assert line.tokens[0][mine][order].tolist() == list(sequence(batch, index)[:seen])
            assert target == batch.replies[index][offset]
            found.append((index, offset))
    wanted = [(i, t) for i, mask in enumerate(batch.masks) for t, on in enumerate(mask) if on]
    assert sorted(found) == wanted
    packed = [zip(m.trajectory.tolist(), m.offset.tolist(), strict=True) for m in pack(batch, batch.masks, 90)]
    assert sorted(pair for pairs in packed for pair in pairs) == wanted


def test_padding_is_nobodys():
    batch = make_batch(1)
    (line,) = pack_lines(batch, batch.masks, 4096, 64)
    padding = line.documents == NOBODY
    assert padding.any()
    assert int(padding.sum()) < 64
    assert not line.tokens[padding].any()
    assert not line.positions[padding].any()
    assert not padding[0, line.places].any()


def test_lines_depend_on_the_batch_alone():
    batch = make_batch(2)
    once, again = (pack_lines(batch, batch.masks, 64, 4) for _ in range(2))
    assert [line.tokens.tolist() for line in once] == [line.tokens.tolist() for line in again]


def test_too_long_a_trajectory_is_named():
    batch = make_batch(3)
    with pytest.raises(PackingError, match=r"trajectory-\d needs \d+ tokens in one line.*micro_batch_tokens=7"):
        pack_lines(batch, batch.masks, 7, 4)


def test_nothing_wanted_is_no_line():
    batch = make_batch(4)
    assert pack_lines(batch, tuple((False,) * len(reply) for reply in batch.replies), 64, 4) == []


def test_experts_go_with_their_tokens():
    batch = make_batch(5)
    rng = np.random.default_rng(0)
    rows = {i: rng.permuted(np.tile(np.arange(8), (len(sequence(batch, i)), 2, 1)), axis=2)[..., :2] for i in (0, 3)}
    routing = tuple(encode(0, rows[i], (0, 2), 8) if i in rows else None for i in range(len(batch.replies)))
    lines = pack_lines(replace(batch, routing=routing), batch.masks, 64, 4)
    compared = 0
    for line in lines:
        assert line.experts.shape == (*line.tokens.shape, 2, 2)
        assert (line.experts[line.documents == NOBODY] == -1).all()
        for index in set(line.trajectory.tolist()):
            at = line.places[line.place[line.trajectory == index][0]]
            mine = line.documents == line.documents[0, at]
            if index in rows:
                expected = torch.from_numpy(rows[index][: int(mine.sum())])
                assert torch.equal(line.experts[mine], expected)
                compared += 1
            else:
                assert (line.experts[mine] == -1).all()
    assert compared == 2


def test_an_empty_line_fits_beside_others():
    batch = make_batch(6)
    line = pack_lines(batch, batch.masks, 64, 8)[0]
    empty = empty_line(line, 8)
    assert empty.tokens.shape == (1, 8)
    assert (empty.documents == NOBODY).all()
    assert len(empty.target) == 0
