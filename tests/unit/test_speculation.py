"""Drawing with a draft: the same bits as without one, whatever it proposes, and whatever happens meanwhile."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_samples import hidden_of
from speculation_samples import ALWAYS, KINDS, VOCABULARY, live, recorded, requests, run

from furlong.ops.draft.drafter import Drafter
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy import batch as batches
from furlong.ops.policy import kv_cache
from furlong.ops.policy.batch import Batch, Turn
from furlong.ops.policy.decoder import Decoder, Taps
from furlong.ops.policy.draft_chain import DraftChain
from furlong.ops.policy.kv_cache import KVCache
from furlong.ops.policy.live import Live
from furlong.ops.policy.paged_attention import Plan, Span
from furlong.ops.policy.score import score
from furlong.ops.protocols import GenerateRequest

CASES = [("llama", torch.float32), ("qwen3", torch.bfloat16), ("moe", torch.float32)]
IDS = [f"{kind}-{dtype}".replace("torch.", "") for kind, dtype in CASES]
REJECTING = replace(ALWAYS, verify="rejection")


SLOW = {"qwen3": pytest.mark.slow}


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, id=name, marks=SLOW.get(case[0], ())) for case, name in zip(CASES, IDS, strict=True)],
)
def case(request):
    """Weights with a draft, requests, and what is drawn of them without it."""
    kind, dtype = request.param
    weights, asked = live(kind, dtype, ALWAYS), requests(16, 1)
    plain, _, turns = run(asked, weights, None)
    assert {told[4] for told in plain.values()} == {"stop", "length"}
    return weights, asked, plain, turns


@pytest.mark.parametrize("proposals", [1, 4, 7])
def test_a_poor_draft_changes_nothing(case, proposals):
    weights, asked, plain, _ = case
    found, batch, _ = run(asked, weights, replace(ALWAYS, proposals=proposals))
    assert found == plain
    counts = batch.speculation()
    assert counts["verifies"] > 100
    assert 0 < counts["accepted"][0] < counts["proposed"][0]
    assert len(counts["proposed"]) == proposals


@pytest.mark.parametrize("wrong", [0.0, 0.25, 1.0])
def test_no_proposal_changes_anything(case, wrong, monkeypatch):
    weights, asked, plain, turns = case
    recorded(monkeypatch, plain, wrong)
    found, batch, fewer = run(asked, weights, ALWAYS)
    assert found == plain
    length = batch.speculation()["acceptance_length"]
    assert length > 3.5 if wrong == 0 else 1.0 <= length < 4
    assert fewer < (turns / 3 if wrong == 0 else turns + 1)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_company_changes_nothing(case, size, monkeypatch):
    """Some at a time, in another order, and joining a running batch; drafts right three times in four."""
    weights, asked, plain, _ = case
    recorded(monkeypatch, plain, 0.25)
    for start in range(0, 10, size):
        some = asked[start : start + size]
        assert run(some, weights, ALWAYS)[0] == {r.request_id: plain[r.request_id] for r in some}
    assert run(asked[::-1], weights, ALWAYS, burst=size)[0] == plain


@pytest.mark.parametrize("pages", [4, 6])
def test_little_memory_and_small_chunks(case, pages, monkeypatch):
    """Replies are put off and begin again, and proposals take no page from others."""
    weights, asked, plain, _ = case
    recorded(monkeypatch, plain, 0.25)
    arch = weights.decoder.architecture
    page = 2 * arch.layers * arch.kv_heads * 16 * 64 * weights.decoder.dtype.itemsize
    monkeypatch.setattr(batches, "CACHE_BYTES", pages * page)
    monkeypatch.setattr(batches, "PREFILL_TOKENS", 23)
    put_off, asking = [], Batch._put_off
    monkeypatch.setattr(Batch, "_put_off", lambda self, reply: put_off.append(reply) or asking(self, reply))
    found, batch, _ = run(asked, weights, ALWAYS)
    assert found == plain
    assert put_off
    assert batch.speculation()["verifies"] > 50


def test_a_resumed_reply_goes_on_as_if_never_interrupted(case, monkeypatch):
    weights, asked, plain, _ = case
    cuts = [(r, len(plain[r.request_id][0]) // 2) for r in asked if len(plain[r.request_id][0]) > 1]
    parts = [replace(r, prefix=plain[r.request_id][0][:at]) for r, at in cuts]
    shifted = {r.request_id: plain[r.request_id] for r, _ in cuts}
    recorded(monkeypatch, shifted, 0.25)
    without = run(parts, weights, None)[0]
    found = run(parts, weights, ALWAYS)[0]
    assert found == without
    for r, at in cuts:
        assert found[r.request_id][:3] == tuple(column[at:] for column in plain[r.request_id][:3])


@pytest.mark.parametrize("retract", [False, True])
@pytest.mark.parametrize("second", ["draft", "none"])
def test_new_weights_under_way(case, retract, second, monkeypatch):
    """At the same token as without a draft; the new version may have no draft, and the one after has one again."""
    weights, _, _, _ = case
    kind = "moe" if weights.decoder.architecture.experts else weights.decoder.architecture.kind
    dtype = weights.decoder.dtype
    lives = [weights, live(kind, dtype, ALWAYS if second == "draft" else None, 1), live(kind, dtype, ALWAYS, 2)]
    request = GenerateRequest("one", tuple(range(1, 70)), 5, 60, 1.0)
    at: list[int] = []
    drawn_by: list[int] = []

    def drafted(turn, batch):
        done = batch._running[0].position if batch._running else 0
        new = [n for n, least in ((1, 15), (2, 35)) if done >= least and n > len(at)]
        at.extend([done] * len(new))
        return lives[len(at)], bool(new) and retract

    found, batch, _ = run([request], weights, ALWAYS, turns=drafted)

    def plain(turn, batch):
        done = batch._running[0].position if batch._running else 0
        passed = sum(done >= edge for edge in at)
        new = passed > len(drawn_by)
        drawn_by.extend([done] * (passed - len(drawn_by)))
        return lives[passed], new and retract

    without, _, _ = run([request], weights, None, turns=plain)
    assert len(at) == 2
    assert drawn_by == at
    assert found == without
    assert found["one"][3] == ((0, 0, at[0]), (1, at[0], at[1]), (2, at[1], 60))
    assert batch.speculation()["verifies"] > 10


def test_a_draft_that_comes_later_serves_replies_that_are_computed_again():
    first, later = live(version=0), live(settings=ALWAYS, version=1)
    (request,) = [GenerateRequest("one", tuple(range(1, 20)), 5, 60, 1.0)]
    for retract in (False, True):
        _, batch, _ = run(
            [request], first, ALWAYS, turns=lambda n, _, again=retract: (first if n < 9 else later, n == 9 and again)
        )
        assert (batch.speculation()["verifies"] > 0) == retract
    _, batch, _ = run([request, replace(request, request_id="two")], first, ALWAYS, burst=1,
                      turns=lambda n, _: (later, False))  # fmt: skip
    assert batch.speculation()["verifies"] > 60


def test_requests_in_the_shadow_have_no_proposals():
    asked = [replace(r, max_new_tokens=12, stop_ids=()) for r in requests(16, 3)]
    weights = live(settings=ALWAYS)
    found, batch, _ = run(asked, weights, replace(ALWAYS, shadow=0.5))
    assert found == run(asked, weights, None)[0]
    counts = batch.speculation()
    shadow = counts["replies"]["shadow"]["tokens"]
    assert shadow % 12 == 0
    assert 2 <= shadow // 12 <= 14
    assert shadow + counts["replies"]["drafted"]["tokens"] == 16 * 12
    only = run(asked, weights, replace(ALWAYS, shadow=0.999999))[1].speculation()
    assert (only["verifies"], only["replies"]["drafted"]["tokens"]) == (0, 0)


def test_proposals_that_break_the_model_do_no_harm(monkeypatch):
    """A token whose embedding is NaN is only ever proposed."""
    poison = 77

    def change(tensors):
        embedding = tensors["model.embed_tokens.weight"].clone()
        embedding[poison] = torch.nan
        head = tensors["lm_head.weight"].clone()
        head[poison] = 0.0
        return tensors | {"model.embed_tokens.weight": embedding, "lm_head.weight": head}

    weights = live("qwen3", change=change)
    # A draft of the sound policy, so that only the proposals are broken.
    weights = replace(weights, drafter=live("qwen3", settings=ALWAYS).drafter)
    asked = [GenerateRequest(str(i), tuple(range(1, 20 + i)), i, 40, 1.0, top_k=5) for i in range(6)]
    plain, _, _ = run(asked, weights, None)
    assert not any(poison in told[0] for told in plain.values())

    def propose(self, pairs, hidden):
        for feed, room in pairs:
            known = plain[feed.reply.request.request_id][0][feed.reply.position :]
            feed.proposals = [*known[:1], *[poison] * room][:room]

    monkeypatch.setattr(DraftChain, "propose", propose)
    found, batch, _ = run(asked, weights, ALWAYS)
    assert found == plain
    assert batch.speculation()["verifies"] == 6, "one each, of a single right proposal; all others were withdrawn"


def test_a_broken_draft_changes_nothing():
    sound = live(settings=ALWAYS)
    tensors = {name: torch.full_like(t, torch.nan) for name, t in sound.drafter.tensors.items()}
    broken = replace(sound, drafter=Drafter(sound.drafter.shape, tensors, torch.float32))
    asked = requests(3, 4, (20,))
    plain = run(asked, sound, None)[0]
    assert run(asked, broken, ALWAYS)[0] == plain
    run(asked, broken, REJECTING)


def test_requests_with_a_broken_model_fail_as_without_a_draft(monkeypatch):
    """Its logits are not finite after one token; the draft proposes what leads there."""

    def change(tensors):
        embedding = tensors["model.embed_tokens.weight"].clone()
        embedding[40] = torch.nan
        return tensors | {"model.embed_tokens.weight": embedding}

    weights = replace(live("qwen3", change=change), drafter=live("qwen3", settings=ALWAYS).drafter)
    arch = weights.decoder.architecture

    def outcome(settings):
        batch, found = Batch(arch, arch, True, settings), []
        ended = batch.turn(Turn(tuple(GenerateRequest(str(i), (1, 2, 3), i, 60, 1.0) for i in range(12))), weights)
        while True:
            found += [(r.request.request_id, tuple(r.tokens), "broken") for r in ended.broken]
            found += [(r.request.request_id, tuple(r.tokens), why) for r, why in ended.replies]
            if not batch.size:
                return sorted(found)
            ended = batch.turn(Turn(), weights)

    plain = outcome(None)
    assert {why for _, _, why in plain} == {"broken", "length"}
    assert outcome(ALWAYS) == plain
    recorded(monkeypatch, {name: (tokens[3:],) for name, tokens, _ in plain}, 0.0)
    assert outcome(ALWAYS) == plain


@pytest.mark.parametrize(("kind", "vocabulary"), [("llama", 0), ("qwen3", 0), ("moe", 40)])
def test_the_drafter_is_the_draft_that_is_trained(kind, vocabulary):
    """Rows computed in pieces, and proposals after them, against one pass row by row in float64: 1e-3, as the policy's
    features are float32 and activations up to 10."""
    settings = replace(ALWAYS, vocabulary=vocabulary)
    weights = live(kind, settings=settings)
    drafter, arch = weights.drafter, KINDS[kind]
    draw = torch.Generator().manual_seed(1)
    tensors = {
        n: t + 0.1 * torch.randn(t.shape, generator=draw) if t.is_floating_point() else t
        for n, t in drafter.tensors.items()
    }
    drafter = Drafter(drafter.shape, tensors, torch.float32)
    cache = KVCache(arch, torch.float32, 2**22)
    cache.attach(1, drafter.shape.kv_heads, drafter.shape.head_dim)
    held = cache.open()
    cache.extend(held, 100)
    tokens = torch.randint(VOCABULARY, (81,), generator=draw)
    taps = Taps(drafter.shape.taps)
    weights.decoder.step(tokens[:80], Plan([Span(held, 0, 80)], cache), torch.tensor([79]), taps)
    features, embedded = drafter.features(taps.seen), weights.decoder.embed(tokens[1:81])
    wide = torch.cat(taps.seen, dim=1).double() @ tensors["fc.weight"].double().T
    exact = hidden_of(tensors, drafter.shape, embedded.double(), wide)
    parts = []
    for first, stop in ((0, 50), (50, 51), (51, 70), (70, 80)):
        plan = Plan([Span(held, first, stop - first)], cache)
        parts.append(drafter.run(embedded[first:stop], features[first:stop], plan, cache.layers))
    hidden = torch.cat(parts)
    assert (hidden - exact).abs().max() < 1e-3
    # One position ahead: the branch of training's second pass, here row 80 of a longer document.
    more = weights.decoder.embed(torch.tensor([5]))
    ahead = drafter.run(more, hidden[-1:], Plan([Span(held, 80, 1)], cache), cache.layers)
    both = torch.cat([embedded, more]).double(), torch.cat([wide, hidden[-1:].double()])
    assert (ahead - hidden_of(tensors, drafter.shape, *both)[-1]).abs().max() < 1e-3
    normed = torch.nn.functional.rms_norm(ahead, (arch.hidden,), tensors["norm.weight"], arch.norm_eps)
    assert torch.allclose(drafter.logits(ahead), normed @ tensors["lm_head.weight"].T, atol=1e-3)
    assert drafter.ids.tolist() == (list(range(40)) if vocabulary else list(range(VOCABULARY)))


def test_a_reduced_vocabulary_is_mapped(case):
    weights, asked, plain, _ = case
    kind = "moe" if weights.decoder.architecture.experts else weights.decoder.architecture.kind
    settings = replace(ALWAYS, vocabulary=30)
    small = live(kind, weights.decoder.dtype, settings)
    found, batch, _ = run(asked, small, settings)
    assert found == plain
    assert batch.speculation()["accepted"][0] > 0


def test_rejection_records_what_the_policy_says_of_its_tokens(case):
    weights, _, _, _ = case
    asked = [replace(r, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) for r in requests(8, 9, (40,))]
    found, batch, _ = run(asked, weights, REJECTING)
    rows = [(r.prompt + found[r.request_id][0], len(r.prompt)) for r in asked]
    assert [list(found[r.request_id][1]) for r in asked] == score(weights.decoder, rows, 1.0)
    assert batch.speculation()["accepted"][0] > 0
    greedy = [replace(r, temperature=0.0) for r in asked]
    assert run(greedy, weights, REJECTING)[0] == run(greedy, weights, None)[0]


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_replies_have_the_policys_law(rule):
    """Three tokens from a vocabulary of 5, 3000 replies, a draft with the policy's own head but hot: chi-square against
    the exact distribution of all 125."""
    arch = replace(KINDS["llama"], vocab=5, layers=2)
    draw = torch.Generator().manual_seed(4)
    tensors = {
        n: torch.ones(s) if "norm" in n else torch.randn(s, generator=draw) * 0.15 for n, s in arch.shapes().items()
    }
    from furlong.ops.draft.start import start_draft

    settings = replace(ALWAYS, verify=rule, proposals=2)
    made, shape = start_draft(settings, arch, tensors, 0)
    weights = Live(0, Decoder(arch, tensors), serial=1, drafter=Drafter(shape, made, torch.float32))
    asked = [GenerateRequest(str(i), (1, 2), 10**6 + i, 3, 1.0) for i in range(3000)]
    found, batch, _ = run(asked, weights, settings)
    assert 1.2 < batch.speculation()["acceptance_length"] < 2.5
    drawn = np.array([found[r.request_id][0] for r in asked])
    rows = [((1, 2, a, b, c), 2) for a in range(5) for b in range(5) for c in range(5)]
    chances = np.exp([sum(row) for row in score(weights.decoder, rows, 1.0)])
    assert abs(chances.sum() - 1) < 1e-5
    counts = np.bincount(drawn @ [25, 5, 1], minlength=125)
    few = chances * len(asked) < 5
    cells = [(counts[~few], chances[~few]), (counts[few].sum(keepdims=True), chances[few].sum(keepdims=True))]
    seen, wanted = (np.concatenate(column) for column in zip(*cells, strict=True))
    statistic = ((seen - wanted * len(asked)) ** 2 / (wanted * len(asked) + 1e-12)).sum()
    freedom = len(seen) - 1
    # Mean + 4 standard deviations of the statistic.
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_speculation_that_does_not_pay_is_switched_off(monkeypatch):
    """As measured: the draft is made slow, and poor."""
    asked = [replace(r, max_new_tokens=120, stop_ids=()) for r in requests(4, 5)]
    weights, ask = live(settings=ALWAYS), DraftChain.propose

    def slow(self, pairs, hidden):
        torch.randn(900, 900) @ torch.randn(900, 900)
        ask(self, pairs, hidden)

    monkeypatch.setattr(DraftChain, "propose", slow)
    settings = DraftSettings(verify="match", shadow=0.0)
    found, batch, _ = run(asked, weights, settings)
    assert found == run(asked, weights, None)[0]
    steps = {step["kind"]: step for step in batch.speculation()["steps"] if step["replies"] == 4}
    assert steps["off: costs"]["count"] > 60
    assert steps["off: measure"]["count"] >= 3
    assert steps["on: measure"]["count"] >= 3
    assert sum(step["count"] for kind, step in steps.items() if kind.startswith("on")) < 30
    assert batch.speculation()["speedup"] < 1


def test_pages_hold_a_draft_beside_the_policy():
    arch = KINDS["llama"]
    cache = KVCache(arch, torch.float32, 0)
    cache.enlarge(64)
    first = cache.open()
    cache.extend(first, 64)
    assert cache.attach(1, 3, 20)
    assert not cache.attach(1, 3, 20)
    assert cache.keys(arch.layers).shape == (1, 3, 64, 32)
    assert not cache.keys(arch.layers).any()
    places = torch.zeros(1, dtype=torch.long), torch.tensor([5])
    cache.write(arch.layers, *places, torch.ones(1, 2, 3, 32))
    cache.enlarge(3 * 64)
    second = cache.open()
    cache.extend(second, 64)
    cache.copy(first, second, 10)
    for held in (first, second):
        assert cache.values(arch.layers)[held.pages[0], :, 5].all()
    cache.close(first)
    assert cache.values(arch.layers)[second.pages[0], :, 5].all()
    assert kv_cache.PAGE == 64
    cache.write(0, torch.tensor(second.pages), torch.tensor([9]), torch.full((1, 2, 2, 16), torch.nan))
    cache.blank(second, 9)
    assert not cache.keys(0)[second.pages[0]].isnan().any()
    assert cache.attach(2, 1, 16)
