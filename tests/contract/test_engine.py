"""What every engine owes to whoever asks it for replies: the same rules for the embedded engine and for a real SGLang
server, for a dense model and for one with experts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from contract.engine_samples import (
    CONTEXT,
    FENCES,
    STOP,
    Stand,
    check_form,
    collect_all,
    digest_of,
    in_thread,
    make_folder,
    other_weights,
    until,
    weights,
)
from safetensors.torch import save_file

from furlong.ops.policy.generate import RequestError
from furlong.ops.policy.routing import decode, join
from furlong.ops.policy.sampling import NonFiniteLogits
from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.sglang import SGLangEngine
from furlong.resources.engines.sglang_push import make_pusher
from furlong.resources.engines.step_gate import EngineError

MODES = ("in_place", "retract")
RULES = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
)


def ask(name: str, number: int = 0, new: int = 24, **more) -> GenerateRequest:
    """Requests of other numbers have prompts of other lengths, some with the same beginning."""
    prompt = tuple((7 * i + number % 3) % 59 for i in range(3 + 5 * (number % 7)))
    rules = {"temperature": 1.0} | more
    return GenerateRequest(name, prompt, seed=1000 + number, max_new_tokens=new, **rules)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return {kind: make_folder(tmp_path_factory.mktemp("models") / kind, kind) for kind in ("dense", "moe")}


@pytest.fixture(scope="module", autouse=True)
def servers(folders) -> Iterator[dict[str, Future]]:
    """Both start at once, while the embedded engine is tested."""
    with ThreadPoolExecutor(2) as pool:
        made = {kind: pool.submit(SGLangEngine, folder, 0, "float32", 1, (STOP,)) for kind, folder in folders.items()}
        yield made
        for future in made.values():
            if future.exception() is None:
                future.result().close()


@pytest.fixture(scope="module", params=["local-dense", "local-moe", "sglang-dense", "sglang-moe"])
def served(request, folders, servers) -> Iterator[Stand]:
    name, _, kind = request.param.partition("-")
    if name == "sglang":
        # Its matrix products are blocked by batch, so the same bits in any company is not a promise that it can keep.
        yield Stand(servers[kind].result(), folders[kind], kind, company=1e-5, close=2e-5)
        return
    engine = LocalEngine(folders[kind], 0, "float32", 1, (STOP,))
    yield Stand(engine, folders[kind], kind, company=0.0, close=2e-5)
    engine.close()


@pytest.fixture
def stand(served) -> Stand:
    served.reset()
    return served


def test_tokens_log_probabilities_and_experts_are_the_models(stand):
    requests = [ask(f"r{i}", i, **rules) for i, rules in enumerate(RULES)]
    samples = stand.engine.generate(requests)
    assert [sample.request_id for sample in samples] == [request.request_id for request in requests]
    for request, sample in zip(requests, samples, strict=True):
        stand.check(request, sample)
        assert sample.finish_reason in ("stop", "length")
        assert {span[0] for span in sample.versions} == {0}
    greedy, only = samples[0], samples[4]
    assert greedy.logprobs == greedy.model_logprobs
    assert only.logprobs == (0.0,) * len(only.tokens)
    assert max(only.model_logprobs) < 0


def test_a_reply_is_a_function_of_its_request(stand):
    """Whatever runs beside it, whenever it came, and whatever the others ask for."""
    requests = [ask(f"r{i}", i, **RULES[i % len(RULES)]) for i in range(12)]
    together = {sample.request_id: sample for sample in stand.engine.generate(requests)}
    long = ask("long", 5, new=300)
    stand.engine.submit([long])
    for request in reversed(requests):
        sample = stand.engine.generate([request])[0]
        before = together[request.request_id]
        assert sample.tokens == before.tokens
        far = [
            np.abs(np.subtract(a, b)).max()
            for a, b in ((sample.logprobs, before.logprobs), (sample.model_logprobs, before.model_logprobs))
        ]
        assert max(far) <= stand.company
        if stand.company == 0:
            assert sample.routing == before.routing
    assert len({sample.tokens for sample in together.values()}) == len(requests)
    collect_all(stand.engine, ["long"])


def test_given_tokens_are_scored_as_they_were_drawn(stand):
    """Alone and beside replies; where the same bits in any company are promised, they are those that were recorded."""
    requests = [ask(f"r{i}", i) for i in range(12)]
    samples = stand.engine.generate(requests)
    rows = [((*r.prompt, *s.tokens), len(r.prompt)) for r, s in zip(requests, samples, strict=True)]
    quiet = stand.engine.score(rows, 1.0)
    stand.engine.submit([ask(f"long{i}", i, new=300) for i in range(3)])
    for found in (quiet, stand.engine.score(rows[::-1], 1.0)[::-1]):
        assert [len(values) for values in found] == [len(sample.tokens) for sample in samples]
        far = [np.abs(np.subtract(v, s.logprobs)).max() for v, s in zip(found, samples, strict=True)]
        assert max(far) <= stand.company
    collect_all(stand.engine, [f"long{i}" for i in range(3)])
    assert stand.engine.score([(rows[0][0], len(rows[0][0]))], 1.0) == [[]]
    with pytest.raises(RequestError, match="row 1"):
        stand.engine.score([rows[0], (rows[1][0], 0)], 1.0)


def test_seeds_and_not_ids_name_the_random_numbers(stand):
    same, other = ask("a", 1), replace(ask("c", 1), seed=7)
    samples = stand.engine.generate([same, replace(same, request_id="b"), other])
    assert samples[0].tokens == samples[1].tokens != samples[2].tokens


@pytest.mark.parametrize("inflight", MODES)
def test_replies_go_on_over_a_flip(stand, inflight):
    """Under load: each token is what the version that its span names draws, from keys and values of the right one."""
    requests = [ask(f"r{i}", i, new=300) for i in range(10)]
    stand.stage()
    stand.engine.submit(requests)
    time.sleep(0.2)
    stand.flip(inflight)
    late = ask("late", 3)
    fresh = stand.engine.generate([late])[0]
    assert fresh.versions == ((1, 0, len(fresh.tokens)),)
    stand.check(late, fresh)
    samples = collect_all(stand.engine, [request.request_id for request in requests])
    spans = [tuple(span[0] for span in sample.versions) for sample in samples.values()]
    assert set(spans) <= {(0,), (1,), (0, 1)}
    assert spans.count((0, 1)) > 2
    for request in requests:
        stand.check(request, samples[request.request_id], inflight)
        assert samples[request.request_id].finish_reason in ("stop", "length")


@pytest.mark.parametrize("flipped", [False, True])
def test_an_aborted_reply_is_resumed_from_its_prefix(stand, flipped):
    """With nothing lost and nothing changed: its second part is what would have followed."""
    request = ask("r", 4, new=300)
    whole = stand.engine.generate([replace(request, request_id="whole")])[0]
    for pause in (0.05, 0.2, 0.8, 3.2):  # until something of it has been drawn, on a busy machine too
        request = replace(request, request_id=f"r-{pause}")
        stand.engine.submit([request])
        time.sleep(pause)
        assert stand.engine.abort([request.request_id, "nobody"]) == 1
        part = collect_all(stand.engine, [request.request_id])[request.request_id]
        check_form(request, part)
        assert part.finish_reason == "abort"
        if part.tokens:
            break
    assert part.tokens == whole.tokens[: len(part.tokens)]
    assert 0 < len(part.tokens) < len(whole.tokens)
    stand.check(request, part)
    if flipped:
        stand.stage()
        stand.flip("in_place")
    rest = replace(request, request_id="r2", prefix=part.tokens)
    last = stand.engine.generate([rest])[0]
    stand.check(rest, last)
    assert last.versions == ((int(flipped), 0, len(last.tokens)),)
    if not flipped:
        assert part.tokens + last.tokens == whole.tokens
        assert last.finish_reason == whole.finish_reason
    if part.routing is not None:
        joined = join([part.routing, last.routing])
        assert joined.rows == len(request.prompt) + len(part.tokens) + len(last.tokens) - 1
        assert (decode(joined)[: part.routing.rows] == decode(part.routing)).all()


def test_a_reply_ends_at_its_deadline_and_the_others_do_not(stand):
    long = ask("long", 4, new=CONTEXT - 40, temperature=0.0)
    whole = stand.engine.generate([long])[0]
    assert len(whole.tokens) > 200
    slow = replace(long, request_id="slow", deadline=whole.seconds / 4)
    requests = [slow, *(ask(f"r{i}", i, deadline=60.0) for i in range(4))]
    samples = stand.engine.generate(requests)
    assert samples[0].finish_reason == "deadline"
    assert slow.deadline < samples[0].seconds < 5
    assert samples[0].tokens == whole.tokens[: len(samples[0].tokens)]
    for request, sample in zip(requests, samples, strict=True):
        stand.check(request, sample)
        assert sample.finish_reason in ("stop", "length") or request is slow


def test_stop_ids_end_a_reply(stand):
    request = ask("r", 2, new=60, temperature=0.0)
    tokens = stand.engine.generate([request])[0].tokens
    at = next(i for i, token in enumerate(tokens) if i > 3 and token not in tokens[:i])
    some = stand.engine.generate([replace(request, request_id="s", stop_ids=(59, tokens[at]))])[0]
    assert some.tokens == tokens[: at + 1]
    assert some.finish_reason == "stop"
    one = stand.engine.generate([replace(request, request_id="t", max_new_tokens=1)])[0]
    assert (one.tokens, one.finish_reason) == (tokens[:1], "length")


def test_a_request_is_drawn_once_and_its_sample_kept_until_it_is_taken(stand):
    """So a driver that died can be followed by one that asks for the same."""
    requests = [ask(f"r{i}", i, new=40) for i in range(3)]
    stand.engine.submit(requests)
    stand.engine.submit(requests)
    until(lambda: len(stand.engine.collect(1.0, [])) == 3)
    first = {sample.request_id: sample for sample in stand.engine.collect(0.0, [])}
    stand.engine.submit([*requests, ask("r3", 3)])
    assert {sample.request_id: sample for sample in stand.engine.collect(0.0, ["r3"])}["r0"] == first["r0"]
    until(lambda: len(stand.engine.collect(1.0, [])) == 4)
    left = stand.engine.collect(0.0, ["r0", "r1", "nobody"])
    assert sorted(sample.request_id for sample in left) == ["r2", "r3"]
    assert next(sample for sample in left if sample.request_id == "r2") == first["r2"]
    assert stand.engine.collect(0.0, ["r2", "r3"]) == []
    began = time.monotonic()
    assert stand.engine.collect(0.3, []) == []
    assert 0.25 < time.monotonic() - began < 5
    again = stand.engine.generate([requests[0]])[0]
    assert again.tokens == first["r0"].tokens


def test_what_is_unusable_is_refused_and_nothing_begun(stand):
    fine = ask("fine", 1)
    for broken, words in (
        (replace(fine, prompt=()), "empty"),
        (replace(fine, prompt=(1, 61)), "vocabulary"),
        (replace(fine, prompt=(-1,)), "vocabulary"),
        (replace(fine, prefix=(2**31,)), "vocabulary"),
        (replace(fine, stop_ids=(61,)), "vocabulary"),
        (replace(fine, max_new_tokens=0), "max_new_tokens"),
        (replace(fine, prefix=(1,) * 24), "prefix"),
        (replace(fine, max_new_tokens=CONTEXT), "context|more than"),
        (replace(fine, temperature=float("nan")), "temperature"),
        (replace(fine, temperature=-1.0), "temperature"),
        (replace(fine, top_k=-1), "top_k"),
        (replace(fine, top_p=0.0), "top_p"),
        (replace(fine, min_p=1.5), "min_p"),
        (replace(fine, seed=2**63), "seed"),
        (replace(fine, deadline=-1.0), "deadline"),
        (fine, "twice"),
    ):
        for call in (stand.engine.submit, stand.engine.generate):
            with pytest.raises(RequestError, match=words):
                call([fine, replace(broken, request_id="fine" if broken is fine else "broken")])
    assert stand.engine.health()["running"] == 0
    assert stand.engine.collect(0.0, []) == []
    stand.check(fine, stand.engine.generate([fine])[0])


def test_the_whole_context_can_be_used(stand):
    """A prompt as long as it can be, and a reply to the last position."""
    long = GenerateRequest("long", tuple(i % 59 for i in range(CONTEXT - 1)), 1, 1, 1.0)
    short = GenerateRequest("short", (5,), 3, CONTEXT - 1, 0.9)
    for request, sample in zip((long, short), stand.engine.generate([long, short]), strict=True):
        stand.check(request, sample)
        assert sample.finish_reason in ("stop", "length")


def test_health_tells_what_is_served_while_it_is(stand):
    stand.engine.submit([ask(f"r{i}", i, new=250) for i in range(6)])
    until(lambda: stand.engine.health()["running"])
    began = time.monotonic()
    health = stand.engine.health()
    assert time.monotonic() - began < 5
    assert health["version"] == 0
    assert health["digest"] == digest_of(weights(stand.folder)) == stand.engine.attest().digest
    assert health["engine"] == stand.engine.attest().engine
    assert health["running"] > 0
    assert health["paused"] is False
    assert health["staged"] is None
    assert health["resident_bytes"] > 2**20
    stand.stage()
    assert stand.engine.health()["staged"] == 1
    stand.flip("in_place")
    health = stand.engine.health()
    assert (health["version"], health["digest"]) == (1, digest_of(other_weights(stand.folder)))
    collect_all(stand.engine, [f"r{i}" for i in range(6)])
    until(lambda: stand.engine.health()["running"] == 0)


def test_a_pause_holds_replies_and_ends_with_its_lease(stand):
    stand.engine.pause(30.0)
    assert stand.engine.health()["paused"]
    requests = [ask(f"r{i}", i) for i in range(3)]
    thread, result = in_thread(lambda: stand.engine.generate(requests))
    time.sleep(0.3)
    assert not result
    stand.engine.pause(0.5)
    thread.join(10)
    for request, sample in zip(requests, result[0], strict=True):
        stand.check(request, sample)


def test_abort_ends_what_runs_and_what_waits(stand):
    """Many more than are decoded at once; each has one sample, and the engine is free afterwards."""
    names = [f"r{i:02d}" for i in range(60)]
    stand.engine.submit([ask(name, i, new=250) for i, name in enumerate(names)])
    time.sleep(0.2)
    first = stand.engine.abort(["r59"])
    ended = first + stand.engine.abort()
    samples = collect_all(stand.engine, names)
    assert first == 1
    assert sum(sample.finish_reason == "abort" for sample in samples.values()) <= ended
    assert samples["r59"].finish_reason == "abort"
    for i, name in enumerate(names):
        check_form(ask(name, i, new=250), samples[name])
    assert stand.engine.abort() == 0
    stand.check(ask("x"), stand.engine.generate([ask("x")])[0])


def test_weights_that_give_no_numbers_fail_their_requests_and_nothing_else(stand, tmp_path):
    path = tmp_path / "bad.safetensors"
    bad = weights(stand.folder)
    bad["model.norm.weight"][3] = float("nan")
    save_file(bad, path)
    stand.engine.load_anchor(str(path), 2, [], next(FENCES))
    with pytest.raises((NonFiniteLogits, EngineError), match="not finite"):
        stand.engine.generate([ask("r", 1), ask("s", 2, temperature=0.0)])
    stand.reset()
    stand.check(ask("r", 1), stand.engine.generate([ask("r", 1)])[0])


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_both_engines_draw_the_same_reply(folders, servers, kind):
    """By the same random numbers from logits that differ by rounding: which engine served can't be seen in the tokens."""
    requests = [ask(f"r{i}", i, new=32, **RULES[i % len(RULES)]) for i in range(16)]
    local = LocalEngine(folders[kind], 0, "float32", 1, (STOP,))
    try:
        mine = local.generate(requests)
    finally:
        local.close()
    server = servers[kind].result()
    server.load_anchor(folders[kind], 0, [], next(FENCES))
    for a, b in zip(mine, server.generate(requests), strict=True):
        assert a.tokens == b.tokens
        assert np.abs(np.subtract(a.logprobs, b.logprobs)).max() < 2e-5


@pytest.mark.parametrize("push", ["tensor", "distributed", "disk"])
def test_one_expert_gets_into_a_server_by_every_way(folders, servers, push):
    """The server keeps all experts of a layer in two tensors; a part of one is changed, and its checksum read back."""
    engine, fence = servers["moe"].result(), next(FENCES)
    engine.load_anchor(folders["moe"], 0, [], fence)
    old = weights(folders["moe"])
    new = dict(old)
    for name in ("model.layers.1.mlp.experts.4.up_proj.weight", "model.layers.2.mlp.experts.0.down_proj.weight"):
        new[name] = old[name] + 1.0
    own, engine._pusher = engine._pusher, make_pusher(push, engine._server, engine._scratch)
    try:
        engine.stage(1, 0, encode(1, 0, "run", old, new, {r["name"]: r["digest"] for r in manifest(new)}), fence)
        engine.activate(1, fence)
        assert engine.attest().digest == engine.health()["digest"] == digest_of(new)
        engine.revert(0, fence)
        assert engine.attest().digest == digest_of(old)
    finally:
        engine._pusher.close()
        engine._pusher = own
