"""Trees of proposals: a node's attention and logits are, bit for bit, those of its path fed as a chain."""

import numpy as np
import pytest
import torch
from tiny_policy import VOCABULARY, make_folder, make_tiny_moe

from furlong.ops.policy.architecture import Architecture, read_architecture
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.kv_cache import PAGE, KVCache, pages_of
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.tree_attention import Tree, keep

HEADS, KV_HEADS, DIM, LAYERS = 6, 2, 12, 2
SHAPE = Architecture("llama", 64, 72, LAYERS, HEADS, KV_HEADS, DIM, 64, 1e-5, 1e4, 4096, True)
FULL = [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
"""Three levels of two children each."""
COMB = [-1, 0, 0, 0, 1, 1, 1, 4, 4]
CHAIN = [-1, 0, 1, 2, 3]
LONE = [-1]
FIRSTS = (0, 5, PAGE - 2, PAGE - 1, PAGE, 2 * PAGE - 3, 3 * PAGE + 17)
"""Of node 0: with and without whole pages before, paths that end within a page and beyond its end."""


@pytest.fixture(params=[1, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    try:
        yield request.param
    finally:
        torch.set_num_threads(before)


def random_rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HEADS + 2 * KV_HEADS, DIM, generator=generator) * 2


def random_tree(count, seed):
    numbers = np.random.default_rng(seed)
    return [-1, *(int(numbers.integers(0, node)) for node in range(1, count))]


def fed(cache, layer, plan, rows):
    return plan.attend(layer, rows[:, :HEADS], rows[:, HEADS:])


def reply(cache, before, most):
    """A reply whose tokens before node 0 are in the cache."""
    held = cache.open()
    cache.extend(held, len(before) + most)
    if len(before):
        plan = Plan([Span(held, 0, len(before))], cache)
        for layer in range(LAYERS):
            fed(cache, layer, plan, before)
    return held


def as_chains(before, parents, nodes, dtype):
    """What each node sees when its path is fed token by token after the reply's tokens, in each layer."""
    tree, seen = Tree(None, 0), []
    tree.add(parents)
    for node in range(len(parents)):
        cache = KVCache(SHAPE, dtype, 2**24)
        held = reply(cache, before, len(parents))
        for at, step in enumerate(tree.path(node)):
            plan = Plan([Span(held, len(before) + at, 1)], cache)
            last = [fed(cache, layer, plan, nodes[step : step + 1]) for layer in range(LAYERS)]
        seen.append(torch.cat(last))
    return torch.stack(seen, dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", FIRSTS)
def test_a_node_sees_what_its_path_would_as_a_chain(first, dtype, threads):
    for seed, parents in enumerate((FULL, COMB, CHAIN, LONE, random_tree(20, first))):
        before, nodes = random_rows(first, seed), random_rows(len(parents), 100 + seed)
        cache = KVCache(SHAPE, dtype, 2**24)
        tree = Tree(reply(cache, before, len(parents)), first)
        tree.add(parents)
        plan = Plan([], cache, [tree])
        assert plan.positions.tolist() == [first + depth for depth in tree.depths]
        got = torch.stack([fed(cache, layer, plan, nodes) for layer in range(LAYERS)])
        assert torch.equal(got, as_chains(before, parents, nodes, dtype))


@pytest.mark.parametrize("first", [3, PAGE - 2, 2 * PAGE + 1])
def test_depth_by_depth_is_the_same_as_at_once(first):
    """As a draft grows its tree: each level is fed after the one before."""
    before, nodes = random_rows(first, 1), random_rows(len(FULL), 2)
    cache = KVCache(SHAPE, torch.float32, 2**24)
    tree, seen = Tree(reply(cache, before, 8), first), []
    for start, stop in ((0, 1), (1, 3), (3, 7), (7, 15)):
        tree.add(FULL[start:stop])
        plan = Plan([], cache, [tree])
        seen.append(torch.stack([fed(cache, layer, plan, nodes[start:stop]) for layer in range(LAYERS)]))
    assert torch.equal(torch.cat(seen, dim=1), as_chains(before, FULL, nodes, torch.float32))


def company(dtype):
    """Replies of every kind in one cache: single tokens, chunks and trees, with what is fed of each."""
    cache = KVCache(SHAPE, dtype, 2**24)
    spans = []
    for at, (before, count) in enumerate([(7, 1), (PAGE, 1), (3, 5), (60, 30)]):
        spans.append((Span(reply(cache, random_rows(before, at), count), before, count), random_rows(count, 50 + at)))
    trees = []
    for at, (first, parents) in enumerate([(9, FULL), (PAGE - 1, CHAIN), (130, random_tree(20, 3)), (64, LONE)]):
        tree = Tree(reply(cache, random_rows(first, 10 + at), len(parents)), first)
        tree.add(parents)
        trees.append((tree, random_rows(len(parents), 60 + at)))
    return cache, spans, trees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_company_changes_nothing(dtype, threads):
    cache, spans, trees = company(dtype)
    plan = Plan([span for span, _ in spans], cache, [tree for tree, _ in trees])
    rows = torch.cat([rows for _, rows in spans + trees])
    together = torch.stack([fed(cache, layer, plan, rows) for layer in range(LAYERS)])
    cache, spans, trees = company(dtype)
    alone = []
    for span, rows in spans:
        plan = Plan([span], cache)
        alone.append(torch.stack([fed(cache, layer, plan, rows) for layer in range(LAYERS)]))
    for tree, rows in trees:
        plan = Plan([], cache, [tree])
        alone.append(torch.stack([fed(cache, layer, plan, rows) for layer in range(LAYERS)]))
    assert torch.equal(together, torch.cat(alone, dim=1))


@pytest.mark.parametrize("first", FIRSTS)
def test_a_kept_path_is_as_if_it_had_been_fed(first):
    """The next token after it sees the same bits, and so does the cache; what was not kept leaves no trace."""
    before, nodes, after = random_rows(first, 1), random_rows(len(FULL), 2), random_rows(1, 3)
    for path in ([0], [0, 2], [0, 1, 4, 10]):
        cache = KVCache(SHAPE, torch.bfloat16, 2**24)
        tree = Tree(reply(cache, before, 8), first)
        tree.add(FULL)
        plan = Plan([], cache, [tree])
        untouched = cache._memory[:, :, : cache.used].clone()
        for layer in range(LAYERS):
            fed(cache, layer, plan, nodes)
        assert torch.equal(cache._memory[:, :, : cache.used], untouched)
        keep([(tree, path)], cache)
        other = KVCache(SHAPE, torch.bfloat16, 2**24)
        held = reply(other, before, 8)
        plan = Plan([Span(held, first, len(path))] if len(path) > 1 else [Span(held, first, 1)], other)
        for layer in range(LAYERS):
            fed(other, layer, plan, nodes[path])
        assert torch.equal(cache._memory[:, :, : cache.used], other._memory[:, :, : other.used])
        next_tokens = [Plan([Span(which, first + len(path), 1)], c) for which, c in ((tree.held, cache), (held, other))]
        seen = [fed(c, 1, plan, after) for plan, c in zip(next_tokens, (cache, other), strict=True)]
        assert torch.equal(*seen)


def test_paths_of_several_trees_are_kept_where_their_pages_are_by_then():
    cache = KVCache(SHAPE, torch.float32, 2**24)
    gone = reply(cache, random_rows(70, 9), 0)
    trees, kept = [], []
    for at, path in enumerate(([0, 1, 3], [0, 2])):
        tree = Tree(reply(cache, random_rows(PAGE - 1, at), 8), PAGE - 1)
        tree.add(FULL)
        trees.append(tree)
        kept.append((tree, path))
    nodes = random_rows(2 * len(FULL), 5)
    plan = Plan([], cache, trees)
    for layer in range(LAYERS):
        fed(cache, layer, plan, nodes)
    cache.close(gone)  # the last pages take its places
    keep(kept, cache)
    for at, (tree, path) in enumerate(kept):
        mine = nodes[at * len(FULL) :][path][:, HEADS:].view(len(path), 2, KV_HEADS, DIM)
        for place, want in enumerate(mine, PAGE - 1):
            page, offset = tree.held.pages[place // PAGE], place % PAGE
            assert torch.equal(cache.keys(1)[page, :, offset, :DIM], want[0])
            assert torch.equal(cache.values(1)[page, :, offset, :DIM], want[1])


@pytest.mark.parametrize("kind", ["llama", "moe"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nodes_logits_and_experts_are_those_of_its_path(kind, dtype, tmp_path, threads):
    """Through the whole policy: a tree verified in one step, two replies side by side, against token by token."""
    folder = make_tiny_moe(tmp_path) if kind == "moe" else make_folder(tmp_path)
    arch = read_architecture(folder)
    decoder = Decoder(arch, read_tensors(folder, arch, dtype))
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCABULARY, (n,), generator=generator) for n in (PAGE - 2, 9)]
    tokens = [torch.randint(VOCABULARY, (len(FULL),), generator=generator) for _ in prompts]
    cache = KVCache(arch, dtype, 2**24)
    trees = []
    for prompt in prompts:
        held = cache.open()
        cache.extend(held, len(prompt) + 8)
        decoder.step(prompt, Plan([Span(held, 0, len(prompt))], cache), torch.tensor([]))
        trees.append(Tree(held, len(prompt)))
        trees[-1].add(FULL)
    plan = Plan([], cache, trees)
    logits, experts = decoder.step(torch.cat(tokens), plan, torch.arange(2 * len(FULL)))
    for place, (prompt, some) in enumerate(zip(prompts, tokens, strict=True)):
        for node in (0, 2, 6, 13):
            path = trees[place].path(node)
            alone = KVCache(arch, dtype, 2**24)
            held = alone.open()
            alone.extend(held, len(prompt) + 8)
            decoder.step(prompt, Plan([Span(held, 0, len(prompt))], alone), torch.tensor([]))
            for at, token in enumerate(some[path]):
                plan = Plan([Span(held, len(prompt) + at, 1)], alone)
                want, chosen = decoder.step(token[None], plan, torch.tensor([0]))
            row = place * len(FULL) + node
            assert torch.equal(logits[row], want[0])
            assert experts is None or torch.equal(experts[row], chosen[0])


def test_what_cannot_be_is_said():
    cache = KVCache(SHAPE, torch.float32, 2**24)
    tree = Tree(reply(cache, random_rows(3, 1), 8), 3)
    for parents in ([0], [-1, 1], [-1, -1], [-2]):
        with pytest.raises(ValueError, match="cannot come after"):
            Tree(tree.held, 3).add(parents)
    with pytest.raises(ValueError, match="no nodes"):
        Plan([], cache, [tree])
    tree.add(FULL)
    with pytest.raises(ValueError, match="no path"):
        keep([(tree, [0])], cache)  # not fed
    Plan([], cache, [tree])
    for nodes in ([], [0, 3], [1, 3], [0, 99]):
        with pytest.raises((ValueError, IndexError), match=r"no path|out of range"):
            keep([(tree, nodes)], cache)
    assert pages_of(3 + 8) == len(tree.held.pages)
