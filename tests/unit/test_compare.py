"""Grids of runs, and runs side by side."""

import math

import pytest
from blank_rows import blank_row

from furlong.ops import records
from furlong.ops.compare.grid import combinations, parse_vary
from furlong.ops.compare.page import comparison_page, differences, wilson
from furlong.ops.spec import Placement, SpecError
from furlong.resources.lake import Lake


def test_a_grid_is_every_combination():
    axes = parse_vary(["algorithm.name=grpo,rloo", "seed=0,1"])
    assert combinations(axes) == [
        {"algorithm.name": name, "seed": seed} for name in ("grpo", "rloo") for seed in (0, 1)
    ]


@pytest.mark.parametrize("word", ["seed", "seed=", "=1", "seed=1,,2", "seed=[1"])
def test_an_axis_that_cannot_be_read_is_refused(word):
    with pytest.raises(SpecError):
        parse_vary([word])


def test_an_empty_or_huge_grid_and_a_key_given_twice_are_refused():
    for axes in ({}, {"seed": []}, {"seed": list(range(257))}):
        with pytest.raises(SpecError):
            combinations(axes)
    with pytest.raises(SpecError):
        parse_vary(["seed=1", "seed=2"])


def test_wilson_agrees_with_a_published_value_and_knows_nothing_of_nothing():
    share, low, high = wilson(8, 10)
    assert share == 0.8
    assert abs(low - 0.4902) < 1e-3
    assert abs(high - 0.9433) < 1e-3
    assert math.isnan(wilson(0, 0)[0])
    assert wilson(0, 0)[1:] == (0.0, 1.0)


def test_only_what_differs_is_shown():
    told = differences({"a": {"x": {"y": 1}, "z": 2}, "b": {"x": {"y": 3}, "z": 2, "w": "<i>"}})
    assert told == {"x.y": {"a": "1", "b": "3"}, "w": {"a": "-", "b": '"<i>"'}}


def test_the_page_stands_alone_and_escapes(tmp_path):
    lake = Lake(str(tmp_path))
    for run, reward in (("a", 0.25), ("b", 0.75)):
        rows = [
            {**blank_row("steps"), "run": run, "step": step, "attempt": 1, "reward_mean": reward, "tokens_trained": 5}
            for step in (1, 2)
        ]
        lake.commit_once("steps", {"run": run}, records.rows("steps", rows))
    page = comparison_page(lake, {"a": {"n": "<script>"}, "b": {"n": "é"}, "empty": {"n": 1}})
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "é" in page
    assert page.count("<svg") >= 2
    assert "src=" not in page
    assert "<td>10</td><td>10</td><td>0</td>" in page


def test_a_bad_spec_in_a_grid_writes_no_run(tmp_path, monkeypatch):
    from furlong.resources.grid import write_grid
    from furlong.resources.system import System

    monkeypatch.setenv("FURLONG_ROOT", str(tmp_path))
    monkeypatch.delenv("FURLONG_LAKE", raising=False)
    system = System(Placement.from_env())
    with pytest.raises(SpecError):
        write_grid(system, "tiny", {"algorithm.name": ["grpo", "nothing"]}, {})
    assert Lake(system.placement.lake_uri()).version("runs") is None
