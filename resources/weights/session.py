"""Who takes part in one transfer, and how they hear of each other's end: through the publisher's store."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from furlong.ops.weights.layout import Offer
from furlong.resources.weights.group import Group, PeerLost

_POLL = (0.0005, 0.01)
"""First and longest pause in seconds between two looks for a value in the store."""
_SLICE = 0.25
"""Seconds; how often a wait looks whether another party has failed."""
_GRACE = 2.0
"""Seconds that a failed party gives the others to report too, before it calls the silent ones lost."""


class TransferError(RuntimeError):
    """A transfer that did not bring its tensors; names this party, the others that reported, and the silent ones."""


def source_name(source: int) -> str:
    return f"source {source}"


def rank_name(engine: int, rank: int) -> str:
    return f"engine {engine} rank {rank}"


def parties(offer: Offer) -> list[str]:
    """Everyone in the transfer: sources, then the ranks of each engine; the index is the rank in its group."""
    ranks = [rank_name(engine, rank) for engine, count in enumerate(offer.engine_ranks) for rank in range(count)]
    return [source_name(source) for source in range(offer.sources)] + ranks


def report_failure(store: dist.Store, offer: Offer, prefix: str, err: Exception) -> None:
    """Tell everyone that the parties whose names begin with `prefix` failed, be it before they joined or by their end;
    what they reported themselves is kept."""
    reports = dist.PrefixStore(f"transfer/{offer.session}", store)
    for name in parties(offer):
        if f"{name} ".startswith(f"{prefix} "):
            reports.compare_set(f"failed/{name}", "", str(err))


class Session:
    """One party's place in a transfer; a context that reports its failure to the others and learns of theirs."""

    def __init__(self, offer: Offer, me: str, wire: str = "auto"):
        """
        Args:
            me: as in `parties`. wire: the p2p wire that a source insists on, or `auto`.
        """
        self.offer, self.me = offer, me
        self.others = [name for name in parties(offer) if name != me]
        self.cards: dict[str, dict] = {}
        self._card = {"host": host_identity(), "pid": os.getpid(), "wire": wire}

    def __enter__(self) -> Session:
        host, _, port = self.offer.address.rpartition(":")
        try:
            store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=self.offer.deadline))
        except RuntimeError as err:
            raise TransferError(f"{self._where()}: no publisher answers at {self.offer.address} ({err})") from err
        self._store = dist.PrefixStore(f"transfer/{self.offer.session}", store)
        return self

    def __exit__(self, kind: type | None, err: BaseException | None, trace: TracebackType | None) -> None:
        if err is None:
            try:
                self.set(f"done/{self.me}", b"1")
            except PeerLost as lost:
                raise TransferError(f"{self._where()}: {lost}") from lost
        elif isinstance(err, Exception):
            raise TransferError(self._account(err)) from err

    def meet(self) -> None:
        """Wait until everyone has joined, and keep their cards."""
        self.set(f"card/{self.me}", json.dumps(self._card).encode())
        for name in self.others:
            self.cards[name] = json.loads(self.wait(f"card/{name}", name, "joining"))
        self.cards[self.me] = self._card

    def all_at(self, mark: str) -> None:
        """Wait until everyone has reached `mark`."""
        self.set(f"{mark}/{self.me}", b"1")
        for name in self.others:
            self.wait(f"{mark}/{name}", name, f"reaching '{mark}'")

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def wait(self, key: str, who: str, doing: str) -> bytes:
        """The value that `who` sets for `key`.

        Raises:
            PeerLost: the deadline passed, `who` ended, another party failed, or the publisher is gone.
        """
        began = looked = time.monotonic()
        pause = _POLL[0]
        # Asking again and again: the store's own wait writes a warning whenever it ends without a value.
        while not self._ask(lambda: self._store.check([key])):
            time.sleep(pause)
            pause = min(2 * pause, _POLL[1])
            if (now := time.monotonic()) - looked > _SLICE:
                looked = now
                self._check_others(f"waiting for {who} ({doing})")
            if now - began > self.offer.deadline:
                raise PeerLost(f"{who} was not seen {doing} within {self.offer.deadline:g} s")
        return self._ask(lambda: self._store.get(key))

    @contextmanager
    def group(self, name: str, members: list[str]) -> Iterator[Group]:
        """A process group of these parties, in this order; closed at the end."""
        offer, made = self.offer, []

        def meet() -> None:
            made.append(Group(offer.address, name, members.index(self.me), len(members), offer.deadline))

        self.watched(f"meeting the group {name}", meet)
        with made[0] as group:
            yield group

    def watched(self, doing: str, call: Callable[[], object]) -> None:
        """Run a call that cannot be interrupted, but leave it when another party has failed or ended."""
        ended: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                call()
                ended.put(None)
            except Exception as err:
                ended.put(err)

        # Not waited for at exit: an operation that was given up on ends with its own deadline.
        threading.Thread(target=run, daemon=True).start()
        while True:
            try:
                err = ended.get(timeout=_SLICE)
            except queue.Empty:
                self._check_others(doing)
                continue
            if err is not None:
                raise err
            return

    def _check_others(self, doing: str) -> None:
        """Refuse to go on when another party has failed or ended, or the publisher is gone."""
        failed = [name for name in self.others if self._ask(partial(self._store.check, [f"failed/{name}"]))]
        if failed:
            raise PeerLost(f"{doing} when {failed[0]} failed")
        for name in self.others:
            if self._has_ended(name):
                raise PeerLost(f"{doing} when {name} (process {self.cards[name]['pid']}) ended")

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as err:
            raise PeerLost(f"the publisher's store is gone ({_first_line(err)})") from err

    def _has_ended(self, name: str) -> bool:
        """Whether a party is known to have ended; of one on another host, or before it joined, nothing is known."""
        card = self.cards.get(name)
        return bool(card and card["host"] and card["host"] == self._card["host"] and not is_alive(card["pid"]))

    def _where(self) -> str:
        return f"{self.me}, version {self.offer.version}, transfer {self.offer.session}"

    def _account(self, err: Exception) -> str:
        """What happened here and to the others, after giving them time to tell."""
        lines = [f"{self._where()}: {err}"]
        try:
            self._store.set(f"failed/{self.me}", str(err).encode())
            until = time.monotonic() + _GRACE
            silent = self.others
            while silent and time.monotonic() < until:
                silent = [n for n in silent if not any(self._store.check([f"{end}/{n}"]) for end in ("failed", "done"))]
                if all(self._has_ended(name) for name in silent):
                    break
                time.sleep(0.02)
            for name in self.others:
                if self._store.check([f"failed/{name}"]):
                    lines.append(f"{name} reported: {self._store.get(f'failed/{name}').decode()}")
            if silent:
                lines.append(
                    f"no sign of life from {', '.join(silent)}: ended or slower than the deadline; see its log"
                )
        except RuntimeError as gone:
            lines.append(f"the publisher's store is gone ({_first_line(gone)})")
        return "; ".join(lines)


def host_identity() -> str | None:
    """Equal for two processes that can map each other's memory: same boot, process namespace and user. None where
    the operating system has no anonymous memory files."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not hasattr(os, "memfd_create") or not boot.exists():
        return None
    return f"{boot.read_text().strip()}/{os.stat('/proc/self/ns/pid').st_ino}/{os.getuid()}"


def is_alive(pid: int) -> bool:
    """Whether a process of this host still runs; a killed one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _first_line(err: Exception) -> str:
    return str(err).splitlines()[0][:200] if str(err) else type(err).__name__
