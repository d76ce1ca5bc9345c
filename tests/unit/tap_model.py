"""A model of TapChannel under a pipeline's schedule, small enough to visit every state it can reach.

Stages run their schedule's operations in order; activations and gradients reach the next stage at once, or as late as
the search likes, for an operation may always be put off. A stage's first tap of a micro-batch takes a slot of its ring,
its last one sends the message; the network delivers a stage's messages in order, each as late as the search likes, as
soon as the draft's stage has a landing slot for it. The draft takes in the last chunk's forward on the last stage and
releases in that micro-batch's backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

Operation = tuple[str, int, int]
"""("F" or "B", chunk, micro-batch)."""


def operations(stages: int, stage: int, virtual: int, micro_batches: int, group: int | None = None) -> list[Operation]:
    """What megatron-core's 1F1B (virtual = 1) and interleaved schedules run on a stage, in order.

    Warm-up forwards, then one forward and one backward in turn, then the rest of the backwards. Interleaved forwards go
    through the first chunk with a whole group of micro-batches, then through the second, ...; backwards alike from the
    last chunk (get_pp_rank_microbatches and get_schedule_table of megatron/core/pipeline_parallel/schedules.py).
    """
    group = stages if group is None else group
    table = [
        (chunk, micro_batch)
        for first in range(0, micro_batches, group)
        for chunk in range(virtual)
        for micro_batch in range(first, min(first + group, micro_batches))
    ]
    ahead = stages - stage - 1 if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * group
    ahead = min(ahead, len(table))
    forwards = [("F", chunk, micro_batch) for chunk, micro_batch in table]
    backwards = [("B", virtual - 1 - chunk, micro_batch) for chunk, micro_batch in table]
    order = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[len(table) - ahead :]


@dataclass(frozen=True)
class Model:
    """A pipeline with taps. `taps[stage]` are the chunks that this stage taps, `slots[stage]` its ring."""

    stages: int
    virtual: int
    micro_batches: int
    taps: dict[int, tuple[int, ...]]
    slots: tuple[int, ...]
    landing: int = 2
    group: int | None = None
    release_late: int = 0
    """Operations that the draft's stage runs on between a micro-batch's backward and its release."""
    projected: bool = False
    """Slots also hold what was tapped, until the draft's gradient has come with the release."""
    waits: set[int] = field(default_factory=set)

    @cached_property
    def orders(self) -> list[list[Operation]]:
        return [operations(self.stages, s, self.virtual, self.micro_batches, self.group) for s in range(self.stages)]

    @cached_property
    def places(self) -> list[dict[Operation, int]]:
        return [{operation: place for place, operation in enumerate(order)} for order in self.orders]

    @cached_property
    def opened(self) -> dict[int, list[int]]:
        """Micro-batches in the order in which each source opens a slot for them."""
        return {s: [m for k, c, m in self.orders[s] if (k, c) == ("F", min(t))] for s, t in self.taps.items()}

    @cached_property
    def sent(self) -> dict[int, list[int]]:
        """Micro-batches in the order of each source's messages."""
        return {s: [m for k, c, m in self.orders[s] if (k, c) == ("F", max(t))] for s, t in self.taps.items()}

    def needs(self, stage: int, operation: Operation) -> tuple[int, Operation] | None:
        """The operation of another stage or chunk whose result this one reads."""
        kind, chunk, micro_batch = operation
        last = self.stages - 1
        if kind == "F":
            if stage > 0:
                return stage - 1, operation
            return (last, ("F", chunk - 1, micro_batch)) if chunk else None
        if stage < last:
            return stage + 1, operation
        return (0, ("B", chunk + 1, micro_batch)) if chunk < self.virtual - 1 else (stage, ("F", chunk, micro_batch))

    def ready(self, done: tuple[int, ...], stage: int, operation: Operation) -> bool:
        need = self.needs(stage, operation)
        return need is None or self.places[need[0]][need[1]] < done[need[0]]

    def released(self, done: tuple[int, ...]) -> int:
        return sum(
            (k, c) == ("B", self.virtual - 1) for k, c, _ in self.orders[-1][: max(done[-1] - self.release_late, 0)]
        )

    def slot_free(self, done: tuple[int, ...], delivered: int, source: int) -> bool:
        """Whether the slot of the next micro-batch to open has been sent from."""
        count = sum((k, c) == ("F", min(self.taps[source])) for k, c, _ in self.orders[source][: done[source]])
        if count < self.slots[source]:
            return True
        place = self.sent[source].index(self.opened[source][count - self.slots[source]])
        return place < (min(delivered, self.released(done)) if self.projected else delivered)

    def steps(self, state: tuple[tuple[int, ...], tuple[int, ...]]) -> Iterator[tuple]:
        """Every state one transition away. Notes the stages whose put waits here."""
        done, delivered = state
        sources = sorted(self.taps)
        released = self.released(done)
        for place, source in enumerate(sources):
            count = sum((k, c) == ("F", max(self.taps[source])) for k, c, _ in self.orders[source][: done[source]])
            landed = delivered[place] - released
            assert 0 <= landed <= self.landing
            assert count - delivered[place] <= self.slots[source]
            if delivered[place] < count and landed < self.landing:
                yield done, (*delivered[:place], delivered[place] + 1, *delivered[place + 1 :])
        for stage, order in enumerate(self.orders):
            if done[stage] == len(order) or not self.ready(done, stage, order[done[stage]]):
                continue
            kind, chunk, micro_batch = order[done[stage]]
            puts = stage in self.taps and (kind, chunk) == ("F", min(self.taps[stage]))
            if puts and not self.slot_free(done, delivered[sources.index(stage)], stage):
                self.waits.add(stage)
                continue
            if stage == self.stages - 1 and (kind, chunk) == ("F", self.virtual - 1):
                here = [self.sent[source][released:n] for source, n in zip(sources, delivered, strict=True)]
                if any(micro_batch not in landed for landed in here):
                    continue
                # Takes follow the order of the messages, so landing slots never fill with what is wanted later.
                taken = sum((k, c) == ("F", self.virtual - 1) for k, c, _ in order[: done[stage]])
                assert all(self.sent[source][taken] == micro_batch for source in sources)
            yield (*done[:stage], done[stage] + 1, *done[stage + 1 :]), delivered

    def explore(self) -> tuple[int, list[tuple]]:
        """How many states there are, and those that nothing leaves though the schedule is not over."""
        first = ((0,) * self.stages, (0,) * len(self.taps))
        final = tuple(len(order) for order in self.orders)
        seen, todo, stuck = {first}, [first], []
        while todo:
            state = todo.pop()
            following = list(self.steps(state))
            if not following and state[0] != final:
                stuck.append(state)
            for one in following:
                if one not in seen:
                    seen.add(one)
                    todo.append(one)
        return len(seen), stuck


def run_ahead(
    stages: int, stage: int, virtual: int, micro_batches: int, chunk: int = 0, group: int | None = None
) -> int:
    """Most micro-batches that `stage` has put and the draft may not have released, whatever the others do.

    A release surely came before an operation only if messages of the pipeline lead from it to that operation: each
    operation collects the releases that precede its own stage's last one and the one that it reads.
    """
    model = Model(stages, virtual, micro_batches, {}, (), group=group)
    known: dict[tuple[int, Operation], frozenset[int]] = {}
    done, most, puts = [0] * stages, 0, 0
    own = [frozenset()] * stages
    while any(done[s] < len(model.orders[s]) for s in range(stages)):
        for s, order in enumerate(model.orders):
            while done[s] < len(order) and model.ready(tuple(done), s, order[done[s]]):
                operation = order[done[s]]
                if need := model.needs(s, operation):
                    own[s] |= known[need]
                if s == stage and operation[:2] == ("F", chunk):
                    puts += 1
                    most = max(most, puts - len(own[s]))
                if s == stages - 1 and operation[:2] == ("B", virtual - 1):
                    own[s] |= {operation[2]}
                known[s, operation] = own[s]
                done[s] += 1
    return most
