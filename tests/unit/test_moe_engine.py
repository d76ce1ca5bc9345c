"""An engine that serves a mixture of experts: its weights versions, and what it records of which experts tokens took."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import experts_of, make_tiny_moe
from transformers import AutoModelForCausalLM

from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.routing import decode, join
from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.step_gate import EngineError

CHANGED = (
    "model.layers.0.mlp.gate.weight",
    "model.layers.0.mlp.experts.3.down_proj.weight",
    "model.layers.2.mlp.experts.0.gate_proj.weight",
    "model.layers.2.mlp.experts.5.up_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
)


CONTEXT = 128
DEADLINE = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_moe(tmp_path_factory.mktemp("moe"), max_position_embeddings=CONTEXT)


def start(folder: str, tp: int = 1) -> LocalEngine:
    """Replies end at their length."""
    engine = LocalEngine(folder, 0, "float32", 1, [3], tp=tp)
    engine._stop_ids = ()
    return engine


@pytest.fixture(scope="module")
def halves(folder):
    engine = start(folder, 2)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(params=["tp1", "tp2"])
def engine(request, folder):
    if request.param == "tp1":
        whole = start(folder)
        yield whole
        whole.close()
        return
    split = request.getfixturevalue("halves")
    split.load_anchor(folder, 0, [], split.health()["fence"] + 1)
    yield split


def requests(count: int = 4, length: int = 12, temperature: float = 1.0) -> list[GenerateRequest]:
    return [GenerateRequest(str(i), tuple(range(1, 3 + i)), i, length, temperature, stop_ids=()) for i in range(count)]


def drawn(engine: LocalEngine) -> list[tuple]:
    return [(s.tokens, s.logprobs, s.finish_reason) for s in engine.generate(requests())]


def next_version(folder: str):
    """Tensors of version 1, their digests, and the rows that lead from 0 to it."""
    old = load_file(f"{folder}/model.safetensors")
    new = {name: tensor * 1.5 if name in CHANGED else tensor for name, tensor in old.items()}
    digests = {row["name"]: row["digest"] for row in manifest(new)}
    return new, digests, encode(1, 0, "run", old, new, digests)


def test_replies_have_the_log_probabilities_of_transformers(engine, folder):
    """Log-probabilities are sums over a softmax of logits that agree within 1e-5 each: within 3e-5."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request, sample in zip(requests(), engine.generate(requests()), strict=True):
        row = torch.tensor([request.prompt + sample.tokens])
        with torch.no_grad():
            logits = model(row).logits[0, len(request.prompt) - 1 : -1]
        want = torch.log_softmax(logits, -1)[range(len(sample.tokens)), list(sample.tokens)]
        assert len(sample.tokens) > 0
        assert (torch.tensor(sample.logprobs) - want).abs().max() <= 3e-5


def test_samples_tell_the_experts_of_every_token(engine, folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request, sample in zip(requests(), engine.generate(requests()), strict=True):
        routing = sample.routing
        assert (routing.first, routing.layers, routing.top_k, routing.experts) == (0, (0, 2), 2, 6)
        fed = (request.prompt + sample.tokens)[:-1]
        assert np.array_equal(np.sort(decode(routing), axis=-1), experts_of(model, fed))


def test_an_aborted_reply_is_resumed_where_it_ended(engine, monkeypatch):
    """A real abort, wherever it comes: the parts join to what an uninterrupted reply gives. Slowed down to come amid."""
    asked = requests(1, length=CONTEXT - 2)[0]
    (whole,) = engine.generate([replace(asked, request_id="whole")])
    step = Decoder.step
    monkeypatch.setattr(Decoder, "step", lambda *args: (time.sleep(0.01), step(*args))[1])
    engine.submit([asked])
    time.sleep(0.1)
    assert engine.abort([asked.request_id]) == 1
    until = time.monotonic() + DEADLINE
    while not (found := engine.collect(1.0, [])):
        assert time.monotonic() < until
    (first,) = found
    assert engine.collect(0.0, [first.request_id]) == []
    assert first.finish_reason == "abort"
    monkeypatch.undo()
    (second,) = engine.generate([replace(asked, request_id="second", prefix=first.tokens)])
    assert first.tokens + second.tokens == whole.tokens
    assert join([first.routing, second.routing]) == whole.routing


def test_staged_experts_are_proved_and_serve_as_a_fresh_engine_does(engine, folder, tmp_path):
    new, digests, rows = next_version(folder)
    fence, before = engine.health()["fence"] + 1, drawn(engine)
    proof = engine.stage(1, 0, rows, fence)
    assert (proof.tensors, proof.digest) == (digests, weights_digest(digests))
    assert drawn(engine) == before
    engine.activate(1, fence)
    assert engine.attest() == proof
    after = drawn(engine)
    assert after != before
    save_file(new, tmp_path / "new.safetensors")
    engine.load_anchor(str(tmp_path / "new.safetensors"), 1, [], fence)
    assert engine.attest().tensors == digests
    assert drawn(engine) == after
    engine.load_anchor(folder, 1, [rows], fence)
    assert drawn(engine) == after


def test_a_tensor_of_an_expert_that_is_not_there_is_refused(engine, folder):
    old = load_file(f"{folder}/model.safetensors")
    odd = {"model.layers.0.mlp.experts.6.up_proj.weight": torch.ones(16, 32)}
    digests = {row["name"]: row["digest"] for row in manifest(old | odd)}
    rows = encode(1, 0, "run", old, old | odd, digests)
    with pytest.raises(EngineError, match=r"experts.6.up_proj.weight is not part of this engine's model"):
        engine.stage(1, 0, rows, engine.health()["fence"] + 1)


def test_sizes_that_do_not_split_the_experts_are_refused(tmp_path):
    folder = make_tiny_moe(tmp_path, moe_intermediate_size=15)
    with pytest.raises(EngineError, match=r"over tp=2 processes.*tp may be 1"):
        LocalEngine(folder, 0, "float32", 1, [3], tp=2)
