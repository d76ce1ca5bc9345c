"""The sending side of a TapChannel: one message per micro-batch, written in place and sent when its last tap is in."""

import time
from collections.abc import Mapping, Sequence

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
    TapError,
    TapKey,
    digest,
    payload,
)
from furlong.kernels.tap_slots import Inbox, MicroBatch, Outbox, Wire
from furlong.kernels.tap_weights import WEIGHT_GRADIENT_TAG, WEIGHT_TAG, WeightGradients, wide

DATA_TAG, GRADIENT_TAG = 1, 2


class Source:
    """A stage's taps on their way to the draft's stage.

    Args:
        layers: what this stage taps; every micro-batch has them all, and they travel in one message.
        landing: slots that the draft's stage keeps for this stage.
        out: width of the projection, if taps are projected here.
    """

    def __init__(
        self, wire: Wire, draft: int, layers: Sequence[int], rows: int, hidden: int, dtype: torch.dtype, slots: int,
        landing: int, verify: bool, out: int | None,
    ):  # fmt: skip
        self._wire, self._draft, self._layers, self._dtype = wire, draft, tuple(layers), dtype
        self._landing, self._verify = landing, verify
        self._width, self._count = (hidden, len(layers)) if out is None else (out, 1)
        self.outbox = Outbox(wire, DATA_TAG, slots, self._count * rows * self._width * dtype.itemsize)
        self.projection = None
        if out is not None:
            self.projection = Projection(wire, draft, self._layers, rows, hidden, out, dtype, slots)
        self._open: dict[MicroBatch, tuple[int, int, set[int]]] = {}
        self._done: set[MicroBatch] = set()
        self._step = -1
        self.messages = self.payload_bytes = self.header_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        return self.outbox.allocated_bytes + (self.projection.allocated_bytes if self.projection else 0)

    def put(self, key: TapKey, hidden: Float[Tensor, "rows hidden"]) -> None:
        """Copy a tap; send its micro-batch's message if it is the last one."""
        micro_batch = (key.step, key.micro_batch)
        if micro_batch in self._done:
            raise TapError(f"{key} was put before, or its micro-batch was cancelled; put each key once")
        if self.projection and not self.projection.weights:
            raise TapError("taps are to be projected but no weights have come; call load_projection on every stage")
        if micro_batch not in self._open:
            self._begin(micro_batch, len(hidden))
        index, rows, layers = self._open[micro_batch]
        if key.layer in layers:
            raise TapError(f"{key} was put before; put each key once")
        if rows != len(hidden):
            raise TapError(f"{key} has {len(hidden)} rows, but its micro-batch's other taps have {rows}")
        place = self._layers.index(key.layer)
        if self.projection:
            self.projection.features(index, rows)[place].copy_(hidden)
        else:
            payload(self.outbox.buffer(index), rows, self._width, self._count, self._dtype)[place].copy_(hidden)
        layers.add(key.layer)
        if len(layers) == len(self._layers):
            self._send(micro_batch)

    def cancel(self, micro_batch: MicroBatch) -> None:
        """Tell the draft's stage that a micro-batch will not come, unless it is on its way already."""
        if micro_batch in self._done or (micro_batch not in self._open and micro_batch[0] < self._step):
            return
        if micro_batch not in self._open:
            self._begin(micro_batch, 0)
        index, *_ = self._open.pop(micro_batch)
        if self.projection:
            self.projection.forget(micro_batch)
        self._done.add(micro_batch)
        self._message(index, Header(CANCELLED, *micro_batch, self._wire.stage), 0)

    def load(self) -> None:
        """Take this step's W_l from the draft's stage, which answers every micro-batch of the last step first."""
        self._check_whole()
        self.projection.load()

    def gradients(self) -> dict[int, Float[Tensor, "out hidden"]]:
        """This step's dW_l; the draft's stage answers every micro-batch first."""
        self._check_whole()
        return self.projection.gradients()

    def close(self, until: float) -> None:
        """Send what ends the stream, and wait until everything has arrived."""
        for micro_batch in list(self._open):
            self.cancel(micro_batch)
        # One for each slot that the draft's stage has posted, so that no receive stays behind without a send.
        ends = []
        for _ in range(self._landing):
            message = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            Header(END, 0, 0, self._wire.stage).write(message)
            ends.append(self._wire.send(message, self._draft, DATA_TAG, "the end of the taps"))
            self.header_bytes += HEADER_BYTES
        self.outbox.drain(until)
        for end in ends:
            self._wire.wait(end, deadline=until - time.monotonic())
        if self.projection:
            self.projection.close(until)

    def _check_whole(self) -> None:
        if self._open:
            raise TapError(
                f"micro-batches {list(self._open)} lack taps; put those, or cancel the micro-batch, before the step ends"
            )

    def _begin(self, micro_batch: MicroBatch, rows: int) -> None:
        if micro_batch[0] < self._step:
            raise TapError(f"micro-batch {micro_batch} is older than step {self._step}; step numbers must grow")
        if micro_batch[0] > self._step:
            self._step, self._done = micro_batch[0], set()
        index = self.outbox.open(micro_batch)
        if self.projection:
            self.projection.keep(index, micro_batch, rows)
        self._open[micro_batch] = (index, rows, set())

    def _send(self, micro_batch: MicroBatch) -> None:
        index, rows, _ = self._open.pop(micro_batch)
        message = self.outbox.buffer(index)
        body = payload(message, rows, self._width, self._count, self._dtype)
        if self.projection:
            body[0].copy_(self.projection.project(index, rows))
            self.projection.sent(micro_batch)
        digests = tuple(digest(tap) for tap in body) if self._verify else ()
        header = Header(
            DATA, *micro_batch, self._wire.stage, rows, self._width, self._dtype, self._layers, digests
        )  # fmt: skip
        self._done.add(micro_batch)
        self._message(index, header, body.numel() * body.element_size())

    def _message(self, index: int, header: Header, size: int) -> None:
        header.write(self.outbox.buffer(index))
        what = f"the taps of step {header.step}, micro-batch {header.micro_batch}"
        self.outbox.send(index, size, [self._draft], what)
        self.messages += 1
        self.payload_bytes += size
        self.header_bytes += HEADER_BYTES


class Projection:
    """Projects taps where they are, y = sum over l of a_l W_l^T, and turns the draft's gradient of y into that of W_l.

    What was tapped is kept until the gradient has come: dW_l = dy^T a_l, summed over micro-batches.
    """

    def __init__(
        self, wire: Wire, draft: int, layers: tuple[int, ...], rows: int, hidden: int, out: int, dtype: torch.dtype,
        slots: int,
    ):  # fmt: skip
        self._wire, self._draft, self._layers, self._out, self._dtype = wire, draft, layers, out, dtype
        self._features = torch.empty(slots, len(layers), rows, hidden, dtype=dtype)
        self._kept: dict[MicroBatch, tuple[int, int]] = {}
        self._refused: set[MicroBatch] = set()
        """Answered before they were sent: the draft's stage does not know what has been."""
        self._inbox = Inbox(wire, draft, GRADIENT_TAG, slots, rows * out * dtype.itemsize)
        self._sums = WeightGradients(layers, out, hidden, dtype)
        self._sent: list = []
        self.weights: Mapping[int, Tensor] = {}
        self.weight_bytes = 0

    @property
    def allocated_bytes(self) -> int:
        return self._features.numel() * self._features.element_size() + self._inbox.allocated_bytes

    def load(self) -> None:
        """Take this step's W_l from the draft's stage."""
        self._settle()
        stacked = torch.empty(len(self._layers), self._out, self._features.shape[-1], dtype=self._dtype)
        self._wire.wait(self._wire.receive(stacked, self._draft, WEIGHT_TAG, "the projection's weights"))
        self.weights = dict(zip(self._layers, stacked, strict=True))

    def keep(self, index: int, micro_batch: MicroBatch, rows: int) -> None:
        """Make room for a micro-batch's taps: the gradient of the one that lies there must be in."""
        while any(kept == index for kept, _ in self._kept.values()):
            self._expect(f"the gradient that {micro_batch} waits for")
        self._refused = {refused for refused in self._refused if refused[0] >= micro_batch[0]}
        self._kept[micro_batch] = (index, rows)

    def sent(self, micro_batch: MicroBatch) -> None:
        if micro_batch in self._refused:
            self.forget(micro_batch)

    def forget(self, micro_batch: MicroBatch) -> None:
        self._kept.pop(micro_batch, None)

    def features(self, index: int, rows: int) -> Float[Tensor, "layers rows hidden"]:
        return self._features[index, :, :rows]

    def project(self, index: int, rows: int) -> Float[Tensor, "rows out"]:
        """In wide precision, one rounding at the end."""
        taps = self.features(index, rows)
        return project(taps, [self.weights[layer] for layer in self._layers])

    def gradients(self) -> dict[int, Float[Tensor, "out hidden"]]:
        """This step's dW_l, once every micro-batch's gradient is in; sent to the draft's stage too."""
        self._settle()
        for transfer in self._sent:
            self._wire.wait(transfer)
        stacked = self._sums.take()
        self._sent = [self._wire.send(stacked, self._draft, WEIGHT_GRADIENT_TAG, "the gradients of the projection")]
        self.weight_bytes += stacked.numel() * stacked.element_size()
        return dict(zip(self._layers, stacked, strict=True))

    def close(self, until: float) -> None:
        while self._inbox.posted:
            self._absorb("the end of the gradients", until - time.monotonic())
        for transfer in self._sent:
            self._wire.wait(transfer, deadline=until - time.monotonic())

    def _settle(self) -> None:
        """Take every answer of the step."""
        while self._expect(f"the gradients of micro-batches {list(self._kept)}") != SETTLE:
            pass
        if self._kept:
            raise self._wire.fail(
                TapError(
                    f"stage {self._draft} has not answered micro-batches {list(self._kept)} and ends the step; take or "
                    "cancel each there"
                )
            )

    def _expect(self, what: str) -> int:
        if (kind := self._absorb(what)) == END:
            raise self._wire.fail(TapError(f"{what} will not come: stage {self._draft} has closed its channel"))
        return kind

    def _absorb(self, what: str, deadline: float | None = None) -> int:
        """Use the draft's stage's next message; its kind."""
        index, header = self._inbox.next(what, deadline)
        if header.kind == END:
            return END
        micro_batch = (header.step, header.micro_batch)
        if header.kind == CANCELLED and self._kept.pop(micro_batch, None) is None:
            self._refused.add(micro_batch)
        elif header.kind == GRADIENT:
            self._use(micro_batch, index, header)
        self._inbox.post(index)
        return header.kind

    def _use(self, micro_batch: MicroBatch, index: int, header: Header) -> None:
        if micro_batch not in self._kept:
            raise self._wire.fail(TapError(f"a gradient came for {micro_batch}, which stage {self._wire.stage} lacks"))
        kept, rows = self._kept.pop(micro_batch)
        if (header.rows, header.width, header.dtype) != (rows, self._out, self._dtype):
            raise self._wire.fail(TapError(f"the gradient of {micro_batch} does not fit its {rows} rows: {header}"))
        gradient = payload(self._inbox.buffer(index), rows, self._out, 1, self._dtype)[0]
        self._sums.add(gradient, self.features(kept, rows))


def project(taps: Float[Tensor, "layers rows hidden"], weights: Sequence[Tensor]) -> Float[Tensor, "rows out"]:
    """Sum over layers of a_l W_l^T, wide."""
    total = torch.zeros(taps.shape[1], weights[0].shape[0], dtype=wide(taps.dtype))
    for tap, weight in zip(taps, weights, strict=True):
        total.addmm_(tap.to(total.dtype), weight.to(total.dtype).T)
    return total
