"""Importance weights and rejections, by hand, one by one, and which settings are refused."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import spec_of

from furlong.ops.policy.corrections import Correction, correction_of
from furlong.ops.policy.importance import log_ratio_at, normalised, rejections, weigh
from furlong.ops.spec import SpecError

# Two trajectories, of three tokens and one; ratios 1/2, 2, 2 and 8.
RATIOS = [0.5, 2.0, 2.0, 8.0]
TRAJECTORY = torch.tensor([0, 0, 0, 1])


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


D = float64(RATIOS).log()


def weights(**options):
    made, rejected = weigh(Correction(**options), D, TRAJECTORY)
    return torch.where(rejected, torch.zeros_like(made), made).tolist()


def rejected(advantages=(1.0,) * 4, **options):
    return rejections(Correction(**options), D, TRAJECTORY, float64(list(advantages))).tolist()


def parsed(name, **options):
    return correction_of(spec_of(correction=name, correction_options=options).algorithm)


def test_levels_by_hand():
    cube = 2 ** (1 / 3)
    assert log_ratio_at("token", D, TRAJECTORY).exp().tolist() == pytest.approx(RATIOS)
    assert log_ratio_at("sequence", D, TRAJECTORY).exp().tolist() == pytest.approx([2, 2, 2, 8])
    assert log_ratio_at("geometric", D, TRAJECTORY).exp().tolist() == pytest.approx([cube, cube, cube, 8])


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({"mode": "truncate", "high": 1.5}, [0.5, 1.5, 1.5, 1.5]),
        ({"mode": "truncate", "high": 1.5, "low": 0.9}, [0.5, 1.5, 1.5, 1.5]),
        ({"mode": "clip", "high": 1.5, "low": 0.9}, [0.9, 1.5, 1.5, 1.5]),
        ({"mode": "mask", "high": 3.0, "low": 0.6}, [0.0, 2.0, 2.0, 0.0]),
        ({"mode": "truncate", "high": 4.0, "level": "sequence"}, [2.0, 2.0, 2.0, 4.0]),
        ({"mode": "mask", "high": 4.0, "level": "sequence"}, [2.0, 2.0, 2.0, 0.0]),
        ({"mode": "clip", "high": 4.0, "low": 1.5, "level": "geometric"}, [1.5, 1.5, 1.5, 4.0]),
        ({"mode": "mask", "high": 9.0, "low": 1.5, "level": "geometric"}, [0.0, 0.0, 0.0, 8.0]),
    ],
)
def test_weights_by_hand(options, want):
    assert weights(**options) == pytest.approx(want)


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_a_long_trajectory_neither_overflows_nor_vanishes(mode):
    """Products of 5000 ratios of e and of 1/e, beyond what a float64 holds."""
    trajectory = torch.tensor([0, 1]).repeat_interleave(5000)
    d = float64([1.0, -1.0]).repeat_interleave(5000)
    made, out = weigh(Correction(mode=mode, level="sequence", low=0.25, high=2.0), d, trajectory)
    assert bool(torch.isfinite(made).all())
    assert bool(out.all()) is (mode == "mask")
    want = {"truncate": (2.0, 0.0), "clip": (2.0, 0.25)}.get(mode)
    assert want is None or (made[0].item(), made[-1].item()) == pytest.approx(want)


def test_rejections_by_hand():
    assert rejected() == [False] * 4
    assert rejected(reject="token", reject_low=0.6, reject_high=4.0) == [True, False, False, True]
    assert rejected(reject="sequence", reject_high=4.0) == [False, False, False, True]
    assert rejected(reject="geometric", reject_low=1.5) == [True, True, True, False]
    assert rejected(veto=0.6) == [True, True, True, False], "one token takes its trajectory with it"
    assert rejected(veto=0.4) == [False] * 4


def test_off_policy_trajectories_lose_their_negative_tokens():
    """The engine found the first trajectory's tokens less likely than the trainer by ln 2 / 3 each; turn that around."""
    options = {"off_policy": 0.2}
    assert rejected([-1.0] * 4, **options) == [False] * 4
    drifted = rejections(Correction(**options), -D, TRAJECTORY, float64([-1.0, 1.0, -1.0, 1.0]))
    assert drifted.tolist() == [True, False, True, False]
    still = rejections(Correction(off_policy=0.24), -D, TRAJECTORY, float64([-1.0] * 4))
    assert still.tolist() == [False, False, False, True], "ln 2 / 3 is 0.231"


def test_normalised_weights_have_mean_one_over_what_stays():
    out = torch.tensor([False, False, True, False])
    made = normalised(float64([1.0, 2.0, 100.0, 3.0]), out)
    assert made.tolist() == pytest.approx([0.5, 1.0, 50.0, 1.5])
    nothing = torch.ones(4, dtype=torch.bool)
    assert normalised(float64([1.0] * 4), nothing).tolist() == [1.0] * 4, "no division by nothing"


@settings(deadline=None)
@given(st.lists(st.floats(-4, 4), min_size=1, max_size=10), st.floats(0, 0.9), st.floats(1.1, 9))
def test_tis_and_icepop_against_plain_python(gaps, low, high):
    trajectory = torch.zeros(len(gaps), dtype=torch.long)
    tis, none = weigh(Correction(high=high), float64(gaps), trajectory)
    assert not none.any()
    assert tis.tolist() == pytest.approx([min(math.exp(d), high) for d in gaps])
    pop, out = weigh(Correction(mode="mask", low=low, high=high), float64(gaps), trajectory)
    kept = [
        low <= math.exp(d) <= high for d in gaps if abs(math.exp(d) - high) > 1e-9 and abs(math.exp(d) - low) > 1e-9
    ]
    if len(kept) == len(gaps):
        assert (~out).tolist() == kept
    assert pop[~out].tolist() == pytest.approx([math.exp(d) for d, o in zip(gaps, out.tolist(), strict=True) if not o])


def test_defaults_of_each_name():
    assert parsed("tis") == Correction(mode="truncate", low=0.0, high=2.0)
    assert parsed("icepop") == Correction(mode="mask", low=0.5, high=5.0)
    assert parsed("mis") == Correction(mode="mask", low=0.5, high=2.0)
    assert parsed("mis", high=4.0, level="sequence") == Correction(mode="mask", low=0.25, high=4.0, level="sequence")
    assert parsed("mis", high=4.0, low=0.0).low == 0.0
    assert parsed("mis", high=0.5).low == 0.0, "1 / high is above it"
    assert parsed("ratio", veto=1e-4) == Correction(veto=1e-4)
    assert parsed("none") == Correction()


@pytest.mark.parametrize(
    ("name", "options", "told"),
    [
        ("mis", {"levle": "token"}, "did you mean 'level'"),
        ("mis", {"level": "word"}, "token, sequence, geometric"),
        ("mis", {"level": 3}, "no str"),
        ("mis", {"mode": "drop"}, "truncate, clip, mask"),
        ("mis", {"low": 3.0, "high": 2.0}, "0 <= low < high"),
        ("mis", {"high": "2"}, "no float"),
        ("mis", {"high": math.inf}, "out of range"),
        ("mis", {"high": math.nan}, "out of range"),
        ("mis", {"veto": 1.0}, "veto < 1"),
        ("mis", {"off_policy": -1.0}, "off_policy"),
        ("mis", {"normalise": 1}, "no bool"),
        ("mis", {"reject": "token"}, "at least one of them"),
        ("mis", {"reject_high": 3.0}, "names the level"),
        ("tis", {"mode": "mask"}, "mode does nothing for correction=tis"),
        ("icepop", {"mode": "clip"}, "mode does nothing for correction=icepop"),
        ("ratio", {"high": 2.0}, "high does nothing for correction=ratio, which takes off_policy"),
        ("none", {"veto": 0.1}, "veto does nothing for correction=none, which takes no options"),
        ("none", {"vteo": 0.1}, "unknown setting"),
    ],
)
def test_settings_that_are_refused(name, options, told):
    with pytest.raises(SpecError, match=told):
        parsed(name, **options)


def test_what_needs_the_whole_step():
    assert not Correction(mode="mask", reject="token", reject_low=0.1).whole
    for options in ({"level": "sequence"}, {"level": "geometric"}, {"normalise": True}, {"veto": 0.1}, {"off_policy": 1.0},
                    {"reject": "sequence", "reject_low": 0.1}):  # fmt: skip
        assert Correction(**options).whole, options
