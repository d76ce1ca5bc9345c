"""Pre-allocated slots and what fills and empties them: a ring on the sending side, posted receives on the other."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from jaxtyping import UInt8
from torch import Tensor

from furlong.kernels.tap_protocol import HEADER_BYTES, Header, TapError, TapPeerLost, TapTimeout

HANG_UP_TAG = 9
"""Nothing is ever sent with it."""

MicroBatch = tuple[int, int]
"""(step, micro-batch)."""


@dataclass
class Transfer:
    """A send or receive under way; holds its memory until it is over."""

    work: dist.Work
    buffer: Tensor
    peer: int
    what: str


class Wire:
    """Sends and receives between the stages of one group that nothing else uses. Waits at most `deadline` seconds.

    The first thing to go wrong breaks it: what follows raises at once and says what that was, and nothing waits.
    """

    def __init__(self, group: dist.ProcessGroup | None, stage: int, deadline: float):
        if not deadline > 0:
            raise ValueError(f"a channel with deadline={deadline} s could not wait; give it seconds, such as 60")
        self.group, self.stage, self.deadline = group, stage, deadline
        self.broken = ""

    def send(self, message: Tensor, to: int, tag: int, what: str) -> Transfer:
        return self._start(dist.isend, message, to, tag, what, group_dst=to)

    def receive(self, buffer: Tensor, of: int, tag: int, what: str) -> Transfer:
        return self._start(dist.irecv, buffer, of, tag, what, group_src=of)

    def wait(self, transfer: Transfer, what: str = "", deadline: float | None = None) -> None:
        """Until a transfer is over.

        Raises:
            TapTimeout: not within the deadline.
            TapPeerLost: the other stage's process is gone.
        """
        self.check()
        seconds = self.deadline if deadline is None else max(deadline, 1e-3)
        begun = time.monotonic()
        try:
            transfer.work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            late = time.monotonic() - begun >= 0.9 * seconds
            self._fail(transfer.peer, what or transfer.what, error, TapTimeout if late else TapPeerLost, seconds)

    def check(self) -> None:
        """Raise if something went wrong before."""
        if self.broken:
            raise TapError(f"stage {self.stage}: the tap channel broke earlier ({self.broken}); start the stages again")

    def fail(self, error: TapError) -> TapError:
        """Breaks the wire for a reason found outside it, on the other stages too."""
        if not self.broken:
            self.broken = str(error)
            self._hang_up()
        return error

    def _hang_up(self) -> None:
        """Lets the other stages know at once instead of at their own deadline.

        gloo closes all of a group's connections when one of its waits runs out, and has no other call that does.
        """
        for peer in range(0 if self.group is None else dist.get_world_size(self.group)):
            if peer != self.stage:
                nothing = torch.empty(1, dtype=torch.uint8)
                # A peer that is gone has no connection to close.
                with suppress(RuntimeError):
                    dist.irecv(nothing, group=self.group, group_src=peer, tag=HANG_UP_TAG).wait(timedelta(seconds=1e-3))

    def _start(self, start: Callable, buffer: Tensor, peer: int, tag: int, what: str, **end: int) -> Transfer:
        self.check()
        try:
            return Transfer(start(buffer, group=self.group, tag=tag, **end), buffer, peer, what)
        except RuntimeError as error:
            self._fail(peer, what, error, TapPeerLost, 0.0)

    def _fail(self, peer: int, what: str, error: RuntimeError, kind: type[TapError], seconds: float) -> None:
        if kind is TapTimeout:
            reason = f"stage {peer} did not act on {what} within {seconds:.1f} s; raise the deadline if it is only slow"
        else:
            reason = f"stage {peer} ended or gave up while {what} was under way; read that stage's log"
        raise self.fail(kind(f"stage {self.stage}: {reason} ({str(error)[:300]})")) from error


@dataclass
class Slot:
    """Memory of one message, and the sends that still read it."""

    buffer: UInt8[Tensor, " bytes"]
    owner: MicroBatch | None = None
    transfers: list[Transfer] = field(default_factory=list)


class Outbox:
    """A ring of slots that messages are written in and sent from; its n-th message lies in slot n modulo their number.

    Opening a slot waits for the send that last used it, which is over if its receiver has released that message. With
    as many slots as the sender is ahead of the receiver, opening therefore never waits.
    """

    def __init__(self, wire: Wire, tag: int, slots: int, payload_bytes: int):
        if slots < 1:
            raise ValueError(f"{slots} slots hold nothing; give every stage that taps what slots_needed says")
        self._wire, self._tag = wire, tag
        self._slots = [Slot(torch.empty(HEADER_BYTES + payload_bytes, dtype=torch.uint8)) for _ in range(slots)]
        self._opened = 0
        self.longest_wait_s = 0.0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def high_water(self) -> int:
        return min(self._opened, len(self._slots))

    @property
    def allocated_bytes(self) -> int:
        return sum(slot.buffer.numel() for slot in self._slots)

    def open(self, owner: MicroBatch) -> int:
        """The next slot, for this micro-batch."""
        slot = self._slots[index := self._opened % len(self._slots)]
        if slot.owner is not None:
            raise self._wire.fail(
                TapError(
                    f"stage {self._wire.stage}: micro-batch {owner} needs the slot of {slot.owner}, which still lacks "
                    f"taps; {len(self._slots)} slots are fewer than slots_needed says"
                )
            )
        begun = time.perf_counter()
        for transfer in slot.transfers:
            self._wire.wait(transfer, f"{transfer.what}, whose slot {owner} needs")
        self.longest_wait_s = max(self.longest_wait_s, time.perf_counter() - begun)
        slot.owner, slot.transfers = owner, []
        self._opened += 1
        return index

    def buffer(self, index: int) -> UInt8[Tensor, " bytes"]:
        return self._slots[index].buffer

    def send(self, index: int, payload_bytes: int, to: Sequence[int], what: str) -> None:
        """Start to send a slot's message; the slot is free once all of them have it."""
        slot = self._slots[index]
        message = slot.buffer[: HEADER_BYTES + payload_bytes]
        slot.transfers = [self._wire.send(message, peer, self._tag, what) for peer in to]
        slot.owner = None

    def drain(self, until: float) -> None:
        """Wait for every send, up to a moment of time.monotonic."""
        for slot in self._slots:
            for transfer in slot.transfers:
                self._wire.wait(transfer, deadline=until - time.monotonic())
            slot.transfers = []


class Inbox:
    """Slots that wait for one stage's messages. A posted receive is a credit: the sender's next message can leave."""

    def __init__(self, wire: Wire, peer: int, tag: int, slots: int, payload_bytes: int):
        self._wire, self.peer, self._tag = wire, peer, tag
        self._buffers = [torch.empty(HEADER_BYTES + payload_bytes, dtype=torch.uint8) for _ in range(slots)]
        self._posted: deque[tuple[int, Transfer]] = deque()
        for index in range(slots):
            self.post(index)

    def __len__(self) -> int:
        return len(self._buffers)

    @property
    def posted(self) -> int:
        return len(self._posted)

    @property
    def allocated_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    def buffer(self, index: int) -> UInt8[Tensor, " bytes"]:
        return self._buffers[index]

    def post(self, index: int) -> None:
        """Give a slot back to the sender."""
        what = f"a message of stage {self.peer}"
        self._posted.append((index, self._wire.receive(self._buffers[index], self.peer, self._tag, what)))

    def next(self, what: str, deadline: float | None = None) -> tuple[int, Header]:
        """The next message's slot and header; `post` the slot again once the message is used up."""
        index, transfer = self._posted[0]
        self._wire.wait(transfer, what, deadline)
        self._posted.popleft()
        try:
            header = Header.read(self._buffers[index])
        except TapError as error:
            raise self._wire.fail(error) from None
        if header.stage != self.peer:
            raise self._wire.fail(
                TapError(f"stage {self._wire.stage}: stage {self.peer} sent a message that says stage {header.stage}")
            )
        return index, header


class Local:
    """Slots of taps on the draft's own stage: copied in by `put`, read in place."""

    def __init__(self, layers: Sequence[int], slots: int, rows: int, hidden: int, dtype: torch.dtype):
        self.layers = tuple(layers)
        if layers and slots < 1:
            raise ValueError(f"{slots} slots hold nothing; give every stage that taps what slots_needed says")
        self._memory = torch.empty(slots if layers else 0, len(layers), rows, hidden, dtype=dtype)
        self._free = deque(range(len(self._memory)))
        self._held: dict[MicroBatch, tuple[int, int, set[int]]] = {}
        self._done: set[MicroBatch] = set()
        """Of the latest step; a slot given to one of these would never be free again."""
        self.high_water = 0

    @property
    def allocated_bytes(self) -> int:
        return self._memory.numel() * self._memory.element_size()

    def __contains__(self, micro_batch: MicroBatch) -> bool:
        return micro_batch in self._held

    def put(self, micro_batch: MicroBatch, layer: int, hidden: Tensor) -> None:
        if micro_batch in self._done:
            raise TapError(f"micro-batch {micro_batch} was taken or cancelled before; put each key once")
        if micro_batch not in self._held:
            self._done = {done for done in self._done if done[0] >= micro_batch[0]}
            if not self._free:
                raise TapError(
                    f"micro-batch {micro_batch} finds the slots of the draft's own stage full of {list(self._held)}; "
                    "release what the draft has used, or give the stage the slots that slots_needed says"
                )
            self._held[micro_batch] = (self._free.popleft(), len(hidden), set())
            self.high_water = max(self.high_water, len(self._held))
        index, rows, layers = self._held[micro_batch]
        if rows != len(hidden):
            raise TapError(f"micro-batch {micro_batch} has {rows} rows, but layer {layer} has {len(hidden)}")
        if layer in layers:
            raise TapError(f"layer {layer} of micro-batch {micro_batch} was put before; put each key once")
        self._memory[index, self.layers.index(layer), :rows].copy_(hidden)
        layers.add(layer)

    def get(self, micro_batch: MicroBatch) -> dict[int, Tensor]:
        """The taps of a micro-batch, in place; all of them must have been put."""
        if not self.layers:
            return {}
        index, rows, layers = self._held.get(micro_batch, (0, 0, set()))
        if missing := [layer for layer in self.layers if layer not in layers]:
            raise TapError(
                f"micro-batch {micro_batch}: layers {missing} lie on the draft's own stage and were not put; "
                "take it after this stage's forward, once"
            )
        return {layer: self._memory[index, place, :rows] for place, layer in enumerate(self.layers)}

    def release(self, micro_batch: MicroBatch) -> None:
        """Free a micro-batch's slot if it has one; it gets no other."""
        if self.layers:
            self._done.add(micro_batch)
        if micro_batch in self._held:
            index, *_ = self._held.pop(micro_batch)
            # A backward that still needs these rows must fail instead of reading the next micro-batch's.
            torch.autograd.graph.increment_version(self._memory[index])
            self._free.append(index)
