"""Requests that come, wait, join, share prompts, run out of time or of memory, and are collected until acknowledged."""

import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from furlong.ops.policy import batch
from furlong.ops.policy.generate import RequestError
from furlong.ops.protocols import GenerateRequest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.step_gate import EngineError

DEADLINE = 30.0
PAGE_BYTES = 2 * 2 * 2 * 16 * 64 * 4
"""Of 64 tokens of the model below."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("model"))
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.3, eos_token_id=7,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return path


@pytest.fixture
def engine(folder):
    """Stops at no token, and counts what each step feeds."""
    return watched(folder)


def watched(folder):
    made = LocalEngine(folder, 0, "float32", 1, [7])
    made._stop_ids = ()
    made.fed = []
    decoder, step = made._gate.live.decoder, made._gate.live.decoder.step

    def count(tokens, plan, wanted):
        made.fed.append((len(tokens), len(wanted)))
        return step(tokens, plan, wanted)

    decoder.step = count
    return made


def ask(name, prompt=(1, 2), new=5, **more):
    return GenerateRequest(str(name), tuple(prompt), 3, new, 1.0, **more)


def wait(condition):
    until = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < until, "deadline passed"
        time.sleep(0.001)


def finished(engine, count):
    """Collected without taking any."""
    wait(lambda: len(engine.collect(0.1, [])) >= count)
    return {s.request_id: s for s in engine.collect(0.0, [])}


def content(sample):
    return (sample.tokens, sample.logprobs, sample.finish_reason)


def test_a_driver_that_died_is_followed_by_one_that_submits_the_same(engine):
    """While it runs and when it has finished: drawn once. After it was taken, it is drawn again, to the same bits."""
    asked = [ask(i, (1, 2 + i), new=30) for i in range(3)]
    engine.submit(asked)
    engine.submit([*asked[::-1], ask("more")])
    first = finished(engine, 4)
    engine.submit(asked)
    assert engine.health()["running"] == 0
    assert engine.collect(0.0, []) == list(first.values())
    assert sum(wanted for _, wanted in engine.fed) == 3 * 30 + 5
    assert engine.collect(0.0, ["0", "1", "2"]) == [first["more"]]
    engine.submit(asked)
    again = finished(engine, 4)
    assert {name: content(s) for name, s in again.items()} == {name: content(s) for name, s in first.items()}


def test_threads_generate_at_once_and_a_collector_beside_them(engine):
    want = {str(i): content(engine.generate([ask(i, (1 + i,), 20)])[0]) for i in range(6)}
    found = {}

    def run(i):
        found[str(i)] = content(engine.generate([ask(i, (1 + i,), 20)])[0])

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(6)]
    engine.submit([ask("aside", new=40)])
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert found == want
    assert set(finished(engine, 1)) == {"aside"}


def test_requests_join_between_two_steps(engine):
    engine.submit([ask("long", new=1500)])
    wait(lambda: len(engine.fed) > 5)
    (sample,) = engine.generate([ask("short", (4, 5, 6))])
    assert engine.health()["running"] == 1
    assert engine.abort() == 1
    assert finished(engine, 1)["long"].finish_reason == "abort"
    assert {fed for fed in engine.fed if fed[0] > 1} >= {(4, 2), (2, 2)}
    assert content(engine.generate([ask("short", (4, 5, 6))])[0]) == content(sample)


def test_a_shared_prompt_is_computed_once_and_long_ones_in_chunks(engine, monkeypatch):
    monkeypatch.setattr(batch, "PREFILL_TOKENS", 100)
    prompt = tuple(i % 61 for i in range(350))
    group = [GenerateRequest(f"{i}", prompt, i, 4, 1.0) for i in range(8)]
    engine.pause(DEADLINE)
    engine.submit([ask("running", new=30), *group])
    engine.resume()
    samples = finished(engine, 9)
    # 2 tokens of the short prompt, 350 of the long one, then each token drawn but the last, and for the seven others of
    # the group the prompt's last token
    assert sum(fed for fed, _ in engine.fed) == 2 + 350 + 29 + 8 * 3 + 7
    assert max(fed for fed, _ in engine.fed) <= 100 + 8
    assert len({s.tokens for s in samples.values()}) > 4
    engine.collect(0.0, list(samples))
    for request in group[::3]:
        assert content(engine.generate([request])[0]) == content(samples[request.request_id])


def test_a_late_member_takes_the_prompt_of_one_that_runs(engine):
    prompt = tuple(i % 61 for i in range(200))
    engine.submit([GenerateRequest("first", prompt, 1, 1000, 1.0)])
    wait(lambda: len(engine.fed) > 3)
    (late,) = engine.generate([GenerateRequest("late", prompt, 2, 3, 1.0)])
    engine.abort()
    assert sum(fed > 100 for fed, _ in engine.fed) == 1
    assert content(engine.generate([GenerateRequest("late", prompt, 2, 3, 1.0)])[0]) == content(late)


@pytest.mark.parametrize("pages", [1, 3, 7])
def test_little_memory_puts_replies_off_but_loses_and_starves_none(folder, monkeypatch, pages):
    monkeypatch.setattr(batch, "CACHE_BYTES", 10**8)
    asked = [ask(i, range(1 + i, 31 + i), 100 + 40 * (i % 2)) for i in range(9)]
    want = [content(s) for s in watched(folder).generate(asked)]
    monkeypatch.setattr(batch, "CACHE_BYTES", pages * PAGE_BYTES)
    engine = watched(folder)
    engine.submit([ask("large", range(60), 900)])
    assert [content(s) for s in engine.generate(asked)] == want
    cache = engine._ranks._batch._cache
    assert finished(engine, 1)["large"].finish_reason == "length"
    assert (cache.used, cache.most_slots <= 10) == (0, True)
    assert engine.health()["waiting"] == 0


def test_waiting_requests_are_counted_and_begin_in_order(folder, monkeypatch):
    monkeypatch.setattr(batch, "MOST_LOGITS", 2 * 61)
    engine = watched(folder)
    engine.submit([ask("a", new=400), ask("b", new=400)])
    engine.submit([ask(i, new=3) for i in range(4)])
    wait(lambda: engine.health()["waiting"] == 4 and engine.fed)
    assert engine.health()["running"] == 6
    assert engine.abort(["3"]) == 1
    wait(lambda: engine.health()["waiting"] == 3)
    assert finished(engine, 1)["3"].tokens == ()
    engine.abort(["a", "b"])
    ended = list(finished(engine, 6))
    assert ended.index("0") < ended.index("2")
    assert ended.index("1") < ended.index("2")


def test_deadlines_end_replies_as_they_are(folder, monkeypatch):
    """Running, waiting behind others, and while a pause lasts."""
    monkeypatch.setattr(batch, "MOST_LOGITS", 61)
    engine = watched(folder)
    (sample,) = engine.generate([ask("slow", new=2000, deadline=0.3)])
    assert sample.finish_reason == "deadline"
    assert 0 < len(sample.tokens) < 2000
    assert 0.3 <= sample.seconds < 5
    engine.submit([ask("other", new=2000)])
    (sample,) = engine.generate([ask("waiting", deadline=0.1)])
    assert (sample.tokens, sample.finish_reason) == ((), "deadline")
    engine.abort()
    engine.pause(DEADLINE)
    begin = time.monotonic()
    (sample,) = engine.generate([ask("paused", deadline=0.2)])
    assert (sample.tokens, sample.finish_reason) == ((), "deadline")
    assert time.monotonic() - begin < 5
    engine.resume()
    (sample,) = engine.generate([ask("quick", deadline=20.0)])
    assert sample.finish_reason == "length"


def test_tokens_to_stop_at_are_the_requests_own(engine):
    (whole,) = engine.generate([ask("a", new=30)])
    stop = whole.tokens[9]
    at = whole.tokens.index(stop) + 1
    cut, other = engine.generate([ask("b", new=30, stop_ids=(60, stop)), ask("c", new=30)])
    assert (cut.tokens, cut.finish_reason) == (whole.tokens[:at], "stop")
    assert other.tokens == whole.tokens


def test_an_unusable_request_keeps_the_others_from_beginning(engine):
    with pytest.raises(RequestError, match="request 'b'"):
        engine.submit([ask("a"), ask("b", ())])
    assert engine.health()["running"] == 0
    assert engine.collect(0.0, []) == []


def test_a_step_that_fails_is_told_to_all_and_the_next_ones_run(engine, monkeypatch):
    want = content(engine.generate([ask("a")])[0])
    decoder = engine._gate.live.decoder
    step = decoder.step

    def broken(tokens, plan, wanted):
        raise MemoryError("no more")

    decoder.step = broken
    with pytest.raises(MemoryError, match="no more"):
        engine.generate([ask("a"), ask("b")])
    engine.submit([ask("c")])
    with pytest.raises(MemoryError, match="no more"):
        engine.collect(DEADLINE, [])
    decoder.step = step
    assert content(engine.generate([ask("a")])[0]) == want
    assert engine.health()["running"] == 0


def test_the_thread_ends_when_nothing_is_left_and_begins_again(engine, monkeypatch):
    monkeypatch.setattr("furlong.resources.engines.scheduler.IDLE_SECONDS", 0.05)
    for _ in range(3):
        engine.generate([ask("a")])
        wait(lambda: engine._scheduler._thread is None)


def test_unknown_treatment_of_replies_under_way_is_refused(engine):
    with pytest.raises(EngineError, match="inflight='drop' is unknown; give one of in_place, retract"):
        engine.activate(0, 1, "drop")
