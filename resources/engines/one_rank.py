"""All weights of an engine in this one process: what `tp_leader.TpRanks` is for several."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import psutil
import pyarrow as pa
import torch

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.batch import Batch, Ended, Turn
from furlong.ops.policy.live import Live
from furlong.ops.policy.shard import pieces
from furlong.ops.weights.digest import tensor_digest
from furlong.ops.weights.layout import Offer, Piece
from furlong.resources.engines.rank import Rank


class OneRank:
    """Makes weights versions, digests them, and generates with them."""

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype, threads: int, invariant: bool,
        draft: DraftSettings | None = None,
    ):  # fmt: skip
        self._architecture = architecture
        self._threads = threads
        self._draft = draft
        self._rank = Rank(architecture, dtype, draft=draft)
        self._serials = count(1)
        self._invariant = invariant
        self.clear()

    def check(self) -> None:
        """Nothing here can be lost but the process itself."""

    def layout(self) -> list[dict[str, Piece]]:
        """For each rank, its pieces of the policy's tensors."""
        return [pieces(self._architecture, 0, 1)]

    def keep(self, live: Live) -> None:
        """Only this version is still referred to."""
        self._rank.keep(live)

    def load(self, path: str, version: int, chain: Sequence[pa.Table]) -> Live:
        return self._rank.load(path, version, chain, next(self._serials))

    def stage(self, version: int, deltas: pa.Table, base: Live) -> Live:
        return self._rank.stage(version, deltas, base, next(self._serials))

    def receive(self, offer: Offer, engine: int, base: Live) -> Live:
        return self._rank.receive(offer, engine, base, next(self._serials))

    def digests(self, live: Live) -> dict[str, str]:
        """Digest of every tensor, read back from the memory that the forward pass reads."""
        found: dict[str, str] = {}
        with ThreadPoolExecutor(self._threads) as pool:
            for part in self._rank.served_parts(live):
                found |= dict(zip(part, pool.map(tensor_digest, part.values()), strict=True))
        return found

    @property
    def waiting(self) -> int:
        return self._batch.waiting

    def turn(self, turn: Turn, live: Live | None) -> Ended:
        """See `Batch.turn`."""
        return self._batch.turn(turn, live)

    def clear(self) -> None:
        """Begin with an empty batch."""
        self._batch = Batch(self._architecture, self._architecture, self._invariant, self._draft)

    def speculation(self) -> dict[str, Any]:
        """See `Batch.speculation`."""
        return self._batch.speculation()

    def resident_bytes(self) -> int:
        return psutil.Process().memory_info().rss

    def close(self) -> None:
        """No process to end."""
