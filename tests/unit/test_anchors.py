"""Complete copies: whole or absent, proved on disk, refused when altered; and when one is due."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import fsspec
import pytest
import torch
from weights_lake import RUN, WeightsLake, same_bits, small_tensors

from furlong.ops.stages.chain import anchor_due, chain_rows, delta_path
from furlong.ops.stages.context import StageError
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.weights import anchors
from furlong.resources.weights.anchors import (
    AnchorError,
    anchor_path,
    list_anchors,
    read_anchor,
    remove_anchor,
    write_anchor,
)


def digest_of(tensors: dict) -> str:
    return weights_digest({entry["name"]: entry["digest"] for entry in manifest(tensors)})


@pytest.fixture(params=["folder", "object store"])
def uri(request, tmp_path) -> str:
    """A local lake, and one that only fsspec can reach; the latter's downloads go to a home of its own."""
    if request.param == "folder":
        return str(tmp_path / "lake")
    return f"memory://{tmp_path.name}/lake"


@pytest.fixture(autouse=True)
def own_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_what_was_written_is_read_bit_for_bit(uri):
    tensors = small_tensors()
    digest = digest_of(tensors)
    anchor = write_anchor(uri, RUN, 7, tensors, digest)
    assert anchor == f"anchors/{RUN}/7-{digest[:12]}.safetensors"
    assert same_bits(read_anchor(uri, anchor, manifest(tensors)), tensors)
    assert write_anchor(uri, RUN, 7, tensors, digest) == anchor
    assert list(list_anchors(uri, RUN)) == [anchor]
    local = anchor_path(uri, anchor)
    assert same_bits(anchors.read_file(local), tensors)
    assert anchor_path(uri, anchor) == local
    remove_anchor(uri, anchor)
    remove_anchor(uri, anchor)
    assert list_anchors(uri, RUN) == {}
    with pytest.raises(AnchorError, match=rf"has no file {anchor}"):
        read_anchor(uri, anchor, manifest(tensors))


def test_views_and_transposed_tensors_are_stored_as_what_they_are(tmp_path):
    block = torch.arange(48.0).reshape(6, 8)
    tensors = {"a": block[:3], "b": block[3:], "c": torch.arange(6.0).reshape(2, 3).T}
    anchor = write_anchor(str(tmp_path), RUN, 1, tensors, digest_of(tensors))
    assert same_bits(read_anchor(str(tmp_path), anchor, manifest(tensors)), tensors)


def test_another_versions_digest_keeps_nothing(uri):
    with pytest.raises(AnchorError, match="announced"):
        write_anchor(uri, RUN, 7, small_tensors(), digest_of(small_tensors(1)))
    assert list_anchors(uri, RUN) == {}


@pytest.mark.parametrize("place", [0, 9, 200, -1])
def test_one_flipped_bit_is_refused(uri, place):
    tensors = small_tensors()
    anchor = write_anchor(uri, RUN, 7, tensors, digest_of(tensors))
    files, root = fsspec.core.url_to_fs(uri)
    content = bytearray(files.cat_file(f"{root}/{anchor}"))
    content[place] ^= 1
    files.pipe_file(f"{root}/{anchor}", bytes(content))
    with pytest.raises(AnchorError, match=r"cannot be read|tensor model\.\w+ has digest"):
        read_anchor(uri, anchor, manifest(tensors))


@pytest.mark.parametrize("left", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(uri, left):
    tensors = small_tensors()
    anchor = write_anchor(uri, RUN, 7, tensors, digest_of(tensors))
    files, root = fsspec.core.url_to_fs(uri)
    files.pipe_file(f"{root}/{anchor}", files.cat_file(f"{root}/{anchor}")[:left])
    with pytest.raises(AnchorError, match=r"cannot be read .* damaged"):
        read_anchor(uri, anchor, manifest(tensors))


def test_more_or_fewer_tensors_than_the_manifest_are_refused(tmp_path):
    tensors = small_tensors()
    anchor = write_anchor(str(tmp_path), RUN, 1, tensors, digest_of(tensors))
    entries = manifest(tensors)
    with pytest.raises(AnchorError, match=r"tensor model\.a has digest \w+, the manifest says None"):
        read_anchor(str(tmp_path), anchor, entries[1:])
    with pytest.raises(AnchorError, match=r"tensor model\.x has digest None"):
        read_anchor(str(tmp_path), anchor, [*entries, entries[0] | {"name": "model.x"}])
    with pytest.raises(AnchorError, match="names no tensors"):
        read_anchor(str(tmp_path), anchor, [])


def test_a_place_that_cannot_be_reached_says_what_to_install_or_set():
    with pytest.raises(AnchorError, match="install the fsspec package for that kind of storage, or set FURLONG_LAKE"):
        write_anchor("nosuch://bucket/lake", RUN, 1, small_tensors(), digest_of(small_tensors()))


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    """In a process whose files may not grow beyond a few KB."""
    code = """
        import resource, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[1])
        import test_anchors as t
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        tensors = {"a": t.torch.ones(40_000)}
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        try:
            t.write_anchor(sys.argv[2], "r", 1, tensors, t.digest_of(tensors))
        except t.AnchorError as err:
            print(err)
    """
    done = run_python(code, Path(__file__).parent, tmp_path)
    assert "version 1 of run r could not be stored" in done.stdout, done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def run_python(code: str, *args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_killed_writer_leaves_whole_files_only(tmp_path):
    code = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import test_anchors as t
        tensors = {f"t{i}": t.torch.full((300_000,), float(i)) for i in range(8)}
        digest = t.digest_of(tensors)
        print("go", flush=True)
        for version in range(10_000):
            t.write_anchor(sys.argv[2], "r", version, tensors, digest)
    """
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(Path(__file__).parent), str(tmp_path)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert writer.stdout.readline() == "go\n"
        time.sleep(0.4)
        os.kill(writer.pid, signal.SIGKILL)
    finally:
        writer.kill()
        writer.wait(20)
    tensors = {f"t{i}": torch.full((300_000,), float(i)) for i in range(8)}
    whole = [name for name in list_anchors(str(tmp_path), RUN) if name.endswith(".safetensors")]
    assert whole
    for anchor in whole:
        assert same_bits(read_anchor(str(tmp_path), anchor, manifest(tensors)), tensors)


def test_the_way_to_a_version_begins_at_its_nearest_anchor(tmp_path):
    made = WeightsLake(tmp_path)
    for parent in (0, 1, 1, 3):
        made.publish(parent)
    five = made.publish(4, anchor=True)
    six = made.publish(five)
    assert delta_path(made.lake, RUN, 0) == ("base", [])
    assert delta_path(made.lake, RUN, 2) == ("base", [1, 2])
    assert delta_path(made.lake, RUN, 4) == ("base", [1, 3, 4])
    assert delta_path(made.lake, RUN, six) == (made.row(five)["anchor"], [6])
    assert [row["version"] for row in chain_rows(made.lake, RUN, 4)] == [4, 3, 1, 0]


def test_a_long_chain_is_walked_to_its_end(tmp_path):
    made = WeightsLake(tmp_path, {"a": torch.zeros(1, dtype=torch.bfloat16)})
    for _ in range(150):
        made.publish()
    assert delta_path(made.lake, RUN, 150) == ("base", list(range(1, 151)))


def test_a_missing_or_collected_link_is_named(tmp_path):
    made = WeightsLake(tmp_path)
    for _ in range(3):
        made.publish()
    made.alter(1, state="collected")
    with pytest.raises(StageError, match=r"run r: weights version 1, needed to build 3, was collected"):
        delta_path(made.lake, RUN, 3)
    made.lake.replace("weight_versions", {"run": RUN, "version": 1}, made.lake.read("weight_versions").slice(0, 0))
    with pytest.raises(StageError, match=r"weights version 1, needed to build 2, is not in the lake"):
        delta_path(made.lake, RUN, 2)
    with pytest.raises(StageError, match=r"weights version 9 is not in the lake"):
        delta_path(made.lake, RUN, 9)
    made.alter(2, parent=2)
    with pytest.raises(StageError, match=r"weights version 2, needed to build 3, has parent 2"):
        delta_path(made.lake, RUN, 3)


def test_an_anchor_is_due_every_n_versions_or_when_deltas_outweigh_it(tmp_path):
    made = WeightsLake(tmp_path)
    lake = made.lake
    assert anchor_due(lake, RUN, 0, 1, 1000, anchor_every=1)
    assert not anchor_due(lake, RUN, 0, 1, 1000, anchor_every=2)
    assert anchor_due(lake, RUN, 0, 1001, 1000, anchor_every=50)
    assert not anchor_due(lake, RUN, 0, 1000, 1000, anchor_every=50)
    for _ in range(3):
        made.publish()
    since = sum(made.row(version)["delta_bytes"] for version in (1, 2, 3))
    assert anchor_due(lake, RUN, 3, 1, 10**9, anchor_every=4)
    assert not anchor_due(lake, RUN, 3, 1, 10**9, anchor_every=5)
    assert anchor_due(lake, RUN, 3, 10, since + 9, anchor_every=50)
    assert not anchor_due(lake, RUN, 3, 10, since + 10, anchor_every=50)
    made.publish(anchor=True)
    assert not anchor_due(lake, RUN, 4, 10, since + 9, anchor_every=2)
