"""A past step comes out again bit for bit; of one whose rows were tampered with, the first tensor that differs is named."""

import shutil

import pytest

from furlong.ops import records
from furlong.ops.stages.context import StageError
from furlong.resources.lake import Lake
from furlong.resources.replay import replay_step


@pytest.fixture
def copied(place, undisturbed, tmp_path):
    """The undisturbed run's rows and states, in a root of their own."""
    for name in ("lake", "models", "runs/calm/state"):
        shutil.copytree(place.placement.folder / name, tmp_path / name, symlinks=True)
    return place.placement.model_copy(update={"root": str(tmp_path)})


def test_every_step_is_identical_and_nothing_is_touched(place, undisturbed):
    before = place.row_digests("calm", "RUN")
    states = sorted(path.name for path in (place.placement.folder / "runs" / "calm" / "state").iterdir())
    for step in (1, 3):
        told = replay_step(place.placement, "calm", step)
        assert told.identical, told
        assert told.tensors > 10
    assert place.row_digests("calm", "RUN") == before
    assert sorted(path.name for path in (place.placement.folder / "runs" / "calm" / "state").iterdir()) == states


def test_another_reward_is_found_out(copied):
    lake = Lake(copied.lake_uri())
    trained = [
        row
        for row in lake.read("steps", {"run": "calm", "step": 2}).to_pylist()[0]["outcomes"]
        if row["tokens_trained"]
    ]
    key = {"run": "calm", "trajectory_id": trained[0]["trajectory_id"]}
    (row,) = lake.read("rewards", key).to_pylist()
    lake.replace("rewards", key, records.rows("rewards", [row | {"score": 1.0 - row["score"]}]))
    told = replay_step(copied, "calm", 2)
    assert not told.identical
    assert told.first_difference.startswith("tensor ")


def test_a_step_that_is_not_there_is_said(place, undisturbed):
    with pytest.raises(StageError, match="no committed step 9"):
        replay_step(place.placement, "calm", 9)
    with pytest.raises(StageError, match="attempt 7 is not in the lake"):
        replay_step(place.placement, "calm", 3, attempt=7)
