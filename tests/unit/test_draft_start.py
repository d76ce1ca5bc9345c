"""The first draft: made of the policy it goes on where the latest tap ends, and it is the same every time."""

import math
from dataclasses import replace

import pytest
import torch
from draft_samples import POLICIES, draft, hidden_of, policy
from tiny_policy import VOCABULARY, make_folder
from transformers import AutoModelForCausalLM

from furlong.ops.draft.layouts import write_draft
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.shape import DraftError
from furlong.ops.draft.start import shape_of, start_draft
from furlong.ops.draft.tensors import check_tensors
from furlong.ops.draft.vocabulary import target_ids
from furlong.ops.policy.architecture import Architecture


def start(of, seed=0, **settings):
    return start_draft(DraftSettings(**settings), *policy(of), seed=seed)


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("draft_kind", ["eagle3", "block"])
def test_every_policy_has_a_complete_first_draft(kind, draft_kind):
    tensors, shape = start(kind, kind=draft_kind)
    check_tensors(tensors, shape, "here")
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    policy_tensors = policy(kind)[1].values()
    assert not {t.data_ptr() for t in tensors.values()} & {t.data_ptr() for t in policy_tensors}


def test_an_untrained_draft_computes_the_policys_next_layer(tmp_path):
    """float64 both, but for transformers' norms and rotary tables, which are float32: 1e-5 of values near 10 here."""
    folder = make_folder(tmp_path, "llama")
    tensors, shape = start("llama", taps="0")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    states = []
    hooks = [layer.register_forward_hook(lambda m, a, out: states.append(out[0])) for layer in model.model.layers]
    tokens = torch.randint(VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    tapped, following = (state.reshape(-1, shape.hidden) for state in states)
    embedding = model.model.embed_tokens.weight.detach()[tokens[0].roll(-1)]
    hidden = hidden_of(tensors, shape, embedding, tapped @ tensors["fc.weight"].double().T)
    torch.testing.assert_close(hidden, following, rtol=0, atol=1e-4)
    proposed = model.model.norm(hidden) @ tensors["lm_head.weight"].double().T
    torch.testing.assert_close(proposed, logits, rtol=0, atol=1e-3)
    assert torch.equal(proposed.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("kind", POLICIES)
def test_after_the_last_layer_the_draft_passes_its_feature_on(kind):
    tensors, shape = start(kind, taps=f"0,{policy(kind)[0].layers - 1}")
    taps = torch.randn(5, 2 * shape.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    feature = taps @ tensors["fc.weight"].double().T
    assert torch.equal(feature, taps[:, shape.hidden :])
    assert torch.equal(hidden_of(tensors, shape, torch.randn(5, shape.hidden), feature), feature)


def test_norms_of_heads_are_folded_in_for_isotropic_inputs():
    tensors = policy("qwen3")[1]
    made, shape = start("qwen3", taps="0")
    at, H, D = "model.layers.1.", shape.hidden, shape.head_dim
    unit = torch.randn(20000, H, generator=torch.Generator().manual_seed(0))
    inputs = unit * tensors[f"{at}input_layernorm.weight"]
    for part, heads in (("q", shape.heads), ("k", shape.kv_heads)):
        weight = made[f"midlayer.self_attn.{part}_proj.weight"]
        assert not weight[:, :H].any()
        squares = (inputs @ weight[:, H:].T).pow(2).mean(0).view(heads, D) / tensors[
            f"{at}self_attn.{part}_norm.weight"
        ] ** 2
        # 20000 draws leave 1 % of the expected 1.
        torch.testing.assert_close(squares.mean(1), torch.ones(heads), rtol=0, atol=0.05)


def test_biases_are_left_out_and_matrices_kept():
    tensors, shape = start("qwen2", taps="0")
    source = policy("qwen2")[1]
    for part in "qkv":
        name = f"self_attn.{part}_proj.weight"
        assert torch.equal(tensors[f"midlayer.{name}"][:, shape.hidden :], source[f"model.layers.1.{name}"])


def test_experts_become_the_mean_of_as_many_as_a_token_has():
    tensors, shape = start("all_moe", taps="0")
    architecture, source = policy("all_moe")
    x = torch.randn(7, shape.hidden, generator=torch.Generator().manual_seed(0))

    def feed(x, at, tensors):
        gate, up, down = (tensors[f"{at}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    mean = (
        sum(feed(x, f"model.layers.1.mlp.experts.{e}.", source) for e in range(architecture.top_k)) / architecture.top_k
    )
    torch.testing.assert_close(feed(x, "midlayer.mlp.", tensors), mean)


def test_beside_experts_the_nearest_dense_block_is_taken():
    tensors, _ = start("moe", taps="0,1")
    assert torch.equal(tensors["midlayer.mlp.up_proj.weight"], policy("moe")[1]["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(
        tensors["midlayer.self_attn.o_proj.weight"], policy("moe")[1]["model.layers.2.self_attn.o_proj.weight"]
    )


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_seed_decides_and_nothing_else(kind):
    torch.manual_seed(1)
    first, _ = start("llama", seed=4, kind=kind)
    torch.manual_seed(2)
    again, _ = start("llama", seed=4, kind=kind)
    assert all(torch.equal(first[name], again[name]) for name in first)
    other, _ = start("llama", seed=5, kind=kind)
    assert [n for n in first if not torch.equal(first[n], other[n])] == (
        ["mask_embedding.weight"] if kind == "block" else []
    )


def test_a_reduced_vocabulary_has_the_heads_rows():
    counts = torch.zeros(VOCABULARY, dtype=torch.int64)
    counts[[7, 20, 59]] = torch.tensor([3, 1, 2])
    architecture, source = policy("qwen3")
    tensors, shape = start_draft(DraftSettings(vocabulary=4), architecture, source, 0, counts, keep=(60,))
    ids = target_ids(tensors, shape)
    assert ids.tolist() == [7, 20, 59, 60]
    assert torch.equal(tensors["lm_head.weight"], source["lm_head.weight"][ids])
    whole, shape = start("llama")
    assert torch.equal(target_ids(whole, shape), torch.arange(VOCABULARY))
    assert torch.equal(whole["lm_head.weight"], policy("llama")[1]["model.embed_tokens.weight"])


def test_counts_of_another_vocabulary_are_refused():
    with pytest.raises(DraftError, match="counts are of 5 tokens"):
        start_draft(DraftSettings(vocabulary=4), *policy("llama"), 0, torch.ones(5, dtype=torch.int64))


def test_formats_are_as_asked():
    tensors, _ = start_draft(DraftSettings(vocabulary=9), *policy("llama"), 0, dtype=torch.bfloat16)
    assert {n: t.dtype for n, t in tensors.items() if t.dtype != torch.bfloat16} == {
        "d2t": torch.int64,
        "t2d": torch.bool,
    }


def test_a_draft_starts_from_a_folder(tmp_path):
    tensors, shape = draft("llama", vocabulary=30, taps="0")
    write_draft(tmp_path / "draft", tensors, shape, "speculators")
    settings = DraftSettings(start=str(tmp_path / "draft"))
    again, same = start_draft(settings, *policy("llama"), seed=9)
    assert same == shape == shape_of(settings, policy("llama")[0])
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "block"}, "kind is eagle3, the spec asks for block"),
        ({"vocabulary": 20}, "draft_vocab is 30, the spec asks for 20"),
        ({"taps": "1"}, r"taps is \(0,\), the spec asks for \(1,\)"),
    ],
)
def test_a_folder_that_contradicts_the_settings_is_refused(tmp_path, settings, words):
    write_draft(tmp_path / "draft", *draft("llama", vocabulary=30, taps="0"), "speculators")
    with pytest.raises(DraftError, match=words):
        shape_of(DraftSettings(start=str(tmp_path / "draft"), **settings), policy("llama")[0])


def test_another_policys_folder_is_refused(tmp_path):
    write_draft(tmp_path / "draft", *draft("llama"), "sglang")
    architecture: Architecture = replace(policy("llama")[0], vocab=62)
    with pytest.raises(DraftError, match="61 tokens, the policy has 62"):
        shape_of(DraftSettings(start=str(tmp_path / "draft")), architecture)
    with pytest.raises(DraftError, match=r"config.json cannot be read"):
        shape_of(DraftSettings(start=str(tmp_path / "nothing")), architecture)


def test_a_block_proposes_no_more_than_it_has_slots_for(tmp_path):
    write_draft(tmp_path / "draft", *draft("llama", kind="block", proposals=3), "sglang")
    settings = DraftSettings(kind="block", proposals=3, start=str(tmp_path / "draft"))
    assert shape_of(settings, policy("llama")[0]).block == 4
    with pytest.raises(DraftError, match=r"proposes 3 tokens, draft\.proposals asks for 4"):
        shape_of(replace(settings, proposals=4), policy("llama")[0])


def test_mask_embeddings_are_spread_as_the_policys():
    tensors, shape = start("llama", kind="block")
    embedding = policy("llama")[1]["model.embed_tokens.weight"]
    noise = (tensors["mask_embedding.weight"][0] - embedding.mean(0)) / embedding.std(0, correction=0)
    assert abs(noise.mean()) < 4 / math.sqrt(shape.hidden)
    assert 0.5 < noise.std() < 1.5
