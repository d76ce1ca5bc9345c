"""Real SGLang servers: weights get into them, are proven, and come out again, whichever way they are pushed."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path

import psutil
import pytest
import torch
from distributed.publish_contract import CONTRACT, Stand
from distributed.sglang_samples import (
    CLOSE,
    ask,
    assert_serves,
    changed,
    deltas,
    descendants,
    greedy,
    in_thread,
    make_folder,
    model_of,
    until,
    weights,
)
from safetensors.torch import save_file
from torch import Tensor

from furlong.ops.policy.generate import RequestError
from furlong.ops.protocols import GenerateRequest, Sample, StaleFence
from furlong.ops.weights.delta import DeltaError
from furlong.ops.weights.digest import manifest, tensor_digest
from furlong.ops.weights.layout import Offer, TensorSpec, whole
from furlong.ops.weights.plan import broadcast_plan, p2p_plan
from furlong.resources.engines.sglang import SGLangEngine
from furlong.resources.engines.sglang_push import make_pusher
from furlong.resources.engines.sglang_weights import compare
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.weights.group import open_store
from furlong.resources.weights.publisher import TRANSPORTS, PublishError
from furlong.resources.weights.send import send

PUSHES = ("tensor", "distributed", "disk")
NORM = "model.norm.weight"
FENCES = count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def served(folder) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(folder, 0, "float32", 1, (60,))
    yield engine
    engine.close()


@pytest.fixture
def engine(served, folder) -> SGLangEngine:
    """The one server, brought back to version 0."""
    served.resume()
    served.load_anchor(folder, 0, [], next(FENCES))
    return served


@pytest.fixture(scope="module")
def pushers(served) -> dict:
    return {push: make_pusher(push, served._server, served._scratch) for push in PUSHES}


@pytest.fixture(params=PUSHES)
def push(request, engine, pushers) -> Iterator[str]:
    """Each way into the same server in turn."""
    before, engine._pusher = engine._pusher, pushers[request.param]
    yield request.param
    engine._drop_staged()
    engine._pusher = before


def publish(engine: SGLangEngine, version: int, base: int, old: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    fence = next(FENCES)
    engine.stage(version, base, deltas(version, base, old, new), fence)
    engine.activate(version, fence)


def test_a_version_is_staged_activated_and_reverted(engine, folder, push):
    old = weights(folder)
    new = changed(old)
    fence = next(FENCES)
    proof = engine.stage(1, 0, deltas(1, 0, old, new), fence)
    assert proof.tensors == {name: tensor_digest(tensor) for name, tensor in new.items()}
    assert_serves(engine, folder, old, 0)
    assert engine.health()["staged"] == 1
    engine.activate(1, fence)
    assert_serves(engine, folder, new, 1)
    engine.revert(1, fence)
    assert_serves(engine, folder, new, 1)
    engine.revert(0, fence)
    assert_serves(engine, folder, old, 0)
    with pytest.raises(EngineError, match="not at hand"):
        engine.revert(1, fence)


def test_a_version_equal_to_the_last_is_a_version(engine, folder, push):
    old = weights(folder)
    publish(engine, 1, 0, old, dict(old))
    assert_serves(engine, folder, old, 1)


@pytest.mark.parametrize("push", ["tensor", "distributed"])
def test_a_draft_s_tensors_never_reach_the_policy(engine, folder, pushers, push):
    """Even of the same name: the server is told which model each is for. This one has no draft, and drops them."""
    old = weights(folder)
    new = changed(old, NORM)
    for version, tensors, wanted in (
        (1, {NORM: new[NORM], f"draft.{NORM}": torch.full_like(old[NORM], 3.0)}, new),
        (2, {f"draft.{NORM}": torch.full_like(old[NORM], 4.0)}, new),
        (3, {NORM: old[NORM]}, old),
    ):
        with engine._pause.changing():
            pushers[push].push(pushers[push].pack({n: t.clone() for n, t in tensors.items()}), version)
        compare(engine._weigh(version, wanted), engine._reported(), engine._architecture)
        assert engine._server.get("/model_info", 10.0)["weight_version"] == str(version)


def flip_a_bit(engine: SGLangEngine, push: str) -> None:
    parcel = engine._staged.parcel
    if push == "disk":
        path = parcel.folder / "model.safetensors"
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    else:
        parcel.tensors["model.layers.1.mlp.up_proj.weight"].view(torch.int32)[3, 4] ^= 1


def test_a_bit_flipped_after_it_was_attested_never_serves(engine, folder, push):
    old = weights(folder)
    new = changed(old)
    fence = next(FENCES)
    engine.stage(1, 0, deltas(1, 0, old, new), fence)
    flip_a_bit(engine, push)
    with pytest.raises(
        EngineError, match=r"does not hold version 1: parameter model\..*serves version 0|version 0 again"
    ):
        engine.activate(1, fence)
    assert_serves(engine, folder, old, 0)
    publish(engine, 2, 0, old, new)
    assert_serves(engine, folder, new, 2)


def break_push(engine: SGLangEngine, push: str) -> None:
    if push == "disk":
        (engine._staged.parcel.folder / "model.safetensors").unlink()
    else:
        engine._server.post("/destroy_weights_update_group", {"group_name": engine._pusher._name}, 10.0)


@pytest.mark.parametrize("push", ["distributed", "disk"], indirect=True)
def test_a_refused_push_leaves_the_version_before(engine, folder, push):
    old = weights(folder)
    new = changed(old)
    fence = next(FENCES)
    engine.stage(1, 0, deltas(1, 0, old, new), fence)
    break_push(engine, push)
    began = time.monotonic()
    with pytest.raises(EngineError, match="serves version 0 again"):
        engine.activate(1, fence)
    assert time.monotonic() - began < 10
    assert_serves(engine, folder, old, 0)
    publish(engine, 2, 0, old, new)
    assert_serves(engine, folder, new, 2)


def put_behind_its_back(engine: SGLangEngine, tensors: dict[str, Tensor], at: Path) -> None:
    at.mkdir()
    save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    body = {"model_path": str(at), "load_format": "safetensors", "flush_cache": False}
    engine._server.post("/update_weights_from_disk", body, 30.0)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.qkv_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        (NORM, NORM),
    ],
)
def test_attest_reads_the_servers_own_bytes(engine, folder, tmp_path, name, parameter):
    old = weights(folder)
    engine.attest()
    wrong = old[name].clone()
    wrong.view(torch.int32).view(-1)[-1] ^= 1
    put_behind_its_back(engine, {name: wrong}, tmp_path / "wrong")
    with pytest.raises(EngineError, match=f"parameter {parameter}.*{name}"):
        engine.attest()
    engine.load_anchor(folder, 0, [], next(FENCES))
    assert_serves(engine, folder, old, 0)


def test_an_anchor_with_a_chain_and_extra_tensors(engine, folder, tmp_path):
    draft = {"draft.fc.weight": torch.arange(6.0).reshape(2, 3).to(torch.bfloat16)}
    old = weights(folder)
    path = tmp_path / "anchor.safetensors"
    save_file(old | draft, path)
    first = changed(old, seed=2) | draft
    second = changed(first, NORM, "draft.fc.weight", seed=3)
    chain = [deltas(8, 7, old | draft, first), deltas(9, 8, first, second)]
    proof = engine.load_anchor(str(path), 9, chain, next(FENCES))
    assert proof.tensors == {name: tensor_digest(tensor) for name, tensor in second.items()}
    assert_serves(engine, folder, second, 9)
    third = changed(second, "draft.fc.weight", seed=4)
    publish(engine, 10, 9, second, third)
    assert_serves(engine, folder, third, 10)
    assert {name: piece.stop for name, piece in engine.layout()[0].items()} == {n: t.shape[0] for n, t in old.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("rule", CONTRACT, ids=lambda rule: rule.__name__)
def test_contract(engine, folder, push, transport, rule: Callable[[Stand], None]):
    """What `test_publish_contract` holds the other engines to, by every transport and every push."""
    stand = Stand(engine, folder, transport, FENCES)
    rule(stand)
    assert_serves(engine, folder, stand.versions[engine.health()["version"]], engine.health()["version"])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publication_that_the_server_does_not_hold_leaves_the_version_before(engine, folder, push, transport):
    stand = Stand(engine, folder, transport, FENCES)
    stand.add()
    # After the shadow was proven and before it is put into the server: only what the server reports can tell.
    with pytest.raises(PublishError, match=r"phase flip.*does not hold version 1.*engine 0 serves version 0"):
        stand.publish(flip=lambda: flip_a_bit(engine, push))
    stand.check_serves(0)
    assert_serves(engine, folder, stand.versions[0], 0)
    stand.publish()
    assert_serves(engine, folder, stand.versions[1], 1)


@pytest.mark.parametrize("way", ["broadcast", "p2p"])
def test_a_transfer_is_received(engine, folder, way):
    old = weights(folder)
    new = changed(old, NORM, "model.layers.1.mlp.gate_proj.weight")
    specs = {
        row["name"]: TensorSpec(row["name"], row["dtype"], tuple(row["shape"]), row["digest"]) for row in manifest(new)
    }
    names = [name for name in new if not torch.equal(old[name], new[name])]
    holdings = [[whole(spec) for spec in specs.values()]]
    store, address = open_store()
    offer = Offer(
        f"sglang-{way}", address, 1, 0, next(FENCES), tuple(specs.values()), (1,), 1,
        buckets=broadcast_plan(holdings, specs, names) if way == "broadcast" else (),
        routes=p2p_plan(holdings, [engine.layout()], specs, names) if way == "p2p" else (), deadline=20.0,
    )  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send, offer, 0, {whole(specs[name]): tensor for name, tensor in new.items()})
        proof = engine.receive(offer, 0)
        assert sent.result() == sum(new[name].nbytes for name in names)
    del store
    assert proof.tensors == {row["name"]: row["digest"] for row in manifest(new)}
    engine.activate(1, offer.fence)
    assert_serves(engine, folder, new, 1)


def test_what_does_not_fit_is_refused(engine, folder):
    old = weights(folder)
    new = changed(old)
    rows, fence = deltas(1, 0, old, new), next(FENCES)
    for call, error in [
        (lambda: engine.activate(1, fence), "not staged"),
        (lambda: engine.stage(2, 1, deltas(2, 1, old, new), fence), "builds on 1"),
        (lambda: engine.stage(0, 0, deltas(0, 0, old, new), fence), "live already"),
        (lambda: engine.stage(3, 0, rows, fence), "rows of"),
        (lambda: engine.pause(0.0), "positive"),
    ]:
        with pytest.raises(EngineError, match=error):
            call()
    with pytest.raises(DeltaError):
        engine.stage(1, 0, rows.slice(0, 1).set_column(10, "digest", [["0" * 64]]), fence)
    with pytest.raises(RequestError, match="vocabulary"):
        engine.generate([GenerateRequest("odd", (1, 61), 0, 4, 0.0)])
    assert_serves(engine, folder, old, 0)


def test_a_late_publisher_changes_nothing(engine, folder):
    old = weights(folder)
    new = changed(old)
    late, fence = next(FENCES), next(FENCES)
    engine.stage(1, 0, deltas(1, 0, old, new), fence)
    for call in (
        lambda: engine.stage(2, 0, deltas(2, 0, old, new), late),
        lambda: engine.activate(1, late),
        lambda: engine.revert(0, late),
        lambda: engine.load_anchor(folder, 0, [], late),
        lambda: engine.receive(Offer("x", "127.0.0.1:1", 2, 0, late, (), (1,), 1), 0),
    ):
        with pytest.raises(StaleFence):
            call()
    assert engine.health()["staged"] == 1
    assert_serves(engine, folder, old, 0)


def test_a_pause_ends_with_its_lease_or_with_resume(engine):
    engine.generate(ask(1))
    began = time.monotonic()
    engine.pause(1.5)
    assert engine.health()["paused"]
    engine.generate(ask(1))
    assert 1.4 < time.monotonic() - began < 5
    assert not engine.health()["paused"]
    engine.pause(60.0)
    thread, result = in_thread(lambda: engine.generate(ask(1)))
    time.sleep(0.3)
    assert not result
    assert engine.health()["running"] == 1
    engine.resume()
    engine.resume()
    thread.join(5)
    assert result[0][0].finish_reason == "length"


def test_a_flip_outlives_a_lease_and_keeps_a_longer_one(engine, folder):
    old = weights(folder)
    engine.pause(30.0)
    publish(engine, 1, 0, old, changed(old))
    assert engine.health()["paused"]
    thread, result = in_thread(lambda: engine.generate(ask(1)))
    time.sleep(0.3)
    assert not result
    engine.resume()
    thread.join(5)
    assert result[0][0].versions == ((1, 0, 12),)


def begun(engine: SGLangEngine) -> bool:
    """Whether the server has some tokens of a reply, by its own account."""
    load = engine._server.get("/v1/loads", 10.0)["loads"][0]
    return load["num_running_reqs"] == 1 and load["num_used_tokens"] > 20


def test_a_reply_spans_the_versions_that_drew_it(engine, folder, push):
    """Flipped while it is drawn, it goes on from the keys and values of before, as the reference does."""
    old = weights(folder)
    new, fence = changed(old), next(FENCES)
    engine.stage(1, 0, deltas(1, 0, old, new), fence)
    request = GenerateRequest("long", (1, 2, 3), 0, 900, 0.0)
    thread, result = in_thread(lambda: engine.generate([request]))
    until(lambda: begun(engine))
    engine.activate(1, fence)
    thread.join(60)
    sample = result[0][0]
    (first, begin, flip), (second, flipped, end) = sample.versions
    assert (first, begin, second, flipped, end) == (0, 0, 1, flip, len(sample.tokens))
    tokens, logprobs = greedy([model_of(folder, old), model_of(folder, new)], request.prompt, [flip, end - flip])
    assert list(sample.tokens) == tokens
    assert sample.logprobs == pytest.approx(logprobs, abs=10 * CLOSE)
    assert_serves(engine, folder, new, 1)


def test_replies_go_on_over_a_failed_flip(engine, folder):
    old = weights(folder)
    fence = next(FENCES)
    engine.stage(1, 0, deltas(1, 0, old, changed(old)), fence)
    flip_a_bit(engine, "tensor")
    request = GenerateRequest("long", (1, 2, 3), 0, 900, 0.0)
    thread, result = in_thread(lambda: engine.generate([request]))
    until(lambda: begun(engine))
    with pytest.raises(EngineError, match="serves version 0 again"):
        engine.activate(1, fence)
    thread.join(60)
    sample = result[0][0]
    assert sample.versions == ((0, 0, len(sample.tokens)),)
    assert list(sample.tokens) == greedy([model_of(folder, old)], request.prompt, [len(sample.tokens)])[0]


def test_abort_keeps_what_was_drawn(engine):
    requests = ask(40, 900)
    thread, result = in_thread(lambda: engine.generate(requests))
    until(lambda: engine.health()["running"])
    time.sleep(0.3)
    assert engine.health()["waiting"] > 0
    assert engine.abort(["r39", "nobody"]) == 1
    assert engine.abort(["r39"]) == 0
    asked = engine.abort()
    thread.join(20)
    samples = result[0]
    assert [sample.request_id for sample in samples] == [request.request_id for request in requests]
    ended = [sample for sample in samples if sample.finish_reason == "abort"]
    # Some come to their own end; the last in the line cannot have begun.
    assert 1 < len(ended) <= asked + 1
    assert {s.request_id for s in samples if not s.tokens} >= {"r39"}
    assert any(0 < len(sample.tokens) < 900 for sample in ended)
    for sample in samples:
        assert len(sample.tokens) == len(sample.logprobs)
        assert [end for _, _, end in sample.versions][-1:] == ([len(sample.tokens)] if sample.tokens else [])
        assert all(left[2] == right[1] for left, right in pairwise(sample.versions))
    assert engine.health()["running"] == 0
    assert engine.abort() == 0


def test_two_callers_at_once_get_their_own(engine):
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: engine.generate(ask(6)), range(2)))
    assert [s.tokens for s in both[0]] == [s.tokens for s in both[1]]


def address(engine: SGLangEngine) -> str:
    return f"http://127.0.0.1:{engine._server._port}"


def test_a_server_of_somebody_else_is_used_and_left_alone(engine, folder):
    """One that an engine before has left with other weights is given those of the folder."""
    old = weights(folder)
    publish(engine, 3, 0, old, changed(old))
    other = SGLangEngine(folder, 7, "float32", 1, (60,), address(engine))
    try:
        assert_serves(other, folder, old, 7)
        assert other.health()["longest"] == 1024
        publish(other, 8, 7, old, changed(old, seed=5))
        assert_serves(other, folder, changed(old, seed=5), 8)
    finally:
        other.close()
    engine._server.get("/server_info", 10.0)
    with pytest.raises(EngineError, match="does not hold version 3"):
        engine.attest()


def test_a_server_that_serves_another_model_is_refused_and_left_as_it_is(engine, folder, tmp_path):
    """Nobody has pushed anything to it, so its weights may be dear to somebody."""
    body = {"new_version": "default", "abort_all_requests": False}
    engine._server.post("/update_weight_version", body, 10.0)
    other = shutil.copytree(folder, tmp_path / "other")
    save_file(changed(weights(folder)), other / "model.safetensors", metadata={"format": "pt"})
    for path, dtype, words in [
        (str(other), "float32", "does not hold version 0"),
        (folder, "bfloat16", "dtype='float32'"),
        (make_folder(tmp_path / "qwen3", "qwen3"), "float32", "model_type='llama', needed is 'qwen3'"),
    ]:
        with pytest.raises(EngineError, match=words):
            SGLangEngine(path, 0, dtype, 1, (60,), address(engine))
    SGLangEngine(folder, 0, "float32", 1, (60,), address(engine)).close()
    for url in ("http://127.0.0.1:9", "127.0.0.1", "https://127.0.0.1:1"):
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"http://|broke the connection"):
            SGLangEngine(folder, 0, "float32", 1, (60,), url)
        assert time.monotonic() - began < 10


def test_a_broken_connection_costs_no_reply(engine, folder):
    """The server lives: what was asked over it is asked again, with the same random numbers."""
    request = GenerateRequest("long", (1, 2, 3), 5, 900, 0.7)
    whole = engine.generate([replace(request, request_id="whole")])[0]
    engine.submit([request])
    until(lambda: begun(engine))
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == engine._server._port:
            # Ends it for both sides; the thread that waits finds out by itself.
            with socket.socket(fileno=os.dup(connection.fd)) as found:
                found.shutdown(socket.SHUT_RDWR)
    samples: list[Sample] = []
    until(lambda: samples.extend(engine.collect(0.5, [])) or samples)
    engine.collect(0.0, ["long"])
    assert samples[0].tokens == whole.tokens
    assert samples[0].finish_reason == whole.finish_reason


def test_a_server_that_cannot_be_made_whole_is_ended(engine, folder, tmp_path):
    """A tensor that the version does not touch is wrong in the server: neither version could be proven."""
    old = weights(folder)
    processes = descendants(engine._server.pid)
    assert len(processes) > 3
    put_behind_its_back(engine, {NORM: old[NORM] + 1}, tmp_path / "wrong")
    fence = next(FENCES)
    engine.stage(1, 0, deltas(1, 0, old, changed(old, "model.layers.0.mlp.up_proj.weight")), fence)
    with pytest.raises(EngineError, match=r"nor version 0 back.*cannot serve a mix"):
        engine.activate(1, fence)
    assert not psutil.wait_procs(processes, timeout=10)[1]
    with pytest.raises(EngineError, match="has ended"):
        engine.generate(ask())
