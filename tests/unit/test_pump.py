"""The loop that draws, on a real engine, trainer, verifier and lake in this process: bound, filter, budget, restarts."""

import dataclasses
import shutil
import threading
import time

import numpy as np
import pump_envs
import pytest
from test_stages import RUN, live, new_engine, new_fleet, open_run, restart, take

from furlong.ops import records
from furlong.ops.identity import counter_seed
from furlong.ops.protocols import GenerateRequest
from furlong.ops.records import Rejection, State
from furlong.ops.rollouts.budget import BudgetSpent
from furlong.ops.rollouts.ledger import Ledger
from furlong.ops.rollouts.reconcile import account, owed
from furlong.ops.rollouts.usage import usage
from furlong.ops.stages.context import StageError
from furlong.ops.tasks.prompts import draw
from furlong.resources.engines.local import LocalEngine
from furlong.resources.rollouts.drawer import Drawer
from furlong.resources.rollouts.writer import Writer


def opened(root, made, spec, **overrides):
    shutil.copytree(made / "models", root / "models")
    return open_run(root, spec, {name.replace("__", "."): value for name, value in overrides.items()})


PLAYGROUND = {"name": "pump_envs:Playground"}


@pytest.fixture(scope="module")
def made_playground(tmp_path_factory, quick_spec):
    """A scratch model is made for its data section, and so for its environment."""
    root = tmp_path_factory.mktemp("playground")
    open_run(root, quick_spec, {"data.env": PLAYGROUND}).verifier.close()
    return root


@pytest.fixture
def begin(request, made, tmp_path, quick_spec):
    """Opens the test's run with dotted spec keys (`__` for the dot), and closes it."""
    runs = []

    def begin(**overrides):
        root = request.getfixturevalue("made_playground") if "data__env" in overrides else made
        runs.append(opened(tmp_path, root, quick_spec, **overrides))
        return runs[-1]

    yield begin
    for run in runs:
        run.pause()
        run.verifier.close()


def ledger_of(run) -> Ledger:
    """From the lake, checked for conservation."""
    ledger = Ledger.replay(RUN, run.lake.read("ledger", {"run": RUN}))
    drawn = run.lake.read("groups", {"run": RUN}).to_pylist()
    positions = {row["group_id"]: row["position"] for row in drawn}
    assert account(ledger, positions, owed(ledger, positions)) == []
    return ledger


def reasons(ledger: Ledger) -> list[str]:
    return [ledger.entry(name).reason for name in ledger.groups(State.REJECTED)]


def test_bound_zero_is_the_loop_that_draws_and_trains_in_turn(run):
    """The reference knows no pump: all requests of a step in one call, on an engine that loads the step's weights."""
    take(run, 1)
    take(run, 2)
    engine = new_engine(run)
    for step in (1, 2):
        requests = []
        rows = run.lake.read("prompts", {"dataset": run.dataset, "split": "train"}).to_pylist()
        by_position = {row["position"]: row for row in rows}
        for index, position in enumerate(draw(64, step, 4, run.spec.seed)):
            prompt = by_position[position]
            for sample in range(4):
                seed = counter_seed(run.spec.seed, step, 1, f"g{index:03d}", prompt["prompt_id"], sample)
                name = f"{RUN}-{step:05d}.1-g{index:03d}-s{sample:02d}"
                requests.append(GenerateRequest(name, tuple(run.render(prompt)), seed, 8, 1.0))
        drawn = engine.generate(requests)
        found = {r["trajectory_id"]: r for r in run.lake.read("trajectories", {"run": RUN, "step": step}).to_pylist()}
        assert len(found) == len(drawn) == 16
        for request, sample in zip(requests, drawn, strict=True):
            row, blank = found[request.request_id], len(request.prompt)
            assert tuple(row["tokens"]) == request.prompt + sample.tokens
            for column, values in (("logprobs", sample.logprobs), ("model_logprobs", sample.model_logprobs)):
                assert [value.hex() for value in row[column][blank:]] == [float32(value).hex() for value in values]
            assert [s["version"] for s in row["version_spans"]] == [step - 1]
        deltas = run.lake.read("weight_deltas", {"run": RUN, "version": step})
        engine.stage(step, step - 1, deltas, 10**6)
        engine.activate(step, 10**6)
    found = usage(run.lake, RUN)
    assert found["staleness_max"] == 0
    assert set(found["wasted_tokens"]) <= {"zero_variance"}
    trained = sum(run.lake.read("steps", {"run": RUN}, ["tokens_trained"])["tokens_trained"].to_pylist())
    assert found["sampled_tokens"] == trained + sum(found["wasted_tokens"].values())


def float32(value: float) -> float:
    return float(np.float32(value))


def staleness_by_hand(run, batch):
    """Token by token: steps between the weights that sampled it and those that the batch's step starts from."""
    names = [group["group_id"] for group in batch["groups"]]
    made = {row["version"]: row["step"] for row in run.lake.read("weight_versions", {"run": RUN}).to_pylist()}
    lags = []
    for row in run.lake.read("trajectories", {"run": RUN, "group_id": names}).to_pylist():
        by = {at: span["version"] for span in row["version_spans"] for at in range(span["start"], span["end"])}
        assert sorted(by) == [at for at, value in enumerate(row["logprobs"]) if value is not None]
        lags += [batch["step"] - 1 - made[version] for version in by.values()]
    return pytest.approx(sum(lags) / len(lags), abs=1e-12), max(lags)


@pytest.mark.parametrize("on_update", ["in_place", "retract", "abort"])
def test_drawing_ahead_keeps_the_bound_and_the_accounts(begin, on_update):
    run = begin(staleness=2, steps=4, rollout__on_update=on_update)
    for step in range(1, 5):
        take(run, step)
        batch = run.lake.read("batches", {"run": RUN, "step": step}).to_pylist()[0]
        assert (batch["staleness_mean"], batch["staleness_max"]) == staleness_by_hand(run, batch)
        assert batch["staleness_max"] <= 2
    run.pause()
    ledger = ledger_of(run)
    assert len(ledger.groups(State.TRAINED)) == 16
    assert ledger.counts()[State.RESERVED] == ledger.counts()[State.RUNNING] == 0, "nothing is drawn beyond the run"
    steps = run.lake.read("steps", {"run": RUN}).to_pylist()
    assert min(steps, key=lambda row: row["step"])["mismatch_coverage"] == 1.0
    assert len(live(run)) == 5
    # What was scored ahead is not scored again.
    names = run.lake.read("rewards", {"run": RUN}, ["trajectory_id"])["trajectory_id"].to_pylist()
    assert len(names) == len(set(names)) == 64


def test_a_straggler_is_passed_over_within_the_window_evicted_and_its_prompt_drawn_again(begin):
    run = begin(staleness=1, steps=3, data__env=PLAYGROUND, rollout__window=3.0)
    take(run, 1, stages=("prompts",))
    first = run.prompts_at(draw(64, 1, 1, run.spec.seed))
    pump_envs.GATE.clear()
    pump_envs.HELD.clear()
    pump_envs.HELD.update(row["question"] for row in first.values())
    try:
        take(run, 1)
        assert run.lake.read("batches", {"run": RUN, "step": 1})["passed_over"].to_pylist()[0] >= 1
        take(run, 2)
        # Published twice since it was begun: too old for step 3, so it was given up and its prompt begun anew.
        assert run.pump.ledger.entry(f"{RUN}-00001.1-g000").reason == Rejection.STALE
        assert set(reasons(run.pump.ledger)) == {Rejection.STALE}
    finally:
        pump_envs.GATE.set()
    take(run, 3)
    run.pause()
    ledger = ledger_of(run)
    drawn = {row["group_id"]: row["position"] for row in run.lake.read("groups", {"run": RUN}).to_pylist()}
    assert [drawn[name] for name in ledger.groups(State.TRAINED)].count(0) == 1, (
        "the straggler's prompt is trained once"
    )
    assert len(ledger.groups(State.TRAINED)) == 12


def test_groups_without_variance_are_replaced_and_stay_in_the_lake(begin, monkeypatch):
    run = begin(rollout__filter="zero_variance")
    honest = run.verifier.score
    flat = set(draw(64, 1, 2, run.spec.seed))

    def some_flat(items):
        rows = honest(items)
        positions = {row["prompt_id"]: p for p, row in run.prompts_at(sorted(flat)).items()}
        return [
            row | ({"score": 0.0, "verdict": "incorrect"} if item["prompt_id"] in positions else
                   {"score": float(n % 2), "verdict": "correct" if n % 2 else "incorrect"})
            for n, (row, item) in enumerate(zip(rows, items, strict=True))
        ]  # fmt: skip

    monkeypatch.setattr(run.verifier, "score", some_flat)
    take(run, 1)
    run.pause()
    ledger = ledger_of(run)
    assert sorted(reasons(ledger)) == [Rejection.ZERO_VARIANCE] * 2
    assert len(ledger.groups(State.TRAINED)) == 4
    rejected = ledger.groups(State.REJECTED)
    assert run.lake.read("trajectories", {"run": RUN, "group_id": rejected}).num_rows == 8
    assert usage(run.lake, RUN)["wasted_tokens"]["zero_variance"] > 0
    outcomes = run.lake.read("steps", {"run": RUN})["outcomes"].to_pylist()[0]
    assert {outcome["disposition"] for outcome in outcomes} == {"trained"}


def test_a_task_that_never_varies_stops_the_run_with_the_reason(begin, monkeypatch):
    run = begin(rollout__filter="zero_variance", rollout__budget=1.0)
    honest = run.verifier.score
    monkeypatch.setattr(run.verifier, "score", lambda items: [row | {"score": 1.0} for row in honest(items)])
    take(run, 1, stages=("prompts",))
    with pytest.raises(BudgetSpent, match=r"rollout\.budget.*zero_variance.*always or never"):
        take(run, 1, stages=("rollouts",))


def test_failed_tries_are_rows_and_are_made_again_one_by_one(begin, monkeypatch):
    monkeypatch.setattr(pump_envs, "BREAKS", [3])
    run = begin(data__env=PLAYGROUND)
    take(run, 1)
    run.pause()
    failures = run.lake.read("failures", {"run": RUN}).to_pylist()
    assert failures
    assert {row["kind"] for row in failures} == {"environment"}
    rows = {row["trajectory_id"]: row for row in run.lake.read("trajectories", {"run": RUN}).to_pylist()}
    assert len(rows) == 16
    again = {row["trajectory_id"] for row in failures}
    assert again < set(rows), "some failed, all have a trajectory in the end"
    seeds = [row["seed"] for row in rows.values()]
    assert len(set(seeds)) == 16
    assert usage(run.lake, RUN)["failures"] == {"environment": len(failures)}
    ledger_of(run)


def test_an_environment_that_is_broken_stops_the_run_with_its_words(begin, monkeypatch):
    monkeypatch.setattr(pump_envs, "BREAKS", [1])
    run = begin(data__env=PLAYGROUND, rollout__budget=2.0)
    take(run, 1, stages=("prompts",))
    with pytest.raises(BudgetSpent, match=r"environment.*no simulator is installed.*data\.env"):
        take(run, 1, stages=("rollouts",))
    assert run.lake.read("batches", {"run": RUN}).num_rows == 0


def test_surplus_groups_of_a_synchronous_run_are_rejected_and_drawn_again_later(begin):
    run = begin(rollout__oversample=1.5)
    for step in (1, 2):
        take(run, step)
    run.pause()
    ledger = ledger_of(run)
    assert len(ledger.groups(State.TRAINED)) == 8
    assert set(reasons(ledger)) <= {Rejection.SURPLUS}
    assert usage(run.lake, RUN)["staleness_max"] == 0


def test_what_was_finished_is_not_drawn_again_after_a_restart(begin):
    """A driver that is gone left one group whole, one short of a sample, and the others undrawn."""
    run = begin()
    take(run, 1, stages=("prompts", "rollouts"))
    whole = run.lake.read("trajectories", {"run": RUN})
    run.pause()
    for table in ("batches", "ledger"):
        run.lake.replace(table, {"run": RUN}, records.TABLES[table].empty_table())
    kept = [r for r in whole.to_pylist() if r["group_id"].endswith("g000") or r["trajectory_id"].endswith("g001-s02")]
    run.lake.replace("trajectories", {"run": RUN}, records.rows("trajectories", kept))
    restart(run, engines=new_fleet(run))
    asked = []
    honest = run.engines.members[0].generate
    run.engines.members[0].generate = lambda requests: asked.extend(r.request_id for r in requests) or honest(requests)
    take(run, 1)
    assert len(asked) == 11
    assert not [name for name in asked if "g000" in name or "g001-s02" in name]
    again = run.lake.read("trajectories", {"run": RUN})
    same = [records.row_digest("trajectories", data) for data in (again, whole)]
    assert same[0] == same[1], "the same replies, whoever drew them when"
    run.pause()
    ledger_of(run)


def test_a_token_without_a_known_version_is_an_error(begin, monkeypatch):
    run = begin()
    take(run, 1, stages=("prompts",))
    honest = run.engines.members[0].generate

    def elsewhere(requests):
        return [
            dataclasses.replace(sample, versions=((41, 0, len(sample.tokens)),)) for sample in honest(requests)
        ]  # fmt: skip

    monkeypatch.setattr(run.engines.members[0], "generate", elsewhere)
    with pytest.raises(StageError, match="weights version 41"):
        take(run, 1, stages=("rollouts",))


def test_an_interrupted_reply_goes_on_bitwise_as_if_it_had_not_been(run):
    """Replies held up in the middle, kept as fragments and resumed, equal those that nothing interrupted."""
    take(run, 1, stages=("prompts",))
    folder = str(run.model.path)
    engine, calm = (LocalEngine(folder, 0, "float32", 1, [10**6 % 7]) for _ in range(2))
    requests = [GenerateRequest(f"r{n}", (2 + n, 3), n, 40, 1.0) for n in range(6)]
    kept: list[dict] = []
    drawer = Drawer(lambda some, key: engine.generate(some), engine.abort, lambda key: True, kept.extend, RUN, 60.0)
    found: list = []
    thread = threading.Thread(target=lambda: found.extend(drawer(requests, "g")))
    thread.start()
    until = time.monotonic() + 60
    while thread.is_alive() and len(kept) < len(requests):
        assert time.monotonic() < until, "the replies never end"
        with drawer.held():
            assert engine.health()["running"] == 0
        time.sleep(0.003)  # for some tokens, not for all
    thread.join(60)
    want = calm.generate(requests)
    assert [s.tokens for s in found] == [s.tokens for s in want]
    assert [[v.hex() for v in s.logprobs] for s in found] == [[v.hex() for v in s.logprobs] for s in want]
    assert kept, "nothing was interrupted, so nothing was shown"
    assert {row["request_id"].partition(".")[0] for row in kept} <= {request.request_id for request in requests}


def test_an_interrupt_while_a_batch_is_committed_loses_nothing(begin, monkeypatch):
    run = begin()
    take(run, 1, stages=("prompts",))
    honest, struck = run.lake.commit_once, []

    def interrupted(table, *rest, **more):
        if table == "trajectories" and not struck:
            struck.append(table)
            raise KeyboardInterrupt
        return honest(table, *rest, **more)

    monkeypatch.setattr(Writer, "age", lambda self: 0.0)  # so that nobody else flushes
    monkeypatch.setattr(run.lake, "commit_once", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take(run, 1)
    run.pause()
    assert run.lake.read("trajectories", {"run": RUN}).num_rows == 16
    assert len(ledger_of(run).groups(State.FINISHED)) == 4
    take(run, 1, stages=("rollouts",))
    run.pause()
    ledger_of(run)


def test_what_an_earlier_driver_began_too_long_ago_is_given_up_once_it_is_whole(begin):
    """The driver died between publishing and rejecting: of a group it left one sample, by weights that are too old now."""
    run = begin()
    take(run, 1)
    take(run, 2, stages=("rollouts",))
    run.pause()
    rows = run.lake.read("trajectories", {"run": RUN, "step": 2}).to_pylist()
    old = next(row for row in rows if row["group_id"].endswith("g001"))
    old["version_spans"] = [{"version": 0, "start": s["start"], "end": s["end"]} for s in old["version_spans"]]
    kept = [row for row in rows if not row["group_id"].endswith("g001")] + [old]
    run.lake.replace("trajectories", {"run": RUN, "step": 2}, records.rows("trajectories", kept))
    run.lake.replace("batches", {"run": RUN, "step": 2}, records.TABLES["batches"].empty_table())
    events = run.lake.read("ledger", {"run": RUN}).to_pylist()
    before = [row for row in events if f"{RUN}-00001" in row["group_id"]]
    run.lake.replace("ledger", {"run": RUN}, records.rows("ledger", before))
    took = time.monotonic()
    take(run, 2)
    assert time.monotonic() - took < 30
    run.pause()
    ledger = ledger_of(run)
    assert reasons(ledger) == [Rejection.SURPLUS]
    assert ledger.entry(old["group_id"]).state == State.REJECTED


@pytest.mark.slow
def test_no_group_is_drawn_for_a_step_beyond_the_last(begin):
    run = begin(staleness=1, steps=2, rollout__oversample=1.5)
    for step in (1, 2):
        take(run, step)
    run.pause()
    ledger_of(run)
    assert set(run.lake.read("groups", {"run": RUN})["step"].to_pylist()) == {1, 2}


def test_closing_does_not_wait_for_an_environment(begin):
    run = begin(data__env=PLAYGROUND)
    take(run, 1, stages=("prompts",))
    pump_envs.GATE.clear()
    pump_envs.HELD.update(row["question"] for row in run.lake.read("prompts", {"dataset": run.dataset}).to_pylist())
    run.placement = run.placement.model_copy(update={"stage_deadline": 0.6})
    try:
        with pytest.raises(StageError, match=r"no batch within.*4 running"):
            take(run, 1, stages=("rollouts",))
        began = time.monotonic()
        run.pause()
        assert time.monotonic() - began < 5
        assert not [t.name for t in threading.enumerate() if t.name.startswith(("group", "flush"))]
    finally:
        pump_envs.GATE.set()
        pump_envs.HELD.clear()
