"""Whatever is killed, times out, grows stale or is repeated, and when: each prompt is accounted for exactly once.

A model of the loop of rollouts, with tables and a ledger that are committed one transaction at a time. A kill drops all
that was not committed, even between two transactions of one flush; the next driver knows nothing but the tables.
"""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_ledger import BATCHES, GROUPS, RUN, STEPS, TRAJECTORIES, clock

from furlong.ops.records import Rejection, State
from furlong.ops.rollouts.admission import Candidate, choose, too_old
from furlong.ops.rollouts.ledger import Ledger
from furlong.ops.rollouts.reconcile import account, facts, owed, reconcile

SAMPLES = 2
ANY = st.integers(0, 10**6)
"""Picks one of however many there are."""
MORTAL = st.one_of(st.none(), st.none(), st.integers(0, 3))
"""Transactions of an action that take place before the driver is killed; None for all, without a kill."""


class Killed(Exception):
    """The driver died."""


class Tables:
    """What survives. Appending is a transaction; `room` of them are left until the driver is killed."""

    def __init__(self):
        self.rows: dict[str, list[dict]] = {n: [] for n in ("groups", "trajectories", "ledger", "batches", "steps")}
        self.room: int | None = None

    def commit(self, table: str, rows: list[dict]) -> None:
        if not rows:
            return
        if self.room is not None:
            if self.room == 0:
                raise Killed("before this transaction")
            self.room -= 1
        self.rows[table] += rows

    def facts(self):
        kinds = {"groups": GROUPS, "trajectories": TRAJECTORIES, "batches": BATCHES, "steps": STEPS}
        return facts(*(pa.Table.from_pylist(self.rows[name], kind) for name, kind in kinds.items()))


class Driver:
    """One process: everything it knows at its start it has from the tables."""

    def __init__(self, tables: Tables):
        self.tables = tables
        self.pending: dict[str, list[dict]] = {"groups": [], "trajectories": []}
        known = tables.facts()
        self.ledger = Ledger.replay(RUN, tables.rows["ledger"][::-1], clock)
        reconcile(self.ledger, known)
        assert reconcile(self.ledger, known) == []
        self.positions = dict(known.positions)
        self.redraw = owed(self.ledger, self.positions)
        self.begun: dict[str, int] = {}
        self.drawn = Counter((row["step"], row["attempt"]) for row in tables.rows["groups"])
        there = {(row["group_id"], row["sample"]) for row in tables.rows["trajectories"]}
        self.samples = {name: {s for g, s in there if g == name} for name in self.positions}
        self.step, self.attempt, self.waits_for = self._where()
        for name in self.ledger.groups(State.FINISHED):
            self.begun[name] = min(self.home[name] - 1, self.step - 1)

    @property
    def home(self) -> dict[str, int]:
        return {name: int(name.split("-")[1].split(".")[0]) for name in self.positions}

    def _where(self) -> tuple[int, int, str]:
        """The step under way, its attempt, and what it waits for: as the chain of stages finds it in the tables."""
        rows = self.tables.rows
        newest: dict[int, int] = {}
        for row in [*rows["groups"], *rows["batches"]]:
            newest[row["step"]] = max(newest.get(row["step"], 0), row["attempt"])
        taken = {(row["step"], row["attempt"]) for row in rows["steps"]}
        batched = {(row["step"], row["attempt"]) for row in rows["batches"]}
        step = 1
        while (step, newest.get(step, 1)) in taken:
            step += 1
        attempt = newest.get(step, 1)
        return step, attempt, "train" if (step, attempt) in batched else "batch"

    def reserve(self) -> None:
        position = self.redraw.pop(0) if self.redraw else max(self.positions.values(), default=-1) + 1
        home = (self.step, self.attempt)
        name = f"{RUN}-{home[0]:05d}.{home[1]}-g{self.drawn[home]:03d}"
        self.drawn[home] += 1
        self.pending["groups"].append(
            {"step": home[0], "attempt": home[1], "group_id": name, "position": position, "samples": SAMPLES}
        )
        self.positions[name], self.samples[name] = position, set()
        self.ledger.reserve(name)

    def start(self, name: str) -> None:
        self.ledger.start(name)
        self.begun[name] = self.step - 1

    def sample(self, name: str, sample: int) -> None:
        """A trajectory is there, and with the last one the group is finished."""
        self.samples[name].add(sample)
        self.pending["trajectories"].append({"group_id": name, "sample": sample})
        if len(self.samples[name]) == SAMPLES:
            self.ledger.finish(name)

    def reject(self, name: str, reason: Rejection) -> None:
        self.ledger.reject(name, reason)
        if reason is not Rejection.ZERO_VARIANCE:
            self.redraw = sorted([*self.redraw, self.positions[name]])

    def open(self) -> list[Candidate]:
        return [
            Candidate(name, self.positions[name], self.ledger.state(name) is State.FINISHED,
                      {self.begun[name]: 5} if name in self.begun else {}, 5.0)
            for name in self.ledger.groups(State.RESERVED, State.RUNNING, State.FINISHED)
        ]  # fmt: skip

    def flush(self) -> None:
        """Rows before the events that tell of them."""
        rows, self.pending = self.pending, {"groups": [], "trajectories": []}
        events = self.ledger.take_events().to_pylist()
        for table in ("groups", "trajectories"):
            self.tables.commit(table, rows[table])
        self.tables.commit("ledger", events)

    def batch(self, names: tuple[str, ...]) -> None:
        self.flush()
        inside = [{"step": self.home[n], "attempt": int(n.split(".")[1][0]), "group_id": n} for n in names]
        self.tables.commit("batches", [{"step": self.step, "attempt": self.attempt, "groups": inside}])
        self.ledger.admit(names, self.step)
        self.waits_for = "train"
        self.flush()

    def train(self) -> None:
        self.tables.commit("steps", [{"step": self.step, "attempt": self.attempt}])
        admitted = [n for n in self.ledger.groups(State.ADMITTED) if self.ledger.entry(n).step == self.step]
        self.ledger.train(admitted, self.step)
        self.step, self.attempt, self.waits_for = self.step + 1, 1, "batch"
        # The step that follows may have been begun, and repeated, only after this one: its attempt is the first.
        self.flush()

    def repeat(self) -> None:
        """Take the last step again, with other groups for the prompts it was taken with."""
        self.step, self.attempt, self.waits_for = self.step - 1, self._last_attempt() + 1, "batch"
        for name in self.ledger.groups(State.TRAINED):
            if self.ledger.entry(name).step == self.step:
                self.reject(name, Rejection.SUPERSEDED)
        for name in [c.group_id for c in self.open()]:
            self.reject(name, Rejection.SUPERSEDED)
        for _ in range(2):
            self.reserve()

    def _last_attempt(self) -> int:
        return max(row["attempt"] for row in self.tables.rows["steps"] if row["step"] == self.step - 1)


class Loop(RuleBasedStateMachine):
    """Two groups to a batch, staleness bound 1, window 2."""

    @initialize()
    def begin(self):
        self.tables = Tables()
        self.driver = Driver(self.tables)
        self.repeated = 0

    def pick(self, number: int, *states: State) -> list[str]:
        """One group in any of these states, or none."""
        names = self.driver.ledger.groups(*states)
        return [names[number % len(names)]] if names else []

    def mortal(self, work, room: int | None) -> None:
        """Do it; with `room`, die after that many transactions, or right after it."""
        self.tables.room = room
        try:
            work()
            died = room is not None
        except Killed:
            died = True
        self.tables.room = None
        if died:
            self.kill()

    @rule()
    def kill(self):
        self.driver = Driver(self.tables)

    @rule(room=MORTAL)
    def flush(self, room):
        self.mortal(self.driver.flush, room)

    @precondition(lambda self: len(self.driver.open()) < 6)
    @rule(count=st.integers(1, 3))
    def reserve(self, count):
        for _ in range(count):
            self.driver.reserve()

    @rule(number=ANY)
    def start(self, number):
        for name in self.pick(number, State.RESERVED):
            self.driver.start(name)

    @rule(number=ANY, sample=st.integers(0, SAMPLES - 1))
    def sample(self, number, sample):
        for name in self.pick(number, State.RUNNING):
            if sample not in self.driver.samples[name]:
                self.driver.sample(name, sample)

    @rule()
    def finish_all(self):
        for name in self.driver.ledger.groups(State.RESERVED):
            self.driver.start(name)
        for name in self.driver.ledger.groups(State.RUNNING):
            for sample in set(range(SAMPLES)) - self.driver.samples[name]:
                self.driver.sample(name, sample)

    @rule(number=ANY)
    def time_out(self, number):
        """The engine was lost; what is drawn of the group stays."""
        for name in self.pick(number, State.RUNNING):
            self.driver.ledger.back(name, "deadline")

    @rule(number=ANY, reason=st.sampled_from([Rejection.STALE, Rejection.SURPLUS]))
    def give_up(self, number, reason):
        for name in self.pick(number, State.RESERVED, State.RUNNING, State.FINISHED):
            self.driver.reject(name, reason)

    @rule(number=ANY)
    def filter(self, number):
        for name in self.pick(number, State.FINISHED):
            self.driver.reject(name, Rejection.ZERO_VARIANCE)

    @rule()
    def evict(self):
        for name in too_old(self.driver.open(), self.driver.step - 1, 1):
            self.driver.reject(name, Rejection.STALE)

    @precondition(lambda self: self.driver.waits_for == "batch")
    @rule(room=MORTAL)
    def batch(self, room):
        choice = choose(self.driver.open(), 2, self.driver.step - 1, 1, 2.0)
        if choice:
            self.mortal(lambda: self.driver.batch(choice.taken), room)

    @precondition(lambda self: self.driver.waits_for == "train")
    @rule(room=MORTAL)
    def train(self, room):
        self.mortal(self.driver.train, room)

    @rule(count=st.integers(2, 6), room=st.one_of(st.none(), st.integers(0, 9)))
    def step(self, count, room):
        """All of a step at once, so that others find some that were taken."""
        self.mortal(lambda: self.whole_step(count), room)

    def whole_step(self, count: int) -> None:
        self.evict()
        while len(self.driver.open()) < count:
            self.driver.reserve()
        self.finish_all()
        if self.driver.waits_for == "batch":
            choice = choose(self.driver.open(), 2, self.driver.step - 1, 1, 2.0)
            assert choice, "everything is finished and fresh, so there is a batch"
            self.driver.batch(choice.taken)
        self.driver.train()

    @precondition(lambda self: self.driver.waits_for == "batch" and self.driver.step > 1 and self.driver.attempt == 1)
    @rule(room=MORTAL)
    def repeat(self, room):
        def work():
            self.driver.repeat()
            self.driver.flush()

        self.driver.flush()
        self.mortal(work, room)

    @invariant()
    def prompts_are_conserved(self):
        driver = self.driver
        assert account(driver.ledger, driver.positions, driver.redraw) == []

    @invariant()
    def each_prompt_is_trained_at_most_once(self):
        """By the tables alone: in the newest attempts of the steps taken."""
        known = self.tables.facts()
        trained = [known.positions[name] for name, step in known.batches.items() if step in known.trained]
        assert len(trained) == len(set(trained))
        assert len(trained) == 2 * len(known.trained)

    @invariant()
    def what_is_committed_can_always_be_taken_up(self):
        driver = Driver(self.tables)
        assert account(driver.ledger, driver.positions, driver.redraw) == []
        known = self.tables.facts()
        kept = {name for name in known.finished if driver.ledger.state(name) is not State.REJECTED}
        held = driver.ledger.groups(State.FINISHED, State.ADMITTED, State.TRAINED)
        assert kept == set(held), "finished work is never thrown away by a crash"

    def teardown(self):
        """Left alone, the loop trains on every prompt drawn, or is done with it."""
        drawn = max(self.driver.positions.values(), default=-1)
        for _ in range(4 * (drawn + 4)):
            if all(self.done_with(position) for position in range(drawn + 1)):
                return
            self.whole_step(6)
            self.prompts_are_conserved()
        raise AssertionError(f"prompts up to position {drawn} are not all done with: {self.driver.ledger.counts()}")

    def done_with(self, position: int) -> bool:
        mine = [self.driver.ledger.entry(n) for n, p in self.driver.positions.items() if p == position]
        return any(e.state is State.TRAINED or e.reason == Rejection.ZERO_VARIANCE for e in mine)


TestLoop = Loop.TestCase
TestLoop.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("seed", range(10))
def test_long_walks(seed: int):
    """The same actions, many more in a row and mostly fruitful: steps are repeated and killed deep inside a run."""
    rng = random.Random(seed)
    loop = Loop()
    loop.begin()
    for _ in range(150):
        room = rng.choice([None, None, None, rng.randrange(8)])
        names = ("flush", "reserve", "start", "sample", "sample", "finish_all", "time_out", "give_up", "filter", "evict",
                 "batch", "batch", "train", "step", "step", "step", "repeat", "kill")  # fmt: skip
        driver, name = loop.driver, rng.choice(names)
        if name in ("batch", "train") and driver.waits_for != name:
            continue
        if name == "repeat" and not (
            rng.random() < 0.5 and driver.waits_for == "batch" and driver.step > 1 and driver.attempt == 1
        ):
            continue
        given = {
            "flush": {"room": room}, "batch": {"room": room}, "train": {"room": room},
            "repeat": {"room": rng.choice([None, 0, 1])},
            "reserve": {"count": rng.randint(1, 3)}, "step": {"count": rng.randint(2, 6), "room": room},
            "sample": {"number": rng.randrange(9), "sample": rng.randrange(SAMPLES)},
            "give_up": {"number": rng.randrange(9), "reason": rng.choice([Rejection.STALE, Rejection.SURPLUS])},
        } | {one: {"number": rng.randrange(9)} for one in ("start", "time_out", "filter")}  # fmt: skip
        if name != "reserve" or len(driver.open()) < 6:
            getattr(loop, name)(**given.get(name, {}))
        loop.prompts_are_conserved()
        loop.each_prompt_is_trained_at_most_once()
        loop.what_is_committed_can_always_be_taken_up()
    assert loop.driver.step > 3, "a walk that takes no steps proves nothing"
    loop.teardown()
