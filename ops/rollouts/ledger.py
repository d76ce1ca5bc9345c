"""Where every prompt group of a run stands: a state machine whose events are rows of table `ledger`.

One thread drives a Ledger. It changes state in memory and remembers the events; a writer commits them in batches:

    events = ledger.take_events()
    lake.commit_once("ledger", {"run": run, "seq": events["seq"].to_pylist()}, events)

What a table tells is committed before the event that tells of it: `groups` before reserved, `trajectories` before
finished, `batches` before admitted, `steps` before trained. A rejection stands in the ledger alone. So after a crash the
ledger may lag behind the tables but never lead; `ops.rollouts.reconcile` closes the gap.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from furlong.ops import records
from furlong.ops.records import Rejection, State
from furlong.ops.stages.context import StageError

_NEXT: dict[State, frozenset[State]] = {
    State.RESERVED: frozenset({State.RUNNING, State.REJECTED}),
    State.RUNNING: frozenset({State.RESERVED, State.FINISHED, State.REJECTED}),
    State.FINISHED: frozenset({State.ADMITTED, State.REJECTED}),
    State.ADMITTED: frozenset({State.TRAINED, State.REJECTED}),
    State.TRAINED: frozenset({State.REJECTED}),
    State.REJECTED: frozenset(),
}
_BATCHED = frozenset({State.ADMITTED, State.TRAINED})
"""States of groups that a batch has: these are rejected for one reason only, that their step was repeated."""


class LedgerError(StageError):
    """The ledger, or what was asked of it, contradicts itself or the tables; the message names the group."""


@dataclass(frozen=True)
class Entry:
    """Where one group stands."""

    state: State
    reason: str
    """Of a rejection, a value of `Rejection`; of a group that went back to reserved, a line for a person; else empty."""
    step: int | None
    """Of the batch it is or was part of."""
    order: int
    """Number of groups reserved before it."""


class Ledger:
    """The groups of one run. Every method checks the transition first and changes nothing when it is not allowed."""

    def __init__(self, run: str, clock: Callable[[], float] = time.time):
        """
        Args:
            run: its name, a column of every event.
            clock: seconds since the epoch, for column `at`.
        """
        self.run = run
        self._clock = clock
        self._entries: dict[str, Entry] = {}
        self._in: dict[State, set[str]] = {state: set() for state in State}
        self._taken: Counter[int] = Counter()
        self._seq = 0
        self._events: list[dict[str, Any]] = []

    @classmethod
    def replay(
        cls, run: str, rows: Iterable[dict[str, Any]] | pa.Table, clock: Callable[[], float] = time.time
    ) -> Ledger:
        """The ledger that wrote these rows, given in any order.

        Raises:
            LedgerError: a row of another run, a number missing or there twice, a state, reason or transition that does
                not exist. Nothing is repaired here: who wrote such rows must be found first.
        """
        events = rows.to_pylist() if isinstance(rows, pa.Table) else list(rows)
        ledger = cls(run, clock)
        for event in sorted(events, key=lambda row: row["seq"]):
            name, seq = event["group_id"], event["seq"]
            if event["run"] != run:
                raise LedgerError(
                    f"ledger of {run}: event {seq} of group {name} is of run {event['run']}; filter by run"
                )
            if seq != ledger._seq + 1:
                what = "is there twice" if seq <= ledger._seq else f"follows {ledger._seq}: events between are missing"
                raise LedgerError(
                    f"ledger of {run}: event {seq} of group {name} {what}; end other drivers of this run, then restore "
                    "table `ledger` to a version before the damage"
                )
            if event["state"] not in set(State):
                raise LedgerError(
                    f"ledger of {run}: event {seq} puts group {name} into unknown state {event['state']!r}; known are "
                    f"{', '.join(State)}; restore table `ledger`, or use the code that wrote it"
                )
            ledger._apply(name, State(event["state"]), event["reason"], event["step"])
        return ledger

    def reserve(self, group_id: str) -> None:
        """Its row of `groups` stands."""
        if group_id in self._entries:
            raise self._illegal(group_id, State.RESERVED)
        self._append(group_id, State.RESERVED)

    def start(self, group_id: str) -> None:
        """Its trajectories are being drawn from now on."""
        self._append(group_id, State.RUNNING)

    def back(self, group_id: str, reason: str) -> None:
        """What ran of it was lost and has to run again."""
        if self._known(group_id).state is not State.RUNNING:
            raise self._illegal(group_id, State.RESERVED)
        self._append(group_id, State.RESERVED, reason)

    def finish(self, group_id: str) -> None:
        """All its trajectories are in the lake."""
        self._append(group_id, State.FINISHED)

    def admit(self, group_ids: Iterable[str], step: int) -> None:
        """The batch of this step has them; all or, when one cannot be, none."""
        self._append_all(group_ids, State.ADMITTED, step)

    def train(self, group_ids: Iterable[str], step: int) -> None:
        """This step, which admitted them, has taken its optimiser step; all or none."""
        self._append_all(group_ids, State.TRAINED, step)

    def reject(self, group_id: str, reason: Rejection) -> None:
        """It is not trained on. A group that a batch has is rejected only as superseded, be it trained: a step is
        repeated only after it was taken, and what it trained on then counts no more."""
        entry = self._known(group_id)
        self._append(group_id, State.REJECTED, str(reason), entry.step)

    def state(self, group_id: str) -> State:
        """Where it stands; LedgerError when it was never reserved."""
        return self._known(group_id).state

    def entry(self, group_id: str) -> Entry:
        """Where it stands, why, and in which step's batch."""
        return self._known(group_id)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def groups(self, *states: State) -> list[str]:
        """Those in any of these states (all without), in order of reservation."""
        found = [name for state in states or State for name in self._in[state]]
        return sorted(found, key=lambda name: self._entries[name].order)

    def taken_after(self, step: int) -> int:
        """Number of groups in the batches of later steps; in time that does not grow with the run."""
        return sum(self._taken[later] for later in range(step + 1, max(self._taken, default=0) + 1))

    def counts(self) -> dict[State, int]:
        """Number of groups in every state."""
        return {state: len(self._in[state]) for state in State}

    def take_events(self) -> pa.Table:
        """Rows for table `ledger` that were not handed out yet, in order; none left afterwards."""
        taken, self._events = self._events, []
        return records.rows("ledger", taken)

    def _append_all(self, group_ids: Iterable[str], state: State, step: int) -> None:
        names = list(group_ids)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise LedgerError(f"group {twice} is named twice for the batch of step {step}; name each group once")
        for name in names:
            self._check(name, state, "", step)
        for name in names:
            self._append(name, state, "", step)

    def _append(self, group_id: str, state: State, reason: str = "", step: int | None = None) -> None:
        self._apply(group_id, state, reason, step)
        self._events.append({
            "run": self.run, "seq": self._seq, "group_id": group_id, "state": str(state), "reason": reason,
            "step": step, "at": self._clock(),
        })  # fmt: skip

    def _apply(self, group_id: str, state: State, reason: str, step: int | None) -> None:
        self._check(group_id, state, reason, step)
        before = self._entries.get(group_id)
        if before:
            self._in[before.state].discard(group_id)
        self._entries[group_id] = Entry(state, reason, step, before.order if before else len(self._entries))
        self._in[state].add(group_id)
        if step is not None and state is not State.TRAINED:
            self._taken[step] += 1 if state is State.ADMITTED else -1
        self._seq += 1

    def _check(self, group_id: str, state: State, reason: str, step: int | None) -> None:
        before = self._entries.get(group_id)
        if before is None:
            if state is not State.RESERVED:
                raise LedgerError(f"group {group_id} is to be {state} but was never reserved; reserve it first")
        elif state not in _NEXT[before.state]:
            raise self._illegal(group_id, state)
        if (step is not None) != (state in _BATCHED or (state is State.REJECTED and before.step is not None)):
            raise LedgerError(
                f"group {group_id} is to be {state} with step {step}; exactly groups that a batch has have a step: name "
                "that of the batch"
            )
        if before and before.step is not None and step != before.step:
            raise LedgerError(
                f"group {group_id} is in the batch of step {before.step}, so it cannot be {state} in step {step}; name "
                "the step that admitted it"
            )
        if state is State.REJECTED:
            self._check_reason(group_id, before.state, reason)

    def _check_reason(self, group_id: str, before: State, reason: str) -> None:
        if reason not in set(Rejection):
            raise LedgerError(
                f"group {group_id} is to be rejected for unknown reason {reason!r}; give one of {', '.join(Rejection)}"
            )
        if before in _BATCHED and reason != Rejection.SUPERSEDED:
            raise LedgerError(
                f"group {group_id} is {before}, so it cannot be rejected as {reason}; only repeating its step, which "
                f"makes it {Rejection.SUPERSEDED}, takes a group out of a batch"
            )

    def _known(self, group_id: str) -> Entry:
        if group_id not in self._entries:
            raise LedgerError(f"group {group_id} is not in the ledger of {self.run}; reserve it first")
        return self._entries[group_id]

    def _illegal(self, group_id: str, state: State) -> LedgerError:
        before = self._known(group_id).state
        allowed = ", ".join(sorted(_NEXT[before])) or "nothing else"
        return LedgerError(
            f"group {group_id} is {before} and cannot become {state}, only {allowed}; look at its events in table "
            "`ledger`: two parts of the driver act on one group"
        )
