"""A version with adapters as a folder: merged for everybody, and the adapters alone beside it."""

import json

import pytest
import torch
from lora_samples import RANK, adapted, base_of
from safetensors.torch import load_file, save_file
from tiny_policy import make_folder
from weights_lake import RUN, WeightsLake, same_bits

from furlong.ops.policy.lora import is_adapted, policy_of
from furlong.ops.policy.manifest import write_manifest
from furlong.ops.protocols import GenerateRequest
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest
from furlong.resources.engines.local import LocalEngine
from furlong.resources.weights.checkpoint import compare_folder
from furlong.resources.weights.export import ExportError, check_export, export_folder, read_export
from furlong.resources.weights.peft import read_adapter
from furlong.resources.weights.rebuild import rebuild

SCALE = 1.1


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Version 1 has adapters that version 0, the model's own folder, has not; version 2 has others; 3 is complete."""
    root = tmp_path_factory.mktemp("made")
    base = make_folder(root / "base")
    (root / "base" / "tokenizer.json").write_text("{}")
    zero = base_of(base)
    lake = WeightsLake(root, zero, base=base)
    lake.publish(tensors=adapted(zero, 1, scale=SCALE))
    lake.publish(tensors=adapted(zero, 1, 0.2, scale=SCALE))
    lake.publish(tensors=adapted(zero, 1, 0.3, scale=SCALE), anchor=True)
    return lake


@pytest.fixture
def exported(made, tmp_path):
    return export_folder(made.lake, RUN, 2, made.base, tmp_path / "out")


def draw(engine):
    asked = [GenerateRequest(str(i), tuple(range(1, 3 + i)), i, 12, float(i % 2)) for i in range(4)]
    return [(s.tokens, s.logprobs, s.model_logprobs) for s in engine.generate(asked)]


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_versions_with_adapters_are_rebuilt_and_exported(made, tmp_path, version):
    assert same_bits(rebuild(made.lake, RUN, version, made.base), made.truth[version])
    folder = export_folder(made.lake, RUN, version, made.base, tmp_path / "out")
    check_export(made.lake, made.row(version), made.base, folder)
    assert (folder / "adapter").exists() == (version > 0)
    assert same_bits(load_file(folder / "model.safetensors"), policy_of(made.truth[version]))
    assert not (folder / "adapter_config.json").exists(), "transformers would add it to what has it already"


def test_the_exported_folder_computes_what_the_engine_computed_with_adapters(made, exported):
    compared = compare_folder(exported, exported, policy_of(made.truth[2]), [[1, 2, 3], [4]])
    assert (compared.passed, compared.reason) == (True, "bit for bit the same")
    assert not compare_folder(exported, exported, policy_of(made.truth[1]), [[1, 2, 3]]).passed
    assert not compare_folder(exported, exported, base_of(made.base), [[1, 2, 3]]).passed
    served = LocalEngine(made.base, 0, "bfloat16", 1, [3])
    digests = {row["name"]: row["digest"] for row in manifest(made.truth[2])}
    deltas = encode(2, 0, RUN, made.truth[0], made.truth[2], digests)
    assert served.load_anchor(made.base, 2, [deltas], 1, digests).tensors == digests
    assert draw(LocalEngine(str(exported), 0, "bfloat16", 1, [3])) == draw(served)


def test_the_adapters_alone_are_in_the_layout_that_peft_reads(made, exported):
    config = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"]) == ("LORA", RANK)
    assert config["lora_alpha"] == pytest.approx(SCALE * RANK, rel=1e-6)
    assert set(config["target_modules"]) == {name.split(".")[-2] for name in made.truth[0] if is_adapted(name)}
    stored = load_file(exported / "adapter" / "adapter_model.safetensors")
    base, merged = base_of(made.base), load_file(exported / "model.safetensors")
    for name in filter(is_adapted, base):
        layer = "base_model.model." + name.removesuffix(".weight")
        a, b = (stored.pop(f"{layer}.lora_{part}.weight").double() for part in "AB")
        wanted = base[name].double() + config["lora_alpha"] / config["r"] * (b @ a)
        # bfloat16 keeps 8 bits: half a unit in the last place, beside float32's own rounding.
        assert ((merged[name].double() - wanted).abs() <= 2**-8 * wanted.abs() + 1e-5).all()
    assert not stored
    adapters = {name: tensor for name, tensor in made.truth[2].items() if name.startswith("adapter.")}
    assert same_bits(read_adapter(exported / "adapter"), adapters)
    assert read_export(exported).keys() == made.truth[2].keys()


def forged(folder, file, change):
    """A tensor changed in a way that the list of files does not tell."""
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    write_manifest(folder, {})


def test_a_merged_weight_that_differs_is_refused(made, exported):
    name = "model.layers.1.mlp.up_proj.weight"
    forged(exported, "model.safetensors", lambda tensors: tensors[name][0].neg_())
    with pytest.raises(
        ExportError, match=f"is not version 2 .*{name} of model.safetensors is not the base weight with"
    ):
        check_export(made.lake, made.row(2), made.base, exported)


def test_a_base_weight_that_was_not_merged_is_refused(made, exported):
    save_file(base_of(made.base), exported / "model.safetensors", metadata={"format": "pt"})
    forged(exported, "model.safetensors", lambda tensors: None)
    with pytest.raises(ExportError, match="is not the base weight with its adapter merged"):
        check_export(made.lake, made.row(2), made.base, exported)


@pytest.mark.parametrize("what", ["tensor", "alpha", "word", "no config", "no file", "no folder"])
def test_an_adapter_folder_that_was_changed_is_refused(made, exported, what):
    folder = exported / "adapter"
    config = folder / "adapter_config.json"
    if what == "tensor":
        name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
        forged(exported, "adapter/adapter_model.safetensors", lambda tensors: tensors[name][0].neg_())
    elif what == "alpha":
        config.write_text(config.read_text().replace('"r": 3', '"r": 4'))
    elif what == "word":
        config.write_text(config.read_text().replace("CAUSAL_LM", "SEQ_CLS"))
    elif what == "no config":
        config.unlink()
    elif what == "no file":
        (folder / "adapter_model.safetensors").unlink()
    else:
        folder.rename(exported.parent / "elsewhere")
    with pytest.raises(ExportError, match="is not version 2 of run r any more"):
        check_export(made.lake, made.row(2), made.base, exported)


def test_a_version_without_its_adapters_is_not_taken_for_one_with(made, exported):
    with pytest.raises(ExportError, match="is not version 1"):
        check_export(made.lake, made.row(1), made.base, exported)
    plain = export_folder(made.lake, RUN, 0, made.base, exported.parent / "plain")
    with pytest.raises(ExportError, match="is not version 2"):
        check_export(made.lake, made.row(2), made.base, plain)
    assert torch.equal(load_file(plain / "model.safetensors")["model.norm.weight"], made.truth[0]["model.norm.weight"])
