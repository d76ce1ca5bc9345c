"""One further rank of a split engine, as a process that this one starts, listens to and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil

from furlong.resources.engines.tp_channel import Channel

_TAIL_BYTES = 4096
_ENDING_SECONDS = 2.0
"""How long a rank whose connection broke has until it is taken for hanging rather than ending."""


class RankProcess:
    """`weights` and `steps` lead to its two threads. It ends when this process does: its standard input closes then."""

    def __init__(self, rank: int, threads: int, deadline: float):
        """
        Args:
            rank: from 1; threads: of PyTorch.
            deadline: seconds within which it takes a message.
        """
        self.rank = rank
        # Appending, because both processes share one position in it.
        self._written = tempfile.TemporaryFile("a+b")  # noqa: SIM115
        pairs = [socket.socketpair() for _ in range(2)]
        ends = [theirs.fileno() for _, theirs in pairs]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "furlong.resources.engines.tp_rank", *map(str, ends)],
                stdin=subprocess.PIPE, stdout=self._written, stderr=self._written, pass_fds=ends,
                env=os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            )  # fmt: skip
        finally:
            for _, theirs in pairs:
                theirs.close()
        self.weights, self.steps = (Channel(ours, deadline) for ours, _ in pairs)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def answer(self, deadline: float) -> dict[str, Any]:
        """What it says to the last command about weights; ChannelLost when it says nothing."""
        return self.weights.receive(deadline)[0]

    def resident_bytes(self) -> int:
        try:
            return psutil.Process(self.pid).memory_info().rss
        except psutil.NoSuchProcess:
            return 0  # whoever asks for more than a number finds out by `ended`

    def account(self) -> str:
        """How it ended, and the last it wrote."""
        until = time.monotonic() + _ENDING_SECONDS
        while not self.ended() and time.monotonic() < until:
            time.sleep(0.01)
        code = self._process.poll()
        if code is None:
            how = "does not answer"
        else:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        size = self._written.seek(0, os.SEEK_END)
        self._written.seek(max(0, size - _TAIL_BYTES))
        said = self._written.read().decode(errors="replace").strip()
        return f"rank {self.rank} (process {self.pid}) {how}; it wrote last: {said or '(nothing)'}"

    def end(self) -> None:
        """Kill it; nothing in it needs saving. Whoever listens to a channel is told by its end, so both stay open."""
        self._process.kill()
        self._process.wait(_ENDING_SECONDS * 10)
        self._process.stdin.close()
