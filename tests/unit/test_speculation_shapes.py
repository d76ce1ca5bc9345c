"""Drawing with trees and with blocks of proposals: the same bits as without, whatever is proposed and whatever happens."""

import random
from dataclasses import replace

import pytest
import torch
from speculation_samples import ALWAYS, VOCABULARY, live, requests, run

from furlong.ops.draft.block_drafter import BlockDrafter
from furlong.ops.draft.module import draft_module
from furlong.ops.draft.verify import propose_stream
from furlong.ops.policy import batch as batches
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.decoder import Taps
from furlong.ops.policy.draft_block import DraftBlock
from furlong.ops.policy.draft_chain import DraftChain
from furlong.ops.policy.draft_tree import DraftTree, nodes_of
from furlong.ops.policy.feed import Feed, rules_of, seeds_of
from furlong.ops.policy.kv_cache import PAGE, KVCache
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.reply import Reply
from furlong.ops.policy.routing import join
from furlong.ops.policy.sampling import laws_of, uniforms
from furlong.ops.policy.score import score
from furlong.ops.policy.tree_attention import Tree
from furlong.ops.protocols import GenerateRequest

TREE = replace(ALWAYS, width=2, proposals=3)
BLOCK = replace(ALWAYS, kind="block", layers=2, proposals=4)
SHAPES = {"tree": TREE, "block": BLOCK}
SLOW = pytest.mark.slow
CASES = [
    pytest.param("moe", "tree"),
    pytest.param("llama", "tree", marks=SLOW),
    pytest.param("llama", "block"),
    pytest.param("moe", "block", marks=SLOW),
    pytest.param("qwen3", "tree", marks=SLOW),
    pytest.param("qwen3", "block", marks=SLOW),
]
DTYPES = {"qwen3": torch.bfloat16}


@pytest.fixture(scope="module")
def plain():
    """What is drawn without a draft, by kind of policy."""
    known = {}

    def of(kind):
        if kind not in known:
            asked = requests(7, 1, (1, 2, 5, 30))
            known[kind] = asked, run(asked, live(kind, DTYPES.get(kind, torch.float32)), None)[0]
        return known[kind]

    return of


def weights_of(kind, settings, version=0):
    return live(kind, DTYPES.get(kind, torch.float32), settings, version)


def recorded(monkeypatch, replies, wrong):
    """Have trees hold what was drawn before at any of their places, but for a share of the tokens, and have it go on from
    there; blocks what a chain would."""
    rng = random.Random(0)

    def token_at(known, depth):
        right = depth < len(known) and rng.random() >= wrong
        return known[depth] if right else rng.randrange(VOCABULARY)

    def tree(self, asked, hidden):
        for feed, room in asked:
            known = replies[feed.reply.request.request_id][0][feed.reply.position :]
            parents, level = [-1], [0]
            for depth in range(room):
                on, below = rng.choice(level), []
                for parent in level:
                    for child in range(self._width):
                        parents.append(parent)
                        feed.proposals.append(
                            token_at(known, depth) if parent == on and child == 0 else rng.randrange(VOCABULARY)
                        )
                        below.append(len(parents) - 1)
                level = [below[level.index(on) * self._width], *below[-1:]]
            feed.tree = Tree(feed.reply.held, feed.reply.fed)
            feed.tree.add(parents)

    def block(self, asked, hidden):
        for feed, room in asked:
            known = replies[feed.reply.request.request_id][0][feed.reply.position :]
            feed.proposals = [token_at(known, depth) for depth in range(room)]

    monkeypatch.setattr(DraftTree, "propose", tree)
    monkeypatch.setattr(DraftBlock, "propose", block)


@pytest.mark.parametrize(("kind", "shape"), CASES)
def test_a_poor_draft_changes_nothing(plain, kind, shape):
    asked, without = plain(kind)
    settings = SHAPES[shape]
    found, batch, _ = run(asked, weights_of(kind, settings), settings)
    assert found == without
    counts = batch.speculation()
    assert counts["verifies"] > 20
    # A block that has learnt nothing hardly ever says what the policy does.
    assert shape == "block" or counts["accepted"][0] > 0
    assert counts["accepted"][0] < counts["proposed"][0]
    assert len(counts["proposed"]) == settings.proposals


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("wrong", [pytest.param(0.0, marks=SLOW), 0.25, pytest.param(1.0, marks=SLOW)])
def test_no_proposal_changes_anything(plain, kind, shape, wrong, monkeypatch):
    """In company that joins a few at a time, and with little memory: replies are put off and begin again."""
    asked, without = plain(kind)
    settings = SHAPES[shape]
    recorded(monkeypatch, without, wrong)
    weights = weights_of(kind, settings)
    found, batch, _ = run(asked, weights, settings, burst=3)
    assert found == without
    length = batch.speculation()["acceptance_length"]
    assert length <= 1.5 if wrong == 1 else length > (1.5 if wrong else 2)
    arch = weights.decoder.architecture
    page = 2 * arch.layers * arch.kv_heads * 16 * PAGE * weights.decoder.dtype.itemsize
    monkeypatch.setattr(batches, "CACHE_BYTES", 5 * page)
    monkeypatch.setattr(batches, "PREFILL_TOKENS", 23)
    put_off, asking = [], Batch._put_off
    monkeypatch.setattr(Batch, "_put_off", lambda self, reply: put_off.append(reply) or asking(self, reply))
    found, batch, _ = run(asked, weights, settings)
    assert found == without
    assert put_off
    assert batch.speculation()["verifies"] > 4


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("retract", [pytest.param(False, marks=SLOW), True])
def test_new_weights_and_an_abort_under_way(kind, shape, retract):
    """At the same token as without a draft; what an abort left goes on as if never interrupted."""
    settings = SHAPES[shape]
    lives = [weights_of(kind, settings, version) for version in range(2)]
    request = GenerateRequest("one", tuple(range(1, 70)), 5, 40, 1.0)

    def switched(edges, at):
        def turns(turn, batch):
            done = batch._running[0].position if batch._running else 0
            new = not edges and done >= at
            edges.extend([done] * new)
            return lives[len(edges)], new and retract

        return turns

    edges: list[int] = []
    found, batch, _ = run([request], lives[0], settings, turns=switched(edges, 15))
    again: list[int] = []
    without, _, _ = run([request], lives[0], None, turns=switched(again, edges[0]))
    assert found == without
    assert again == edges
    assert found["one"][3] == ((0, 0, edges[0]), (1, edges[0], 40))
    assert batch.speculation()["verifies"] > 5
    whole = run([request], lives[0], settings)[0]["one"]
    arch = lives[0].decoder.architecture
    batch = Batch(arch, arch, True, settings)
    batch.turn(Turn((request,)), lives[0])
    while batch._running[0].position < 17:
        batch.turn(Turn(), lives[0])
    ((reply, _),) = batch.turn(Turn(reasons={"one": "abort"}), None).replies
    first = reply.sample("abort", arch, 0.0)
    assert (first.tokens, first.logprobs) == tuple(column[: len(first.tokens)] for column in whole[:2])
    rest = run([replace(request, prefix=first.tokens)], lives[0], settings)[0]["one"]
    assert rest[:3] == tuple(column[len(first.tokens) :] for column in whole[:3])
    if first.routing is not None:
        assert join([first.routing, rest[5]]) == whole[5]


@pytest.mark.parametrize("shape", SHAPES)
def test_rejection_records_what_the_policy_says_and_who_proposed(shape, monkeypatch):
    """Flags are of tokens that were proposed and kept; requests in the shadow have none."""
    settings = replace(SHAPES[shape], verify="rejection", shadow=0.3)
    weights = weights_of("llama", settings)
    asked = [replace(r, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for r in requests(6, 9, (30,))]
    asked[0] = replace(asked[0], temperature=0.0)
    kept, drawing = {}, batches.drawn

    def seen(feeds, *args):
        told = drawing(feeds, *args)
        for feed, tokens in zip(feeds, told, strict=True):
            kept.setdefault(feed.reply, []).extend([True] * (len(tokens) - 1) + [False])
        return told

    monkeypatch.setattr(batches, "drawn", seen)
    arch = weights.decoder.architecture
    found, batch, _ = run(asked, weights, settings)
    drafted = dict(kept)
    rows = [(r.prompt + found[r.request_id][0], len(r.prompt)) for r in asked[1:]]
    assert [list(found[r.request_id][1]) for r in asked[1:]] == score(weights.decoder, rows, 1.0)
    assert found[asked[0].request_id] == run(asked[:1], weights, None)[0][asked[0].request_id]
    assert batch.speculation()["accepted"][0] > 0
    shadowed = 0
    for reply, flags in drafted.items():
        sample = reply.sample("", arch, 0.0)
        assert sample.drafted == tuple(flags[: len(sample.tokens)])
        in_shadow = batch._speculation.in_shadow(reply)
        shadowed += in_shadow
        assert not (in_shadow and any(sample.drafted))
    assert 0 < shadowed < len(asked)
    assert any(any(flags) for flags in drafted.values())
    (reply,) = (Reply(r) for r in asked[:1])
    assert reply.sample("", arch, 0.0).drafted is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_broken_proposals_and_drafts_do_no_harm(shape, rule, monkeypatch):
    """A draft of NaN; then a token whose embedding is NaN and that is only ever proposed, at the end of a path."""
    settings = replace(SHAPES[shape], verify=rule)
    sound = weights_of("llama", settings)
    tensors = {name: torch.full_like(t, torch.nan) for name, t in sound.drafter.tensors.items()}
    broken = replace(sound, drafter=type(sound.drafter)(sound.drafter.shape, tensors, torch.float32))
    asked = requests(3, 4, (12,))
    found = run(asked, broken, settings)[0]
    assert found == run(asked, sound, None)[0]
    if rule == "rejection":
        return
    poison = 77

    def change(tensors):
        embedding, head = tensors["model.embed_tokens.weight"].clone(), tensors["lm_head.weight"].clone()
        embedding[poison], head[poison] = torch.nan, 0.0
        return tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}

    weights = replace(live("qwen3", change=change), drafter=live("qwen3", settings=settings).drafter)
    asked = [GenerateRequest(str(i), tuple(range(1, 20 + i)), i, 20, 1.0, top_k=5) for i in range(3)]
    without = run(asked, weights, None)[0]
    recorded(monkeypatch, without, 0.0)
    for kind in (DraftTree, DraftBlock):
        told = kind.propose

        def last_is_poison(self, pairs, hidden, told=told):
            told(self, pairs, hidden)
            for feed, _ in pairs:
                feed.proposals[-1] = poison

        monkeypatch.setattr(kind, "propose", last_is_poison)
    assert run(asked, weights, settings)[0] == without


def a_reply(weights, settings, count, seed=5, heat=1.0):
    """One whose first `count` tokens are fed, and the cache it is in; its draft has followed all but what waits."""
    cache = KVCache(weights.decoder.architecture, torch.float32, 2**22)
    shape = weights.drafter.shape
    cache.attach(shape.layers, shape.kv_heads, shape.head_dim)
    tokens = torch.randint(VOCABULARY, (count + 1,), generator=torch.Generator().manual_seed(seed))
    reply = Reply(GenerateRequest("r", tuple(tokens.tolist()), seed, 40, heat))
    reply.held = cache.open()
    cache.extend(reply.held, count + 10)
    taps = Taps(shape.taps)
    plan = Plan([Span(reply.held, 0, count)], cache)
    weights.decoder.step(tokens[:count], plan, torch.tensor([count - 1]), taps)
    reply.fed = count
    reply.draft.add(0, weights.drafter.features(taps.seen))
    return reply, cache, torch.cat(taps.seen, dim=1), tokens


@pytest.mark.parametrize("count", [1, PAGE - 2, 70])
def test_a_tree_holds_the_chain_and_its_draws(count):
    """Of first children the chain's own, bit for bit; every node's law is that of a chain that ends there."""
    settings = replace(TREE, width=3)
    weights = live("llama", settings=settings)
    found = []
    for made in (DraftChain, lambda *args: DraftTree(*args, 3)):
        reply, cache, _, _ = a_reply(weights, settings, count)
        feed = Feed(reply, 1)
        proposer = made(weights, cache, False)
        proposer.propose([(feed, 3)], proposer.follow([reply], 0))
        found.append(feed)
    chain, tree = found
    assert len(tree.proposals) == nodes_of(3, 3) == 21
    assert nodes_of(1, 4) == 4
    assert tree.depth == chain.depth == 3
    node, path = 0, []
    for law in chain.laws:
        assert torch.equal(law, tree.laws[tree.sources.index(node)])
        node = tree.parents.index(node)
        path.append(tree.proposals[node - 1])
    assert path == chain.proposals
    request = reply.request
    for law, source in zip(tree.laws, tree.sources, strict=True):
        trail = [tree.proposals[at - 1] for at in tree.tree.path(source)[1:]]
        children = [tree.proposals[at - 1] for at, above in enumerate(tree.parents) if above == source]
        mass = law.double().sum()
        for child, token in enumerate(children):
            number = uniforms(seeds_of([request]), reply.position + len(trail), propose_stream(child))
            assert law.flatten().double().cumsum(0).div(mass).gt(number[0]).int().argmax() == token
        if trail:
            assert torch.equal(law, law_after(weights, settings, count, trail, request))


def law_after(weights, settings, count, trail, request):
    """The draft's, one row at a time."""
    reply, cache, _, _ = a_reply(weights, settings, count)
    hidden = DraftChain(weights, cache, True).follow([reply], 0)
    for depth, token in enumerate(trail):
        plan = Plan([Span(reply.held, count + depth, 1)], cache)
        hidden = weights.drafter.run(weights.decoder.embed(torch.tensor([token])), hidden, plan, cache.layers)
    return laws_of(weights.drafter.logits(hidden), rules_of([request])).chances[0]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_matched_tree_has_different_children(heat):
    """Those that go on are the likeliest to be kept: whose path has the fewest other than first children."""
    settings = replace(TREE, proposals=4)
    weights = live("llama", settings=settings)
    reply, cache, _, _ = a_reply(weights, settings, 20, heat=heat)
    feed = Feed(reply, 1)
    proposer = DraftTree(weights, cache, True, 2)
    proposer.propose([(feed, 4)], proposer.follow([reply], 0))
    assert len(feed.proposals) == 14
    assert not feed.laws
    for node in set(feed.parents) - {-1}:
        children = [feed.proposals[at - 1] for at, above in enumerate(feed.parents) if above == node]
        assert len(set(children)) == 2
    first = [at for at in range(15) if all(n == feed.parents.index(feed.parents[n]) for n in feed.tree.path(at)[1:])]
    assert [feed.tree.depths[at] for at in first] == [0, 1, 2, 3, 4], "the path of first children always goes on"


@pytest.mark.parametrize(("kind", "vocabulary"), [("llama", 0), ("moe", 40)])
@pytest.mark.parametrize("count", [1, 61, 80])
def test_the_block_drafter_is_the_draft_that_is_trained(kind, vocabulary, count):
    """Against one dense pass of the trained module in float64: 1e-3, as the policy's features are float32 and activations
    up to 10. Features come in pieces, and what an earlier block left in the pages changes nothing."""
    settings = replace(BLOCK, vocabulary=vocabulary)
    weights = live(kind, settings=settings)
    draw = torch.Generator().manual_seed(1)
    tensors = {
        n: t + 0.1 * torch.randn(t.shape, generator=draw) if t.is_floating_point() else t
        for n, t in weights.drafter.tensors.items()
    }
    shape = weights.drafter.shape
    weights = replace(weights, drafter=BlockDrafter(shape, tensors, torch.float32))
    reply, cache, taps, tokens = a_reply(weights, settings, count)
    proposer, states = DraftBlock(weights, cache, True), []
    proposer._draw = lambda asked, found: states.append(found)
    for keep in {min(20, count - 1), 0}:
        if reply.draft.pending > keep:
            proposer.follow([reply], keep)
    for _ in range(2):
        proposer.propose([(Feed(reply, 1), 4)], None)
    assert torch.equal(*states)
    module = draft_module(shape, tensors, torch.float64)

    def attend(q, k_main, v_main, k, v):
        keys, values = (torch.cat([main[None], own], 1) for main, own in ((k_main, k), (v_main, v)))
        keys, values = (x.repeat_interleave(shape.heads // shape.kv_heads, 2) for x in (keys, values))
        weight = torch.einsum("bqhd,bkhd->bhqk", q, keys).div(shape.head_dim**0.5).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weight, values)

    with torch.no_grad():
        anchor = weights.decoder.embed(tokens[-1:]).double()
        exact = module.states(
            module.feature(taps.double()), torch.arange(count), anchor, torch.tensor([count]), attend
        )[0, 1:]
    assert (states[0] - exact).abs().max() < 1e-3
    logits = weights.drafter.logits(states[0])
    assert torch.allclose(logits.double(), module.normed(exact) @ module.head.T, atol=1e-3)
    assert weights.drafter.ids.tolist() == (list(range(40)) if vocabulary else list(range(VOCABULARY)))
