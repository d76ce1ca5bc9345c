"""The one loop that draws: groups are begun as far ahead as the staleness bound lets them, played, and kept for batches.

    reserve -> play (in threads) -> finish -> score and filter -> gather (the `rollouts` stage) -> train -> publish
       ↑                                                                                                     │
       └──────── room for more groups, under newer weights; groups that are too old now are rejected ←───────┘

Every change of a group's state is an event of the ledger; rows are committed before the events that tell of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from furlong.ops.records import Failure, Rejection, State
from furlong.ops.rollouts.admission import Choice, choose, too_old
from furlong.ops.rollouts.budget import Budget
from furlong.ops.rollouts.course import Reservation, attempt_of, room
from furlong.ops.rollouts.reconcile import account
from furlong.ops.stages.context import Run, StageError, StepKey
from furlong.ops.tasks.prompts import draw
from furlong.resources.rollouts.drawer import Drawer, Unwanted
from furlong.resources.rollouts.group import Group, is_flat, play_group
from furlong.resources.rollouts.meter import Meter
from furlong.resources.rollouts.restore import restore
from furlong.resources.rollouts.writer import Writer

if TYPE_CHECKING:
    from furlong.resources.router import Router

FLUSH_SECONDS = 1.0
"""How long finished trajectories gather for one transaction: what a kill may cost, besides replies under way."""
LOOK_SECONDS = 0.5


class Pump:
    """One per driver of a run. The stages call `gather`; whoever drives tells it what was admitted, trained, published."""

    def __init__(self, run: Run, router: Router):
        self.run, self.spec = run, run.spec
        self._prompts = run.train_prompts
        self._router = router
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._closing = False
        self._writer = Writer(run.lake, run.name)
        self._meter = Meter(router.fleet.present) if self.spec.draft else None
        if self._meter:
            self._meter.begin()
        known = restore(run)
        self.ledger, self.course, self._groups = known.ledger, known.course, known.groups
        self._positions, self._step_of = known.positions, known.step_of
        self._published = 0
        self._budget = Budget(self.spec.rollout.budget * self.spec.algorithm.prompts_per_step)
        self._drawer = Drawer(
            router.generate, router.abort, self._wanted, lambda rows: self._writer.add("fragments", rows), run.name,
            run.publish_deadline,
        )  # fmt: skip
        self._drawer.restore(known.parts)
        self._judge_finished()
        most = 2 * room(0, 0, 1, self.spec.steps + 1, self._per_step, self.spec.staleness, self.spec.rollout.oversample)
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="group")
        self._flusher = threading.Thread(target=self._flush_often, name="flush", daemon=True)
        self._flusher.start()

    @property
    def _per_step(self) -> int:
        return self.spec.algorithm.prompts_per_step

    def gather(self, key: StepKey, version: int) -> dict[str, Any]:
        """The row of `batches` for a step, once there are enough groups that are new enough.

        Raises:
            BudgetSpent: too many groups were rejected, or trajectories failed, for one batch.
            StageError: nothing came of it within the stage's deadline, or data that must not be trained on.
            Others: what drawing or committing raised, the first first.
        """
        began = time.monotonic()
        self._router.at(version, self.run.fence)
        if self._meter and self.spec.staleness == 0:
            self._meter.begin()  # only evaluations drew since the last step
        with self._changed:
            self._step_of[version] = key.step - 1
            self._published = key.step - 1
            self._begin_attempt(key)
            self._evict()
        self._drawer.end_unwanted()
        with self._changed:
            self._feed(key)
            while (choice := self._choose(key)) is None:
                self._raise()
                if time.monotonic() - began > self.run.stage_deadline:
                    raise StageError(self._stalled(key))
                self._changed.wait(LOOK_SECONDS)
                self._evict()  # what an earlier driver began may be too old now that it is finished
                self._feed(key)
            if wrong := account(self.ledger, self._positions, self.course.returned):
                raise StageError(f"{key}: prompts are not conserved: {'; '.join(wrong[:3])}; see `ledger` and `groups`")
        self._writer.flush()
        homes = {name: self._groups[name].row for name in choice.taken}
        return {
            **key.columns(), "version": version,
            "groups": [{"step": r["step"], "attempt": r["attempt"], "group_id": name} for name, r in homes.items()],
            **choice.columns(), "waited_seconds": time.monotonic() - began,
            "speculation": self._meter.take() if self._meter else None,
        }  # fmt: skip

    def admitted(self, key: StepKey, group_ids: list[str]) -> None:
        """The batch of `key` is in the lake."""
        with self._changed:
            fresh = [name for name in group_ids if self.ledger.state(name) == State.FINISHED]
            self.ledger.admit(fresh, key.step)
            self._budget.admitted()
            self._tell()
            if self.spec.staleness and key.step < self.spec.steps:
                self._feed(StepKey(key.run, key.step + 1))

    def trained(self, key: StepKey) -> None:
        """The record of the step is in the lake."""
        with self._changed:
            mine = [name for name in self.ledger.groups(State.ADMITTED) if self.ledger.entry(name).step == key.step]
            self.ledger.train(mine, key.step)
            self._tell()

    def published(self, step: int, version: int) -> None:
        """Every engine serves `version`, which `step` made."""
        with self._changed:
            self._published, self._step_of[version] = step, step
            for name in [n for n in self._groups if self.ledger.state(n) in (State.TRAINED, State.REJECTED)]:
                del self._groups[name]
            self._evict()
            if self.spec.staleness and step < self.spec.steps:
                self._feed(StepKey(self.run.name, step + 1))
        self._drawer.end_unwanted()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Inside, engines may flip: replies under way go on beside it, or are ended and resumed, as the spec says."""
        if self.spec.rollout.on_update != "abort":
            yield
            return
        with self._drawer.held():
            yield

    def settle(self) -> None:
        """The ledger in the lake tells everything that its other tables do, whoever died before telling it."""
        self._writer.flush()
        self._raise()

    def close(self) -> None:
        """Stop drawing; what was drawn is kept. Nothing may be gathered afterwards."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._drawer.end_unwanted()
        self._pool.shutdown(cancel_futures=True)
        self._flusher.join()
        self._writer.flush()

    def counts(self) -> dict[str, int]:
        """State -> groups, of the whole run."""
        with self._changed:
            return {str(state): count for state, count in self.ledger.counts().items()}

    def _choose(self, key: StepKey) -> Choice | None:
        candidates = [group.candidate() for group in self._open()]
        return choose(candidates, self._per_step, key.step - 1, self.spec.staleness, self.spec.rollout.window)

    def _open(self) -> list[Group]:
        """Groups that may still become part of a batch."""
        return [self._groups[name] for name in self.ledger.groups(State.RESERVED, State.RUNNING, State.FINISHED)]

    def _feed(self, key: StepKey) -> None:
        """Begin groups while there is room, those first that an earlier driver has left."""
        for name in self.ledger.groups(State.RESERVED):
            self._start(self._groups[name])
        spec, ahead = self.spec, len(self._open())
        begun = ahead + self.ledger.taken_after(self._published)
        count = room(begun, ahead, key.step, spec.steps, self._per_step, spec.staleness, spec.rollout.oversample)
        bound = min(spec.staleness, spec.steps - key.step)
        made = self.course.reserve(count, key.step, key.attempt, ahead, self._per_step, bound)
        if not made:
            return
        for group in self._rows(made):
            self._groups[group.group_id] = group
            self._positions[group.group_id] = group.row["position"]
            self.ledger.reserve(group.group_id)
            self._writer.add("groups", [group.row])
            self._start(group)
        self._tell()

    def _rows(self, made: list[Reservation]) -> list[Group]:
        """Groups of these reservations, with their prompts."""
        places = [draw(self._prompts, r.position + 1, 1, self.spec.seed)[0] for r in made]
        prompts = self.run.prompts_at(sorted(set(places)))
        version = max(self._step_of, key=lambda v: (self._step_of[v], v))
        return [
            Group.new(self.run, reservation, prompts[place], version)
            for reservation, place in zip(made, places, strict=True)
        ]

    def _start(self, group: Group) -> None:
        self.ledger.start(group.group_id)
        group.begun_at = self._published
        self._tell()
        self._pool.submit(self._guarded, self._play, group)

    def _play(self, group: Group) -> None:
        """In a thread of the pool: draw, record, finish."""
        try:
            play_group(self.run, group, self._drawer, self._writer, self._spend)
        except Unwanted:
            return
        rewards = self._rewards(group)
        with self._changed:
            if not self._wanted(group.group_id):
                return
            for version in group.versions():
                self._learn(version)
            group.finish(self._step_of)
            self.ledger.finish(group.group_id)
            self._judge(group, rewards)
            self._tell()
            self._changed.notify_all()

    def _judge(self, group: Group, rewards: list[dict[str, Any]]) -> None:
        if self.spec.rollout.filter == "zero_variance" and is_flat(group, rewards):
            self.ledger.reject(group.group_id, Rejection.ZERO_VARIANCE)
            scores = sorted({row["score"] for row in rewards if row["score"] is not None})
            self._budget.reject(group.group_id, Rejection.ZERO_VARIANCE, f"all its rewards are {scores}")

    def _judge_finished(self) -> None:
        """What an earlier driver had finished it may not have judged."""
        for name in self.ledger.groups(State.FINISHED):
            group = self._groups[name]
            names = [row["trajectory_id"] for row in group.trajectories]
            where = {"run": self.run.name, "step": group.row["step"], "trajectory_id": names}
            known = self.run.lake.read("rewards", where, ["trajectory_id", "score"]).to_pylist()
            self._judge(group, known if len(known) == len(names) else self._rewards(group))
        self._tell()

    def _rewards(self, group: Group) -> list[dict[str, Any]]:
        """Score a group while others are drawn: for the filter, or because its step may be far off."""
        if self.spec.staleness == 0 and self.spec.rollout.filter == "none":
            return []
        rows = group.score(self.run, self._spend)
        self._writer.add("rewards", rows)
        return rows

    def _spend(self, trajectory_id: str, kind: Failure, detail: str) -> None:
        with self._changed:
            self._budget.fail(trajectory_id, kind, detail)

    def _evict(self) -> None:
        """Reject groups that are too old for the next batch; a synchronous run keeps nothing from step to step."""
        old = too_old([group.candidate() for group in self._open()], self._published, self.spec.staleness)
        for name in old:
            self._reject(name, Rejection.STALE if self.spec.staleness else Rejection.SURPLUS)
        if old:
            self._tell()

    def _begin_attempt(self, key: StepKey) -> None:
        """A step that is repeated on purpose takes the prompts of the attempt before again."""
        before = [
            name for name in (self.ledger.groups(State.ADMITTED, State.TRAINED) if key.attempt > 1 else [])
            if self.ledger.entry(name).step == key.step and attempt_of(name) < key.attempt
        ]  # fmt: skip
        # Told with the groups of the new attempt, without which nobody would know that there is one.
        for name in before:
            self._reject(name, Rejection.SUPERSEDED)

    def _reject(self, name: str, reason: Rejection) -> None:
        self.ledger.reject(name, reason)
        self.course.give_back(self._positions[name])

    def _wanted(self, name: str) -> bool:
        return not self._closing and self._error is None and self.ledger.state(name) == State.RUNNING

    def _learn(self, version: int) -> None:
        """Find out which step made a weights version; one that is being published is in the lake as staged."""
        if version not in self._step_of:
            rows = self.run.lake.read("weight_versions", {"run": self.run.name, "version": version}, ["step"])
            self._step_of.update((version, step) for step in rows["step"].to_pylist())

    def _tell(self) -> None:
        self._writer.tell(self.ledger.take_events())

    def _flush_often(self) -> None:
        while not self._closing and self._error is None:
            time.sleep(FLUSH_SECONDS / 4)
            if self._writer.age() > FLUSH_SECONDS:
                self._guarded(self._writer.flush)

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """What fails in a thread fails the stage that waits for it."""
        try:
            work(*args)
        except BaseException as err:
            with self._changed:
                self._error = self._error or err
                self._changed.notify_all()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _stalled(self, key: StepKey) -> str:
        states = ", ".join(f"{count} {state}" for state, count in self.counts().items() if count)
        return (
            f"{key}: no batch within {self.run.stage_deadline:g} s (groups: {states}; engines: {self._router.loads()}); "
            "raise FURLONG_STAGE_DEADLINE if it was only slow, and run again: what was drawn is kept"
        )
