"""An engine's weights versions, whole and split over two processes: loading, fencing, reverting, drafts."""

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_policy import make_folder

from furlong.ops import records
from furlong.ops.policy.decoder import WeightsError
from furlong.ops.policy.manifest import ModelError
from furlong.ops.protocols import GenerateRequest, StaleFence
from furlong.ops.weights.delta import DeltaError, encode
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.ops.weights.layout import Offer, TensorSpec, cut
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.weights.fence import FenceGuard

CHANGED = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.1.self_attn.k_proj.weight",
    "model.layers.1.mlp.gate_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.post_attention_layernorm.weight",
)
DRAFT = {
    "draft.layers.0.weight": torch.arange(12, dtype=torch.float32).view(3, 4),
    "draft.sort.scale": torch.tensor(0.5, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def halves(folder):
    engine = LocalEngine(folder, 0, "float32", 1, [3], tp=2)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(params=["tp1", "tp2"])
def engine(request, folder):
    """Version 0; tokens of fencing stay comparable because tests take the next ones."""
    if request.param == "tp1":
        return LocalEngine(folder, 0, "float32", 1, [3])
    split = request.getfixturevalue("halves")
    split.load_anchor(folder, 0, [], split.health()["fence"] + 1)
    return split


@pytest.fixture
def fence(engine):
    return engine.health()["fence"] + 1


def base_tensors(folder):
    return load_file(f"{folder}/model.safetensors")


def version(old, number, base, names=CHANGED, extra=(), factor=1.01):
    """New tensors, their digests, and the rows that lead to them."""
    new = {name: tensor * factor if name in names else tensor for name, tensor in old.items()} | dict(extra)
    digests = {row["name"]: row["digest"] for row in manifest(new)}
    return new, digests, encode(number, base, "run", old, new, digests)


def draw(engine, count=4):
    asked = [GenerateRequest(str(i), tuple(range(1, 3 + i)), i, 12, float(i % 2)) for i in range(count)]
    return [(s.tokens, s.logprobs, s.finish_reason) for s in engine.generate(asked)]


def test_layouts_tile_every_tensor(engine, folder):
    layout, tensors = engine.layout(), base_tensors(folder)
    assert len(layout) == engine.health()["tp"]
    for name, tensor in tensors.items():
        parts = [rank[name] for rank in layout]
        whole = all((p.start, p.stop) == (0, tensor.shape[p.dim]) for p in parts)
        assert whole or torch.equal(torch.cat([cut(tensor, p) for p in parts], parts[0].dim), tensor)
        assert whole == (len(layout) == 1 or "norm" in name), name
    held = [rank.keys() for rank in layout]
    assert all(names == tensors.keys() for names in held)


def test_memory_of_a_split_engine_is_split(halves):
    """The leader's pieces and the tensors it multiplies with are those of its layout, not whole ones."""
    held = halves._gate.live.tensors
    for name, piece in halves.layout()[0].items():
        assert held[name].shape[piece.dim] == piece.stop - piece.start
        assert held[name].untyped_storage().nbytes() == held[name].nbytes


def test_load_folder_file_and_chain_give_the_same_version(engine, folder, fence, tmp_path):
    zero = base_tensors(folder)
    one, _, first = version(zero, 1, 0)
    two, digests, second = version(one, 2, 1, names=CHANGED[2:4], factor=0.97)
    proof = engine.load_anchor(folder, 2, [first, second], fence)
    assert (proof.version, proof.tensors, proof.digest) == (2, digests, weights_digest(digests))
    through_chain = draw(engine)
    save_file(two, tmp_path / "anchor.safetensors")
    assert engine.load_anchor(str(tmp_path / "anchor.safetensors"), 2, [], fence) == proof
    assert draw(engine) == through_chain
    assert engine.load_anchor(folder, 0, [], fence).tensors != proof.tensors
    engine.stage(1, 0, first, fence)
    engine.activate(1, fence)
    assert engine.stage(2, 1, second, fence) == proof
    engine.activate(2, fence)
    assert draw(engine) == through_chain


def test_chains_with_gaps_are_refused_and_change_nothing(engine, folder, fence):
    zero = base_tensors(folder)
    one, _, first = version(zero, 1, 0)
    two, _, second = version(one, 2, 1)
    _, _, third = version(two, 3, 2)
    before = engine.attest()
    with pytest.raises(EngineError, match="builds version 3 on 2, but the one before gives 1"):
        engine.load_anchor(folder, 3, [first, third], fence)
    with pytest.raises(EngineError, match="ends at version 2, but version 3 was asked for"):
        engine.load_anchor(folder, 3, [first, second], fence)
    import pyarrow as pa

    with pytest.raises(EngineError, match="table 0 of the chain mixes"):
        engine.load_anchor(folder, 2, [pa.concat_tables([first, second])], fence)
    with pytest.raises(DeltaError):  # without the first table the base is another one
        engine.load_anchor(folder, 2, [second], fence)
    assert engine.attest() == before
    assert engine.health()["staged"] is None


def test_chains_may_have_versions_without_changes(engine, folder, fence):
    one, _, first = version(base_tensors(folder), 1, 0)
    _, digests, third = version(one, 3, 2)
    nothing = records.TABLES["weight_deltas"].empty_table()
    assert engine.load_anchor(folder, 3, [first, nothing, third], fence).tensors == digests
    assert engine.load_anchor(folder, 4, [first, nothing, third, nothing], fence).tensors == digests


def test_a_wrong_base_is_seen_in_split_tensors_too(engine, folder, fence):
    """A rank that holds part of a tensor cannot compare its digest; the engine as a whole must."""
    zero = base_tensors(folder)
    other = {name: tensor + 1 if name == CHANGED[2] else tensor for name, tensor in zero.items()}
    _, _, deltas = version(other, 1, 0, names=CHANGED[2:3])
    before = engine.attest()
    with pytest.raises(DeltaError, match=CHANGED[2]):
        engine.stage(1, 0, deltas, fence)
    assert engine.health()["staged"] is None
    assert engine.attest() == before
    with pytest.raises(EngineError, match="version 1 is not staged"):
        engine.activate(1, fence)


def test_revert_goes_back_once(engine, folder, fence):
    zero = draw(engine)
    before = engine.attest()
    _, _, deltas = version(base_tensors(folder), 1, 0)
    engine.revert(0, fence)  # it is live
    engine.stage(1, 0, deltas, fence)
    with pytest.raises(EngineError, match="version 1 cannot be gone back to: none is kept"):
        engine.revert(1, fence)
    engine.activate(1, fence)
    assert draw(engine) != zero
    engine.activate(1, fence)  # it is live, and nothing else is staged
    engine.revert(0, fence)
    engine.revert(0, fence)
    assert engine.attest() == before
    assert draw(engine) == zero
    with pytest.raises(EngineError, match=r"version 1 is not staged \(nothing is\)"):
        engine.activate(1, fence)
    engine.stage(1, 0, deltas, fence)
    engine.activate(1, fence)
    _, _, again = version(version(base_tensors(folder), 1, 0)[0], 2, 1)
    engine.stage(2, 1, again, fence)
    with pytest.raises(EngineError, match=r"version 1 is not staged \(version 2 is\)"):
        engine.activate(1, fence)
    with pytest.raises(EngineError, match="version 0 cannot be gone back to: none is kept"):
        engine.revert(0, fence)


def test_a_flip_that_comes_after_going_back_finds_nothing(engine, folder, fence):
    """The two calls may be under way at once, and the second be served first."""
    before = engine.attest()
    _, _, deltas = version(base_tensors(folder), 1, 0)
    engine.stage(1, 0, deltas, fence)
    engine.revert(0, fence)
    with pytest.raises(EngineError, match=r"version 1 is not staged \(nothing is\)"):
        engine.activate(1, fence)
    assert engine.attest() == before


def test_other_weights_than_asked_for_are_not_loaded(engine, folder, fence):
    before = engine.attest()
    _, digests, deltas = version(base_tensors(folder), 1, 0)
    for wrong in ({**digests, CHANGED[2]: "0" * 64}, {**digests, "draft.more": "0" * 64}):
        name = (wrong.items() - digests.items()).pop()[0]
        with pytest.raises(EngineError, match=f"tensor {name} of version 1 has digest .* version 0 goes on serving"):
            engine.load_anchor(folder, 1, [deltas], fence, wrong)
        assert engine.attest() == before
    assert engine.load_anchor(folder, 1, [deltas], fence, digests).tensors == digests


@pytest.mark.parametrize("coming", ["receive", "load"])
def test_a_version_is_forgotten_before_the_next_but_one_comes(folder, monkeypatch, coming):
    """Beside the live version there is room for one."""
    engine = LocalEngine(folder, 0, "float32", 1, [3])
    one, _, first = version(base_tensors(folder), 1, 0)
    engine.load_anchor(folder, 0, [], 1)
    old = weakref.ref(engine._gate.live.tensors[CHANGED[1]])
    engine.stage(1, 0, first, 1)
    engine.activate(1, 1)
    there = []

    def comes(*_):
        gc.collect()
        there.append(old())
        raise ModelError("does not come")

    monkeypatch.setattr("furlong.resources.weights.receive.take", comes)
    monkeypatch.setattr("furlong.resources.engines.rank.read_tensors", comes)
    tensors = tuple(TensorSpec(r["name"], r["dtype"], tuple(r["shape"]), r["digest"]) for r in manifest(one))
    offer = Offer("s", "", 2, 1, 1, tensors, (1,), 1, (), (), 1.0)
    call, args = {"receive": (engine.receive, (offer, 0)), "load": (engine.load_anchor, (folder, 2, [], 1))}[coming]
    with pytest.raises(ModelError, match="does not come"):
        call(*args)
    assert there == [None]


def test_a_new_publisher_replaces_what_a_dead_one_staged(engine, folder, fence):
    _, _, dead = version(base_tensors(folder), 1, 0)
    _, digests, alive = version(base_tensors(folder), 1, 0, factor=0.9)
    engine.stage(1, 0, dead, fence)
    assert engine.stage(1, 0, alive, fence + 1).tensors == digests
    engine.activate(1, fence + 1)
    assert engine.attest().tensors == digests
    assert engine.health()["digest"] == weights_digest(digests)


def test_a_late_publisher_changes_nothing(engine, folder, fence):
    _, digests, deltas = version(base_tensors(folder), 1, 0)
    engine.stage(1, 0, deltas, fence + 5)
    offer = Offer("s", "127.0.0.1:1", 2, 0, fence, (), (engine.health()["tp"],), 1)
    for late in (
        lambda: engine.stage(1, 0, deltas, fence),
        lambda: engine.activate(1, fence + 4),
        lambda: engine.revert(0, fence),
        lambda: engine.load_anchor(folder, 7, [], fence),
        lambda: engine.receive(offer, 0),
    ):
        with pytest.raises(StaleFence, match=f"lower than {fence + 5}"):
            late()
    health = engine.health()
    assert (health["version"], health["staged"], health["fence"]) == (0, 1, fence + 5)
    engine.activate(1, fence + 5)
    assert engine.attest().tensors == digests


def test_fence_guard_between_threads():
    """Whatever the order, the highest stays, and no thread passes with less than what was seen before."""
    guard, passed = FenceGuard(), []

    def show(fence):
        try:
            guard.check(fence)
            passed.append(fence)
        except StaleFence:
            pass

    threads = [threading.Thread(target=show, args=(fence,)) for fence in (3, 9, 1, 7, 9, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert guard.highest == 9
    assert passed.count(9) == 2
    with pytest.raises(StaleFence):
        guard.check(8)


def test_drafts_come_change_and_go(engine, folder, fence, tmp_path):
    zero = base_tensors(folder)
    one, digests, first = version(zero, 1, 0, names=(), extra=DRAFT)
    assert engine.stage(1, 0, first, fence).tensors == digests
    engine.activate(1, fence)
    assert all(rank.keys() == zero.keys() for rank in engine.layout())
    wider = {"draft.layers.0.weight": torch.ones(5, 4, dtype=torch.bfloat16)}
    two, digests, second = version(one, 2, 1, extra=wider)
    assert engine.stage(2, 1, second, fence).tensors == digests
    engine.activate(2, fence)
    assert engine.attest().tensors == digests
    save_file(two, tmp_path / "model.safetensors")
    assert engine.load_anchor(str(tmp_path / "model.safetensors"), 2, [], fence).tensors == digests
    assert engine.load_anchor(folder, 2, [first.slice(0, 0)], fence).tensors.keys() == zero.keys()


BAD = [
    ({"lm_head.weight": torch.ones(2, 2)}, "tensor lm_head.weight is not part of this engine's model"),
    ({"drafty.weight": torch.ones(2)}, "tensor drafty.weight is not part of this engine's model"),
    ({"model.norm.weight": torch.ones(31)}, r"tensor model.norm.weight is float32 \(31,\), .* float32 \(32,\)"),
    ({"model.norm.weight": torch.ones(32).bfloat16()}, r"tensor model.norm.weight is bfloat16"),
]


@pytest.mark.parametrize(("extra", "message"), BAD)
def test_tensors_of_another_model_are_refused(engine, folder, fence, extra, message, tmp_path):
    new, _, deltas = version(base_tensors(folder), 1, 0, names=(), extra=extra)
    before = engine.attest()
    with pytest.raises(EngineError, match=message):
        engine.stage(1, 0, deltas, fence)
    with pytest.raises(EngineError, match=message):
        engine.load_anchor(folder, 1, [deltas], fence)
    specs = tuple(TensorSpec(r["name"], r["dtype"], tuple(r["shape"]), r["digest"]) for r in manifest(new))
    ranks = (engine.health()["tp"],)
    with pytest.raises(EngineError, match=message):
        engine.receive(Offer("s", "127.0.0.1:1", 1, 0, fence, specs, ranks, 1), 0)
    with pytest.raises(EngineError, match=r"tensor model\.embed_tokens.weight is not part of the offered version 1"):
        engine.receive(Offer("s", "127.0.0.1:1", 1, 0, fence, (), ranks, 1), 0)
    with pytest.raises(EngineError, match="counts 5 ranks of engine 0"):
        engine.receive(Offer("s", "127.0.0.1:1", 1, 0, fence, specs, (5,), 1), 0)
    if "norm" not in next(iter(extra)):
        save_file(new, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match="is not part of the model"):
            engine.load_anchor(str(tmp_path / "model.safetensors"), 1, [], fence)
    assert engine.attest() == before


def flip_bit(tensor):
    address = torch.ops.mkldnn.data_ptr(tensor) if tensor.is_mkldnn else tensor.data_ptr()
    byte = ctypes.c_ubyte.from_address(address)
    byte.value ^= 1


LIVE_BYTES = {
    "model.layers.1.self_attn.q_proj.weight": lambda d: d.layers[1]._qkv._weight,
    "model.layers.1.mlp.gate_proj.weight": lambda d: d.layers[1]._block._gate_up._weight,
    "model.layers.0.mlp.down_proj.weight": lambda d: d.layers[0]._block._down._weight,
    "model.layers.0.input_layernorm.weight": lambda d: d.layers[0]._norm1.wide,
    "model.norm.weight": lambda d: d._final_norm.wide,
}


@pytest.mark.parametrize("name", list(LIVE_BYTES))
def test_attestation_sees_a_flipped_bit_in_the_memory_that_is_multiplied_with(folder, name):
    single = LocalEngine(folder, 0, "float32", 1, [3])
    before = single.attest()
    flip_bit(LIVE_BYTES[name](single._gate.live.decoder))
    after = single.attest()
    assert {n for n in before.tensors if before.tensors[n] != after.tensors[n]} == {name}
    assert after.digest != before.digest


@pytest.mark.parametrize("copy", ["input", "head"])
def test_attestation_covers_both_copies_of_a_tied_embedding(folder, copy):
    single = LocalEngine(folder, 0, "float32", 1, [3])
    decoder = single._gate.live.decoder
    flip_bit(decoder.tensors["model.embed_tokens.weight"] if copy == "input" else decoder._head._weight)
    with pytest.raises(WeightsError, match=r"the copies of model.embed_tokens.weight .* differ"):
        single.attest()


def test_no_rows_is_the_same_version_under_another_number(engine, fence):
    empty = records.TABLES["weight_deltas"].empty_table()
    proof = engine.attest()
    assert engine.stage(1, 0, empty, fence).tensors == proof.tensors
    engine.activate(1, fence)
    assert engine.attest().tensors == proof.tensors


def test_sizes_that_do_not_split_the_model_are_refused(folder):
    for tp in (0, 3, 4):
        with pytest.raises(EngineError, match=rf"over tp={tp} processes.*tp may be 1, 2"):
            LocalEngine(folder, 0, "float32", 1, [3], tp=tp)


def test_sizes_that_fit_divide_everything():
    from furlong.ops.policy.architecture import Architecture

    shape = {"kind": "llama", "vocab": 7, "hidden": 8, "layers": 1, "head_dim": 4, "norm_eps": 1e-5, "rope_theta": 1e4}
    more = {"context": 8, "tied": True}
    assert Architecture(**shape, **more, heads=12, kv_heads=6, ffn=24).splits() == [1, 2, 3, 6]
    assert Architecture(**shape, **more, heads=12, kv_heads=6, ffn=25).splits() == [1]
