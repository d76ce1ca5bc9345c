"""Ranks in a ring that pass tensors on, with a deadline on every wait and agreement before every call.

Each call starts with a header from every rank to every other: what it is about to do and with which shapes. Ranks that
disagree, or one that found fault with its own arguments, make all of them raise the same error before anything moves.
A rank that died shows by its closed connection or by its silence until the deadline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from furlong.kernels.counters import Ledger

HEADER_BYTES = 512


class ContextParallelError(RuntimeError):
    """A call that its ranks could not finish together: they disagree, or one is gone."""


class Pending:
    """Tensors on their way in from one rank, others on their way out to another."""

    def __init__(self, ring: Ring, kind: str, of: int, arriving: tuple[Tensor, ...], works: list, leaving: Any):
        self._ring, self._kind, self._of, self._works = ring, kind, of, works
        self._arriving = arriving
        # The process group reads it until it is sent.
        self._leaving = leaving

    def wait(self) -> tuple[Tensor, ...]:
        """What has come, once it has and what leaves is gone.

        Raises:
            ContextParallelError: not within the ring's deadline, or a rank is gone.
        """
        for work in self._works:
            self._ring.wait(work, f"{self._kind} from rank {self._of}")
        self._works, self._leaving = [], None
        self._ring.landed(self)
        return self._arriving


class Ring:
    """The ranks that share a sequence, in the order of their process group.

    All ranks make the same calls in the same order, also those of a recomputed forward pass. One Ring per group: it
    numbers the calls. A rank that is lost in the middle of a call is an error there for whoever still needs it, and in
    the next call for the rest. A ring that had an error in the middle of a call is broken, and every later call says
    so; after ranks disagreed in a header it goes on, for nothing has moved.

    Args:
        group: gloo (CPU tensors) or NCCL; None for one rank alone, without a process group.
        deadline: seconds that a rank waits for another, each time that it waits. It must cover the longest that one
            rank computes while another has nothing to do.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline: float) -> None:
        if not deadline > 0:
            raise ContextParallelError(f"a ring with deadline={deadline} s could not wait; give it seconds, such as 60")
        self.group, self.deadline = group, deadline
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ledger = Ledger()
        self.number = 0
        """Of the latest call, the same on all ranks: a backward pass names its forward pass by it."""
        self._call = ""
        self._broken = ""
        self._in_flight: list[Pending] = []

    @contextmanager
    def call(self, name: str, same: dict[str, object], problem: str = "", own: str = "") -> Iterator[tuple[str, ...]]:
        """One call that all ranks make together; gives what each rank says of itself.

        Args:
            name: of the call, for the errors.
            same: what must be equal on all ranks, by name.
            problem: why this rank cannot take part; then none does.
            own: what this rank says of itself and may differ.
        Raises:
            ContextParallelError: on every rank, where two differ or one has a problem, or where one is gone.
        """
        if self._broken:
            raise ContextParallelError(
                f"rank {self.rank} cannot start {name}: the ring broke earlier ({self._broken}); start the ranks again"
            )
        self.number += 1
        self._call = name
        facts = {"call": f"{name} (number {self.number})", **{key: str(value) for key, value in same.items()}}
        words = self._agree(facts, problem, own)
        try:
            yield words
        except BaseException as error:
            # Others may still wait for what this rank will never send; what is in flight has to stay until the end.
            self._broken = self._broken or f"{name}: {type(error).__name__}: {error}"
            raise

    def swap(
        self, kind: str, tensors: Sequence[Tensor], to: int, of: int, like: Sequence[torch.Size] | None = None
    ) -> Pending:
        """Start to send tensors to one rank and to take as many from another; within `call` only.

        Args:
            kind: under which the ledger counts the bytes.
            tensors: any shapes; ranks agree on them beforehand.
            to, of: ranks of this ring, not this one.
            like: shapes that come; those that go by default.
        Raises:
            ContextParallelError: a rank is gone.
        """
        leaving = tuple(tensor.detach().contiguous() for tensor in tensors)
        shapes = [tensor.shape for tensor in leaving] if like is None else like
        arriving = tuple(torch.empty(s, dtype=x.dtype, device=x.device) for s, x in zip(shapes, leaving, strict=True))
        ops = [dist.P2POp(dist.isend, x, self._global(to), self.group) for x in leaving if x.numel()]
        self.ledger.sent[kind] += sum(x.numel() * x.element_size() for x in leaving)
        self.ledger.messages[kind] += len(ops)
        ops += [dist.P2POp(dist.irecv, x, self._global(of), self.group) for x in arriving if x.numel()]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:
            raise self._lost(f"{kind} to rank {to} and from rank {of}", error) from error
        pending = Pending(self, kind, of, arriving, works, leaving)
        self._in_flight.append(pending)
        return pending

    def pass_on(self, kind: str, tensors: Sequence[Tensor]) -> Pending:
        """Start to send tensors to the next rank and to take the like from the one before."""
        return self.swap(kind, tensors, (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks)

    def travel(self, kind: str, tensors: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """(rank they come from, its tensors), own first; the next are on their way while these are used."""
        load = tuple(tensors)
        for step in range(self.ranks):
            coming = self.pass_on(kind, load) if step + 1 < self.ranks else None
            yield (self.rank - step) % self.ranks, load
            if coming is not None:
                load = coming.wait()

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for one message, at most the deadline."""
        try:
            work.wait(timedelta(seconds=self.deadline))
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def landed(self, pending: Pending) -> None:
        """Forget a message that has come and gone."""
        self._in_flight.remove(pending)

    def _agree(self, facts: dict[str, str], problem: str, own: str) -> tuple[str, ...]:
        mine = _header(facts, problem, own)
        headers: list[bytes] = [mine] * self.ranks
        sheet = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._header_device())
        turns = [((self.rank + hop) % self.ranks, (self.rank - hop) % self.ranks) for hop in range(1, self.ranks)]
        coming = [(of, self.swap("header", [sheet], to, of)) for to, of in turns]
        for of, pending in coming:
            headers[of] = bytes(pending.wait()[0].cpu().numpy())
        said = [header.rstrip(b"\0").decode(errors="replace").split("\n") for header in headers]
        problems = [f"rank {rank}: {lines[0]}" for rank, lines in enumerate(said) if lines[0]]
        if problems:
            raise ContextParallelError(f"{facts['call']}: {'; '.join(problems)}")
        if any(lines[2:] != said[0][2:] for lines in said):
            raise ContextParallelError(_differences(said))
        return tuple(lines[1] for lines in said)

    def _lost(self, what: str, error: Exception) -> ContextParallelError:
        self._broken = f"{what} did not arrive"
        return ContextParallelError(
            f"rank {self.rank} of {self.ranks} in {self._call}: no {what} ({error}); that rank died, stopped with an "
            f"error of its own (see its log), or took longer than the ring's deadline of {self.deadline} s"
        )

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.group, rank)

    def _header_device(self) -> torch.device:
        on_card = self.group is not None and dist.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_card else torch.device("cpu")


def _header(facts: dict[str, str], problem: str, own: str) -> bytes:
    lines = [own, *(f"{key}={value}" for key, value in facts.items())]
    body = "\n".join(" ".join(line.split()) for line in lines).encode()
    room = HEADER_BYTES - len(body) - 1
    if room < 0:
        # The others are waiting for one.
        long = f"a header of {len(body)} bytes is longer than {HEADER_BYTES}; say less in it: {' '.join(lines)}"
        return _header({}, problem or long, "")
    return (" ".join(problem.split()).encode()[:room] + b"\n" + body).ljust(HEADER_BYTES, b"\0")


def _differences(said: list[list[str]]) -> str:
    width = max(len(lines) for lines in said)
    columns = [[lines[at] if at < len(lines) else "nothing" for lines in said] for at in range(2, width)]
    unlike = [
        ", ".join(f"rank {rank} has {value}" for rank, value in enumerate(column))
        for column in columns
        if len(set(column)) > 1
    ]
    return (
        f"the ranks do not agree on {'; '.join(unlike)}; every rank has to make the same calls in the same order, with "
        "the same layout, heads and dtype"
    )
