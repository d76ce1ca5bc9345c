"""Small objects for actors to hold; actors import this module by name."""

from __future__ import annotations

import os
import sys
import threading
import time

import pyarrow as pa

from furlong.ops.protocols import Attestation, Sample


class Unsendable(Exception):
    """Cannot be rebuilt from its pickled form."""

    def __init__(self, one: int, two: int):
        super().__init__(f"{one}{two}")


class Counter:
    """Counts, waits, fails and dies on request."""

    def __init__(self, start: int = 0):
        if start < 0:
            raise ValueError(f"start={start} is negative; give 0 or more")
        self.value = start
        self.go_on = threading.Event()

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    def where(self) -> dict:
        torch_before = "torch" in sys.modules
        import torch

        return {
            "pid": os.getpid(),
            "torch_before": torch_before,
            "torch_threads": torch.get_num_threads(),
            "omp": os.environ["OMP_NUM_THREADS"],
            "wait": os.environ["OMP_WAIT_POLICY"],
            "executable": sys.executable,
        }

    def bytes_of(self, table: pa.Table) -> int:
        return table.nbytes

    def fail(self, how: str) -> None:
        if how == "unsendable":
            raise Unsendable(1, 2)
        raise LookupError(f"no {how} in store")

    def sleep(self, seconds: float) -> str:
        return "released" if self.go_on.wait(seconds) else "slept"

    def release(self) -> None:
        self.go_on.set()

    def crash(self, how: str) -> None:
        print("about to go down", file=sys.stderr)
        if how == "exit":
            os._exit(3)
        if how == "segfault":
            import ctypes

            ctypes.string_at(0)
        time.sleep(60)


class PacedEngine:
    """Draws a token of every reply each `pace` seconds, each a function of seed and position; proves what it holds, or
    something else while a file `lies` is in its folder."""

    def __init__(self, folder: str, pace: float):
        self.folder, self.pace, self.version = folder, pace, 0
        self.running, self.finished, self.aborted = {}, {}, set()
        self.changed = threading.Condition()
        threading.Thread(target=self._draw, daemon=True).start()

    def submit(self, requests: list) -> None:
        if any(not request.prompt for request in requests):
            raise ValueError("a prompt is empty")
        with self.changed:
            for request in requests:
                if request.request_id not in self.finished:
                    self.running.setdefault(request.request_id, (request, []))

    def collect(self, seconds: float, taken: list[str]) -> list:
        with self.changed:
            for name in taken:
                self.finished.pop(name, None)
            self.changed.wait_for(lambda: self.finished, seconds)
            return list(self.finished.values())

    def abort(self, request_ids: list[str] | None = None) -> int:
        with self.changed:
            ending = self.running.keys() if request_ids is None else self.running.keys() & set(request_ids)
            self.aborted |= set(ending)
            return len(ending)

    def resume(self) -> None:
        """It is never paused."""

    def load_anchor(self, path: str, version: int, chain: list, fence: int, digests: dict | None = None) -> Attestation:
        self.version = version
        return self.attest()

    def attest(self) -> Attestation:
        shown = self.version + 100 * os.path.exists(f"{self.folder}/lies")
        return Attestation("paced", self.version, f"weights {shown}", {"w": f"tensor {shown}"})

    def health(self) -> dict:
        return {"version": self.version, "engine": "paced", "pid": os.getpid(), "running": len(self.running)}

    def _draw(self) -> None:
        while True:
            time.sleep(self.pace)
            with self.changed:
                for name, (request, tokens) in list(self.running.items()):
                    if name not in self.aborted:
                        tokens.append((request.seed * 31 + len(tokens)) % 97)
                    if len(tokens) == request.max_new_tokens or name in self.aborted:
                        self.finished[name] = self._sample(name, tokens)
                        del self.running[name]
                        self.changed.notify_all()

    def _sample(self, name: str, tokens: list[int]) -> Sample:
        ones = (-1.0,) * len(tokens)
        reason = "abort" if name in self.aborted else "stop"
        return Sample(name, tuple(tokens), ones, ones, ((self.version, 0, len(tokens)),), reason, 0.0)
