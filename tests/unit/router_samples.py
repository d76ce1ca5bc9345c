"""Engines of a few lines in this process, for the tests of the router."""

from __future__ import annotations

import threading
import time
from typing import Any

from router_lake import DEADLINE, drawn

from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.resources.actors import ActorLost


class Drawer:
    """Draws at once, or when `gate` is open; dies when told to, and if `blind` its calls only notice at the gate; `lies`
    about what it holds."""

    def __init__(self, name: str, lies: bool = False):
        self.name, self.lies, self.dead, self.blind = name, lies, False, False
        self.version = -1
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, Any]] = []
        """Everything asked of it, in order: what for, and at which version."""
        self.asked: list[list[str]] = []

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        self._note("generate")
        self.asked.append([request.request_id for request in requests])
        end = time.monotonic() + DEADLINE
        while not self.gate.wait(0.005):
            if not self.blind:
                self._alive("generate")
            assert time.monotonic() < end, "nobody opened the gate"
        self._alive("generate")
        return [drawn(request, self.version) for request in requests]

    def abort(self, request_ids: list[str] | None = None) -> int:
        self._alive("abort")
        self.gate.set()
        return 1

    def load_anchor(self, path: str, version: int, chain: list, fence: int, digests: dict[str, str]) -> Attestation:
        self._note("load_anchor")
        self.version = version
        return self.attest()

    def attest(self) -> Attestation:
        self._note("attest")
        version = self.version + 100 * self.lies
        return Attestation(self.name, self.version, f"weights {version}", {"w": f"tensor {version}"})

    def health(self) -> dict[str, Any]:
        self._note("health")
        return {"version": self.version, "engine": self.name}

    def said(self, what: str) -> list[Any]:
        return [version for name, version in self.calls if name == what]

    def _note(self, what: str) -> None:
        self.calls.append((what, self.version))
        self._alive(what)

    def _alive(self, what: str) -> None:
        if self.dead:
            raise ActorLost(f"{self.name} was lost in {what}")
