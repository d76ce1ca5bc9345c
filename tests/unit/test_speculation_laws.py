"""Replies drawn with trees and blocks have the policy's distribution: exactly, by what the engine calls, and as counted."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import verified_law
from speculation_samples import ALWAYS, KINDS, run
from verified_law import Model, distance, joint_law, true_law

from furlong.ops.draft.block_drafter import BlockDrafter
from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.start import start_draft
from furlong.ops.draft.verify import Numbers
from furlong.ops.policy import feed as feeds
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.draft_tree import nodes_of
from furlong.ops.policy.feed import Feed, drawn
from furlong.ops.policy.live import Live
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.score import score
from furlong.ops.policy.tree_attention import Tree
from furlong.ops.protocols import GenerateRequest

ROUNDING = 1e-6
"""As in test_draft_verify.py: of float32 shares of 1, and of steps found to 2^-27."""


@dataclass
class Answer:
    accepted: torch.Tensor
    nodes: torch.Tensor
    tokens: torch.Tensor


@pytest.fixture
def engines_own(monkeypatch):
    """Have laws computed from what the engine's step asks, `feed.drawn`, for feeds as a draft fills them."""

    def run(box, which, draw, accept):
        asked = [fed(box, instance) for instance in which]
        kept = [[0, *(at + 1 for at in range(len(box.parents) - 1) if at < len(feed.proposals))] for feed in asked]
        there = [torch.stack([box._policy[i][at] for at in places]) for i, places in zip(which, kept, strict=True)]
        numbers = type("Numbers", (), {"of": staticmethod(lambda *_: Numbers(draw, accept))})
        monkeypatch.setattr(feeds, "Numbers", numbers)
        told = drawn(asked, torch.cat(there), "rejection", None)
        accepted = torch.tensor([len(tokens) - 1 for tokens in told])
        nodes, tokens = (torch.full((len(which), box.depth + 1), -1) for _ in range(2))
        for row, (feed, found) in enumerate(zip(asked, told, strict=True)):
            assert len(feed.path) == len(found)
            nodes[row, : len(found)] = torch.tensor(feed.path)
            tokens[row, : len(found)] = torch.tensor([token for token, _, _ in found])
        return Answer(accepted, nodes, tokens)

    monkeypatch.setattr(verified_law._Box, "run", run)


def fed(box, instance):
    """As a draft fills it: nothing comes after a sibling's double."""
    rules = {"temperature": 1.0} | box._rules
    feed = Feed(Reply(GenerateRequest("r", (1,), 0, 9, **rules)), 1)
    tokens, parents = box._tokens[instance].tolist(), box.parents
    double = {
        at for at in range(1, len(parents)) for other in range(1, at)
        if (parents[other], tokens[other]) == (parents[at], tokens[at])
    }  # fmt: skip
    last = len(parents)
    while last > 1 and parents[last - 1] in double:
        last -= 1
    assert not double & set(parents[:last])
    feed.proposals = tokens[1:last]
    sources = sorted({parents[at] for at in range(1, last)})
    feed.laws = [box._drafted[instance][node] for node in sources]
    if parents[:last] != list(range(-1, last - 1)) or len(box.parents) == len(TREE):
        feed.tree, feed.sources = Tree(None, 0), sources
        feed.tree.add(parents[:last])
    return feed


TREE = [-1, 0, 0, 1, 1, 2, 2]
"""`draft.width: 2`, two levels."""


class Blocks(Model):
    """A draft whose proposals do not know each other: its law is that of the reply's tokens and the place after them."""

    def logits(self, who, context):
        if who == "draft":
            base = BASE[0]
            context = (*context[:base], -1 - (len(context) - base))
        return super().logits(who, context)


BASE = [0]


def test_trees_give_three_tokens_exactly_the_policys_distribution(engines_own):
    assert nodes_of(2, 2) == len(TREE) - 1
    model = Model(2, 5)
    law = joint_law(model, 3, lambda left: TREE if left > 2 else [-1, 0, 0])
    assert distance(law, true_law(model, 3)) < ROUNDING


def test_blocks_give_three_tokens_exactly_the_policys_distribution(engines_own):
    model = Blocks(3, 5)

    def shape(left):
        BASE[0] = 3 - left
        return list(range(-1, min(2, left)))

    assert distance(joint_law(model, 3, shape), true_law(model, 3)) < ROUNDING


@pytest.mark.parametrize("rule", [pytest.param("match", marks=pytest.mark.slow), "rejection"])
@pytest.mark.parametrize("shape", [{"width": 2}, {"width": 3}, {"kind": "block"}], ids=str)
@pytest.mark.parametrize("count", [600, pytest.param(2000, marks=pytest.mark.slow)])
def test_replies_have_the_policys_law(rule, shape, count):
    """Three tokens from a vocabulary of 5, a draft with the policy's own head: chi-square against the exact distribution."""
    arch = replace(KINDS["llama"], vocab=5, layers=2)
    draw = torch.Generator().manual_seed(4)
    tensors = {
        n: torch.ones(s) if "norm" in n else torch.randn(s, generator=draw) * 0.15 for n, s in arch.shapes().items()
    }
    settings = replace(ALWAYS, verify=rule, proposals=2, **shape)
    made, found_shape = start_draft(settings, arch, tensors, 0)
    kind = BlockDrafter if settings.kind == "block" else Drafter
    weights = Live(0, Decoder(arch, tensors), serial=1, drafter=kind(found_shape, made, torch.float32))
    asked = [GenerateRequest(str(i), (1, 2), 10**6 + i, 3, 1.0) for i in range(count)]
    found, batch, _ = run(asked, weights, settings)
    assert 1.1 < batch.speculation()["acceptance_length"] < 2.7
    replies = np.array([found[r.request_id][0] for r in asked])
    rows = [((1, 2, a, b, c), 2) for a in range(5) for b in range(5) for c in range(5)]
    chances = np.exp([sum(row) for row in score(weights.decoder, rows, 1.0)])
    assert abs(chances.sum() - 1) < 1e-5
    counts = np.bincount(replies @ [25, 5, 1], minlength=125)
    few = chances * count < 5
    cells = [(counts[~few], chances[~few]), (counts[few].sum(keepdims=True), chances[few].sum(keepdims=True))]
    seen, wanted = (np.concatenate(column) for column in zip(*cells, strict=True))
    statistic = ((seen - wanted * count) ** 2 / (wanted * count + 1e-12)).sum()
    freedom = len(seen) - 1
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, "mean and four standard deviations"
