"""Small objects for actors to hold; actors import this module by name."""

from __future__ import annotations

import os
import sys
import threading
import time

import pyarrow as pa


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


class SlowEngine:
    """Draws replies until it is told to stop."""

    def __init__(self):
        self.stopped, self.busy = threading.Event(), threading.Event()

    def generate(self, requests: list) -> list[str]:
        self.stopped.clear()
        self.busy.set()
        self.stopped.wait(30)
        self.busy.clear()
        return [request.request_id for request in requests]

    def abort(self, request_ids: list[str] | None) -> int:
        self.stopped.set()
        return 1

    def health(self) -> dict:
        return {"busy": self.busy.is_set()}
