"""What the trainer's host makes of failures that are not the saved state's, and of saves that fail."""

from dataclasses import replace

import pytest
from loss_cases import spec_of
from tiny_policy import make_batch
from weights_lake import WeightsLake

from furlong.ops.policy.manifest import ModelError
from furlong.ops.stages.context import StageError
from furlong.resources.trainers.group import TrainerError
from furlong.resources.trainers.host import BASE, TrainerHost, _Saver, _superseded
from furlong.resources.trainers.others import OtherWeights
from furlong.resources.trainers.snapshots import SnapshotError


class Failing:
    """A trainer that says this of every state, and holds nothing to begin with."""

    def __init__(self, error):
        self.error = error

    def restore(self, folder):
        raise self.error

    save = restore

    def load(self, folder):
        raise AssertionError("nothing that could be restored is left")


def host_of(error, folder):
    host = object.__new__(TrainerHost)
    host.trainer, host.state_folder, host.base_folder, host.saver = Failing(error), folder, "", None
    for step in (1, 2):
        (folder / f"{step:05d}.1").mkdir(parents=True)
    return host


def test_a_layout_that_does_not_fit_leaves_every_saved_state_in_its_place(tmp_path):
    host = host_of(ModelError("tp3 must divide its key/value heads"), tmp_path)
    with pytest.raises(ModelError, match="tp3"):
        host._restore(2, {step: {"attempt": 1, "master_digest_after": ""} for step in (1, 2)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00001.1", "00002.1"]


def test_states_that_cannot_be_read_are_set_aside(tmp_path):
    host = host_of(SnapshotError("was damaged"), tmp_path)
    with pytest.raises(AssertionError, match="left"):
        host._restore(2, {step: {"attempt": 1, "master_digest_after": ""} for step in (1, 2)})
    assert all(".damaged-" in path.name for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "at", "advice"),
    [(TrainerError("rank 1 was lost"), None, "same command"), (OSError(28, "no space"), BASE, "disk space")],
)
def test_a_save_that_ends_the_ranks_leaves_nothing_to_go_on_from(tmp_path, error, at, advice):
    host = host_of(error, tmp_path)
    host.at, host.saver = BASE, _Saver(host.trainer, tmp_path, "00003.1")
    with pytest.raises(StageError, match=advice):
        host.settle()
    assert host.at == at
    host.settle()


def test_repeating_a_step_keeps_the_state_that_it_starts_from():
    names = ["00008.1", "00009.1", "00010.1", "00010.2", "00010.10", "00010.9.damaged-7", ".00010.11.new-3"]
    assert _superseded(names) == {"00008.1", "00010.1", "00010.2"}
    assert _superseded(["00001.1", "00002.1"]) == set()


def test_tokens_of_a_collected_version_are_left_uncompared_and_stop_nothing(tmp_path):
    made = WeightsLake(tmp_path)
    made.publish(state="collected")
    batch = make_batch(1)
    spec = spec_of().model_copy(update={"staleness": 2})
    others = OtherWeights(made.lake, made.run, spec, made.base)
    old = replace(batch, version=2, sampled_by=tuple((1,) * len(reply) for reply in batch.replies))
    assert others._sampling(None, old) is None
    live = replace(old, sampled_by=tuple((0,) * len(reply) for reply in batch.replies))
    with pytest.raises(AttributeError):
        others._sampling(None, live)


def test_older_weights_are_not_asked_for_when_no_token_of_theirs_is_trained():
    batch = make_batch(1)
    masks = tuple(tuple(t > 0 for t in range(len(reply))) for reply in batch.replies)
    mixed = tuple(tuple(2 if on else 1 for on in mask) for mask in masks)
    others = OtherWeights(None, "quick", spec_of().model_copy(update={"staleness": 2}), "")
    assert others._sampling(None, replace(batch, version=2, masks=masks, sampled_by=mixed)) is None
