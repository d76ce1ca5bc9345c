"""Verification of proposals: the exact law, chi-square over many replies, mutants that must fail, and the edges."""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from verified_law import BELOW_ONE, Model, distance, joint_law, law_of_a_step, rules_of, true_law

from furlong.ops.draft import verify
from furlong.ops.draft.proposed import Drafted, Proposed
from furlong.ops.draft.verify import Numbers, accept_stream, match, propose_stream, rejection
from furlong.ops.policy.sampling import draw, laws_of, uniforms

ROUNDING = 1e-6
"""Of float32 shares of 1, and of steps found to 2^-27; measured 4e-8."""
SHAPES = {
    "chain": lambda left: list(range(-1, min(2, left))),
    "tree": lambda left: {3: [-1, 0, 0, 1, 1], 2: [-1, 0, 0], 1: [-1]}[left],
    "wide, then a chain": lambda left: {3: [-1, 0, 0, 0], 2: [-1, 0, 1], 1: [-1, 0]}[left],
}
STEPS = {"chain": [-1, 0, 1], "two": [-1, 0, 0], "three": [-1, 0, 0, 0], "tree": [-1, 0, 0, 2, 2]}
CUTS = {"hot": {"temperature": 1.7}, "cold": {"temperature": 0.4}, "cut": {"top_k": 2}}


@pytest.mark.parametrize("shape", SHAPES)
def test_three_tokens_have_exactly_the_policys_distribution(shape):
    """Steps of other shapes follow each other, as the number of proposals may change under way."""
    model = Model(3, 5)
    assert distance(joint_law(model, 3, SHAPES[shape]), true_law(model, 3)) < ROUNDING


def first_token(law):
    found = {}
    for tokens, weight in law.items():
        found[tokens[:1]] = found.get(tokens[:1], 0.0) + weight
    return found


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_law_of_one_step(step, seed):
    model = Model(3, seed, spread=3.0)
    law, _ = law_of_a_step(model, (), STEPS[step])
    assert distance(first_token(law), true_law(model, 1)) < ROUNDING


@pytest.mark.parametrize("cut", CUTS)
def test_rules_are_part_of_the_law(cut):
    model = Model(3, 3, rules=CUTS[cut])
    p = true_law(model, 1)
    if "top_k" in CUTS[cut]:
        kept = sorted(p, key=p.get, reverse=True)[:2]
        p = {key: p[key] / sum(p[k] for k in kept) for key in kept}
    law, _ = law_of_a_step(model, (), [-1, 0, 0])
    assert distance(first_token(law), p) < ROUNDING


def test_as_many_are_kept_as_p_and_q_overlap():
    """E[kept] of a chain is sum min(p, q) at the first, and given that it is kept, at the next."""
    model = Model(3, 4)
    p, q = (lambda who: lambda context: model.chances(who, context))("policy"), lambda c: model.chances("draft", c)
    first = torch.minimum(p(()), q(()))
    want = first.sum() + sum(first[x] * torch.minimum(p((x,)), q((x,))).sum() for x in range(3))
    _, kept = law_of_a_step(model, (), [-1, 0, 1])
    assert abs(kept - want.item()) < ROUNDING


def not_clamped(p, q):
    rest = (p - q).abs()
    return rest / rest.sum(-1, keepdim=True)


def not_subtracted(p, q):
    return p


def turned(numbers, p, q):
    return numbers * p < q


def always(numbers, p, q):
    return np.ones(len(p), dtype=np.bool_)


class BonusFromDraft(verify._Rejection):
    """Draws what comes after kept proposals from the distribution of the last one."""

    def last(self, walked):
        accepted, _ = verify._ends(self._proposed, walked)
        replies = np.arange(len(walked))
        node = walked[replies, (accepted - 1).clip(0)]
        law = self._drafted.chances[torch.from_numpy(self._rows[replies, node])]
        numbers = self._numbers.draw[torch.from_numpy(replies), torch.from_numpy(accepted)]
        drawn = verify.invert(law, law.sum(-1).double(), numbers).numpy()
        return np.where(accepted == self._proposed.depth, drawn, super().last(walked))


MUTANTS = {
    "residual without clamping": ("residual", not_clamped),
    "residual without subtracting": ("residual", not_subtracted),
    "accept with q/p": ("keeps", turned),
    "accept all": ("keeps", always),
    "bonus from q": ("_Rejection", BonusFromDraft),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_has_another_law(mutant, monkeypatch):
    """So the tests above would see it."""
    name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(verify, name, wrong)
    model = Model(3, 5)
    law = joint_law(model, 2, lambda left: list(range(-1, left - 1))) if mutant == "bonus from q" else None
    law = law or first_token(law_of_a_step(model, (), [-1, 0, 0])[0])
    assert distance(law, true_law(model, len(next(iter(law))))) > 1e-2


class Chain:
    """Many replies at once, whose next token depends on the last one only: decoded in steps of k proposals."""

    def __init__(self, vocabulary, seed, ids=None):
        generator = torch.Generator().manual_seed(seed)
        self.policy = 1.3 * torch.randn(vocabulary, vocabulary, generator=generator)
        self.ids = ids
        drafted = vocabulary if ids is None else len(ids)
        self.draft = self.policy if ids is None else self.policy[:, ids]
        self.draft = self.draft + torch.randn(vocabulary, drafted, generator=generator)

    def decode(self, seeds, k, width, horizon, rules, propose=propose_stream):
        """The first tokens of each reply, after token 0."""
        n = len(seeds)
        found = torch.zeros((n, horizon + k + 1), dtype=torch.int64)
        count = torch.ones(n, dtype=torch.int64)  # the prompt is token 0
        while (count <= horizon).any():
            at = torch.arange(n)
            last = found[at, count - 1]
            proposed, drafted = self.propose(seeds, count.numpy() - 1, last, k, width, rules, propose)
            logits = self.policy[torch.where(proposed.parents < 0, last[:, None], proposed.tokens)].flatten(0, 1)
            numbers = Numbers.of(seeds, count.numpy() - 1, proposed)
            verified = rejection(logits, rules, proposed, numbers, drafted)
            for later in range(verified.tokens.shape[1]):
                on = (later <= verified.accepted) & (count + later < found.shape[1])
                found[at[on], count[on] + later] = verified.tokens[on, later]
            count = torch.minimum(count + verified.accepted + 1, torch.tensor(found.shape[1] - 1))
        return found[:, 1 : horizon + 1]

    def propose(self, seeds, positions, last, k, width, rules, propose):
        """A chain of k, or `width` children of node 0 and nothing more."""
        tokens, chances = [], []
        for place in range(k):
            depth, child = (place, 0) if width == 1 else (0, place)
            laws = laws_of(self.draft[last], rules)
            numbers = torch.from_numpy(uniforms(seeds, positions + depth, propose(child)))
            drawn = laws.draw(numbers)
            tokens.append(drawn if self.ids is None else self.ids[drawn])
            chances.append(laws.chances)
            last = tokens[-1] if width == 1 else last
        tokens, chances = torch.stack(tokens, 1), torch.stack(chances, 1)
        if width == 1:
            return Proposed.chains(tokens), Drafted.chains(chances, self.ids)
        parents = torch.tensor([[-1] + [0] * k]).expand(len(tokens), -1)
        drafted = Drafted(chances[:, 0], torch.arange(len(tokens))[:, None].expand(-1, k + 1), self.ids)
        return Proposed(torch.cat([torch.full((len(tokens), 1), -1), tokens], 1), parents), drafted


def chi_square(found, policy, heat=1.0):
    """How likely counts as far from the policy's distribution of three tokens are."""
    p = torch.softmax(policy.double() / heat, -1)
    V = len(p)
    want = (p[0][:, None, None] * p[:, :, None] * p[None, :, :]).flatten()
    counts = torch.bincount((found[:, 0] * V + found[:, 1]) * V + found[:, 2], minlength=V**3).double()
    want = want * len(found)
    few = want < 5  # taken together, as the approximation needs
    groups = [torch.cat([x[~few], x[few].sum()[None]]).numpy() for x in (counts, want)]
    keep = groups[1] > 0
    return stats.chisquare(groups[0][keep], groups[1][keep] * groups[0].sum() / groups[1][keep].sum()).pvalue


def decoded(chain, k, width, parts, temperature=1.0, **more):
    """Ten thousand replies a part."""
    found = []
    for part in range(parts):
        seeds = np.arange(10_000, dtype=np.uint64) * np.uint64(7919) + np.uint64(part * 100_000_007)
        found.append(chain.decode(seeds, k, width, 3, rules_of(len(seeds), temperature), **more))
    return torch.cat(found)


@pytest.mark.parametrize(("k", "width", "reduced", "parts"), [(3, 1, False, 10), (2, 2, False, 4), (2, 1, True, 4)])
def test_chi_square_of_a_hundred_thousand_replies(k, width, reduced, parts):
    """With the numbers that replies are really drawn with, which must be independent where the proof says so. (A tree and
    a reduced vocabulary have fewer.)"""
    chain = Chain(5, 1, torch.tensor([1, 3, 4]) if reduced else None)
    assert chi_square(decoded(chain, k, width, parts, 0.8), chain.policy, 0.8) > 1e-3


def test_chi_square_sees_a_proposal_drawn_with_the_policys_number():
    chain = Chain(5, 1)
    assert chi_square(decoded(chain, 3, 1, 1, propose=lambda child: 0), chain.policy) < 1e-9


def random_case(seed, replies=40, vocabulary=50, nodes=9):
    """Trees of all shapes with random logits; some replies greedy, some cut."""
    generator, numbers = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    parents = np.full((replies, nodes), -1)
    for reply, count in enumerate(numbers.integers(1, nodes + 1, replies)):
        parents[reply, 1:count] = [numbers.integers(0, node) for node in range(1, count)]
    tokens = torch.randint(0, vocabulary, (replies, nodes), generator=generator)
    proposed = Proposed(tokens, torch.from_numpy(parents))
    logits = 2 * torch.randn(len(proposed.owners), vocabulary, generator=generator)
    rules = rules_of(replies)
    rules.temperatures[::3] = 0.0
    rules.temperatures[1::3] = 0.7
    rules.top_k[::4], rules.top_p[::5] = 8, 0.9
    seeds, positions = np.arange(replies, dtype=np.uint64) + np.uint64(seed), numbers.integers(0, 90, replies)
    return proposed, logits, rules, seeds, positions


@pytest.mark.parametrize("seed", range(6))
def test_matched_tokens_are_those_drawn_without_a_draft(seed):
    """Half of the proposals are what would be drawn, so that walks are long; the rest are anything."""
    proposed, logits, rules, seeds, positions = random_case(seed)
    depth = positions[proposed.owners] + proposed.depths[proposed.there]
    drawn = draw(
        logits,
        rules.of(proposed.owners),
        torch.from_numpy(uniforms(seeds[proposed.owners], depth)),
    )
    for reply, node in itertools.product(range(40), range(1, 9)):
        if proposed.there[reply, node] and (reply + node + seed) % 2:
            proposed.tokens[reply, node] = drawn.tokens[proposed.rows[reply, proposed.parents[reply, node]]]
    found = match(logits, rules, proposed, Numbers.of(seeds, positions, proposed))
    assert found.accepted.max() >= 2
    assert (found.accepted == 0).any()
    for reply in range(40):
        node = 0
        for place in range(proposed.depth + 1):
            row = proposed.rows[reply, node]
            for mine, want in ((found.tokens, drawn.tokens), (found.logprobs, drawn.logprobs),
                               (found.model_logprobs, drawn.model_logprobs)):  # fmt: skip
                assert mine[reply, place] == want[row]
            same = [
                n
                for n in range(9)
                if proposed.parents[reply, n] == node and proposed.tokens[reply, n] == drawn.tokens[row]
            ]
            assert found.nodes[reply, place] == node
            if not same:
                assert found.accepted[reply] == place
                break
            node = same[0]


def drafted_of(proposed, vocabulary, seed=0):
    """Any distribution for every node."""
    b, nodes = proposed.parents.shape
    logits = torch.randn(b * nodes, vocabulary, generator=torch.Generator().manual_seed(seed))
    return Drafted(laws_of(logits, rules_of(b * nodes)).chances, torch.arange(b * nodes).view(b, nodes))


@pytest.mark.parametrize("seed", range(4))
def test_greedy_and_empty_proposals_are_the_same_under_both_rules(seed):
    proposed, logits, rules, seeds, positions = random_case(seed)
    rules.temperatures[:] = 0.0
    numbers = Numbers.of(seeds, positions, proposed)
    found = [match(logits, rules, proposed, numbers)]
    found.append(rejection(logits, rules, proposed, numbers, drafted_of(proposed, 50)))
    for name in ("accepted", "nodes", "tokens"):
        assert torch.equal(*(getattr(one, name) for one in found))
    assert torch.equal(found[0].logprobs.nan_to_num(1), found[1].logprobs.nan_to_num(1))
    best = logits[proposed.rows[:, 0]].argmax(-1)
    assert torch.equal(found[0].tokens[:, 0], best)
    rules.temperatures[1::2] = 0.9
    nothing = Proposed(torch.full((40, 1), -1), torch.full((40, 1), -1))
    roots = logits[proposed.rows[:, 0]]
    want = draw(roots, rules, torch.from_numpy(uniforms(seeds, positions)))
    numbers = Numbers.of(seeds, positions, nothing)
    for one in (
        match(roots, rules, nothing, numbers),
        rejection(roots, rules, nothing, numbers, drafted_of(nothing, 50)),
    ):
        assert torch.equal(one.tokens[:, 0], want.tokens)
        assert torch.equal(one.logprobs[:, 0], want.logprobs)
        assert torch.equal(one.model_logprobs[:, 0], want.model_logprobs)
        assert not one.accepted.any()


@pytest.mark.parametrize("seed", range(4))
def test_recorded_log_probabilities_are_the_policys(seed):
    """To the bit what `draw` records for the token in the same row, never the residual's or the draft's."""
    proposed, logits, rules, seeds, positions = random_case(seed)
    found = rejection(logits, rules, proposed, Numbers.of(seeds, positions, proposed), drafted_of(proposed, 50))
    for reply in range(40):
        for place in range(found.accepted[reply] + 1):
            row = proposed.rows[reply, found.nodes[reply, place]]
            token, grid = found.tokens[reply, place], torch.linspace(0, 1, 4000, dtype=torch.float64)
            mine = rules.of(np.full(4000, reply))
            drawn = draw(logits[row].expand(4000, -1), mine, grid)
            at = (drawn.tokens == token).nonzero()
            if len(at):
                assert found.logprobs[reply, place] == drawn.logprobs[at[0, 0]]
                assert found.model_logprobs[reply, place] == drawn.model_logprobs[at[0, 0]]
            slow = torch.log_softmax(logits[row].double(), -1)[token]
            assert abs(found.model_logprobs[reply, place] - slow) < 4e-6


@pytest.mark.parametrize("seed", range(3))
def test_company_and_fillings_change_nothing(seed):
    proposed, logits, rules, seeds, positions = random_case(seed)
    drafted = drafted_of(proposed, 50)
    together = rejection(logits, rules, proposed, Numbers.of(seeds, positions, proposed), drafted)
    for reply in range(0, 40, 7):
        count = int(np.flatnonzero(proposed.there[reply]).max()) + 1
        one = Proposed(proposed.tokens[reply : reply + 1, :count], proposed.parents[reply : reply + 1, :count])
        numbers = Numbers.of(seeds[[reply]], positions[[reply]], one)
        mine = Drafted(drafted.chances, drafted.rows[reply : reply + 1, :count])
        rows = logits[proposed.owners == reply]
        alone = rejection(rows, rules.of(np.array([reply])), one, numbers, mine)
        assert alone.accepted[0] == together.accepted[reply]
        size = int(alone.accepted[0]) + 1
        for name in ("tokens", "nodes", "logprobs", "model_logprobs"):
            assert torch.equal(getattr(alone, name)[0, :size], getattr(together, name)[reply, :size])


def one_step(p, q, token, accept, number=0.5, ids=None):
    """A single proposal, from probabilities."""
    logits = torch.tensor(p).log().clamp(min=-200).repeat(2, 1)
    chances = torch.zeros(1, 1, 1, 128)
    chances[..., : len(q)] = torch.tensor(q)
    proposed = Proposed.chains(torch.tensor([[token]]))
    draws = torch.full((1, 2), number, dtype=torch.float64)
    numbers = Numbers(draws, torch.tensor([[[accept]]], dtype=torch.float64))
    return rejection(logits, rules_of(1), proposed, numbers, Drafted.chains(chances, ids))


def test_equal_distributions_keep_everything():
    """With the largest number there is, too."""
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 300, generator=generator)
    laws = laws_of(logits, rules_of(64))
    for number in (0.0, 0.5, BELOW_ONE):
        tokens = laws.draw(torch.rand(64, generator=generator, dtype=torch.float64))
        proposed = Proposed.chains(tokens[:, None])
        numbers = Numbers(
            torch.full((64, 2), 0.5, dtype=torch.float64), torch.full((64, 1, 1), number, dtype=torch.float64)
        )
        found = rejection(
            logits.repeat_interleave(2, 0), rules_of(64), proposed, numbers, Drafted.chains(laws.chances[:, None])
        )
        assert bool((found.accepted == 1).all())


def test_disjoint_supports_keep_nothing():
    for token, number in itertools.product((1, 2), (0.0, 0.3, BELOW_ONE)):
        found = one_step([0.5, 0.0, 0.0, 0.5], [0.0, 0.4, 0.6, 0.0], token, accept=0.0, number=number)
        assert found.accepted.item() == 0
        assert found.tokens[0, 0].item() == (0 if number < 0.5 else 3)


def test_a_policy_with_a_single_token():
    """The residual of what is rejected is that token alone."""
    assert one_step([0.0, 1.0, 0.0], [0.3, 0.4, 0.3], 1, accept=BELOW_ONE).tokens.tolist() == [[1, 1]]
    for token, number in itertools.product((0, 2), (0.0, BELOW_ONE)):
        assert one_step([0.0, 1.0, 0.0], [0.3, 0.4, 0.3], token, accept=0.0, number=number).tokens[0, 0] == 1


def test_a_residual_that_rounds_to_nothing_is_the_policys_distribution():
    p = torch.tensor([[0.25, 0.75]], dtype=torch.float64)
    assert torch.equal(verify.residual(p, p), p)
    assert torch.equal(verify.residual(p, p * (1 + 2**-50)), p)
    q = torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    assert verify.residual(p, q).tolist() == [[0.0, 1.0]]


def test_a_reduced_vocabulary_spreads_over_the_policys():
    """Draft token 1 is the policy's 3; what the draft cannot propose stays whole in the residual."""
    ids = torch.tensor([0, 3])
    kept = one_step([0.1, 0.3, 0.3, 0.3], [0.5, 0.5], 3, accept=0.59, ids=ids)
    assert kept.tokens[0, 0].item() == 3
    lost = [one_step([0.1, 0.3, 0.3, 0.3], [0.5, 0.5], 3, 0.61, number, ids) for number in (0.49, 0.51)]
    assert [one.tokens[0, 0].item() for one in lost] == [1, 2]
    assert not any(one.accepted.item() for one in lost)


def test_an_impossible_proposal_is_an_error():
    for token, ids in ((1, None), (2, torch.tensor([0, 3]))):
        with pytest.raises(ValueError, match="was not drawn from"):
            one_step([0.1, 0.3, 0.3, 0.3], [1.0, 0.0], token, accept=0.5, ids=ids)


@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_logits_that_are_not_finite_end_the_walk_and_no_other(broken):
    """The reply's last token is NaN's, and is not recorded by the caller; what was kept before is sound."""
    logits = torch.randn(2, 4, 9, generator=torch.Generator().manual_seed(3))
    laws = laws_of(logits.flatten(0, 1), rules_of(8))
    tokens = laws.draw(torch.full((8,), 0.4, dtype=torch.float64)).view(2, 4)
    proposed = Proposed.chains(tokens[:, :3])
    numbers = Numbers(torch.full((2, 4), 0.4, dtype=torch.float64), torch.zeros((2, 3, 1), dtype=torch.float64))
    drafted = Drafted.chains(laws.chances.view(2, 4, *laws.chances.shape[1:])[:, :3])
    logits[0, broken, 2] = float("nan")
    for found in (
        match(logits.flatten(0, 1), rules_of(2), proposed, numbers),
        rejection(logits.flatten(0, 1), rules_of(2), proposed, numbers, drafted),
    ):
        assert found.accepted.tolist() == [broken, 3]
        assert found.logprobs[0, :broken].isfinite().all()
        assert bool(found.logprobs[0, broken].isnan())
        assert found.logprobs[1].isfinite().all()


def test_a_broken_draft_is_set_aside_and_named():
    """The reply goes on as without proposals, bit for bit."""
    logits = torch.randn(2, 2, 9, generator=torch.Generator().manual_seed(4))
    seeds, positions = np.arange(2, dtype=np.uint64), np.array([3, 4])
    for bad in (float("nan"), 0.0, float("inf")):
        chances = laws_of(logits[:, 0], rules_of(2)).chances[:, None].clone()
        chances[0] = bad
        proposed = Proposed.chains(torch.tensor([[0], [0]]))
        numbers = Numbers.of(seeds, positions, proposed)
        found = rejection(logits.flatten(0, 1), rules_of(2), proposed, numbers, Drafted.chains(chances))
        want = draw(logits[:, 0], rules_of(2), torch.from_numpy(uniforms(seeds, positions)))
        assert found.unusable.tolist() == [True, False]
        assert found.accepted[0] == 0
        assert found.tokens[0, 0] == want.tokens[0]
        assert found.logprobs[0, 0] == want.logprobs[0]


def test_what_is_no_tree_is_an_error():
    for parents in ([[-1, 1]], [[0, 0]], [[-1, 0, 3]], [[-1, -1, 1]], [[-1, 0, 2]]):
        with pytest.raises(ValueError, match="no trees"):
            Proposed(torch.zeros((1, len(parents[0])), dtype=torch.int64), torch.tensor(parents))
    proposed = Proposed.chains(torch.tensor([[0]]))
    numbers = Numbers.of(np.zeros(1, dtype=np.uint64), np.zeros(1, dtype=np.int64), proposed)
    drafted = Drafted(torch.ones(1, 1, 128), torch.tensor([[-1, -1]]))
    with pytest.raises(ValueError, match="has children and no row"):
        rejection(torch.zeros(2, 9), rules_of(1), proposed, numbers, drafted)


def test_streams_are_apart():
    """Different for every child and use; the policy's own is what it is without a draft; unrelated to each other."""
    streams = [0, *(s for child in range(8) for s in (accept_stream(child), propose_stream(child)))]
    assert len(set(streams)) == 17
    seeds = np.arange(4000, dtype=np.uint64)
    assert np.array_equal(uniforms(seeds, 7), uniforms(seeds, 7, 0))
    table = np.stack([uniforms(seeds, 7, stream) for stream in streams])
    assert (table >= 0).all()
    assert (table < 1).all()
    correlations = np.corrcoef(np.concatenate([table, [uniforms(seeds, 8)]])) - np.eye(18)
    assert np.abs(correlations).max() < 0.06
    mixed = uniforms(seeds[:3, None], np.arange(2), np.array([0, 5]))
    assert np.array_equal(mixed, np.stack([uniforms(seeds[:3], 0), uniforms(seeds[:3], 1, 5)], axis=1))
