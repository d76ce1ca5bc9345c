"""Runs whose trainer is megatron-core over several ranks: it learns from the same loop, survives losses, and moves."""

import pytest

from furlong.resources.processes import writer_of

MEGATRON = {"trainer.backend": "megatron"}


def drive(place, run: str, layout: str, **config) -> None:
    process = place.start(run, {**place.env, "FURLONG_TRAINER_LAYOUT": layout}, overrides=MEGATRON, **config)
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-4000:]


def trainers(place, run: str) -> list[str]:
    rows = sorted(place.lake.read("steps", {"run": run}).to_pylist(), key=lambda row: row["step"])
    assert all(row["mismatch_coverage"] == 1.0 and row["mismatch_max"] < 1e-4 for row in rows)
    return [row["trainer"] for row in rows]


@pytest.mark.slow
def test_a_run_moves_to_another_layout_between_two_blocks_of_steps(place):
    drive(place, "moves", "tp2-sp", steps=2)
    before = place.digests("moves")
    drive(place, "moves", "pp2")
    used = trainers(place, "moves")
    assert ["tp2-sp" in name for name in used] == [True, True, False]
    assert "pp2" in used[2]
    assert place.digests("moves")[:3] == before, "what was published stays"
    assert [state for _, state, _ in place.digests("moves")] == ["live"] * 4


@pytest.mark.slow
def test_a_rank_that_is_killed_between_two_blocks_costs_a_replay_and_no_bit(place):
    drive(place, "whole", "dp2")
    drive(place, "broken", "dp2", steps=1)
    log = place.placement.folder / "logs" / "trainer-broken-ranks" / "trainer-quick-rank1.log"
    writer_of(log).kill()
    process = place.start("broken", {**place.env, "FURLONG_TRAINER_LAYOUT": "dp2"}, overrides=MEGATRON)
    try:
        _, errors = process.communicate(timeout=200)
    finally:
        process.kill()
    if process.returncode:
        assert "rank 1" in errors, errors[-4000:]
        drive(place, "broken", "dp2")
    assert [digest for *_, digest in place.digests("broken")] == [digest for *_, digest in place.digests("whole")]
