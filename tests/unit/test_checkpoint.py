"""The exported checkpoint: what Dagster materialises, what its card says, and a check that fails whatever is odd."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from dagster import DagsterInstance, materialize
from safetensors.torch import load_file, save_file
from weights_lake import RUN, same_bits, small_run

from furlong.ops.spec import Placement
from furlong.ops.stages.context import StageError
from furlong.pipelines.hf_checkpoint import hf_checkpoint
from furlong.pipelines.partitions import STEPS, partition_key
from furlong.resources.system import System
from furlong.resources.weights.checkpoint import compare_folder, export_checkpoint
from furlong.resources.weights.export import ExportError, export_folder

PROMPT = [[1, 2, 3, 4], [5]]


@pytest.fixture(scope="module")
def made(tmp_path_factory, quick_spec):
    root = tmp_path_factory.mktemp("made")
    return small_run(root, quick_spec), Placement(root=str(root), threads=1)


@pytest.fixture
def exported(made, tmp_path) -> tuple:
    """A fresh export of version 2, its base, and its tensors."""
    lake, _ = made
    folder = export_folder(lake.lake, RUN, 2, lake.base, tmp_path / "out")
    return folder, Path(lake.base), lake.truth[2]


def materialised(placement: Placement, step: int, raising: bool = True):
    with DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions(STEPS.name, [partition_key(RUN, step)])
        return materialize(
            [hf_checkpoint],
            partition_key=partition_key(RUN, step),
            resources={"system": System(placement)},
            instance=instance,
            raise_on_error=raising,
        )


def test_materialising_exports_checks_and_tells_the_lineage(made):
    lake, placement = made
    result = materialised(placement, 3)
    (event,) = result.asset_materializations_for_node("hf_checkpoint")
    facts = {name: value.value for name, value in event.metadata.items()}
    folder = Path(facts["path"])
    assert folder == placement.folder / "checkpoints" / RUN / "3"
    assert same_bits(load_file(folder / "model.safetensors"), lake.truth[3])
    assert (facts["version"], facts["already_exported"]) == (3, False)
    assert facts["size_bytes"] > sum(tensor.nbytes for tensor in lake.truth[3].values())
    (check,) = result.get_asset_check_evaluations()
    assert check.passed
    assert check.metadata["reason"].value == "bit for bit the same"
    assert check.metadata["prompts"].value == 4
    assert check.metadata["logits"].value > 100
    card = (folder / "README.md").read_text()
    identity = lake.lake.read("runs").to_pylist()[0]
    for fact in (lake.row(3)["digest"], identity["spec_fingerprint"], identity["base_digest"], identity["dataset"],
                 identity["code_version"], lake.lake.uri, "v2 <- v1 <- v0", "library_name: transformers"):  # fmt: skip
        assert fact in card, fact
    again = export_checkpoint(placement, RUN, 3)
    assert not again.wrote
    assert again.files_digest == facts["files_digest"]


def test_a_checkpoint_that_was_changed_is_refused(made):
    _, placement = made
    folder = export_checkpoint(placement, RUN, 1).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ExportError, match="is not version 1 of run r any more"):
        export_checkpoint(placement, RUN, 1)
    assert not materialised(placement, 1, raising=False).success
    shutil.rmtree(folder)
    assert export_checkpoint(placement, RUN, 1).wrote


def test_a_check_that_cannot_compare_fails_the_run(made):
    """The lake has lost its questions, so nothing was compared, which is no success."""
    lake, placement = made
    rows = lake.lake.read("prompts")
    key = {"dataset": rows["dataset"][0].as_py()}
    lake.lake.replace("prompts", key, rows.slice(0, 0))
    try:
        result = materialised(placement, 2, raising=False)
    finally:
        lake.lake.replace("prompts", key, rows)
    assert not result.success
    (check,) = result.get_asset_check_evaluations()
    assert not check.passed
    assert "no prompts to compare on" in check.metadata["reason"].value
    assert materialised(placement, 2).success


def test_an_unpublished_step_has_nothing_to_export(made):
    lake, placement = made
    with pytest.raises(StageError, match="step 9 has no record"):
        export_checkpoint(placement, RUN, 9)
    lake.alter(2, state="staged")
    try:
        with pytest.raises(StageError, match="step 2 has not published its weights"):
            export_checkpoint(placement, RUN, 2)
    finally:
        lake.alter(2, state="live")


def test_the_same_weights_pass(exported):
    folder, base, tensors = exported
    compared = compare_folder(folder, base, tensors, PROMPT)
    assert (compared.passed, compared.prompts, compared.reason) == (True, 2, "bit for bit the same")


def test_one_changed_bit_fails(exported):
    folder, base, tensors = exported
    stored = load_file(folder / "model.safetensors")
    flat = stored["model.layers.1.mlp.down_proj.weight"].view(-1)
    # The lowest bit of an exponent, as a change in the last place may be rounded away.
    flat.view(torch.int32 if flat.dtype == torch.float32 else torch.int16)[0] ^= 1 << (flat.itemsize * 8 - 9)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    compared = compare_folder(folder, base, tensors, PROMPT)
    assert not compared.passed
    assert "differ by up to" in compared.reason


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]])
def test_nothing_to_compare_fails(exported, prompts):
    folder, base, tensors = exported
    compared = compare_folder(folder, base, tensors, prompts)
    assert not compared.passed
    assert "no prompts" in compared.reason


def test_nan_weights_fail_even_where_both_sides_have_them(exported):
    folder, base, tensors = exported
    tensors = tensors | {"model.norm.weight": torch.full_like(tensors["model.norm.weight"], float("nan"))}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    compared = compare_folder(folder, base, tensors, PROMPT)
    assert not compared.passed
    assert "not finite" in compared.reason


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_missing_or_left_over_tensor_fails(exported, name):
    folder, base, tensors = exported
    fewer = {key: value for key, value in tensors.items() if key != name}
    save_file(fewer, folder / "model.safetensors", metadata={"format": "pt"})
    for stored in (tensors, fewer):
        compared = compare_folder(folder, base, stored, PROMPT)
        assert not compared.passed
        assert compared.reason.startswith("it cannot be loaded")
    save_file(tensors | {"model.odd": torch.ones(1)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert not compare_folder(folder, base, tensors, PROMPT).passed
    assert not compare_folder(folder, base, tensors | {"model.odd": torch.ones(1)}, PROMPT).passed


def test_another_configuration_fails(exported):
    folder, base, tensors = exported
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    assert not compare_folder(folder, base, tensors, PROMPT).passed
