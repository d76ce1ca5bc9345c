"""Weights of an engine split over several processes; this one is rank 0 and leads the others."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import psutil
import pyarrow as pa
import torch
from torch import Tensor

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import Batch, Ended, Turn
from furlong.ops.policy.checkpoint import DTYPES
from furlong.ops.policy.decoder import WeightsError
from furlong.ops.policy.live import Live
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.shard import part_of, pieces
from furlong.ops.weights.delta import DeltaError
from furlong.ops.weights.digest import tensor_digest
from furlong.ops.weights.layout import Offer, Piece, whole_piece
from furlong.resources.engines.rank import Rank
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.engines.tp_channel import offer_to_json
from furlong.resources.engines.tp_process import RankProcess
from furlong.resources.engines.tp_steps import drawn_digest, turn_to_json
from furlong.resources.weights.group import Group, open_store

START_DEADLINE = 120.0
"""Seconds in which the other ranks must have loaded PyTorch and met."""
PEER_DEADLINE = 120.0
"""Seconds one rank waits for another within a step, or for its piece of a tensor."""
WORK_DEADLINE = 600.0
"""Seconds a rank may take to make a version of its piece of the weights, or to digest it."""
BATCH_BYTES = 2**29
"""Most bytes of complete tensors put together at once while digesting."""
_KNOWN = {kind.__name__: kind for kind in (DeltaError, ModelError, WeightsError)}


class TpRanks:
    """What `OneRank` is for a single process, with the same methods; EngineError once a rank is lost, for ever."""

    def __init__(
        self, architecture: Architecture, dtype: str, size: int, threads: int, invariant: bool,
        draft: DraftSettings | None = None,
    ):  # fmt: skip
        """
        Args:
            dtype: of the policy's tensors, by name.
            size: number of ranks; threads: of PyTorch in each; invariant, draft: see `Batch`.
        Raises:
            EngineError: a rank did not start; with the last it wrote.
        """
        self._architecture, self._size, self._threads = architecture, size, threads
        self._shapes = architecture.shapes()
        self._layout = [pieces(architecture, rank, size) for rank in range(size)]
        self._serials = count(1)
        self._invariant, self._draft = invariant, draft
        self._part = part_of(architecture, 0, size)
        self.clear()
        self._lost = ""
        self._losing = threading.Lock()
        self._others: list[RankProcess] = []
        self.close = weakref.finalize(self, _end_all, self._others)
        try:
            for rank in range(1, size):
                self._others.append(RankProcess(rank, threads, PEER_DEADLINE))
            self._store, address = open_store()
            for other in self._others:
                other.answer(START_DEADLINE)
                setup = {
                    "architecture": asdict(architecture), "dtype": dtype, "rank": other.rank, "size": size,
                    "threads": threads, "address": address, "deadline": PEER_DEADLINE, "invariant": invariant,
                    "draft": None if draft is None else asdict(draft),
                }  # fmt: skip
                other.weights.send(setup)
            self._slabs = Group(address, "weights", 0, size, PEER_DEADLINE)
            exchange = Group(address, "steps", 0, size, PEER_DEADLINE)
            self._rank = Rank(architecture, DTYPES[dtype], 0, size, exchange, draft)
            self._answers(START_DEADLINE)
        except Exception as err:
            raise self._lose(err) from err
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """EngineError when a rank is lost."""
        if not self._lost and any(other.ended() for other in self._others):
            self._lose(None)
        if self._lost:
            raise EngineError(self._lost)

    def layout(self) -> list[dict[str, Piece]]:
        """For each rank, its pieces of the policy's tensors."""
        return self._layout

    def keep(self, live: Live) -> None:
        """Every rank forgets every version but this one."""
        self._all("keep", {"serial": live.serial}, lambda: self._rank.keep(live))

    def load(self, path: str, version: int, chain: Sequence[pa.Table]) -> Live:
        serial = next(self._serials)
        said = {"path": path, "version": version, "serial": serial}
        return self._all("load", said, lambda: self._rank.load(path, version, chain, serial), chain)

    def stage(self, version: int, deltas: pa.Table, base: Live) -> Live:
        serial = next(self._serials)
        said = {"version": version, "base": base.serial, "serial": serial}
        return self._all("stage", said, lambda: self._rank.stage(version, deltas, base, serial), [deltas])

    def receive(self, offer: Offer, engine: int, base: Live) -> Live:
        serial = next(self._serials)
        said = {"offer": offer_to_json(offer), "engine": engine, "base": base.serial, "serial": serial}
        return self._all("receive", said, lambda: self._rank.receive(offer, engine, base, serial))

    def digests(self, live: Live) -> dict[str, str]:
        """Digest of every complete tensor, put together from what each rank reads back from the memory it uses.

        Raises:
            WeightsError: a tensor that every rank has whole is not the same on all of them.
        """
        split = [name for name, shape in self._shapes.items() if self._layout[0][name] != whole_piece(name, shape)]
        said = {"serial": live.serial, "split": split}
        mine, answers = self._all_answers("prove", said, lambda: self._rank.served(live))
        with ThreadPoolExecutor(self._threads) as pool:
            unsplit = {name: tensor for name, tensor in mine.items() if name not in split}
            found = dict(zip(unsplit, pool.map(tensor_digest, unsplit.values()), strict=True))
            for other, answer in zip(self._others, answers, strict=True):
                _same_whole(other.rank, found, answer["digests"])
            for names in self._batches(split, mine):
                found |= dict(zip(names, pool.map(tensor_digest, self._gather(names, mine)), strict=True))
        return found

    @property
    def waiting(self) -> int:
        return self._batch.waiting

    def turn(self, turn: Turn, live: Live | None) -> Ended:
        """See `Batch.turn`; EngineError when the ranks do not draw the same.

        A turn that breaks off leaves the other ranks waiting in it for ever, so that ends them.
        """
        self.check()
        # From this rank's clock: the others' would say otherwise.
        turn = replace(turn, decision=self._batch.decide(live))
        self._tell_steps({"turn": turn_to_json(turn), "serial": None if live is None else live.serial})
        try:
            ended = self._batch.turn(turn, live)
        except Exception as err:
            raise self._lose(err) from err
        if ended.replies or ended.broken:
            drawn = drawn_digest(ended)
            if any(other != drawn for other in self._drawn()):
                raise self._lose(ValueError("the ranks drew different tokens from the same requests"))
        return ended

    def clear(self) -> None:
        """Only after `turn` raised, upon which all ranks are lost."""
        self._batch = Batch(self._architecture, self._part, self._invariant, self._draft)

    def speculation(self) -> dict[str, Any]:
        """See `Batch.speculation`."""
        return self._batch.speculation()

    def resident_bytes(self) -> int:
        return psutil.Process().memory_info().rss + sum(other.resident_bytes() for other in self._others)

    def _all(self, do: str, said: dict[str, Any], mine: Callable[[], Any], tables: Sequence[pa.Table] = ()) -> Any:
        """Have every rank do it at the same time, this one by `mine`; this one's result once all are done."""
        return self._all_answers(do, said, mine, tables)[0]

    def _all_answers(
        self, do: str, said: dict[str, Any], mine: Callable[[], Any], tables: Sequence[pa.Table] = ()
    ) -> tuple[Any, list[dict[str, Any]]]:
        with self._together():
            for other in self._others:
                other.weights.send({"do": do, **said}, tables)
        try:
            result = mine()
        finally:
            with self._together():
                answers = self._answers(WORK_DEADLINE)
        for other, answer in zip(self._others, answers, strict=True):
            if "error" in answer:
                kind = _KNOWN.get(answer["error"], EngineError)
                raise kind(f"rank {other.rank}: {answer['error']}: {answer['message']}")
        return result, answers

    def _answers(self, deadline: float) -> list[dict[str, Any]]:
        return [other.answer(deadline) for other in self._others]

    def _gather(self, names: list[str], mine: dict[str, Tensor]) -> list[Tensor]:
        """The complete tensors, of which every rank has read back its pieces."""
        parts: dict[str, list[Tensor]] = {name: [mine[name]] for name in names}
        with self._together():
            for other in self._others:
                other.weights.send({"do": "send", "names": names})
                for name in names:
                    piece, shape = self._layout[other.rank][name], list(self._shapes[name])
                    shape[piece.dim] = piece.stop - piece.start
                    slab = torch.empty(shape, dtype=mine[name].dtype)
                    self._slabs.receive(slab.view(-1).view(torch.uint8), other.rank)
                    parts[name].append(slab)
            self._answers(PEER_DEADLINE)
        return [torch.cat(parts[name], dim=self._layout[0][name].dim) for name in names]

    def _batches(self, names: list[str], tensors: dict[str, Tensor]) -> Iterator[list[str]]:
        batch: list[str] = []
        held = 0
        for name in names:
            size = tensors[name].nbytes * self._size
            if batch and held + size > BATCH_BYTES:
                yield batch
                batch, held = [], 0
            batch.append(name)
            held += size
        if batch:
            yield batch

    def _tell_steps(self, message: dict[str, Any]) -> None:
        with self._together():
            for other in self._others:
                other.steps.send(message)

    def _drawn(self) -> list[str | None]:
        with self._together():
            return [other.steps.receive(PEER_DEADLINE)[0]["drawn"] for other in self._others]

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Whatever breaks an exchange off leaves the others waiting in it, so it ends them."""
        try:
            yield
        except Exception as err:
            raise self._lose(err) from err
        except BaseException:
            self._lose(None)
            raise

    def _lose(self, err: BaseException | None) -> EngineError:
        """End all other ranks, and say why from now on."""
        with self._losing:
            if not self._lost:
                dead = [other for other in self._others if other.ended()] or self._others
                account = "; ".join(other.account() for other in dead)
                cause = f" ({type(err).__name__}: {str(err).splitlines()[0]})" if err and str(err) else ""
                self._lost = f"the engine lost its other ranks{cause} and serves no more; start it again. {account}"
                self.close()
            return EngineError(self._lost)


def _same_whole(rank: int, mine: dict[str, str], theirs: dict[str, str]) -> None:
    odd = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
    if odd:
        raise WeightsError(
            f"ranks 0 and {rank} hold different copies of {odd[0]} ({len(odd)} in all), so memory was overwritten; load "
            "the weights again"
        )


def _end_all(others: list[RankProcess]) -> None:
    for other in others:
        other.end()
