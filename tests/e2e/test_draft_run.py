"""Whole runs with a draft: it is trained and published with the policy, what is killed comes back with the same bits, and
with `match` the policy of the run is the one that there is without it."""

import signal
from itertools import pairwise

import pytest

from furlong.ops.draft.tensors import of_version
from furlong.resources.weights.rebuild import rebuild
from furlong.resources.weights.run_model import run_model
from furlong.resources.weights.verify import verify_run

MATCH = {
    "draft.kind": "eagle3", "draft.verify": "match", "draft.vocabulary": 10, "draft.learning_rate": 3e-3,
    "draft.warmup_steps": 1, "draft.adaptive": False,
}  # fmt: skip


def policy_of(place, run: str) -> dict[int, dict[str, str]]:
    """Digests of the policy's tensors, by version."""
    rows = place.lake.read("weight_versions", {"run": run}, ["version", "tensors"]).to_pylist()
    return {
        row["version"]: {t["name"]: t["digest"] for t in row["tensors"] if not t["name"].startswith("draft.")}
        for row in rows
    }


def steps_of(place, run: str) -> list[dict]:
    return sorted(place.lake.read("steps", {"run": run}).to_pylist(), key=lambda row: row["step"])


@pytest.fixture(scope="module")
def drafted(place) -> list:
    """The versions of a run that nothing disturbed."""
    place.finish("drafted", overrides=MATCH)
    return place.digests("drafted")


@pytest.mark.slow
def test_the_whole_runs_policy_is_bitwise_the_one_without_a_draft(place, undisturbed, drafted):
    """Tokens, log-probabilities, rewards, gradients, weights: of all of them, these digests are the last."""
    without, beside = (policy_of(place, run) for run in ("calm", "drafted"))
    assert without == beside
    assert len({tuple(tensors.items()) for tensors in without.values()}) == 4, "every step changes the weights"
    columns = ["trajectory_id", "tokens", "logprobs", "model_logprobs", "text"]
    replies = [
        [row | {"trajectory_id": row["trajectory_id"].replace(run, "RUN")} for row in
         sorted(place.lake.read("trajectories", {"run": run}, columns).to_pylist(), key=lambda row: row["trajectory_id"])]
        for run in ("calm", "drafted")
    ]  # fmt: skip
    assert replies[0] == replies[1]
    assert replies[0]


def test_the_draft_learns_and_is_published_with_every_version_from_one_on(place, drafted):
    assert [state for _, state, _ in drafted] == ["live"] * 4
    rows = steps_of(place, "drafted")
    assert all(row["draft_loss"] > 0 and row["draft_tokens"] > 0 and row["draft_skipped"] is None for row in rows)
    assert all(1 < row["draft_acceptance"] <= 5 and 0 < row["draft_seconds"] < row["seconds"] for row in rows)
    _, _, model = run_model(place.lake, "drafted", place.placement)
    drafts = [of_version(rebuild(place.lake, "drafted", version, str(model.path))) for version in range(4)]
    assert not drafts[0]
    assert all({"fc.weight", "d2t", "t2d"} <= draft.keys() for draft in drafts[1:])
    for one, two in pairwise(drafts[1:]):
        assert not one["lm_head.weight"].equal(two["lm_head.weight"])
        assert one["d2t"].equal(two["d2t"])
    assert [verdict.fault for verdict in verify_run(place.lake, "drafted", str(model.path))] == [None] * 4
    with_it = place.lake.read("batches", {"run": "drafted"}, ["step", "speculation"]).to_pylist()
    spoken = {row["step"]: row["speculation"] for row in with_it}
    assert all(spoken[step]["verifies"] > 0 for step in (2, 3)), "versions 1 and 2 have a draft to draw with"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["trainer", "engine"])
def test_an_actor_killed_between_blocks_comes_back_with_the_same_draft(place, drafted, role):
    run = f"drafted-{role}"
    place.finish(run, overrides=MATCH, steps=1)
    place.actor_process(role, run).send_signal(signal.SIGKILL)
    place.finish(run, overrides=MATCH)
    assert place.digests(run) == drafted


@pytest.mark.slow
def test_a_frozen_draft_is_published_once(place):
    place.finish("frozen", overrides=MATCH | {"draft.train": False})
    drafts = []
    for version in range(4):
        rows = place.lake.read("weight_versions", {"run": "frozen", "version": version}, ["tensors"]).to_pylist()
        drafts.append({t["name"]: t["digest"] for t in rows[0]["tensors"] if t["name"].startswith("draft.")})
    assert not drafts[0]
    assert drafts[1] == drafts[2] == drafts[3] != {}
    for version in (2, 3):
        rows = place.lake.read("weight_deltas", {"run": "frozen", "version": version}, ["name"])
        assert not any(name.startswith("draft.") for name in rows["name"].to_pylist())
