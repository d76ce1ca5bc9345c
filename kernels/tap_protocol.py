"""What travels on a TapChannel: keys, the header of a message, digests, and how many slots a stage needs."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor

EMBEDDING = -1
"""Layer number of the embedding's output; sorts before every layer."""
FINAL = 2**31 - 1
"""Layer number of the final state; sorts after every layer."""

Schedule = Literal["none", "1f1b", "interleaved"]

DATA, CANCELLED, END, GRADIENT, SETTLE = range(5)
"""Kinds of message: tapped rows; "this micro-batch will not come"; "nothing comes any more"; the draft's gradient; "you
have every answer now"."""

HEADER_WORDS = 32
HEADER_BYTES = 8 * HEADER_WORDS
MOST_TAPS = 11
_MAGIC = 0x7461_7031
_FIXED = 9
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TapError(RuntimeError):
    """A tap cannot be sent, received or believed; the message says which and what to do."""


class TapTimeout(TapError):
    """Another stage did not act within the channel's deadline."""


class TapPeerLost(TapError):
    """The connection to another stage broke: its process has ended, or its own wait ran out."""


class TapCancelled(TapError):
    """The micro-batch was cancelled on a stage that holds its taps."""


@dataclass(frozen=True, order=True)
class TapKey:
    """Names one tapped tensor. `step` is any number that grows with every forward-backward pass."""

    step: int
    micro_batch: int
    layer: int


def slots_needed(stages: int, stage: int, virtual: int, schedule: Schedule, group: int | None = None) -> int:
    """Slots that a stage needs so that its `put` never waits: the most micro-batches it is ahead of the draft.

    Run-ahead counts micro-batches whose first tap on `stage` was put and that the draft, on the last stage, may not have
    taken; with taps projected, not answered with a gradient, which it does before its stage's own gradient leaves.
    1F1B: stage s runs `stages - s` forwards before it needs a backward. Interleaved: it runs a whole group of
    micro-batches through every chunk, and in stage s at most 2 (stages - s) - 1, or a group, through the first one.

    Args:
        stages: pipeline stages (PP).
        stage: 0-based; the number of the stage that taps.
        virtual: model chunks per stage; 1 unless interleaved.
        schedule: "none" (one stage), "1f1b", "interleaved".
        group: micro-batches per group of the interleaved schedule; `stages` unless set.
    """
    if not 0 <= stage < stages:
        raise ValueError(f"stage {stage} is not one of {stages} stages; number them from 0")
    if (schedule == "interleaved") != (virtual > 1) or virtual < 1:
        raise ValueError(f"schedule {schedule!r} with {virtual} chunks per stage; only 'interleaved' has 2 or more")
    if schedule == "none":
        if stages != 1:
            raise ValueError(f"schedule 'none' has one stage, not {stages}; name '1f1b' or 'interleaved'")
        return 1
    if schedule == "1f1b":
        return stages - stage
    if schedule != "interleaved":
        raise ValueError(f"unknown schedule {schedule!r}; choose 'none', '1f1b' or 'interleaved'")
    if (group := stages if group is None else group) < stages:
        raise ValueError(f"a group of {group} micro-batches is smaller than {stages} stages; the schedule forbids it")
    return max(group, 2 * (stages - stage) - 1)


def slots_per_stage(stages: int, virtual: int, schedule: Schedule, group: int | None = None) -> tuple[int, ...]:
    """`slots_needed` of every stage, as TapChannel takes it."""
    return tuple(slots_needed(stages, stage, virtual, schedule, group) for stage in range(stages))


@dataclass(frozen=True)
class Header:
    """The first 256 bytes of a message, 32 int64 words; `rows` x `width` elements of `dtype` follow per layer."""

    kind: int
    step: int
    micro_batch: int
    stage: int
    rows: int = 0
    width: int = 0
    dtype: torch.dtype = torch.float32
    layers: tuple[int, ...] = ()
    digests: tuple[int, ...] = ()

    def write(self, message: UInt8[Tensor, " bytes"]) -> None:
        """Put the header at the start of a message."""
        layers = [*self.layers, *(0,) * (MOST_TAPS - len(self.layers))]
        digests = [*self.digests, *(0,) * (MOST_TAPS - len(self.digests))]
        dtype, count = _DTYPES.index(self.dtype), len(self.layers)
        words = [_MAGIC, self.kind, self.step, self.micro_batch, self.stage, self.rows, self.width, dtype, count]
        words += [*layers, *digests, len(self.digests)]
        message[:HEADER_BYTES].view(torch.int64).copy_(torch.tensor(words))

    @classmethod
    def read(cls, message: UInt8[Tensor, " bytes"]) -> "Header":
        """Take the header off a message; a message that has none is an error."""
        words = message[:HEADER_BYTES].view(torch.int64).tolist()
        magic, kind, step, micro_batch, stage, rows, width, dtype, count = words[:_FIXED]
        if magic != _MAGIC or kind not in range(5) or not 0 <= count <= MOST_TAPS or dtype not in range(len(_DTYPES)):
            raise TapError(
                f"what arrived is no tap message (it begins {words[:_FIXED]}); "
                "give the channel a process group that nothing else uses"
            )
        digests = _FIXED + MOST_TAPS
        return cls(
            kind, step, micro_batch, stage, rows, width, _DTYPES[dtype],
            tuple(words[_FIXED : _FIXED + count]), tuple(words[digests : digests + words[-1]]),
        )  # fmt: skip


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless taps of this dtype can travel."""
    if dtype not in _DTYPES:
        raise ValueError(f"taps of dtype {dtype} cannot travel; choose one of {_DTYPES}")


def payload(message: UInt8[Tensor, " bytes"], rows: int, width: int, count: int, dtype: torch.dtype) -> Tensor:
    """The rows behind a message's header, in place: [count rows width]."""
    size = count * rows * width * dtype.itemsize
    return message[HEADER_BYTES : HEADER_BYTES + size].view(dtype).view(count, rows, width)


def digest(x: Shaped[Tensor, "..."]) -> int:
    """64 bits of BLAKE2b over a contiguous CPU tensor's bytes."""
    raw = x.reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little", signed=True)


def by_stage(taps: dict[int, int], stages: int) -> list[tuple[int, ...]]:
    """The layers that each stage holds, ascending: `by_stage({5: 0, -1: 0, 9: 1}, 2) == [(-1, 5), (9,)]`."""
    if wrong := {layer: stage for layer, stage in taps.items() if not 0 <= stage < stages}:
        raise ValueError(f"taps {wrong} lie on no stage of {stages}; number stages from 0")
    held: Sequence[tuple[int, ...]] = [
        tuple(sorted(layer for layer, stage in taps.items() if stage == one)) for one in range(stages)
    ]
    if crowded := [stage for stage, layers in enumerate(held) if len(layers) > MOST_TAPS]:
        raise ValueError(f"stages {crowded} tap more than {MOST_TAPS} layers; a message has no room for more")
    return list(held)
