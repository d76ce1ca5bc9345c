"""A version with a draft as a folder: the draft lies beside the model as other software reads it, proved bit for bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from draft_samples import draft
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner
from weights_lake import RUN, WeightsLake, same_bits, small_run, small_step

from furlong.cli.main import app
from furlong.ops.draft.layouts import read_draft, write_draft
from furlong.ops.draft.settings import draft_of
from furlong.ops.draft.start import start_draft
from furlong.ops.draft.tensors import of_version, to_version
from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.manifest import ModelError
from furlong.ops.spec import Placement
from furlong.resources.weights.checkpoint import compare_logits, export_checkpoint
from furlong.resources.weights.draft_folder import draft_shape, read_fitting_draft
from furlong.resources.weights.export import ExportError, check_export, export_folder, read_export
from furlong.resources.weights.run_model import run_model

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=[("eagle3", 0), ("eagle3", 20), ("block", 20)], ids=str)
def exported(request, tmp_path):
    """Version 1 has a draft; version 2 another one, beside the same policy."""
    kind, vocabulary = request.param
    tensors, shape = draft("llama", kind=kind, vocabulary=vocabulary)
    made = WeightsLake(tmp_path)
    made.publish(tensors=made.truth[0] | to_version(tensors))
    moved = {name: t + 1 if t.is_floating_point() else t for name, t in tensors.items()}
    made.publish(tensors=made.truth[0] | to_version(moved))
    return made, shape, export_folder(made.lake, RUN, 1, made.base, tmp_path / "out", draft=shape)


def test_the_draft_lies_in_a_folder_of_its_own_as_sglang_reads_it(exported):
    made, shape, folder = exported
    tensors, found = read_draft(folder / "draft")
    assert found == shape
    assert same_bits(tensors, of_version(made.truth[1]))
    assert not any(name.startswith("draft.") for name in load_file(folder / "model.safetensors"))
    assert ("d2t" in tensors) is shape.reduced
    config = json.loads((folder / "draft" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(shape.taps)
    assert same_bits(read_export(folder), made.truth[1])
    check_export(made.lake, made.row(1), made.base, folder, shape)
    with pytest.raises(ExportError, match=r"is not version 2 of run r any more.*tensor draft"):
        check_export(made.lake, made.row(2), made.base, folder, shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_format_keeps_its_bits(tmp_path, dtype):
    tensors, shape = draft("qwen3", vocabulary=20)
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    made = WeightsLake(tmp_path)
    made.publish(tensors=made.truth[0] | to_version(tensors), anchor=dtype == torch.float32)
    folder = export_folder(made.lake, RUN, 1, made.base, tmp_path / "out", draft=shape)
    check_export(made.lake, made.row(1), made.base, folder, shape)
    assert same_bits(read_draft(folder / "draft")[0], tensors)


def test_a_draft_changed_in_any_way_is_not_taken_for_the_version_s(exported):
    made, shape, folder = exported
    file, config = folder / "draft" / "model.safetensors", folder / "draft" / "config.json"
    tensors, text = load_file(file), config.read_text()

    def refused(why: str, known=shape) -> None:
        with pytest.raises(ExportError, match=f"is not version 1 of run r any more: .*{why}"):
            check_export(made.lake, made.row(1), made.base, folder, known)

    for name in tensors:
        altered = tensors[name].clone()
        altered.view(torch.uint8).view(-1)[0] ^= 1
        save_file(tensors | {name: altered}, file, {"format": "pt"})
        refused(name if name not in ("d2t", "t2d") else "")
        save_file({other: t for other, t in tensors.items() if other != name}, file, {"format": "pt"})
        refused("")
    save_file(tensors, file, {"format": "pt"})
    taps = json.loads(text)
    taps["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [0, 5]
    theta = json.loads(text) | {"rope_theta": 5e5}
    architecture = json.loads(text) | {"torch_dtype": "float16"}
    for changed, why in ((taps, "eagle_config"), (theta, "rope_theta"), (architecture, "torch_dtype")):
        config.write_text(json.dumps(changed))
        refused(why)
    config.write_text("{")
    refused("cannot be read")
    config.unlink()
    refused("cannot be read")
    config.write_text(text)
    refused("describes none", None)
    refused("rope_theta", replace(shape, rope_theta=5.0))
    check_export(made.lake, made.row(1), made.base, folder, shape)
    (folder / "draft").rename(folder.parent / "elsewhere")
    refused("draft")


def test_a_version_whose_draft_nobody_describes_is_not_exported(exported, tmp_path):
    made, shape, _ = exported
    with pytest.raises(ExportError, match=r"nothing was written.*its run's spec describes none"):
        export_folder(made.lake, RUN, 1, made.base, tmp_path / "a")
    with pytest.raises(ExportError, match=r"nothing was written.*fc.weight is .* was described"):
        export_folder(made.lake, RUN, 1, made.base, tmp_path / "b", draft=replace(shape, taps=(0, 1, 2)))
    assert not any((tmp_path / name).exists() for name in "ab")
    export_folder(made.lake, RUN, 0, made.base, tmp_path / "c", draft=shape)
    assert not (tmp_path / "c" / "draft").exists()


def test_a_checkpoint_of_a_run_with_a_draft_serves_elsewhere(tmp_path, quick_spec, monkeypatch):
    """The folder of the asset `hf_checkpoint`: transformers reads the model as before, and the draft starts another run."""
    chosen = {"draft.kind": "eagle3", "draft.vocabulary": 8}
    made, placement = small_run(tmp_path, quick_spec, **chosen), Placement(root=str(tmp_path), threads=1)
    _, spec, model = run_model(made.lake, RUN, placement)
    architecture = read_architecture(str(model.path))
    tensors, shape = start_draft(draft_of(spec), architecture, made.truth[3], 1, dtype=torch.bfloat16)
    assert shape == draft_shape(spec, model.path)
    small_step(made, 4, made.truth[3] | to_version(tensors))
    checkpoint = export_checkpoint(placement, RUN, 4)
    assert checkpoint.wrote
    assert not export_checkpoint(placement, RUN, 4).wrote
    assert same_bits(read_draft(checkpoint.folder / "draft")[0], tensors)
    compared = compare_logits(placement, RUN, checkpoint)
    assert (compared.passed, compared.reason) == (True, "bit for bit the same")
    again = replace(draft_of(spec), start=str(checkpoint.folder / "draft"))
    started, found = start_draft(again, architecture, made.truth[3], 2, dtype=torch.bfloat16)
    assert found == shape
    assert same_bits(started, tensors)
    assert same_bits(read_fitting_draft(checkpoint.folder / "draft", shape, architecture.layers), tensors)

    monkeypatch.setenv("FURLONG_ROOT", str(tmp_path))
    monkeypatch.delenv("FURLONG_LAKE", raising=False)
    done = CliRunner().invoke(app, ["weights", "rebuild", "4", "--to", str(tmp_path / "four")])
    assert done.exit_code == 0, done.output
    assert same_bits(read_draft(tmp_path / "four" / "draft")[0], tensors)
    done = CliRunner().invoke(app, ["weights", "publish-draft", str(tmp_path / "four" / "draft")])
    assert done.exit_code == 1
    assert "run r trains its draft: what its trainer holds is the draft of every version" in done.stderr


def test_a_draft_for_another_policy_is_not_read_as_one_of_the_run_s(tmp_path):
    tensors, shape = draft("llama", vocabulary=20)
    write_draft(tmp_path / "d", tensors, shape, "speculators")
    assert same_bits(read_fitting_draft(tmp_path / "d", replace(shape, context=7), 2), tensors)
    for name, value in (("rope_theta", 5.0), ("taps", (1,)), ("heads", 2), ("draft_vocab", 21)):
        with pytest.raises(ModelError, match=f"the draft's {name} is .*, that of the run's drafts"):
            read_fitting_draft(tmp_path / "d", replace(shape, **{name: value}), 2)
    with pytest.raises(ModelError, match="cannot be read"):
        read_fitting_draft(tmp_path / "nowhere", shape, 2)
