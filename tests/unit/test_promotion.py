"""`stable` and `candidate`: what is refused, what is written, and going back."""

import pytest
from blank_rows import blank_row
from weights_lake import RUN, WeightsLake

from furlong.ops import records
from furlong.ops.promotion import PromotionError, failing_checks, previous_version, worse_evals
from furlong.ops.stages.checks import CHECKS
from furlong.resources.lake import Lake
from furlong.resources.weights.promotion import promote, rollback
from furlong.resources.weights.tags import list_tags


def _evals(version: int, right: list[int]) -> list[dict]:
    return [
        {**blank_row("evals"), "run": RUN, "version": version, "mode": "greedy", "prompt_id": f"p{n}", "samples": 1,
         "correct": correct}
        for n, correct in enumerate(right)
    ]  # fmt: skip


def _commit_evals(lake: Lake, version: int, right: list[int]) -> None:
    lake.commit_once("evals", {"run": RUN, "version": version}, records.rows("evals", _evals(version, right)))


def _commit_check(lake: Lake, version: int, passed: bool, blocking: bool = True) -> None:
    row = lake.read("weight_versions", {"run": RUN, "version": version}, ["step", "attempt"]).to_pylist()[0]
    same = {**blank_row("checks"), "run": RUN, **row, "passed": passed}
    checks = [same | {"check": name, "blocking": blocks} for name, (blocks, _) in CHECKS.items() if blocks == blocking]
    key = {"run": RUN, **row, "check": [check["check"] for check in checks]}
    lake.commit_once("checks", key, records.rows("checks", checks))


@pytest.fixture
def lake(tmp_path) -> Lake:
    place = WeightsLake(tmp_path)
    for _ in range(3):
        place.publish()
    return place.lake


def _promote(lake: Lake, version: int, fault: str = "", tag: str = "stable") -> dict:
    return promote(lake, RUN, version, tag, "it is good", lambda: fault, by="somebody")


def test_what_is_missing_refuses(lake):
    with pytest.raises(PromotionError, match=r"never checked for conservation.*not evaluated"):
        _promote(lake, 1)
    _commit_evals(lake, 1, [1, 0, 1, 0])
    _commit_check(lake, 1, passed=True, blocking=False)
    with pytest.raises(PromotionError, match="never checked for conservation"):
        _promote(lake, 1)
    _commit_check(lake, 1, passed=True)
    with pytest.raises(PromotionError, match=r"does not reload.*model.a"):
        _promote(lake, 1, "model.a differs")
    with pytest.raises(PromotionError, match="unknown"):
        _promote(lake, 99)
    assert not list_tags(lake, RUN)
    assert not lake.count("promotions")


def test_a_failed_blocking_check_refuses_and_a_warning_does_not():
    rows = [
        {"check": name, "blocking": blocks, "passed": blocks, "message": "too far"}
        for name, (blocks, _) in CHECKS.items()
    ]
    assert failing_checks(rows) == []
    failed = [row | {"passed": row["check"] != "finite_loss"} for row in rows]
    assert failing_checks(failed) == ["check finite_loss did not pass: too far"]
    assert (
        "never checked for conservation;" in failing_checks([row for row in rows if row["check"] != "conservation"])[0]
    )


def test_an_evaluation_is_worse_only_beyond_noise():
    right, slightly, far = [1] * 20, [1] * 19 + [0], [0] * 15 + [1] * 5
    assert worse_evals(_evals(2, slightly), _evals(1, right)) == []
    assert "below the stable" in worse_evals(_evals(2, far), _evals(1, right))[0]
    assert "other questions" in worse_evals(_evals(2, right[:10]), _evals(1, right))[0]
    unasked = [{**row, "samples": 0} for row in _evals(2, right)]
    assert worse_evals(unasked, _evals(1, right))


def test_promoting_twice_writes_once_and_rolling_back_goes_back(lake):
    for version in (1, 2, 3):
        _commit_evals(lake, version, [1, 0, 1, 1])
        _commit_check(lake, version, passed=True)
        first = _promote(lake, version)
        assert _promote(lake, version) == first
    assert lake.count("promotions", {"run": RUN}) == 3
    brought = []
    row = rollback(lake, RUN, "stable", "users complained", brought.append, by="somebody")
    assert (row["version"], row["previous"], row["action"], brought) == (2, 3, "rollback", [2])
    assert rollback(lake, RUN, "stable", "still", brought.append, by="x")["version"] == 1
    assert list_tags(lake, RUN) == {"stable": 1}
    with pytest.raises(PromotionError, match="nothing to roll back to"):
        rollback(lake, RUN, "stable", "again", brought.append, by="x")


def test_engines_that_do_not_follow_leave_the_tag(lake):
    for version in (1, 2):
        _commit_evals(lake, version, [1, 0])
        _commit_check(lake, version, passed=True)
        _promote(lake, version)

    def lost(version: int) -> None:
        raise ConnectionError(f"the engine is gone, so version {version} was not proved")

    with pytest.raises(ConnectionError):
        rollback(lake, RUN, "stable", "why", lost)
    assert list_tags(lake, RUN) == {"stable": 2}
    assert lake.count("promotions") == 2


def test_a_reason_and_a_known_name_are_needed(lake):
    with pytest.raises(PromotionError, match="reason is empty"):
        promote(lake, RUN, 1, "stable", "  ", str)
    with pytest.raises(PromotionError, match="no name to promote to"):
        promote(lake, RUN, 1, "best", "why", str)
    with pytest.raises(PromotionError, match="nothing to roll back"):
        previous_version([], "stable")
