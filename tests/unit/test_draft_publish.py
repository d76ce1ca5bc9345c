"""A draft published alone, with a real engine, trainer and lake: the policy keeps its bytes, and the next step its draft."""

from __future__ import annotations

import shutil

import pytest
import torch
from test_stages import RUN, live, new_fleet, new_trainer, open_run, restart, take

from furlong.ops.draft.settings import DraftSettings, draft_of
from furlong.ops.draft.shape import DraftError
from furlong.ops.draft.start import shape_of, start_draft
from furlong.ops.draft.tensors import of_version
from furlong.ops.policy.architecture import read_architecture
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.protocols import StaleFence
from furlong.ops.stages.context import StageError
from furlong.ops.stages.draft_publish import publish_draft
from furlong.resources.weights.draft_folder import draft_shape
from furlong.resources.weights.publisher import PublishError
from furlong.resources.weights.rebuild import rebuild
from furlong.resources.weights.verify import verify_run

FROZEN = {"draft.kind": "eagle3", "draft.train": False, "draft.vocabulary": 8}


@pytest.fixture
def run(made, tmp_path, quick_spec):
    shutil.copytree(made / "models", tmp_path / "models")
    run = open_run(tmp_path, quick_spec, FROZEN)
    yield run
    run.pause()
    run.verifier.close()


def some_draft(run, seed):
    """A draft of the run's shape that is no other's."""
    architecture = read_architecture(str(run.model.path))
    tensors, shape = start_draft(
        draft_of(run.spec), architecture, read_tensors(str(run.model.path), architecture, torch.float32), seed
    )
    return {n: t + seed if n == "norm.weight" else t for n, t in tensors.items()}, shape


def rows(run):
    return {row["version"]: row for row in run.lake.read("weight_versions", {"run": RUN}).to_pylist()}


def drafts(row):
    return {t["name"]: t["digest"] for t in row["tensors"] if t["name"].startswith("draft.")}


def policy(row):
    return {t["name"]: t["digest"] for t in row["tensors"]}.items() - drafts(row).items()


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_draft_goes_out_between_steps_and_stays_until_the_next_one(run):
    take(run, 1)
    first, shape = some_draft(run, 1)
    assert shape == draft_shape(run.spec, run.model.path)
    told = publish_draft(run, first, shape).values
    assert (told["version"], told["parent"], told["transport"]) == (2, 1, "disk_delta")
    before, alone = rows(run)[1], rows(run)[2]
    assert policy(alone) == policy(before), "the policy is its parent's, bit for bit"
    assert (alone["step"], alone["state"], len(alone["attestations"])) == (1, "live", 1)
    deltas = run.lake.read("weight_deltas", {"run": RUN, "version": 2}, ["name"])["name"].to_pylist()
    assert deltas
    assert all(name.startswith("draft.") for name in deltas)
    assert run.engines.members[0].attest().digest == alone["digest"]
    assert same(of_version(rebuild(run.lake, RUN, 2, str(run.model.path))), first)

    take(run, 2)
    step = run.lake.read("steps", {"run": RUN, "step": 2}).to_pylist()[0]
    assert (step["version_before"], step["version_after"]) == (2, 3)
    assert step["digest_before"] == alone["digest"]
    after = rows(run)[3]
    assert drafts(after) == drafts(alone), "the step keeps it"
    assert policy(after) != policy(alone)
    assert run.lake.read("batches", {"run": RUN, "step": 2}, ["version"])["version"].to_pylist() == [2]

    second, _ = some_draft(run, 2)
    publish_draft(run, second, shape)
    # Whoever begins anew finds it in the lake: the trainer restores a saved state, or replays from the base.
    shutil.rmtree(run.folder / "state", ignore_errors=True)
    restart(run, trainer=new_trainer(run), engines=new_fleet(run))
    take(run, 3)
    assert drafts(rows(run)[5]) == drafts(rows(run)[4]) != drafts(after)
    assert sorted(live(run)) == [0, 1, 2, 3, 4, 5]
    assert [v.fault for v in verify_run(run.lake, RUN, str(run.model.path))] == [None] * 6
    assert run.engines.members[0].attest().digest == rows(run)[5]["digest"]


@pytest.mark.slow
def test_publishing_it_does_not_change_what_is_trained(run, made, tmp_path_factory, quick_spec):
    """The same steps without a published draft give the same policy, as proposals change no reply."""
    take(run, 1)
    publish_draft(run, *some_draft(run, 1))
    take(run, 2)
    root = tmp_path_factory.mktemp("calm")
    shutil.copytree(made / "models", root / "models")
    calm = open_run(root, quick_spec, FROZEN)
    try:
        for step in (1, 2):
            take(calm, step)
        assert policy(rows(calm)[2]) == policy(rows(run)[3])
    finally:
        calm.pause()
        calm.verifier.close()


@pytest.mark.slow
def test_before_the_first_step_and_twice(run):
    take(run, 1, stages=("prompts",))
    mine, shape = some_draft(run, 1)
    assert publish_draft(run, mine, shape).values["version"] == 1
    versions = run.lake.version("weight_versions")
    again = publish_draft(run, mine, shape)
    assert again.values["version"] == 1
    assert not again.wrote
    assert run.lake.version("weight_versions") == versions
    take(run, 1)
    assert rows(run)[2]["parent"] == 1
    assert drafts(rows(run)[2]) == drafts(rows(run)[1])


@pytest.mark.slow
def test_a_step_repeated_on_purpose_takes_a_number_that_nobody_has(run):
    take(run, 1)
    publish_draft(run, *some_draft(run, 1))
    take(run, 1, attempt=2)
    again = rows(run)[3]
    assert (again["step"], again["attempt"], again["parent"]) == (1, 2, 0)
    take(run, 2)
    assert rows(run)[4]["parent"] == 3


@pytest.mark.slow
def test_within_a_step_nothing_is_published(run):
    take(run, 1)
    take(run, 2, stages=("prompts", "rollouts"))
    mine, shape = some_draft(run, 1)
    with pytest.raises(StageError, match="step 2 has its batch already"):
        publish_draft(run, mine, shape)
    take(run, 2, stages=("rewards", "train_step"))
    with pytest.raises(StageError, match="step 2 has not published its weights"):
        publish_draft(run, mine, shape)
    take(run, 2, stages=("weight_publish",))
    assert publish_draft(run, mine, shape).values["version"] == 3


def test_a_publication_that_failed_goes_on_under_its_number(run, monkeypatch):
    take(run, 1)
    mine, shape = some_draft(run, 1)
    engine = run.engines.members[0]
    honest = engine.activate

    def broken(*args):
        raise RuntimeError("the roof fell in")

    monkeypatch.setattr(engine, "activate", broken)
    with pytest.raises(PublishError, match="roof fell in"):
        publish_draft(run, mine, shape)
    monkeypatch.setattr(engine, "activate", honest)
    assert rows(run)[2]["state"] == "staged"
    assert engine.attest().version == 1
    assert publish_draft(run, mine, shape).values["version"] == 2
    assert sorted(live(run)) == [0, 1, 2]


@pytest.mark.slow
def test_one_left_staged_does_not_stand_in_the_next_step_s_way(run, monkeypatch):
    take(run, 1)

    def killed(*_):
        raise RuntimeError("killed")

    with monkeypatch.context() as broken:
        broken.setattr(type(run), "publish", killed)
        with pytest.raises(RuntimeError, match="killed"):
            publish_draft(run, *some_draft(run, 1))
    take(run, 2)
    assert {v: (row["state"], row["parent"]) for v, row in rows(run).items()} == {
        0: ("live", None), 1: ("live", 0), 2: ("staged", 1), 3: ("live", 1),
    }  # fmt: skip


@pytest.mark.slow
def test_a_driver_that_another_has_followed_publishes_nothing(run):
    take(run, 1)
    mine, shape = some_draft(run, 1)
    held = run.fence
    assert run.lake.take_fence(RUN) > held
    with pytest.raises(StaleFence):
        publish_draft(run, mine, shape)
    assert run.engines.members[0].attest().version == 1


def test_drafts_that_no_version_may_have_are_refused(run):
    take(run, 1, stages=("prompts",))
    mine, shape = some_draft(run, 1)
    for odd, why in (
        ({"norm.weight": mine["norm.weight"] * float("nan")}, "norm.weight .* is not all finite"),
        ({"norm.weight": mine["norm.weight"][1:]}, "norm.weight is .* was described"),
        ({"d2t": mine["d2t"] + 1}, "d2t"),
        ({"more": mine["d2t"]}, "more is not part of the draft"),
    ):
        with pytest.raises(DraftError, match=why):
            publish_draft(run, mine | odd, shape)
    with pytest.raises(DraftError, match="is missing"):
        publish_draft(run, {}, shape)
    assert rows(run).keys() == {0}


@pytest.mark.parametrize(
    ("settings", "why"),
    [({}, "draws without a draft"), (FROZEN | {"draft.train": True}, "trains its draft.*next step would undo")],
)
def test_a_run_whose_drafts_come_from_elsewhere_refuses(made, tmp_path, quick_spec, settings, why):
    shutil.copytree(made / "models", tmp_path / "models")
    run = open_run(tmp_path, quick_spec, settings)
    try:
        architecture = read_architecture(str(run.model.path))
        shape = shape_of(DraftSettings(), architecture)
        tensors, _ = start_draft(
            DraftSettings(), architecture, read_tensors(str(run.model.path), architecture, torch.float32), 0
        )
        with pytest.raises(StageError, match=why):
            publish_draft(run, tensors, shape)
        assert not run.lake.read("weight_versions", {"run": RUN}).num_rows
    finally:
        run.pause()
        run.verifier.close()
