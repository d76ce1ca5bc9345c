"""The receiving side of a TapChannel: the draft's stage takes taps by key, uses them in place, and frees their slots."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from furlong.kernels.tap_protocol import (
    CANCELLED,
    DATA,
    END,
    GRADIENT,
    HEADER_BYTES,
    SETTLE,
    Header,
    TapCancelled,
    TapError,
    TapKey,
    digest,
    payload,
)
from furlong.kernels.tap_slots import Inbox, Local, MicroBatch, Outbox, Transfer, Wire
from furlong.kernels.tap_source import DATA_TAG, GRADIENT_TAG, project
from furlong.kernels.tap_weights import WEIGHT_GRADIENT_TAG, WEIGHT_TAG, WeightGradients


class Arrivals:
    """One stage's messages on the draft's stage, by key.

    Args:
        refuse: told (stage, micro-batch) of every one that nobody will use: who projects keeps it until it hears.
    """

    def __init__(
        self, wire: Wire, peer: int, layers: Sequence[int], rows: int, width: int, count: int, dtype: torch.dtype,
        landing: int, verify: bool, refuse: Callable[[int, MicroBatch], None],
    ):  # fmt: skip
        self._refuse = refuse
        self._wire, self.peer, self.layers = wire, peer, tuple(layers)
        self._rows, self._width, self._count, self._dtype, self._verify = rows, width, count, dtype, verify
        self.inbox = Inbox(wire, peer, DATA_TAG, landing, count * rows * width * dtype.itemsize)
        self._slots: dict[MicroBatch, tuple[int, int]] = {}
        self._seen: set[MicroBatch] = set()
        self._cancelled: set[MicroBatch] = set()
        self._unwanted: set[MicroBatch] = set()
        self._step = -1
        self._ends = 0

    @property
    def held(self) -> list[MicroBatch]:
        return list(self._slots)

    def take(self, micro_batch: MicroBatch) -> Float[Tensor, "count rows width"]:
        """A micro-batch's rows, in place; waits until they are here."""
        while micro_batch not in self._slots:
            self._explain(micro_batch)
            self._receive(f"the taps of step {micro_batch[0]}, micro-batch {micro_batch[1]}", None)
        index, rows = self._slots[micro_batch]
        return payload(self.inbox.buffer(index), rows, self._width, self._count, self._dtype)

    def check(self, micro_batch: MicroBatch) -> None:
        """Compare digests, where the sender made them."""
        if not self._verify:
            return
        index, _ = self._slots[micro_batch]
        header = Header.read(self.inbox.buffer(index))
        taps = self.take(micro_batch)
        if len(header.digests) != self._count:
            raise self._wire.fail(TapError(f"stage {self.peer} sends no digests; set verify alike on all stages"))
        for place, (tap, expected) in enumerate(zip(taps, header.digests, strict=True)):
            if digest(tap) != expected:
                what = f"layer {self.layers[place]}" if self._count == len(self.layers) else f"layers {self.layers}"
                raise self._wire.fail(
                    TapError(
                        f"{what} of step {micro_batch[0]}, micro-batch {micro_batch[1]} is not what stage {self.peer} "
                        "sent: the digests differ; do not train on it, and check that machine's memory and network"
                    )
                )

    def release(self, micro_batch: MicroBatch) -> None:
        """Give a micro-batch's slot back to its sender."""
        index, _ = self._slots.pop(micro_batch)
        # A backward that still needs these rows must fail instead of reading the next micro-batch's.
        torch.autograd.graph.increment_version(self.inbox.buffer(index))
        self.inbox.post(index)

    def cancel(self, micro_batch: MicroBatch) -> None:
        """Drop a micro-batch's message: now, or as soon as it comes."""
        if micro_batch in self._slots:
            self.release(micro_batch)
            self._refuse(self.peer, micro_batch)
        elif micro_batch not in self._seen | self._unwanted:
            self._unwanted.add(micro_batch)
            self._refuse(self.peer, micro_batch)
        # Unread, more than there are landing slots would keep the sender's own slots from ever being free.
        while len(self._unwanted) > len(self.inbox) and self.inbox.posted:
            self._receive("the taps of cancelled micro-batches", None)

    def close(self, until: float) -> None:
        """Drop what comes until the sender has said on every posted slot that nothing more does."""
        for micro_batch in list(self._slots):
            self.cancel(micro_batch)
        while self.inbox.posted:
            self._receive("the end of the taps", until - time.monotonic())
            for micro_batch in list(self._slots):
                self.cancel(micro_batch)

    def _explain(self, micro_batch: MicroBatch) -> None:
        """Raise where waiting would be in vain."""
        name = f"step {micro_batch[0]}, micro-batch {micro_batch[1]}"
        if micro_batch in self._cancelled:
            raise TapCancelled(f"{name} was cancelled on stage {self.peer}; cancel it here too and go on")
        if micro_batch in self._seen or micro_batch in self._unwanted:
            raise TapError(f"{name} was taken or cancelled before; take each micro-batch once")
        if self._ends:
            raise TapError(f"{name} will not come: stage {self.peer} has closed its channel")
        if not self.inbox.posted:
            raise TapError(
                f"{name} cannot come: all {len(self.inbox)} slots for stage {self.peer} are held by "
                f"{list(self._slots)}; release those, and take micro-batches in the order in which they are put"
            )

    def _receive(self, what: str, deadline: float | None) -> None:
        index, header = self.inbox.next(what, deadline)
        if header.kind == END:
            self._ends += 1
            return
        micro_batch = (header.step, header.micro_batch)
        if problem := self._problem(header, micro_batch):
            raise self._wire.fail(TapError(f"stage {self.peer} sent {header}: {problem}"))
        if header.step > self._step:
            self._step = header.step
            for keys in (self._seen, self._cancelled, self._unwanted):
                keys.intersection_update({key for key in keys if key[0] >= header.step})
        self._seen.add(micro_batch)
        wanted = micro_batch not in self._unwanted
        self._unwanted.discard(micro_batch)
        if header.kind == DATA and wanted:
            self._slots[micro_batch] = (index, header.rows)
            return
        self.inbox.post(index)
        if wanted:
            self._cancelled.add(micro_batch)

    def _problem(self, header: Header, micro_batch: MicroBatch) -> str:
        if micro_batch in self._seen:
            return "that key came before; put each key once"
        if header.step < self._step:
            return f"step {self._step} has begun; step numbers must grow"
        if header.kind == CANCELLED:
            return ""
        if header.kind != DATA:
            return "a message of that kind does not travel this way"
        if header.layers != self.layers:
            return f"this stage expects layers {self.layers}; give every stage the same taps"
        if (header.width, header.dtype) != (self._width, self._dtype):
            return (
                f"this stage expects width {self._width} and {self._dtype}; give every stage the same hidden and dtype"
            )
        if not 0 <= header.rows <= self._rows:
            return f"a slot holds at most {self._rows} rows; give every stage the same rows"
        return ""


class Draft:
    """The draft's stage: taps of its own and of the stages before it.

    Args:
        held: layers of each stage.
        slots: slots of each stage; this one's own hold the taps that need not travel.
        out: width of the projection, if there is one.
    """

    def __init__(
        self, wire: Wire, held: Sequence[tuple[int, ...]], rows: int, hidden: int, dtype: torch.dtype,
        slots: Sequence[int], landing: int, verify: bool, out: int | None,
    ):  # fmt: skip
        self._wire, self._dtype, self._out = wire, dtype, out
        self.local = Local(held[wire.stage], slots[wire.stage], rows, hidden, dtype)
        self.arrivals = [
            Arrivals(
                wire, stage, layers, rows, hidden if out is None else out, len(layers) if out is None else 1, dtype,
                landing, verify, (lambda peer, micro_batch: None) if out is None else self._refuse,
            )
            for stage, layers in enumerate(held)
            if layers and stage != wire.stage
        ]  # fmt: skip
        self._taken: dict[MicroBatch, int] = {}
        self.high_water = 0
        self.gradient_bytes = self.weight_bytes = self.header_bytes = 0
        self._source_slots = {one.peer: slots[one.peer] for one in self.arrivals}
        self._hidden = hidden
        self._weights_sent: list[Transfer] = []
        self._notices: list[Transfer] = []
        self.layers = tuple(layer for layers in held for layer in layers)
        self.weights: Mapping[int, Tensor] = {}
        if out is not None:
            self._sums = WeightGradients(self.local.layers, out, hidden, dtype)
            self._gradients = Outbox(wire, GRADIENT_TAG, 2, rows * out * dtype.itemsize)

    @property
    def allocated_bytes(self) -> int:
        landing = sum(one.inbox.allocated_bytes for one in self.arrivals)
        return self.local.allocated_bytes + landing + (self._gradients.allocated_bytes if self._out else 0)

    def put(self, key: TapKey, hidden: Float[Tensor, "rows hidden"]) -> None:
        if (micro_batch := (key.step, key.micro_batch)) in self._taken:
            raise TapError(f"{key} was put before and taken; put each key once")
        self.local.put(micro_batch, key.layer, hidden)

    def take(self, micro_batch: MicroBatch) -> dict[int, Float[Tensor, "rows hidden"]]:
        """Taps in place, by ascending layer."""
        self._fetch(micro_batch)
        found = self.local.get(micro_batch)
        for one in self.arrivals:
            found |= dict(zip(one.layers, one.take(micro_batch), strict=True))
        self._taken[micro_batch] = self._rows_of(micro_batch, found.values())
        return dict(sorted(found.items()))

    def take_projected(self, micro_batch: MicroBatch) -> Float[Tensor, "rows out"]:
        """Sum of all stages' projected taps, in the order of the stages; what came is free at once."""
        if not self.weights:
            raise TapError("taps are to be projected but there are no weights; call load_projection on every stage")
        self._fetch(micro_batch)
        parts = [one.take(micro_batch)[0] for one in self.arrivals]
        if own := self.local.get(micro_batch):
            parts.append(project(torch.stack(list(own.values())), [self.weights[layer] for layer in own]))
        rows = self._rows_of(micro_batch, parts)
        total = torch.zeros(parts[0].shape, dtype=self._sums.dtype)
        for part in parts:
            total += part
        for one in self.arrivals:
            one.release(micro_batch)
        self._taken[micro_batch] = rows
        return total.to(self._dtype)

    def release(self, micro_batch: MicroBatch) -> None:
        """Free a taken micro-batch."""
        if micro_batch not in self._taken:
            raise TapError(f"micro-batch {micro_batch} is not held here; release what was taken, once")
        self._taken.pop(micro_batch)
        self.local.release(micro_batch)
        for one in self.arrivals:
            if self._out is None:
                one.release(micro_batch)
            else:
                self._refuse(one.peer, micro_batch)

    def cancel(self, micro_batch: MicroBatch) -> None:
        """Free a micro-batch in whatever state it is."""
        if micro_batch in self._taken:
            self.release(micro_batch)
            return
        self.local.release(micro_batch)
        for one in self.arrivals:
            one.cancel(micro_batch)

    def return_gradient(self, micro_batch: MicroBatch, gradient: Float[Tensor, "rows out"]) -> None:
        """Send the gradient of `take_projected` to the stages whose taps are in it, and free the micro-batch."""
        if micro_batch not in self._taken:
            raise TapError(f"micro-batch {micro_batch} is not held here; return the gradient of what was taken, once")
        if (rows := self._taken[micro_batch]) != len(gradient) or gradient.shape[1:] != (self._out,):
            raise TapError(
                f"the gradient of micro-batch {micro_batch} is {tuple(gradient.shape)}, what was taken is "
                f"{(rows, self._out)}; return the gradient of take_projected's tensor"
            )
        index = self._gradients.open(micro_batch)
        header = Header(GRADIENT, *micro_batch, self._wire.stage, len(gradient), self._out, self._dtype)
        header.write(self._gradients.buffer(index))
        payload(self._gradients.buffer(index), *gradient.shape, 1, self._dtype)[0].copy_(gradient)
        size = gradient.numel() * self._dtype.itemsize
        peers = [one.peer for one in self.arrivals]
        self._gradients.send(index, size, peers, f"the gradient of micro-batch {micro_batch}")
        self.gradient_bytes += size * len(peers)
        self.header_bytes += HEADER_BYTES * len(peers)
        if own := self.local.get(micro_batch):
            self._sums.add(gradient, torch.stack(list(own.values())))
        self._taken.pop(micro_batch)
        self.local.release(micro_batch)

    def load(self, weights: Mapping[int, Float[Tensor, "out hidden"]]) -> None:
        """Give every stage the W_l of its own taps."""
        self._settle()
        self._wait_for(self._weights_sent)
        self.weights = {layer: w.detach().to(self._dtype) for layer, w in weights.items()}
        for one in self.arrivals:
            stacked = torch.stack([self.weights[layer] for layer in one.layers])
            self._weights_sent.append(self._wire.send(stacked, one.peer, WEIGHT_TAG, "the projection's weights"))
            self.weight_bytes += stacked.numel() * stacked.element_size()

    def gradients(self) -> dict[int, Float[Tensor, "out hidden"]]:
        """dW_l of all stages, by ascending layer."""
        self._settle()
        found = dict(zip(self.local.layers, self._sums.take(), strict=True))
        for one in self.arrivals:
            stacked = torch.empty(len(one.layers), self._out, self._hidden, dtype=self._sums.dtype)
            self._wire.wait(self._wire.receive(stacked, one.peer, WEIGHT_GRADIENT_TAG, "the projection's gradients"))
            found |= dict(zip(one.layers, stacked, strict=True))
        return dict(sorted(found.items()))

    def close(self, until: float) -> None:
        for micro_batch in list(self._taken):
            self.release(micro_batch)
        for one in self.arrivals:
            one.close(until)
        if self._out is None:
            return
        for peer, slots in self._source_slots.items():
            for _ in range(slots):
                self._notice(peer, END, (0, 0))
        self._wait_for(self._weights_sent, until)
        self._gradients.drain(until)
        self._wait_for(self._notices, until)

    def _rows_of(self, micro_batch: MicroBatch, taps: Iterable[Tensor]) -> int:
        if len(rows := {len(tap) for tap in taps}) > 1:
            raise self._wire.fail(TapError(f"micro-batch {micro_batch}: stages disagree on its rows: {sorted(rows)}"))
        return rows.pop()

    def _fetch(self, micro_batch: MicroBatch) -> None:
        if micro_batch in self._taken:
            raise TapError(f"micro-batch {micro_batch} is held already; take each micro-batch once")
        self.local.get(micro_batch)
        for one in self.arrivals:
            one.take(micro_batch)
            self.high_water = max(self.high_water, len(one.held))
            one.check(micro_batch)

    def _settle(self) -> None:
        """Between steps: sources may believe that every micro-batch has its answer."""
        if self._taken:
            raise self._wire.fail(
                TapError(
                    f"micro-batches {list(self._taken)} have no answer; call return_gradient, release or cancel for each "
                    "before the step ends"
                )
            )
        self._wait_for(self._notices)
        for one in self.arrivals:
            self._notice(one.peer, SETTLE, (0, 0))

    def _refuse(self, peer: int, micro_batch: MicroBatch) -> None:
        self._notice(peer, CANCELLED, micro_batch)

    def _notice(self, peer: int, kind: int, micro_batch: MicroBatch) -> None:
        """A header alone, on the gradients' way; nobody waits for it before the step ends."""
        message = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        Header(kind, *micro_batch, self._wire.stage).write(message)
        self._notices.append(self._wire.send(message, peer, GRADIENT_TAG, f"the end of micro-batch {micro_batch}"))
        self.header_bytes += HEADER_BYTES

    def _wait_for(self, transfers: list[Transfer], until: float | None = None) -> None:
        while transfers:
            self._wire.wait(transfers[0], deadline=None if until is None else until - time.monotonic())
            transfers.pop(0)
