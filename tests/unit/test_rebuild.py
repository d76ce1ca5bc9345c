"""Every version again, bit for bit, and every fault named: rebuild, the exported folder, and the check of a whole run."""

import json
import math
import re
import weakref
from pathlib import Path

import pytest
import torch
from weights_lake import RUN, WeightsLake, same_bits, small_tensors

from furlong.ops import records
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.weights import verify
from furlong.resources.weights.anchors import read_file
from furlong.resources.weights.export import ExportError, check_export, export_folder, read_export
from furlong.resources.weights.rebuild import RebuildError, rebuild
from furlong.resources.weights.verify import verify_run


@pytest.fixture
def made(tmp_path) -> WeightsLake:
    """0 - 1 - 2 - 3(anchor) - 4, with 5 a repetition on 3 and 6, staged, on 5."""
    made = WeightsLake(tmp_path)
    for _ in range(2):
        made.publish()
    made.publish(anchor=True)
    made.publish()
    made.publish(parent=3)
    made.publish(state="staged")
    return made


def alter_deltas(made: WeightsLake, version: int, change) -> None:
    """Rewrite the rows of a version with what `change` makes of them."""
    where = {"run": RUN, "version": version}
    rows = change(made.lake.read("weight_deltas", where).sort_by("name").to_pylist())
    made.lake.replace("weight_deltas", where, records.rows("weight_deltas", rows))


def faults(made: WeightsLake) -> dict[int, str | None]:
    verdicts = list(verify_run(made.lake, RUN, made.base))
    assert len(verdicts) == len({verdict.version for verdict in verdicts})
    return {verdict.version: verdict.fault for verdict in verdicts}


def test_every_version_is_rebuilt_bit_for_bit(made):
    for version, truth in made.truth.items():
        assert same_bits(rebuild(made.lake, RUN, version, made.base), truth), version
    assert not same_bits(made.truth[1], made.truth[2])
    assert faults(made) == dict.fromkeys(range(7))


def test_a_base_stored_wider_is_rounded_as_version_0_was(tmp_path):
    wide = {name: tensor.float() + 1e-4 for name, tensor in small_tensors().items()}
    from safetensors.torch import save_file

    made = WeightsLake(tmp_path, {name: tensor.bfloat16() for name, tensor in wide.items()})
    save_file(wide, Path(made.base) / "model.safetensors")
    assert same_bits(rebuild(made.lake, RUN, 0, made.base), made.truth[0])


def test_tensors_may_come_go_and_change_shape(tmp_path):
    made = WeightsLake(tmp_path)
    first = made.truth[0]
    draft = {"draft.head": torch.ones(3, 2), "adapter.low.q": torch.full((4,), 2.0, dtype=torch.float16)}
    made.publish(tensors=first | draft)
    made.publish(tensors={name: t for name, t in made.truth[1].items() if name != "draft.head"})
    made.publish(tensors=made.truth[2] | {"draft.head": torch.ones(3, 2), "model.b": torch.ones(5).bfloat16()})
    made.publish(tensors=made.truth[3] | {"model.scalar": torch.tensor(2.5)})
    for version, truth in made.truth.items():
        assert same_bits(rebuild(made.lake, RUN, version, made.base), truth), version
    assert faults(made) == dict.fromkeys(range(5))


def test_a_version_in_which_nothing_changed(tmp_path):
    made = WeightsLake(tmp_path)
    made.publish(tensors=made.truth[0])
    assert made.lake.count("weight_deltas") == 0
    assert same_bits(rebuild(made.lake, RUN, 1, made.base), made.truth[0])
    assert faults(made) == {0: None, 1: None}


def flip(rows):
    data = bytearray(rows[0]["data"])
    data[len(data) // 2] ^= 1
    return [rows[0] | {"data": bytes(data)}, *rows[1:]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1:], r"version 1.*tensor model\.a (has|comes out with) digest"),
        (lambda rows: [], r"version 1.*tensor model\.a (has|comes out with) digest"),
        (flip, r"version 1.*model\.a"),
        (lambda rows: [rows[0] | {"digest": "0" * 64}, *rows[1:]], r"version 1.*model\.a.*recorded is 0000"),
        (lambda rows: [rows[0] | {"shape": [8, 8]}, *rows[1:]], r"version 1.*model\.a"),
    ],
)
def test_altered_and_missing_rows_are_named_and_what_builds_on_them_too(made, change, message):
    alter_deltas(made, 1, change)
    for version in (1, 2):
        with pytest.raises(RebuildError, match=rf"weights version ({version}|1).*model\.a"):
            rebuild(made.lake, RUN, version, made.base)
    found = faults(made)
    assert {version for version, fault in found.items() if fault} == {1, 2}
    assert re.search(message, found[1]), found[1]
    assert "built on version 1, which is at fault itself" in found[2]
    assert same_bits(rebuild(made.lake, RUN, 4, made.base), made.truth[4])


def test_a_tensor_that_did_not_change_is_verified_too(made):
    """The base is another model in one tensor that no delta touches."""
    from safetensors.torch import save_file

    made.publish(parent=0, tensors=made.truth[0] | {"model.b": torch.ones(24).bfloat16()})
    save_file(made.truth[0] | {"model.a": torch.ones(16, 8).bfloat16()}, Path(made.base) / "model.safetensors")
    with pytest.raises(RebuildError, match=r"weights version 0: tensor model\.a has digest"):
        rebuild(made.lake, RUN, 7, made.base)


def test_a_manifest_that_was_altered_is_refused(made):
    entries = made.row(4)["tensors"]
    made.alter(4, tensors=[entries[0] | {"digest": "1" * 64}, *entries[1:]])
    with pytest.raises(RebuildError, match="the manifest of weights version 4 has digest"):
        rebuild(made.lake, RUN, 4, made.base)
    made.alter(4, tensors=[])
    with pytest.raises(RebuildError, match="the manifest of weights version 4 has no tensors"):
        rebuild(made.lake, RUN, 4, made.base)
    assert "version 4 has no tensors" in faults(made)[4]


def test_a_damaged_anchor_is_named_and_only_what_needs_it_is_at_fault(made):
    path = Path(made.lake.uri) / made.row(3)["anchor"]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RebuildError, match=r"weights version 3: anchor .*tensor model\.\w+ has digest"):
        rebuild(made.lake, RUN, 4, made.base)
    found = faults(made)
    assert {version for version, fault in found.items() if fault} == {3, 4, 5, 6}
    path.unlink()
    assert "has no file anchors/r/3-" in faults(made)[3]


def test_an_anchors_deltas_are_verified_as_well(made):
    """Warm engines go from 2 to 3 by them."""
    alter_deltas(made, 3, lambda rows: rows[1:])
    assert same_bits(rebuild(made.lake, RUN, 3, made.base), made.truth[3])
    assert "version 3: tensor model.a comes out with digest" in faults(made)[3]


def test_missing_links_and_versions(made):
    with pytest.raises(RebuildError, match="run r has no weights version 99"):
        rebuild(made.lake, RUN, 99, made.base)
    with pytest.raises(RebuildError, match="run nobody has no weights versions"):
        list(verify_run(made.lake, "nobody", made.base))
    made.lake.replace("weight_versions", {"run": RUN, "version": 1}, made.lake.read("weight_versions").slice(0, 0))
    with pytest.raises(RebuildError, match="weights version 1, needed to build 2, is not in the lake"):
        rebuild(made.lake, RUN, 2, made.base)
    assert faults(made)[2].endswith("is built on version 1, which is not in the lake")


def test_verifying_applies_each_version_once_and_holds_few_at_a_time(tmp_path, monkeypatch):
    """A trunk of 12 versions, each with a branch of 2 that was published before the trunk went on."""
    made = WeightsLake(tmp_path, {"a": torch.zeros(5, dtype=torch.bfloat16)})
    trunk = 0
    for _ in range(12):
        made.publish(made.publish(trunk, share=1.0), share=1.0)
        trunk = made.publish(trunk, share=1.0)
    alive, most, applied, original, kind = [], [], [], verify.changed, verify.Held

    def held(*args):
        new = kind(*args)
        alive.append(weakref.ref(new))
        return new

    def counting(lake, run, version, parent):
        applied.append(version)
        most.append(sum(ref() is not None for ref in alive))
        return original(lake, run, version, parent)

    monkeypatch.setattr(verify, "changed", counting)
    monkeypatch.setattr(verify, "Held", held)
    assert set(faults(made).values()) == {None}
    assert sorted(applied) == list(range(1, 37))
    assert max(most) <= math.log2(37) + 2


def test_the_exported_folder_has_the_bits_that_were_served(tmp_path):
    made = WeightsLake(tmp_path)
    made.publish()
    target = export_folder(made.lake, RUN, 1, made.base, tmp_path / "out" / "v1", card="# card\n")
    assert same_bits(read_file(target / "model.safetensors"), made.truth[1])
    assert same_bits(read_export(target), made.truth[1])
    assert json.loads((target / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}
    assert (target / "README.md").read_text() == "# card\n"
    assert (target / "tokenizer.json").exists()
    assert [path.name for path in target.parent.iterdir()] == ["v1"]
    assert all(path.stat().st_mode & 0o004 for path in [target, *target.rglob("*")]), "others may read it"
    check_export(made.lake, made.row(1), made.base, target)
    with pytest.raises(ExportError, match="is not version 0 of run r any more"):
        check_export(made.lake, made.row(0), made.base, target)


def test_an_export_never_overwrites_and_leaves_nothing_when_it_fails(made, tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("x")
    with pytest.raises(ExportError, match="exists and is not empty; nothing was written"):
        export_folder(made.lake, RUN, 1, made.base, target)
    assert [path.name for path in target.iterdir()] == ["mine"]
    (target / "mine").unlink()
    alter_deltas(made, 2, flip)
    with pytest.raises(RebuildError, match="version 2"):
        export_folder(made.lake, RUN, 2, made.base, target)
    assert not list(target.iterdir())
    export_folder(made.lake, RUN, 1, made.base, target)
    assert (target / "model.safetensors").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_folder_that_was_changed_is_not_taken_for_the_version(made, tmp_path, file):
    target = export_folder(made.lake, RUN, 4, made.base, tmp_path / "out")
    check_export(made.lake, made.row(4), made.base, target)
    content = bytearray((target / file).read_bytes())
    content[-1] ^= 1
    (target / file).write_bytes(content)
    with pytest.raises(ExportError, match=f"is not version 4 of run r any more: .*{file}"):
        check_export(made.lake, made.row(4), made.base, target)
    (target / file).unlink()
    with pytest.raises(ExportError, match=file):
        check_export(made.lake, made.row(4), made.base, target)


def test_an_adapter_of_no_weight_is_not_exported(tmp_path):
    made = WeightsLake(tmp_path)
    made.publish(tensors=made.truth[0] | {"adapter.../../x.q": torch.ones(1)})
    with pytest.raises(ExportError, match=r"nothing was written: tensor adapter\.\.\./\.\./x\.q is of no adapter"):
        export_folder(made.lake, RUN, 1, made.base, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_digest_of_a_version_is_over_its_manifest(made):
    assert made.row(4)["digest"] == weights_digest({e["name"]: e["digest"] for e in manifest(made.truth[4])})
