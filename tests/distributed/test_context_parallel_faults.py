"""A rank that is wrong, dead or too slow is an error on every rank, in time; one that is only slow is none."""

import pytest
from context_parallel_faults import SWAPPED, WRONG, disagree, killed, late, slow
from kernel_ranks import run_ranks

from furlong.kernels.ring import ContextParallelError, Ring

SLACK = 4.0
"""Seconds past the deadline: cores that others use too."""


def test_what_one_rank_has_wrong_all_ranks_hear():
    results = run_ranks(4, disagree)
    assert len(results[0]) == 2 * len(WRONG) + len(SWAPPED) + 5
    for name, errors in {name: [result[name] for result in results] for name in results[0]}.items():
        if name.startswith("right"):
            assert errors == [""] * 4, name
        else:
            assert all(errors), name
    said = {name: results[0][name] for name in results[0]}
    assert "rank 2: attention: main keys [9, 2, 8]" in said["rows"]
    assert "with the coordinates of the same rows" in said["rows"]
    assert "rank 2 has dtype=torch.float32" in said["dtype"]
    assert "rank 2 has heads=[6]" in said["heads"]
    assert "rank 2: branch_attention: k_branch" in said["entries"]
    assert "rank 2: branch_attention: k_branch is neither" in said["values apart"]
    assert "rank 2 has gradient=False" in said["gradient"]
    assert "rank 2: backend_of: no backend is called 'fastestfastest" in said["long backend"]
    assert "the scale of the scores is 0.0; give a finite one above 0" in said["no scale"]
    for name in SWAPPED:
        assert "the ranks do not agree on rank 0 has call=" in said[f"swapped {name}"]
        assert " of number " in said[f"swapped {name}"]
    assert "attention by gather" in said["strategy"]
    assert "'fastest' is not known" in said["unknown strategy"]
    assert "scale=0.5" in said["scale"]
    assert "no backend is called 'fastest'" in said["backend"]
    assert "rank 2 has layout=" in said["layout"]
    assert "forward" in said["order"]
    assert "backward" in said["order"]
    assert "2 kv heads cannot be dealt to 4 ranks" in said["ulysses"]
    assert 'set strategy "ring"' in said["ulysses"]


@pytest.mark.parametrize(
    "when",
    [pytest.param("before", marks=pytest.mark.slow), pytest.param("between", marks=pytest.mark.slow), "backward"],
)
def test_a_killed_rank_is_an_error_on_all_others(when):
    deadline = 2.0
    results = run_ranks(4, killed, when, deadline, lost={2})
    for rank in (0, 1, 3):
        error, seconds = results[rank]["first"]
        assert "died" in error
        assert f"rank {rank} of 4" in error
        assert seconds < 2 * deadline + SLACK
        assert "broke earlier" in results[rank]["again"][0]
        assert results[rank]["again"][1] < 0.1


def test_slow_is_no_error_within_the_deadline():
    for rank, found in enumerate(run_ranks(4, slow)):
        assert found == [[float((rank - hop) % 4) for hop in range(4)]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("own_error", [False, True])
def test_a_rank_that_does_not_come_is_an_error_on_all(own_error):
    results = run_ranks(4, late, own_error, lost={1})
    for rank in (0, 2, 3):
        error, seconds = results[rank]
        assert "deadline of 1 s" in error
        assert seconds < 2 * 1 + SLACK


def test_a_ring_needs_time_and_one_rank_needs_no_group():
    for deadline in (0, -1, float("nan")):
        with pytest.raises(ContextParallelError, match="give it seconds"):
            Ring(None, deadline)
    alone = Ring(None, 1)
    with alone.call("nothing", {}) as said:
        assert said == ("",)
    with (
        pytest.raises(ContextParallelError, match="bytes is longer than 512"),
        alone.call("too much", {"x": "x" * 600}),
    ):
        pass
    assert not alone.ledger.sent.total()
