"""The ledger: only legal moves, the same after a replay, agreement with the tables, an account of every prompt."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from furlong.ops import records
from furlong.ops.records import Rejection, State
from furlong.ops.rollouts.ledger import Ledger, LedgerError
from furlong.ops.rollouts.reconcile import Facts, account, facts, owed, reconcile

RUN = "tiny"
GROUPS = pa.schema([(n, records.TABLES["groups"].field(n).type) for n in
                    ("step", "attempt", "group_id", "position", "samples")])  # fmt: skip
TRAJECTORIES = pa.schema([("group_id", pa.string()), ("sample", pa.int32())])
BATCHES = pa.schema([(n, records.TABLES["batches"].field(n).type) for n in ("step", "attempt", "groups")])
STEPS = pa.schema([("step", pa.int64()), ("attempt", pa.int32())])


def clock() -> float:
    return 0.0


def walk(ledger: Ledger, name: str, state: State, step: int = 1) -> None:
    """Bring a new group to a state by the shortest way."""
    ledger.reserve(name)
    if state is not State.RESERVED:
        ledger.start(name)
    if state in (State.FINISHED, State.ADMITTED, State.TRAINED):
        ledger.finish(name)
    if state in (State.ADMITTED, State.TRAINED):
        ledger.admit([name], step)
    if state is State.TRAINED:
        ledger.train([name], step)
    if state is State.REJECTED:
        ledger.reject(name, Rejection.STALE)


def made_of(ledger: Ledger, names: list[str], **more) -> Facts:
    """Facts about groups at positions 0, 1, ..."""
    known = {"finished": frozenset(), "batches": {}, "trained": frozenset(), "superseded": {}} | more
    return Facts({name: i for i, name in enumerate(names)}, **known)


MOVES = {
    "start": (lambda ledger, name: ledger.start(name), {State.RESERVED}),
    "back": (lambda ledger, name: ledger.back(name, "engine lost"), {State.RUNNING}),
    "finish": (lambda ledger, name: ledger.finish(name), {State.RUNNING}),
    "admit": (lambda ledger, name: ledger.admit([name], 1), {State.FINISHED}),
    "train": (lambda ledger, name: ledger.train([name], 1), {State.ADMITTED}),
    "reserve": (lambda ledger, name: ledger.reserve(name), set()),
    "stale": (lambda ledger, name: ledger.reject(name, Rejection.STALE),
              {State.RESERVED, State.RUNNING, State.FINISHED}),
    "superseded": (lambda ledger, name: ledger.reject(name, Rejection.SUPERSEDED), set(State) - {State.REJECTED}),
}  # fmt: skip


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", MOVES)
def test_exactly_the_legal_moves_are_possible(move: str, state: State):
    ledger = Ledger(RUN, clock)
    walk(ledger, "g", state)
    act, allowed = MOVES[move]
    before, told = ledger.entry("g"), ledger.take_events()
    if state in allowed:
        act(ledger, "g")
        assert ledger.take_events().num_rows == 1
        assert ledger.state("g") is not state
        return
    with pytest.raises(LedgerError, match="group g"):
        act(ledger, "g")
    assert ledger.entry("g") == before
    assert ledger.take_events().num_rows == 0
    assert Ledger.replay(RUN, told).entry("g") == before


def test_the_step_must_be_the_one_that_admitted():
    ledger = Ledger(RUN, clock)
    walk(ledger, "g", State.ADMITTED, 3)
    with pytest.raises(LedgerError, match="in the batch of step 3"):
        ledger.train(["g"], 4)
    with pytest.raises(LedgerError, match="unknown reason 'dull'"):
        ledger.reject("g", "dull")
    ledger.train(["g"], 3)
    ledger.reject("g", Rejection.SUPERSEDED)
    assert (ledger.entry("g").reason, ledger.entry("g").step) == ("superseded", 3)


def test_a_batch_is_admitted_whole_or_not_at_all():
    ledger = Ledger(RUN, clock)
    walk(ledger, "a", State.FINISHED)
    walk(ledger, "b", State.RUNNING)
    ledger.take_events()
    for names in (["a", "b"], ["a", "a"], ["a", "nobody"]):
        with pytest.raises(LedgerError):
            ledger.admit(names, 1)
    assert ledger.state("a") is State.FINISHED
    assert ledger.take_events().num_rows == 0


def test_groups_are_listed_in_order_of_reservation():
    ledger = Ledger(RUN, clock)
    for name in ("z", "m", "a"):
        ledger.reserve(name)
    ledger.start("a")
    ledger.start("z")
    assert ledger.groups() == ["z", "m", "a"]
    assert ledger.groups(State.RUNNING) == ["z", "a"]
    assert ledger.groups(State.RUNNING, State.RESERVED) == ["z", "m", "a"]
    assert ledger.counts() == {**dict.fromkeys(State, 0), State.RUNNING: 2, State.RESERVED: 1}


def told() -> list[dict]:
    ledger = Ledger(RUN, clock)
    walk(ledger, "a", State.TRAINED)
    walk(ledger, "b", State.REJECTED)
    return ledger.take_events().to_pylist()


def test_a_replay_in_any_order_is_the_ledger_and_goes_on_from_it():
    events = told()
    random.Random(0).shuffle(events)
    ledger = Ledger.replay(RUN, events, clock)
    assert ledger.groups(State.TRAINED) == ["a"]
    assert ledger.groups(State.REJECTED) == ["b"]
    assert ledger.take_events().num_rows == 0
    ledger.reserve("c")
    assert ledger.take_events()["seq"].to_pylist() == [len(events) + 1]
    assert len(Ledger.replay(RUN, [])) == 0


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda e: e.pop(2), "events between are missing"),
        (lambda e: e.pop(0), "events between are missing"),
        (lambda e: e.append(dict(e[3])), "there twice"),
        (lambda e: e[1].update(state="dreaming"), "unknown state 'dreaming'"),
        (lambda e: e[-1].update(reason="dull"), "unknown reason 'dull'"),
        (lambda e: e[0].update(run="other"), "of run other"),
        (lambda e: e[1].update(state="finished"), "cannot become finished"),
        (lambda e: e[1].update(group_id="ghost"), "never reserved"),
        (lambda e: e[3].update(step=None), "with step None"),
        (lambda e: e[4].update(step=9), "batch of step 1"),
        (lambda e: e[1].update(step=1), "with step 1"),
    ],
)
def test_a_damaged_ledger_is_refused(damage, said: str):
    events = told()
    damage(events)
    with pytest.raises(LedgerError, match=said):
        Ledger.replay(RUN, events)


@pytest.mark.parametrize("state", [s for s in State if s is not State.REJECTED])
@pytest.mark.parametrize("lag", range(6))
def test_reconcile_advances_a_ledger_that_lags(state: State, lag: int):
    ledger = Ledger(RUN, clock)
    walk(ledger, "g", state, 4)
    events = ledger.take_events().to_pylist()
    behind = Ledger.replay(RUN, events[: max(0, len(events) - lag)], clock)
    known = made_of(
        ledger, ["g"],
        finished={"g"} if state in (State.FINISHED, State.ADMITTED, State.TRAINED) else set(),
        batches={"g": 4} if state in (State.ADMITTED, State.TRAINED) else {},
        trained={4} if state is State.TRAINED else set(),
    )  # fmt: skip
    reconcile(behind, known)
    assert behind.state("g") is (State.RESERVED if state is State.RUNNING else state)
    written = [*events[: max(0, len(events) - lag)], *behind.take_events().to_pylist()]
    assert Ledger.replay(RUN, written).entry("g") == behind.entry("g")
    assert reconcile(behind, known) == []
    assert behind.take_events().num_rows == 0


@pytest.mark.parametrize(
    ("state", "known", "said"),
    [
        (State.FINISHED, {}, "tables know it as reserved"),
        (State.ADMITTED, {"finished": {"g"}}, "no batch with it"),
        (State.ADMITTED, {"finished": {"g"}, "batches": {"g": 2}}, "no batch with it"),
        (State.TRAINED, {"finished": {"g"}, "batches": {"g": 1}}, "tables know it as admitted"),
        (State.RUNNING, {"batches": {"g": 1}}, "without all its trajectories"),
        (State.REJECTED, {"finished": {"g"}, "batches": {"g": 1}}, "rejected as stale but in the batch"),
        (State.RUNNING, {"finished": {"h"}}, "no row in `groups`"),
    ],
)
def test_reconcile_refuses_what_contradicts(state: State, known: dict, said: str):
    ledger = Ledger(RUN, clock)
    walk(ledger, "g", state)
    with pytest.raises(LedgerError, match=said):
        reconcile(ledger, made_of(ledger, ["g"], **known))
    with pytest.raises(LedgerError, match="not in table `groups`"):
        reconcile(ledger, made_of(ledger, []))


@pytest.mark.parametrize("state", State)
def test_who_drew_a_prompt_again_had_given_up_the_group_before(state: State):
    ledger = Ledger(RUN, clock)
    walk(ledger, "old", state)
    known = Facts(
        {"old": 0, "new": 0},
        frozenset({"old"} if state in (State.FINISHED, State.ADMITTED, State.TRAINED) else ()),
        {"old": 1} if state in (State.ADMITTED, State.TRAINED) else {},
        frozenset({1} if state is State.TRAINED else ()),
        {},
    )
    if state in (State.ADMITTED, State.TRAINED):
        with pytest.raises(LedgerError, match="drawn for the same prompt"):
            reconcile(ledger, known)
        return
    reconcile(ledger, known)
    assert (ledger.state("old"), ledger.entry("old").reason) == (State.REJECTED, "stale")
    assert ledger.state("new") is State.RESERVED
    assert account(ledger, known.positions) == []


@pytest.mark.parametrize("state", State)
def test_the_groups_of_a_repeated_step_are_superseded_however_far_the_ledger_got(state: State):
    ledger = Ledger(RUN, clock)
    walk(ledger, "g", state)
    known = made_of(ledger, ["g"], finished={"g"}, superseded={"g": 1})
    reconcile(ledger, known)
    assert ledger.state("g") is State.REJECTED
    assert ledger.entry("g").reason == ("stale" if state is State.REJECTED else "superseded")
    assert reconcile(ledger, known) == []


def test_a_repetition_that_only_the_ledger_tells_of_yet_is_believed():
    ledger = Ledger(RUN, clock)
    walk(ledger, "g", State.TRAINED)
    ledger.reject("g", Rejection.SUPERSEDED)
    assert reconcile(ledger, made_of(ledger, ["g"], finished={"g"}, batches={"g": 1}, trained={1})) == []
    with pytest.raises(LedgerError, match="rejected as superseded but in the batch of step 2"):
        reconcile(ledger, made_of(ledger, ["g"], finished={"g"}, batches={"g": 2}))


@pytest.mark.parametrize("told_by", ["groups", "batches"])
def test_facts_know_a_newer_attempt_by_its_groups_or_by_its_batch(told_by: str):
    def home(name: str, attempt: int) -> dict:
        return {"step": 1, "attempt": attempt, "group_id": name}

    groups = [home("a", 1), home("b", 2 if told_by == "groups" else 1)]
    batches = [{"step": 1, "attempt": 1, "groups": [home("a", 1)]}]
    if told_by == "batches":
        batches.append({"step": 1, "attempt": 2, "groups": [home("b", 1)]})
    known = facts(
        pa.Table.from_pylist([row | {"position": 0, "samples": 1} for row in groups], GROUPS),
        pa.Table.from_pylist([{"group_id": name, "sample": 0} for name in "ab"], TRAJECTORIES),
        pa.Table.from_pylist(batches, BATCHES),
        pa.Table.from_pylist([{"step": 1, "attempt": 1}], STEPS),
    )
    assert known.superseded == {"a": 1}
    assert known.batches == ({"b": 1} if told_by == "batches" else {})
    assert known.trained == frozenset()


def test_facts_refuse_tables_that_contradict_each_other():
    def tables(groups=1, batched=1, twice=False, step=1) -> list[pa.Table]:
        row = {"step": 1, "attempt": 1, "group_id": "g", "position": 0, "samples": 1}
        inside = [{"step": 1, "attempt": 1, "group_id": "g"}] * (2 if twice else 1)
        return [
            pa.Table.from_pylist([row] * groups, GROUPS),
            pa.Table.from_pylist([{"group_id": "g", "sample": 0}], TRAJECTORIES),
            pa.Table.from_pylist([{"step": 1, "attempt": 1, "groups": inside}] * batched, BATCHES),
            pa.Table.from_pylist([{"step": step, "attempt": 1}], STEPS),
        ]

    assert facts(*tables()) == Facts({"g": 0}, frozenset({"g"}), {"g": 1}, frozenset({1}), {})
    for broken in (tables(groups=2), tables(batched=0), tables(batched=2), tables(twice=True), tables(step=2)):
        with pytest.raises(LedgerError):
            facts(*broken)


def test_a_group_is_whole_when_each_of_its_samples_is_there():
    groups = [{"step": 1, "attempt": 1, "group_id": name, "position": i, "samples": 2} for i, name in enumerate("ab")]
    # `a` has two leaves of one sample, which is not two samples.
    rows = [("a", 1), ("a", 1), ("b", 0), ("b", 1), ("b", 1)]
    known = facts(
        pa.Table.from_pylist(groups, GROUPS),
        pa.Table.from_pylist([{"group_id": g, "sample": s} for g, s in rows], TRAJECTORIES),
        BATCHES.empty_table(), STEPS.empty_table(),
    )  # fmt: skip
    assert known.finished == {"b"}


def test_account_tells_what_is_lost_or_taken_twice():
    ledger = Ledger(RUN, clock)
    walk(ledger, "a", State.TRAINED)
    walk(ledger, "b", State.REJECTED)
    assert account(ledger, {"a": 0, "b": 1}, [1]) == []
    assert owed(ledger, {"a": 0, "b": 1}) == [1]
    assert "position 1: no group holds it and none will be drawn" in account(ledger, {"a": 0, "b": 1})[0]
    assert "about to be drawn again" in account(ledger, {"a": 0, "b": 1}, [0, 1])[0]
    assert [line[:10] for line in account(ledger, {"a": 0, "b": 3}, [3])] == ["position 1", "position 2"]
    walk(ledger, "c", State.RUNNING)
    assert "taken twice" in account(ledger, {"a": 0, "b": 1, "c": 0}, [1])[0]
    assert "not in the ledger" in account(ledger, {"a": 0, "b": 1, "c": 2, "d": 3}, [1])[0]
    assert "was not drawn" in account(ledger, {"a": 0, "b": 1}, [1])[0]
    assert account(Ledger(RUN), {}) == []


def test_groups_taken_by_later_batches_are_counted_as_they_come_and_go():
    ledger = Ledger(RUN, clock)
    for step in (1, 2, 3):
        for index in range(step):
            walk(ledger, f"{step}-{index}", (State.ADMITTED, State.TRAINED)[step % 2], step)
    assert [ledger.taken_after(step) for step in range(5)] == [6, 5, 3, 0, 0]
    ledger.reject("3-1", Rejection.SUPERSEDED)
    ledger.train(["2-0"], 2)
    events = ledger.take_events()
    for known in (ledger, Ledger.replay(RUN, events)):
        assert [known.taken_after(step) for step in range(5)] == [5, 4, 2, 0, 0]
