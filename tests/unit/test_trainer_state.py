"""What a trainer saves: it gives back the same trainer, or an error and the trainer as it was."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_fsdp_trainer import ALONE, assert_bitwise, everything, folder, folders, loaded  # noqa: F401 - fixtures
from tiny_policy import make_batch, make_spec

from furlong.ops.weights.layout import LayoutError, Piece
from furlong.resources.trainers import snapshots
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.snapshots import Saved, SnapshotError

FILE = "rank-00000.safetensors"
CONTINUE = """
import sys
sys.path.insert(0, sys.argv[1])
from tiny_policy import make_batch, make_spec
from furlong.ops.protocols import OtherLogprobs
from furlong.resources.trainers.fsdp import FSDPTrainer
for compute in sys.argv[4:]:
    trainer = FSDPTrainer(make_spec(sys.argv[2], compute=compute, warmup_steps=3), threads=1)
    done = trainer.restore(f"{sys.argv[3]}/{compute}")
    for step in (3, 4):
        trainer.step(make_batch(step, step=step), OtherLogprobs())
    trainer.save(f"{sys.argv[3]}/{compute}-after")
    print(done, trainer.master_digest())
"""


def tensors_of(path) -> dict[str, torch.Tensor]:
    saved = Saved(str(path))
    return {name: saved.tensor(name) for name in saved.shapes if name != "random"}


def test_two_and_two_steps_in_another_process_equal_four(folder, tmp_path):  # noqa: F811
    formats, straight = ("float32", "bfloat16"), {}
    for compute in formats:
        straight[compute] = trainer = loaded(folder, compute=compute, warmup_steps=3)
        for step in (1, 2, 3, 4):
            trainer.step(make_batch(step, step=step), ALONE)
            if step == 2:
                trainer.save(str(tmp_path / compute))
    command = [sys.executable, "-c", CONTINUE, str(Path(__file__).parent), folder, str(tmp_path), *formats]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-2:] == [f"2 {straight[compute].master_digest()}" for compute in formats]
    for compute in formats:
        assert_bitwise(tensors_of(tmp_path / f"{compute}-after"), everything(straight[compute]))


def test_restore_goes_back_in_place(folder, tmp_path):  # noqa: F811
    trainer = loaded(folder)
    trainer.step(make_batch(1), ALONE)
    kept = everything(trainer)
    trainer.save(str(tmp_path / "one"))
    drawn = torch.rand(3)
    after = [trainer.step(make_batch(2, step=2), ALONE), trainer.master_digest()]
    assert trainer.restore(str(tmp_path / "one")) == 1
    assert_bitwise(everything(trainer), kept)
    assert torch.equal(torch.rand(3), drawn), "the random state is part of it"
    assert [trainer.step(make_batch(2, step=2), ALONE), trainer.master_digest()] == after


def test_save_replaces_a_folder_and_leaves_no_scraps(folder, tmp_path):  # noqa: F811
    trainer = loaded(folder)
    trainer.save(str(tmp_path / "state"))
    trainer.step(make_batch(1), ALONE)
    trainer.save(str(tmp_path / "state"))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert trainer.restore(str(tmp_path / "state")) == 1


def test_failed_save_keeps_the_state_that_stood_there(folder, tmp_path, monkeypatch):  # noqa: F811
    trainer = loaded(folder)
    trainer.save(str(tmp_path / "state"))
    trainer.step(make_batch(1), ALONE)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("furlong.resources.trainers.snapshots.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        trainer.save(str(tmp_path / "state"))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert trainer.restore(str(tmp_path / "state")) == 0


def damage_bytes(state):
    path = state / FILE
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)


def damage_length(state):
    path = state / FILE
    path.write_bytes(path.read_bytes()[:-100])


def change_index(state, change):
    about = json.loads((state / "state.json").read_text())
    change(about)
    (state / "state.json").write_text(json.dumps(about))


def damage_cover(state):
    change_index(state, lambda about: about["pieces"].pop())


def damage_file(state):
    tensors = load_file(state / FILE)
    tensors.popitem()
    save_file(tensors, state / FILE)


def damage_names(state):
    def forget(about):
        del about["tensors"]["exp_avg/model.norm.weight"]
        about["pieces"] = [row for row in about["pieces"] if row["name"] != "exp_avg/model.norm.weight"]

    change_index(state, forget)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_bytes, "was damaged"),
        (damage_length, "no readable state"),
        (damage_cover, "no readable state"),
        (damage_file, "no readable"),
        (damage_names, "exp_avg/model.norm.weight"),
        (lambda state: change_index(state, lambda about: about.update(format=99)), "format 99"),
        (lambda state: change_index(state, lambda about: about.pop("tensors")), "no readable state"),
        (lambda state: (state / "state.json").unlink(), "no readable state"),
        (lambda state: (state / FILE).unlink(), "no readable state"),
    ],
)
def test_damaged_state_is_refused_and_the_trainer_unchanged(folder, tmp_path, damage, message):  # noqa: F811
    trainer = loaded(folder)
    trainer.save(str(tmp_path / "state"))
    trainer.step(make_batch(1), ALONE)
    before = everything(trainer)
    damage(tmp_path / "state")
    with pytest.raises(SnapshotError, match=message):
        trainer.restore(str(tmp_path / "state"))
    assert_bitwise(everything(trainer), before)


def test_state_of_another_number_format_is_refused(folder, tmp_path):  # noqa: F811
    """Float64 masters would lose bits in a float32 trainer, and nobody would be told."""
    wide = loaded(folder, compute="float64")
    wide.save(str(tmp_path / "state"))
    with pytest.raises(SnapshotError, match="compute_dtype"):
        loaded(folder).restore(str(tmp_path / "state"))
    other = FSDPTrainer(make_spec(folder, "float64"), 1)
    assert other.restore(str(tmp_path / "state")) == 0
    assert other.master_digest() == wide.master_digest()


def test_pieces_come_back_as_other_pieces(tmp_path):
    """Written by rows or by columns, read by rows, by columns and whole; empty, 0-d and uneven ones too."""
    x, flat = torch.randn(7, 6, dtype=torch.float64), torch.tensor(3.0)
    pieces = {Piece("by rows", 0, lo, hi): x[lo:hi] for lo, hi in ((0, 3), (3, 6), (6, 7), (7, 7))}
    pieces |= {Piece("by columns", 1, lo, hi): x[:, lo:hi].contiguous() for lo, hi in ((0, 1), (1, 6))}
    pieces |= {Piece("number", 0, 0, 1): flat, Piece("nothing", 0, 0, 0): torch.empty(0, 4)}
    shapes = {"by rows": (7, 6), "by columns": (7, 6), "number": (), "nothing": (0, 4)}
    snapshots.write(str(tmp_path / "s"), pieces, shapes, {"note": 1})
    saved = Saved(str(tmp_path / "s"))
    assert (saved.about["note"], saved.shapes) == (1, shapes)
    for name in ("by rows", "by columns"):
        assert torch.equal(saved.tensor(name), x)
        assert torch.equal(saved.piece(Piece(name, 0, 2, 7)), x[2:7])
        assert torch.equal(saved.piece(Piece(name, 1, 0, 4)), x[:, :4])
        assert saved.piece(Piece(name, 0, 7, 7)).shape == (0, 6)
    assert torch.equal(saved.tensor("number"), flat)
    assert saved.tensor("nothing").shape == (0, 4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [([(0, 3), (4, 7)], "3 to 4 is missing"), ([(0, 4), (3, 7)], "is there twice"), ([(0, 6)], "6 to 7 is missing")],
)
def test_pieces_that_do_not_tile_are_not_saved(tmp_path, rows, message):
    pieces = {Piece("x", 0, lo, hi): torch.zeros(hi - lo, 2) for lo, hi in rows}
    with pytest.raises(LayoutError, match=message):
        snapshots.write(str(tmp_path / "s"), pieces, {"x": (7, 2)}, {})
    with pytest.raises(LayoutError, match="is given as"):
        snapshots.write(str(tmp_path / "s"), {Piece("x", 0, 0, 7): torch.zeros(7, 3)}, {"x": (7, 2)}, {})
    assert list(tmp_path.iterdir()) == []


def test_nan_survives_a_save(tmp_path):
    """A digest is over bits, so a number that equals nothing, not even itself, is no damage."""
    x = torch.tensor([math.nan, -0.0])
    snapshots.write(str(tmp_path / "s"), {Piece("x", 0, 0, 2): x}, {"x": (2,)}, {})
    assert torch.equal(Saved(str(tmp_path / "s")).tensor("x").view(torch.int32), x.view(torch.int32))
