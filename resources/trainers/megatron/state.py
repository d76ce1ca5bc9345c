"""What a megatron-core trainer keeps, in Hugging Face names: the members of `masters.py` over tp, pp, ep and dp.

A parameter of the model holds pieces of one or more Hugging Face tensors (`names.py`), and its elements are cut once more,
as a flat run, over the ranks that update it. Here runs become parameters again, and parameters complete tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from furlong.ops.spec import AlgorithmSpec
from furlong.ops.weights.layout import Piece, cut
from furlong.resources.trainers.masters import (
    KINDS,
    UPDATES,
    Shapes,
    require_finite_gradients,
    require_weights,
    state_shapes,
)
from furlong.resources.trainers.megatron.model import Chunk
from furlong.resources.trainers.megatron.names import Held, pieces
from furlong.resources.trainers.megatron.optimizer import Shard, ShardedAdamW
from furlong.resources.trainers.ranks import Ranks


@dataclass(frozen=True)
class Holding:
    """One parameter of the whole model, and who answers for it where several ranks hold the same."""

    pieces: tuple[Piece, ...]
    """Of Hugging Face tensors, that it consists of."""
    ranks: tuple[int, ...]
    """Among which its elements are divided; the first hands them on."""
    shard: Shard | None
    """This rank's share; None when others answer for it."""
    parts: tuple[Held, ...]
    """Where the pieces are in it; none when others answer for it."""


class MegatronMasters:
    """The interface of `masters.py`, which says what each member is for; every method is called on all ranks."""

    def __init__(self, modules: list[Chunk], algorithm: AlgorithmSpec, ranks: Ranks) -> None:
        """`modules`: this rank's chunks of the model; their weights need not be there yet."""
        self.ranks, self._whole = ranks, modules[0].architecture.shapes()
        self.adamw = ShardedAdamW(modules, algorithm)
        self.chunks = self.adamw.chunks
        self._parts: dict[nn.Parameter, tuple[Held, ...]] = {}
        for held in pieces(modules).values():
            self._parts[held.parameter] = (*self._parts.get(held.parameter, ()), held)
        self._holdings = self._survey()
        names = [piece.name for holding in self._holdings for piece in holding.pieces]
        self._names = list(dict.fromkeys(names))

    @property
    def dtype(self) -> torch.dtype:
        """Number format of masters and moments."""
        return self.adamw.dtype

    @property
    def pieces(self) -> dict[str, Piece]:
        """What this rank's model has of each Hugging Face tensor that it has any of."""
        return {part.piece.name: part.piece for parts in self._parts.values() for part in parts}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Number formats of the complete tensors that `state` is made of, but for the number of updates."""
        return dict.fromkeys(self.shapes().keys() - {UPDATES}, self.dtype)

    def state_pieces(self) -> list[Piece]:
        """What `load_state` will read, besides the number of updates."""
        held = [self._parts[shard.parameter] for shard in self.adamw.shards if shard.master is not None]
        return [_of(kind, part.piece) for parts in held for part in parts for kind in KINDS]

    def begin(self) -> None:
        """See `masters.py`."""
        self.adamw.begin()

    def gradient_norm(self) -> float:
        """Global L2 norm of the gradients, which are summed over the ranks here; the same on all.

        Raises:
            NonFiniteError: on all ranks: a gradient with a NaN or an infinity, by the tensor's name.
        """
        self.adamw.collect()
        own = torch.zeros(len(self._holdings), dtype=torch.float64)
        for number, holding in enumerate(self._holdings):
            if holding.shard is not None and holding.shard.master is not None:
                own[number] = torch.linalg.vector_norm(holding.shard.master.grad, dtype=torch.float64).cpu()
        squares = self.ranks.sum(own.square())
        if not bool(torch.isfinite(squares).all()):
            self._refuse(squares)
        return float(squares.sum().sqrt())

    def update(self, learning_rate: float, norm: float) -> None:
        """See `masters.py`."""
        self.adamw.clip(norm)
        self.adamw.update(learning_rate)

    def round(self) -> None:
        """See `masters.py`."""
        self.adamw.round()

    @contextmanager
    def placed(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Have the model compute with these complete weights; afterwards it is bitwise as it was.

        Raises:
            ValueError: weights of another model.
        """
        require_weights(weights, self._whole)
        # Wide parameters are their own masters, so these have to be set aside too.
        before = [master.clone() for master in self.adamw.masters]
        try:
            with torch.no_grad():
                for parameter, parts in self._parts.items():
                    for part in parts:
                        part.put(parameter.data, cut(weights[part.piece.name], part.piece))
            yield
        finally:
            for master, kept in zip(self.adamw.masters, before, strict=True):
                master.copy_(kept)
            self.round()

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """On rank 0, masters rounded to `dtype` by Hugging Face name, whole, on the CPU; nothing on the others."""
        return {name: whole.to(dtype) for name, whole in self.complete()}

    def complete(self, what: str = "master") -> Iterator[tuple[str, Tensor]]:
        """On rank 0 every master by name, whole, on the CPU, one at a time; the others help and get nothing.

        Args:
            what: one of `masters.KINDS`, or `grad` after `gradient_norm`.
        """
        partial: dict[str, Tensor] = {}
        missing = {name: math.prod(shape) for name, shape in self._whole.items()}
        for holding in self._holdings:
            whole = self._gather(holding, what)
            source = holding.ranks[0]
            for number, piece in enumerate(holding.pieces):
                part = self._hand_over(holding, number, whole, source)
                if part is None:
                    continue
                if piece.name not in partial:
                    partial[piece.name] = torch.empty(self._whole[piece.name], dtype=self.dtype)
                cut(partial[piece.name], piece).copy_(part)
                missing[piece.name] -= part.numel()
                if not missing[piece.name]:
                    yield piece.name, partial.pop(piece.name)
        if partial:
            raise RuntimeError(f"of {sorted(partial)[:3]} some pieces are held by no rank; mend the layout's names")

    def bad_weight(self) -> str | None:
        """Name of the first master with a NaN or an infinity, on any rank."""
        bad = [
            part.piece.name
            for holding in self._holdings
            if (whole := self._gather(holding, "master")) is not None
            for part in holding.parts
            if not torch.isfinite(part.get(whole)).all()
        ]
        found = {name for names in self.ranks.exchange(bad) for name in names}
        return next((name for name in self._names if name in found), None)

    def shapes(self) -> Shapes:
        """See `masters.py`."""
        return state_shapes(self._whole)

    def state(self) -> dict[Piece, Tensor]:
        """What this rank writes of everything a step reads and changes: copies on the CPU."""
        state: dict[Piece, Tensor] = {}
        for number, holding in enumerate(self._holdings):
            writer = holding.ranks[number % len(holding.ranks)]
            for kind in KINDS:
                whole = self._gather(holding, kind)
                if self.ranks.rank == writer:
                    for part in holding.parts:
                        state[_of(kind, part.piece)] = part.get(whole).contiguous().to("cpu", copy=True)
        if self.ranks.first:
            state[Piece(UPDATES, 0, 0, 1)] = torch.tensor([float(self.adamw.updates)])
        return state

    def load_state(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Take over this rank's part of what `state` gave, under this or another layout."""
        self._fill(KINDS, lambda kind, piece: fetch(_of(kind, piece)))
        self.adamw.set_updates(int(fetch(Piece(UPDATES, 0, 0, 1))[0]))
        self.round()

    def load_weights(self, fetch: Callable[[Piece], Tensor]) -> None:
        """Take over masters alone, asked for by Hugging Face name."""
        self._fill(("master",), lambda kind, piece: fetch(piece))
        self.round()

    @torch.no_grad()
    def _fill(self, kinds: tuple[str, ...], fetch: Callable[[str, Piece], Tensor]) -> None:
        for shard in self.adamw.shards:
            if shard.master is None:
                continue
            for kind in kinds:
                # Rows that pad a vocabulary belong to no piece, and stay 0.
                whole = torch.zeros(shard.parameter.shape, dtype=self.dtype)
                for part in self._parts[shard.parameter]:
                    part.put(whole, fetch(kind, part.piece))
                self.adamw.state(shard, kind).copy_(whole.flatten()[shard.start : shard.stop])

    def _survey(self) -> list[Holding]:
        """Every parameter of the model, in an order all ranks agree on; of equal ones the lowest rank's group counts."""
        mine = {tuple(part.piece for part in self._parts[s.parameter]): s for s in self.adamw.shards}
        rows = [(key, tuple(dist.get_process_group_ranks(shard.group))) for key, shard in mine.items()]
        owners: dict[tuple[Piece, ...], tuple[int, ...]] = {}
        for held in self.ranks.exchange(rows):
            for key, group in held:
                owners.setdefault(key, group)
        found = []
        for key in sorted(owners, key=lambda key: (_natural(key[0].name), key)):
            shard = mine.get(key) if self.ranks.rank in owners[key] else None
            found.append(Holding(key, owners[key], shard, self._parts[shard.parameter] if shard else ()))
        return found

    @torch.no_grad()
    def _gather(self, holding: Holding, what: str) -> Tensor | None:
        """A complete parameter of masters, moments or gradients (`grad`), on the ranks that answer for it."""
        shard = holding.shard
        if shard is None:
            return None
        own = None
        if shard.master is not None:
            own = shard.master.grad if what == "grad" else self.adamw.state(shard, what)
        shape = shard.parameter.shape
        if len(holding.ranks) == 1:
            return own.view(shape)
        # Every element is one rank's and the others add integer zeros to its bits, so that even -0.0 arrives as it is.
        bits = torch.int64 if self.dtype == torch.float64 else torch.int32
        whole = torch.zeros(shape.numel(), dtype=bits, device=shard.parameter.device)
        if own is not None:
            whole[shard.start : shard.stop] = own.view(bits)
        dist.all_reduce(whole, group=shard.group)
        return whole.view(self.dtype).view(shape)

    def _hand_over(self, holding: Holding, number: int, whole: Tensor | None, source: int) -> Tensor | None:
        """On rank 0, one piece of a parameter, from wherever it is."""
        piece = holding.pieces[number]
        if self.ranks.rank == source:
            part = holding.parts[number].get(whole)
            if source:
                dist.send(part.contiguous(), 0)
                return None
            return part.cpu()
        if not self.ranks.first:
            return None
        shape = list(self._whole[piece.name])
        shape[piece.dim] = piece.stop - piece.start
        part = torch.empty(shape, dtype=self.adamw.dtype, device=self._device())
        dist.recv(part, source)
        return part.cpu()

    def _refuse(self, squares: Tensor) -> None:
        """Raise, on all ranks, with the name of the first tensor whose gradient is not finite."""
        bad = []
        for holding, square in zip(self._holdings, squares.tolist(), strict=True):
            if math.isfinite(square):
                continue
            whole = self._gather(holding, "grad")
            for part in holding.parts:
                if not math.isfinite(float(torch.linalg.vector_norm(part.get(whole), dtype=torch.float64)) ** 2):
                    bad.append(part.piece.name)
        found = {name for names in self.ranks.exchange(bad) for name in names}
        require_finite_gradients({name: math.inf if name in found else 0.0 for name in self._names})
        raise RuntimeError("a gradient's norm is not finite, but no tensor's is; run the step again and report this")

    def _device(self) -> torch.device:
        return next(iter(self._parts)).device


def _of(kind: str, piece: Piece) -> Piece:
    return Piece(f"{kind}/{piece.name}", piece.dim, piece.start, piece.stop)


def _natural(name: str) -> list[str | int]:
    """Sorts layer 10 after layer 9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
