"""Rewards made again: into a table of their own, once, and what they would have changed."""

from types import SimpleNamespace

import pytest
from blank_rows import blank_row

from furlong.ops import records
from furlong.ops.spec import load_spec
from furlong.ops.stages.context import StageError
from furlong.ops.stages.rescore import counterfactual, rescore
from furlong.resources.lake import Lake

OLD, NEW = "furlong.ops.tasks.scoring:last_integer", "furlong.ops.tasks.scoring:exact"
STEPS = 2
TEXT = 'süß <b>"7"</b>'


class Judge:
    """Finds the last trajectory of each group right; dies after `lives` calls."""

    def __init__(self, lives: int = 99, flaky: bool = False):
        self.lives, self.flaky, self.asked = lives, flaky, 0

    def score(self, items):
        if not self.lives:
            raise KeyboardInterrupt("killed")
        self.lives -= 1
        self.asked += len(items)
        if self.flaky:
            self.flaky = False
            return [_found("timeout", None) for _ in items]
        return [_found("correct", 1.0) if item["reply"].endswith("1") else _found("incorrect", 0.0) for item in items]


def _found(verdict, score):
    return {"verdict": verdict, "score": score, "extracted": "", "detail": "", "seconds": 0.0}


@pytest.fixture
def run(tmp_path) -> SimpleNamespace:
    """Two steps of two groups of two; in group 0 the old verdicts were the other way round, in group 1 all wrong."""
    lake = Lake(str(tmp_path / "lake"))
    for table, rows in _tables().items():
        key = {"run": "r"} if "run" in rows[0] else {"dataset": "d"}
        lake.commit_once(table, key, records.rows(table, rows))
    return SimpleNamespace(lake=lake, dataset="d", verifier=Judge())


def _tables() -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {name: [] for name in ("prompts", "batches", "trajectories", "rewards", "steps")}
    found["prompts"].append({**blank_row("prompts"), "dataset": "d", "prompt_id": "p", "entry": "{}", "verifier": OLD})
    for step in range(1, STEPS + 1):
        key = {"run": "r", "step": step, "attempt": 1}
        names = [f"g{step}-{n}" for n in range(2)]
        groups = [{"step": step, "attempt": 1, "group_id": name} for name in names]
        found["batches"].append({**blank_row("batches"), **key, "groups": groups})
        found["steps"].append({**blank_row("steps"), **key})
        for n, name in enumerate(names):
            for sample in range(2):
                which = {**key, "trajectory_id": f"{name}-s{sample}"}
                told = {"group_id": name, "prompt_id": "p", "text": f"{TEXT}{sample}", "finish_reason": "stop"}
                found["trajectories"].append({**blank_row("trajectories"), **which, **told, "messages": "[]"})
                right = n == 0 and sample == 0
                verdict = {"verdict": "correct" if right else "incorrect", "score": float(right), "verifier": OLD}
                found["rewards"].append({**blank_row("rewards"), **which, **verdict})
    return found


def test_flips_and_advantages_are_told_and_nothing_trained_changes(run):
    before = {table: run.lake.version(table) for table in records.TABLES if table != "rescores"}
    assert list(rescore(run, "r")) == [(1, 4), (2, 4)]
    told = counterfactual(run, "r", load_spec("tiny", {}).algorithm)
    assert (told["trajectories"], told["groups"]) == (8, 4)
    assert (told["changed_sign"], told["vanished"], told["appeared"]) == (2, 0, 2)
    flips = {flip["trajectory_id"]: (flip["old"], flip["new"]) for flip in told["flips"]}
    assert flips["g1-0-s0"] == ("correct", "incorrect")
    assert flips["g2-1-s1"] == ("incorrect", "correct")
    assert len(flips) == 6
    assert told["flips"][0]["text"].startswith(TEXT)
    assert before == {table: run.lake.version(table) for table in before}


def test_a_killed_one_goes_on_where_it_was(run):
    run.verifier = Judge(lives=1)
    with pytest.raises(KeyboardInterrupt):
        list(rescore(run, "r"))
    with pytest.raises(StageError, match="lacks an old or a new verdict"):
        counterfactual(run, "r", load_spec("tiny", {}).algorithm)
    run.verifier = Judge()
    assert list(rescore(run, "r")) == [(1, 0), (2, 4)]
    assert run.verifier.asked == 4
    assert list(rescore(run, "r")) == [(1, 0), (2, 0)]
    assert run.lake.count("rescores") == 8


def test_another_verifier_has_rows_of_its_own_and_a_time_out_is_tried_again(run):
    run.verifier = Judge(flaky=True)
    assert sum(new for _, new in rescore(run, "r", NEW)) == 8
    rows = run.lake.read("rescores", {"run": "r"}).to_pylist()
    assert {row["verifier"] for row in rows} == {NEW}
    assert "timeout" not in {row["verdict"] for row in rows}
    assert sum(new for _, new in rescore(run, "r")) == 8
    assert run.lake.count("rescores") == 16


def test_a_run_without_a_step_is_refused(tmp_path):
    with pytest.raises(StageError, match="no finished step"):
        list(rescore(SimpleNamespace(lake=Lake(str(tmp_path))), "r"))
