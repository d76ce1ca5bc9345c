"""A gloo process group of one purpose, beside any others in this process, in which every wait has a deadline."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor


class PeerLost(RuntimeError):
    """A peer of the group ended, or did not answer within the deadline."""


def open_store(host: str = "127.0.0.1") -> tuple[dist.TCPStore, str]:
    """A rendezvous store in this process on a free port, and its address; it ends with the object."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, f"{host}:{port}"


class Group:
    """Ranks 0 to `size` - 1 under one `name` at one store. Not safe for two threads; make a group for each."""

    def __init__(self, address: str, name: str, rank: int, size: int, deadline: float):
        """
        Args:
            address: from `open_store`.
            name: of this group; two groups at one store need different ones.
            deadline: seconds for the rendezvous and for each later operation.
        Raises:
            PeerLost: a peer did not appear in time.
        """
        self.name, self.rank, self.size, self.deadline = name, rank, size, deadline
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=deadline)
        try:
            self._store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
            self._group = dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, limit)
        except (RuntimeError, ValueError) as err:
            raise self._lost("meeting the others", err) from err

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections, which ends what the peers are waiting for with PeerLost."""
        held, self._group = [self._group], None
        # The group ends with its last reference, and then waits for an operation that was given up on: not here.
        closing = threading.Thread(target=held.clear, daemon=True)
        closing.start()
        closing.join(1.0)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Fill `tensor` (contiguous) with the root's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._wait(f"a broadcast from rank {root}", lambda: self._group.broadcast([tensor], options))

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place."""
        self._wait("a sum over all ranks", lambda: self._group.allreduce([tensor]))

    def all_gather(self, parts: Sequence[Tensor], mine: Tensor) -> None:
        """Fill `parts`, one contiguous tensor per rank, all of one shape."""
        self._wait("a gather", lambda: self._group.allgather([list(parts)], [mine]))

    def send(self, tensor: Tensor, to: int) -> None:
        self._wait(f"a send to rank {to}", lambda: self._group.send([tensor], to, 0))

    def receive(self, tensor: Tensor, source: int) -> None:
        self._wait(f"a send from rank {source}", lambda: self._group.recv([tensor], source, 0))

    def _wait(self, what: str, begin) -> None:
        try:
            begin().wait(timedelta(seconds=self.deadline))
        except RuntimeError as err:
            raise self._lost(f"in {what}", err) from err

    def _lost(self, what: str, err: Exception) -> PeerLost:
        return PeerLost(
            f"group {self.name}, rank {self.rank} of {self.size}: {what} failed within {self.deadline:g} s "
            f"({str(err).splitlines()[0][:200]}); a peer ended or is too slow: see its log"
        )
