"""Drafts in an engine: they come and go with weights versions, in one process and in two."""

import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculation_samples import requests
from test_speculation_shapes import BLOCK, TREE
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.start import start_draft
from furlong.ops.draft.tensors import to_version
from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.batch import Turn
from furlong.ops.policy.manifest import ModelError
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.tp_steps import turn_from_json, turn_to_json

SIZES = {
    "vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.2, "eos_token_id": 7,
    "tie_word_embeddings": False, "head_dim": 16,
}  # fmt: skip
CONFIGS = {
    "dense": Qwen3Config(**SIZES),
    "moe": Qwen3MoeConfig(
        **SIZES,
        moe_intermediate_size=20,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}
ALWAYS = DraftSettings(verify="match", adaptive=False, shadow=0.0)
ASKED = requests(12, 2, (5, 30))


@pytest.fixture(scope="module", params=["dense", "moe"])
def folder(request, tmp_path_factory):
    path = str(tmp_path_factory.mktemp(request.param))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).float().save_pretrained(path)
    return path


def new_version(folder, draft=True, change=lambda draft: draft, settings=ALWAYS):
    """Deltas of a version 1 with other keys, and a draft in another format than the policy's."""
    old = load_file(f"{folder}/model.safetensors")
    new = {name: tensor * 1.25 if "k_proj" in name else tensor for name, tensor in old.items()}
    if draft:
        tensors, _ = start_draft(settings, read_architecture(folder), new, 0, dtype=torch.bfloat16)
        new |= to_version(change(tensors))
    return encode(1, 0, "run", old, new, {row["name"]: row["digest"] for row in manifest(new)})


def drawn(samples):
    return [(s.tokens, s.logprobs, s.model_logprobs, s.versions, s.finish_reason, s.routing) for s in samples]


@pytest.mark.parametrize(
    ("tp", "settings"),
    [
        (1, ALWAYS),
        (2, ALWAYS),
        *(pytest.param(tp, settings, marks=pytest.mark.slow) for tp in (1, 2) for settings in (TREE, BLOCK)),
    ],
    ids=lambda value: value if isinstance(value, int) else f"{value.kind}-{value.width}",
)
def test_a_draft_comes_with_a_version_and_goes_with_one(folder, tp, settings):
    plain = LocalEngine(folder, 0, "float32", 1, [7])
    engine = LocalEngine(folder, 0, "float32", 1, [7], tp=tp, draft=settings)
    try:
        # Two ranks add up in another order than one.
        plain = plain if tp == 1 else LocalEngine(folder, 0, "float32", 1, [7], tp=tp)
        assert drawn(engine.generate(ASKED)) == drawn(plain.generate(ASKED))
        assert engine.health()["speculation"]["verifies"] == 0
        assert {s["kind"] for s in engine.health()["speculation"]["steps"]} == {"off: no draft"}
        proofs = [one.stage(1, 0, new_version(folder, settings=settings), 1) for one in (engine, plain)]
        assert proofs[0].digest == proofs[1].digest
        for one in (engine, plain):
            one.activate(1, 1)
        assert engine.attest().tensors.keys() > load_file(f"{folder}/model.safetensors").keys()
        assert drawn(engine.generate(ASKED)) == drawn(plain.generate(ASKED))
        after = engine.health()["speculation"]
        assert after["verifies"] > 50
        assert sum(after["accepted"]) > 0
        for one in (engine, plain):
            one.load_anchor(folder, 2, [], 2)
        assert drawn(engine.generate(ASKED)) == drawn(plain.generate(ASKED))
        assert engine.health()["speculation"]["verifies"] == after["verifies"]
        assert "speculation" not in plain.health()
    finally:
        engine.close()
        plain.close()


@pytest.mark.parametrize("how", ["in_place", "retract"])
def test_a_draft_that_comes_while_replies_are_drawn(folder, how):
    """Tokens before the flip are version 0's, tokens after it continue them; in place, replies under way go on without
    the draft, as it knows nothing of their beginnings."""
    engine = LocalEngine(folder, 0, "float32", 1, [7], draft=ALWAYS)
    try:
        engine._stop_ids = ()
        asked = [r.__class__(f"x{i}", r.prompt, i, 150, 1.0) for i, r in enumerate(ASKED[:4])]
        before = engine.generate(asked)
        engine.stage(1, 0, new_version(folder), 1)
        step, steps = engine._gate.step, []

        def counted(until):
            steps.append(0)
            if len(steps) == 30:
                engine.activate(1, 1, how)
            return step(until)

        engine._gate.step = counted
        done = []
        thread = threading.Thread(target=lambda: done.extend(engine.generate(asked)), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert (engine.health()["speculation"]["verifies"] > 0) == (how == "retract")
        for sample, old in zip(done, before, strict=True):
            (_, _, edge), _ = sample.versions
            assert sample.tokens[:edge] == old.tokens[:edge]
            assert sample.logprobs[:edge] == old.logprobs[:edge]
            assert len(sample.tokens) == 150
            if sample.routing is not None:
                assert sample.routing.rows == old.routing.rows
        if how == "retract":
            engine._gate.step = step
            rest = [r.__class__(f"y{r.request_id}", r.prompt, r.seed, 150, 1.0, prefix=s.tokens[: s.versions[0][2]])
                    for r, s in zip(asked, done, strict=True)]  # fmt: skip
            for sample, whole in zip(engine.generate(rest), done, strict=True):
                assert sample.tokens == whole.tokens[whole.versions[0][2] :]
                assert sample.logprobs == whole.logprobs[whole.versions[0][2] :]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: {n: t for n, t in d.items() if n != "fc.weight"}, "fc.weight is missing"),
        (lambda d: d | {"fc.weight": d["fc.weight"][:, :48]}, "fc.weight is"),
        (lambda d: d | {"norm.weight": d["norm.weight"] * torch.nan}, "norm.weight"),
        (lambda d: d | {"more.weight": torch.ones(2)}, "more.weight is not part"),
    ],
)
def test_a_version_with_another_draft_is_refused(folder, change, words):
    engine = LocalEngine(folder, 0, "float32", 1, [7], draft=ALWAYS)
    try:
        with pytest.raises(ModelError, match=words):
            engine.stage(1, 0, new_version(folder, change=change), 1)
        assert engine.health()["version"] == 0
        assert engine.health()["staged"] is None
        engine.generate(ASKED[:1])
    finally:
        engine.close()


def test_a_draft_that_cannot_be_is_refused_at_the_start(folder):
    with pytest.raises(ModelError, match="taps layers"):
        LocalEngine(folder, 0, "float32", 1, [7], draft=DraftSettings(taps="0,9"))


def test_a_draft_is_read_from_an_anchor(folder, tmp_path):
    tensors = load_file(f"{folder}/model.safetensors")
    made, _ = start_draft(ALWAYS, read_architecture(folder), tensors, 0)
    save_file(tensors | to_version(made), tmp_path / "anchor.safetensors", metadata={"format": "pt"})
    engine = LocalEngine(folder, 0, "bfloat16", 1, [7], draft=ALWAYS)
    plain = LocalEngine(folder, 0, "bfloat16", 1, [7])
    try:
        for one in (engine, plain):
            one.load_anchor(str(tmp_path / "anchor.safetensors"), 5, [], 1)
        drafter = engine._gate.live.drafter
        assert drawn(engine.generate(ASKED)) == drawn(plain.generate(ASKED))
        assert engine.health()["speculation"]["verifies"] > 50
        old = engine._gate.live.tensors
        new = old | {"model.norm.weight": old["model.norm.weight"] * 2}
        digests = {row["name"]: row["digest"] for row in manifest(new)}
        engine.stage(6, 5, encode(6, 5, "run", old, new, digests), 1)
        engine.activate(6, 1)
        assert engine._gate.live.drafter is drafter, "the same draft is not laid out again"
    finally:
        engine.close()
        plain.close()


def test_a_decision_travels_with_the_step():
    from furlong.ops.draft.cost import Decision

    turn = Turn((ASKED[0],), {"x": "abort"}, True, Decision(3, "pays"))
    assert turn_from_json(turn_to_json(turn)) == turn
    assert turn_from_json(turn_to_json(Turn())) == Turn()
