"""Real runs on two engines of two processes each: every version is proved by both, whoever is killed."""

import signal
import time

import pytest

SPLIT = {"FURLONG_ENGINES": "2", "FURLONG_ENGINE_TP": "2"}


@pytest.fixture
def split(place, monkeypatch):
    for name, value in SPLIT.items():
        monkeypatch.setitem(place.env, name, value)
    return place


def versions(place, run: str) -> list[dict]:
    return sorted(place.lake.read("weight_versions", {"run": run}).to_pylist(), key=lambda row: row["version"])


def test_versions_reach_every_engine_by_every_transport_and_an_engine_that_was_killed(split):
    split.finish("split", steps=2)
    split.actor_process("engine-1", "split").send_signal(signal.SIGKILL)
    split.finish("split")
    rows = versions(split, "split")
    assert [(row["version"], row["state"]) for row in rows] == [(0, "live"), (1, "live"), (2, "live"), (3, "live")]
    assert {row["transport"] for row in rows[1:]} == {"broadcast", "p2p", "disk_delta"}
    for row in rows[1:]:
        assert row["retried_because"] == ""
        assert [proof["digest"] for proof in row["attestations"]] == [row["digest"]] * 2
        assert all("tp=2" in proof["engine"] for proof in row["attestations"])
        assert 0 < row["pause_seconds"] < row["stage_seconds"] + 5
    fences = [row["fence"] for row in rows]
    assert fences == sorted(fences), "a later driver has a higher token"
    assert fences[-1] > fences[0]


@pytest.mark.slow
def test_a_run_whose_engines_are_killed_in_turn_ends_with_the_same_weights(place, undisturbed):
    """Every reply comes, from whichever engine lives, and is the same; who was killed is back by the next publication."""
    driver = place.start("struck", env={**place.env, "FURLONG_ENGINES": "2"})
    killed = 0
    try:
        begun = time.monotonic()
        while driver.poll() is None and killed < 2:
            assert time.monotonic() - begun < 200
            groups = place.lake.read("groups", {"run": "struck"}, ["step"])["step"].to_pylist()
            if max(groups, default=0) > killed:
                place.actor_process(("engine-1", "engine")[killed], "struck").send_signal(signal.SIGKILL)
                killed += 1
            time.sleep(0.02)
        _, err = driver.communicate(timeout=200)
        assert driver.returncode == 0, err[-4000:]
    finally:
        driver.kill()
    assert killed == 2
    assert place.digests("struck") == undisturbed[0]
    last = versions(place, "struck")[-1]
    assert last["state"] == "live"
    assert {proof["digest"] for proof in last["attestations"]} == {last["digest"]}
