"""Drafts as folders: round trips keep every bit, public folders can be read, and faults are named."""

import json
import os
import re
import shutil
import socket
import subprocess

import pytest
import torch
from draft_samples import draft, policy
from safetensors.torch import load_file, save_file
from tiny_policy import make_folder
from transformers import AutoConfig

from furlong.ops.draft.layouts import read_draft, read_shape, write_draft
from furlong.ops.draft.shape import DraftError
from furlong.ops.draft.vocabulary import target_ids
from furlong.ops.policy.manifest import ModelError

KINDS = [{}, {"vocabulary": 20}, {"kind": "block", "layers": 2}, {"kind": "block", "vocabulary": 20, "proposals": 2}]


def equal(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def edit(folder, change):
    """Change config.json in place; dotted keys reach into sections, None removes."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in change.items():
        *outer, last = key.split(".")
        section = config
        for name in outer:
            section = section[name]
        if value is None:
            del section[last]
        else:
            section[last] = value
    path.write_text(json.dumps(config))


def retensor(folder, change):
    """Change model.safetensors in place: a tensor, or None to remove it."""
    tensors = {**load_file(folder / "model.safetensors"), **change}
    tensors = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("settings", KINDS)
@pytest.mark.parametrize("layout", ["sglang", "speculators"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trips_are_exact(tmp_path, settings, layout, dtype):
    tensors, shape = draft("qwen3", **settings)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    write_draft(tmp_path / "a", tensors, shape, layout)
    again, same = read_draft(tmp_path / "a")
    assert same == shape == read_shape(tmp_path / "a")
    assert equal(again, tensors)
    write_draft(tmp_path / "b", again, same, layout)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("settings", KINDS)
def test_a_draft_goes_from_one_layout_to_the_other_and_back(tmp_path, settings):
    tensors, shape = draft("llama", **settings)
    write_draft(tmp_path / "a", tensors, shape, "sglang")
    write_draft(tmp_path / "b", *read_draft(tmp_path / "a"), "speculators")
    write_draft(tmp_path / "c", *read_draft(tmp_path / "b"), "sglang")
    assert equal(read_draft(tmp_path / "c")[0], tensors)
    assert (tmp_path / "a" / "config.json").read_text() == (tmp_path / "c" / "config.json").read_text()


def test_names_and_keys_are_those_of_specforge_and_sglang(tmp_path):
    tensors, shape = draft("llama", vocabulary=20)
    write_draft(tmp_path / "draft", tensors, shape, "sglang")
    layer = "input_layernorm hidden_norm post_attention_layernorm self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    layer += " self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
    names = {f"midlayer.{name}.weight" for name in layer.split()} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert load_file(tmp_path / "draft" / "model.safetensors").keys() == names | {"d2t", "t2d"}
    config = AutoConfig.from_pretrained(tmp_path / "draft")
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert (config.vocab_size, config.draft_vocab_size, config.num_hidden_layers) == (61, 20, 1)
    assert config.eagle_config == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 1]}
    assert config.rope_parameters["rope_theta"] == shape.rope_theta
    assert config.dtype == torch.float32
    assert config.head_dim == shape.head_dim
    assert not config.tie_word_embeddings


def test_names_and_keys_are_those_of_speculators(tmp_path):
    tensors, shape = draft("llama", vocabulary=20)
    write_draft(tmp_path / "draft", tensors, shape, "speculators", verifier="someone/policy", proposals=3)
    names = load_file(tmp_path / "draft" / "model.safetensors").keys()
    assert {name.replace("layers.0.", "midlayer.") for name in names} == tensors.keys()
    assert "layers.0.self_attn.q_proj.weight" in names
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/policy"
    assert config["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 3}]
    # vLLM counts the embedding's output as state 0.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["transformer_layer_config"]["vocab_size"] == 61
    assert config["draft_vocab_size"] == 20
    assert "vocab_size" not in config


SPECFORGE = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "max_window_layers": 9,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 1,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 61,
    "draft_vocab_size": 16,
}
"""A config with all the keys, and the oddities, of those in SpecForge's repository: heads unlike the policy's, a window that
is not used, an embedding that would be tied if there were one, no tapped layers."""


def specforge_folder(folder, config, ids, taps=3):
    """What SpecForge's trainer saves: parameters and map buffers of its model, the embedding left out."""
    H, width, kv, ffn = (
        32,
        config["num_attention_heads"] * 8,
        config["num_key_value_heads"] * 8,
        config["intermediate_size"],
    )
    shapes = {
        "fc.weight": (H, taps * H), "midlayer.self_attn.q_proj.weight": (width, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H), "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, width), "midlayer.mlp.gate_proj.weight": (ffn, H),
        "midlayer.mlp.up_proj.weight": (ffn, H), "midlayer.mlp.down_proj.weight": (H, ffn),
        "midlayer.hidden_norm.weight": (H,), "midlayer.input_layernorm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,), "norm.weight": (H,), "lm_head.weight": (len(ids), H),
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=draw).bfloat16() for name, shape in shapes.items()}
    tensors["d2t"] = torch.tensor(ids) - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(61, dtype=torch.bool).index_fill(0, torch.tensor(ids), True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return tensors


def test_a_folder_as_specforge_writes_it_starts_here(tmp_path):
    written = specforge_folder(tmp_path / "public", SPECFORGE, list(range(0, 48, 3)))
    tensors, shape = read_draft(tmp_path / "public", policy_layers=10)
    assert equal(tensors, written)
    assert shape.taps == (1, 4, 6)
    assert (shape.heads, shape.kv_heads, shape.ffn, shape.rope_theta) == (6, 3, 80, 1e6)
    assert target_ids(tensors, shape).tolist() == list(range(0, 48, 3))
    write_draft(tmp_path / "ours", tensors, shape, "sglang")
    assert equal(load_file(tmp_path / "ours" / "model.safetensors"), written)
    with pytest.raises(DraftError, match="names no tapped layers"):
        read_draft(tmp_path / "public")


def test_a_whole_vocabularys_maps_are_read_and_dropped(tmp_path):
    config = {**SPECFORGE, "draft_vocab_size": 61}
    written = specforge_folder(tmp_path / "public", config, list(range(61)))
    tensors, shape = read_draft(tmp_path / "public", policy_layers=10)
    assert tensors.keys() == written.keys() - {"d2t", "t2d"}
    assert not shape.reduced
    retensor(tmp_path / "public", {"t2d": torch.zeros(61, dtype=torch.bool)})
    with pytest.raises(DraftError, match="other tokens"):
        read_draft(tmp_path / "public", policy_layers=10)


def test_named_taps_are_each_layouts_own(tmp_path):
    specforge_folder(tmp_path / "two", SPECFORGE, list(range(16)), taps=2)
    edit(tmp_path / "two", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 8]}})
    assert read_shape(tmp_path / "two").taps == (3, 8)
    assert read_draft(tmp_path / "two")[1].taps == (3, 8)


def test_a_folder_of_the_authors_release_is_read(tmp_path):
    """EAGLE's own drafts are named as the model they are for, without a rotary base, and keep a copy of its embedding."""
    gone = ("rope_theta", "head_dim")
    config = {k: v for k, v in SPECFORGE.items() if k not in gone} | {"architectures": ["LlamaForCausalLM"]}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    written = specforge_folder(tmp_path / "public", config, list(range(16)))
    retensor(tmp_path / "public", {"embed_tokens.weight": torch.zeros(61, 32).bfloat16()})
    tensors, shape = read_draft(tmp_path / "public", policy_layers=10)
    assert equal(tensors, written)
    assert (shape.rope_theta, shape.head_dim) == (10000.0, 8)
    retensor(tmp_path / "public", {"embed_tokens.weight": torch.zeros(60, 32).bfloat16()})
    with pytest.raises(DraftError, match=r"embed_tokens\.weight"):
        read_draft(tmp_path / "public", policy_layers=10)


def test_a_folder_in_several_files_is_read(tmp_path):
    tensors, shape = draft("llama", vocabulary=20)
    write_draft(tmp_path / "d", tensors, shape, "sglang")
    stored = load_file(tmp_path / "d" / "model.safetensors")
    (tmp_path / "d" / "model.safetensors").unlink()
    parts = {"model-1.safetensors": sorted(stored)[:5], "model-2.safetensors": sorted(stored)[5:]}
    for file, names in parts.items():
        save_file({name: stored[name] for name in names}, tmp_path / "d" / file)
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (tmp_path / "d" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert equal(read_draft(tmp_path / "d")[0], tensors)
    (tmp_path / "d" / "model-2.safetensors").unlink()
    with pytest.raises(DraftError, match=r"model-2\.safetensors is missing"):
        read_draft(tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_before_residual": True}, "asks for norm_before_residual"),
        ({"fc_norm": True}, "asks for fc_norm"),
        ({"eagle_config.norm_before_fc": True}, "asks for norm_before_fc"),
        ({"eagle_config.use_aux_hidden_state": False}, "use_aux_hidden_state is false"),
        ({"num_aux_hidden_states": 3}, r"num_aux_hidden_states=3, but layers \[0, 1\]"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rotary embedding 'llama3'"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"target_hidden_size": 64}, "the policy's 64"),
        ({"num_hidden_layers": 2}, "of 2 layers"),
        ({"hidden_size": None}, "hidden_size|hidden size"),
        ({"architectures": ["EagleForCausalLM"], "draft_vocab_size": None}, "no EAGLE-3 draft"),
        ({"model_type": "qwen3"}, "no EAGLE-3 draft"),
        ({"eagle_config.eagle_aux_hidden_state_layer_ids": [1, 0]}, "ascending"),
        ({"eagle_config.eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"fc\.weight is \(32, 64\), \(32, 96\)"),
        ({"draft_vocab_size": 21}, "was described"),
        ({"draft_vocab_size": 62}, "larger than the policy's 61"),
        ({"draft_vocab_size": None}, "d2t has 20 and t2d 61 entries"),
        ({"vocab_size": 60}, r"t2d is \(61,\), \(60,\)"),
        ({"num_key_value_heads": 4}, "k_proj"),
        ({"intermediate_size": 40}, "mlp"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_or_asks_for_more_is_refused(tmp_path, change, words):
    write_draft(tmp_path / "d", *draft("llama", vocabulary=20), "sglang")
    read_draft(tmp_path / "d")
    edit(tmp_path / "d", change)
    with pytest.raises(ModelError, match=words):
        read_draft(tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"speculators_model_type": "dflash"}, "type 'dflash'"),
        ({"transformer_layer_config.model_type": "qwen3"}, "layer of type 'qwen3'"),
        ({"transformer_layer_config": None}, "layer of type None"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"embed_requires_grad": True}, "embed_requires_grad"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 2]}, "from 0"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "names no tapped layers"),
    ],
)
def test_a_speculator_that_asks_for_more_is_refused(tmp_path, change, words):
    write_draft(tmp_path / "d", *draft("llama"), "speculators")
    read_draft(tmp_path / "d")
    edit(tmp_path / "d", change)
    with pytest.raises(ModelError, match=words):
        read_draft(tmp_path / "d")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fc.weight": None}, r"fc\.weight is missing"),
        ({"d2t": None, "t2d": None}, "d2t is missing"),
        ({"fc.bias": torch.zeros(32)}, r"fc\.bias is not part"),
        ({"layers.0.hidden_norm.weight": torch.zeros(32)}, "twice"),
        ({"norm.weight": torch.zeros(31)}, r"norm\.weight is \(31,\)"),
        ({"norm.weight": torch.full((32,), float("nan"))}, "not all finite"),
        ({"norm.weight": torch.zeros(32, dtype=torch.int32)}, "not all finite"),
        ({"norm.weight": torch.zeros(32, dtype=torch.bfloat16)}, "formats"),
        ({"d2t": torch.full((20,), 50)}, "leads to token 61"),
        ({"d2t": torch.zeros(20, dtype=torch.int32)}, "int64"),
    ],
)
def test_faulty_tensors_are_named(tmp_path, change, words):
    write_draft(tmp_path / "d", *draft("llama", vocabulary=20), "sglang")
    retensor(tmp_path / "d", change)
    with pytest.raises(DraftError, match=re.escape(str(tmp_path / "d")) + ".*" + words):
        read_draft(tmp_path / "d")


def test_files_that_are_none_are_refused(tmp_path):
    folder = tmp_path / "d"
    write_draft(folder, *draft("llama"), "sglang")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(DraftError, match="cannot be read"):
        read_draft(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DraftError, match=r"pytorch_model\.bin is not read"):
        read_draft(folder)
    for text in ("", "[]", "{"):
        (folder / "config.json").write_text(text)
        with pytest.raises(DraftError, match=r"config\.json"):
            read_draft(folder)


def test_nothing_is_written_over_a_model_or_without_all_tensors(tmp_path):
    tensors, shape = draft("llama")
    write_draft(tmp_path / "d", tensors, shape, "sglang")
    with pytest.raises(DraftError, match="nothing was written"):
        write_draft(tmp_path / "d", tensors, shape, "sglang")
    del tensors["fc.weight"]
    with pytest.raises(DraftError, match=r"fc\.weight is missing"):
        write_draft(tmp_path / "e", tensors, shape, "sglang")
    with pytest.raises(DraftError, match="layout 'hf'"):
        write_draft(tmp_path / "e", draft("llama")[0], shape, "hf")
    with pytest.raises(DraftError, match="one tap"):
        write_draft(tmp_path / "e", *draft("llama", taps="0"), "sglang")
    assert not (tmp_path / "e").exists()


def test_parameters_that_share_memory_are_written_apart(tmp_path):
    """Masters may be views of one buffer, and transposed."""
    tensors, shape = draft("llama")
    flat = torch.cat([t.flatten() for t in tensors.values()])
    views = dict(zip(tensors, flat.split([t.numel() for t in tensors.values()]), strict=True))
    views = {name: view.view(tensors[name].shape) for name, view in views.items()}
    views["fc.weight"] = tensors["fc.weight"].T.contiguous().T
    write_draft(tmp_path / "d", views, shape, "sglang")
    assert equal(read_draft(tmp_path / "d")[0], tensors)


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", [0, 20])
def test_sglangs_own_model_class_takes_every_tensor(tmp_path, vocabulary):
    """Its module, filled by its own load_weights: each parameter but the embedding, which it takes from the policy."""
    from furlong.resources.engines.sglang_server import ROOT, SHIM, python

    tensors, shape = draft("llama", vocabulary=vocabulary)
    write_draft(tmp_path / "draft", tensors, shape, "sglang")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = ROOT / "tests" / "unit" / "sglang_draft_load.py"
    folders = (tmp_path / "draft", make_folder(tmp_path / "policy", "llama"))
    done = subprocess.run(
        [python(), str(script), *map(str, folders), str(port), str(tmp_path / "held")],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(SHIM), "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["class"] == "LlamaForCausalLMEagle3"
    assert report["empty"] == ["model.embed_tokens.weight"]
    assert report["taps"] == list(shape.taps)
    assert report["ids"] == (target_ids(tensors, shape).tolist() if vocabulary else None)
    held = load_file(tmp_path / "held")
    ours = {
        name.replace("midlayer.", "model.layers.0."): t for name, t in tensors.items() if name not in ("d2t", "t2d")
    }
    at = "model.layers.0."
    expected = {
        f"{at}self_attn.qkv_proj.weight": torch.cat([ours.pop(f"{at}self_attn.{part}_proj.weight") for part in "qkv"]),
        f"{at}mlp.gate_up_proj.weight": torch.cat([ours.pop(f"{at}mlp.{part}_proj.weight") for part in ("gate", "up")]),
        **{name if name.startswith((at, "lm_head")) else f"model.{name}": t for name, t in ours.items()},
    }
    held["lm_head.weight"] = held["lm_head.weight"][: shape.draft_vocab]  # it pads to whole tiles
    assert equal(held, expected)


def test_the_policy_is_the_one_that_the_draft_was_made_for(tmp_path):
    write_draft(tmp_path / "d", *draft("llama"), "speculators")
    read_shape(tmp_path / "d").check_policy(policy("llama")[0])
    shutil.rmtree(tmp_path / "d")
    write_draft(tmp_path / "d", *draft("moe", taps="0,2"), "speculators")
    with pytest.raises(DraftError, match=r"taps layers \[0, 2\]"):
        read_shape(tmp_path / "d").check_policy(policy("llama")[0])
