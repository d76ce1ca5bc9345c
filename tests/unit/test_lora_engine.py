"""Adapters in an engine, whole and split over two processes: it computes with merged weights and proves what it holds."""

import ctypes

import pytest
import torch
from lora_samples import RANK, adapted, base_of
from safetensors.torch import save_file
from tiny_policy import make_folder, make_tiny_moe

from furlong.ops.policy.decoder import WeightsError
from furlong.ops.policy.lora import SCALE, is_adapted, merge, names_of, policy_of
from furlong.ops.policy.manifest import ModelError
from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest
from furlong.resources.engines.local import LocalEngine


@pytest.fixture(scope="module", params=["llama", "moe"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return make_folder(path) if request.param == "llama" else make_tiny_moe(path)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def started(request, folder):
    engine = LocalEngine(folder, 0, "bfloat16", 1, [3], tp=request.param)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture
def engine(started, folder):
    """Version 0."""
    started.load_anchor(folder, 0, [], fence(started))
    return started


def fence(engine):
    return engine.health()["fence"] + 1


def rows(old, new, version, base_version):
    digests = {row["name"]: row["digest"] for row in manifest(new)}
    return digests, encode(version, base_version, "run", old, new, digests)


def draw(engine):
    asked = [GenerateRequest(str(i), tuple(range(1, 3 + i)), i, 12, float(i % 2)) for i in range(4)]
    return [(s.tokens, s.logprobs, s.model_logprobs, s.finish_reason) for s in engine.generate(asked)]


def test_an_engine_samples_with_adapters_what_it_samples_with_the_merged_weights(engine, folder, tmp_path):
    zero = base_of(folder)
    plain = draw(engine)
    one = adapted(zero, 1)
    digests, deltas = rows(zero, one, 1, 0)
    assert {name for name in deltas["name"].to_pylist() if not name.startswith("adapter.")} == set()
    token = fence(engine)
    assert engine.stage(1, 0, deltas, token).tensors == digests
    engine.activate(1, token)
    assert engine.attest().tensors == digests
    with_adapters = draw(engine)
    assert with_adapters != plain
    two = adapted(zero, 1, 0.3)
    digests, deltas = rows(one, two, 2, 1)
    assert "lora_A" not in str(deltas["name"].to_pylist())
    engine.stage(2, 1, deltas, token)
    engine.activate(2, token)
    assert engine.attest().tensors == digests
    later = draw(engine)
    assert later != with_adapters
    for published, wanted in ((one, with_adapters), (two, later)):
        file = tmp_path / "model.safetensors"
        save_file(policy_of(published), file)
        engine.load_anchor(str(file), 3, [], token)
        assert draw(engine) == wanted
        save_file(published, file)
        proof = engine.load_anchor(str(file), 4, [], token)
        assert proof.tensors == {row["name"]: row["digest"] for row in manifest(published)}
        assert draw(engine) == wanted
    chain = [rows(zero, one, 1, 0)[1], rows(one, two, 2, 1)[1]]
    assert engine.load_anchor(folder, 2, chain, token).tensors == digests
    assert draw(engine) == later


def test_adapters_that_are_zero_change_nothing(engine, folder):
    zero = base_of(folder)
    plain = draw(engine)
    digests, deltas = rows(zero, adapted(zero, 1, 0.0), 1, 0)
    token = fence(engine)
    assert engine.stage(1, 0, deltas, token).tensors == digests
    engine.activate(1, token)
    assert draw(engine) == plain
    engine.revert(0, token)
    assert engine.attest().tensors == {row["name"]: row["digest"] for row in manifest(zero)}


def test_only_what_changed_is_merged_again(folder, monkeypatch):
    from furlong.resources.engines import rank

    merged = []
    monkeypatch.setattr(rank, "merge", lambda base, adapter: merged.append(1) or merge(base, adapter))
    engine = LocalEngine(folder, 0, "bfloat16", 1, [3])
    zero = base_of(folder)
    one = adapted(zero, 1)
    engine.stage(1, 0, rows(zero, one, 1, 0)[1], 1)
    engine.activate(1, 1)
    assert len(merged) == sum(map(is_adapted, zero))
    layer = "model.layers.1.mlp.down_proj.weight"
    two = one | {names_of(layer)[1]: one[names_of(layer)[1]] * 2}
    engine.stage(2, 1, rows(one, two, 2, 1)[1], 1)
    engine.activate(2, 1)
    assert len(merged) == sum(map(is_adapted, zero)) + 1
    three = two | {SCALE: torch.tensor(1.0)}
    engine.stage(3, 2, rows(two, three, 3, 2)[1], 1)
    engine.activate(3, 1)
    assert len(merged) == 2 * sum(map(is_adapted, zero)) + 1
    found = draw(engine)
    engine.load_anchor(folder, 0, [], 1)
    engine.load_anchor(folder, 3, [rows(zero, three, 3, 0)[1]], 1)
    assert draw(engine) == found


def test_a_merged_weight_that_was_overwritten_is_found(folder):
    engine = LocalEngine(folder, 0, "bfloat16", 1, [3])
    zero = base_of(folder)
    one = adapted(zero, 1)
    engine.stage(1, 0, rows(zero, one, 1, 0)[1], 1)
    engine.activate(1, 1)
    before = engine.attest()
    weight = engine._gate.live.decoder.layers[0]._out._weight
    address = torch.ops.mkldnn.data_ptr(weight) if weight.is_mkldnn else weight.data_ptr()
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 1
    # Nor is it taken for good by a version that goes on with it.
    deltas = rows(one, one | {"model.norm.weight": one["model.norm.weight"] * 2}, 2, 1)[1]
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.o_proj\.weight of version 2 is not what it became"):
        engine.stage(2, 1, deltas, 1)
    with pytest.raises(WeightsError, match=r"layers\.0\.self_attn\.o_proj\.weight of version 1 is not what it became"):
        engine.attest()
    byte.value ^= 1
    assert engine.attest() == before


A, B = names_of("model.layers.0.self_attn.q_proj.weight")
BAD = [
    ({B: None}, "lora_B.weight is missing"),
    ({SCALE: None}, "adapter.scale is missing"),
    ({A: torch.ones(RANK, 31)}, r"adapt no weight model.layers.0.self_attn.q_proj.weight \(\d+, 32\) of the model"),
    ({B: torch.ones(8, RANK + 1)}, "adapt no weight"),
    ({A: torch.ones(0, 32), B: torch.ones(48, 0)}, "adapt no weight"),
    ({A: torch.ones(RANK, 32, dtype=torch.bfloat16)}, "publish adapters in float32"),
    ({"adapter.lm_head.lora_A.weight": torch.ones(1, 2), "adapter.lm_head.lora_B.weight": torch.ones(2, 1)}, "lm_head"),
    ({"adapter.sort.q": torch.ones(2)}, r"tensor adapter\.sort\.q is of no adapter"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_adapters_that_fit_no_weight_are_refused_and_the_old_version_goes_on(engine, folder, change, message):
    zero, before = base_of(folder), engine.attest()
    new = {name: t for name, t in (adapted(zero, 1) | change).items() if t is not None}
    with pytest.raises(ModelError, match=message):
        engine.stage(1, 0, rows(zero, new, 1, 0)[1], fence(engine))
    assert engine.health()["staged"] is None
    assert engine.attest() == before
