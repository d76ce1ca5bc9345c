"""A lake of one table, whose versions are words, and requests, for the tests of the router."""

from __future__ import annotations

import time
from typing import Any

import pyarrow as pa

from furlong.ops.protocols import GenerateRequest, Sample

DEADLINE = 60.0


def request(name: str, seed: int = 3, prompt: tuple[int, ...] = (1,)) -> GenerateRequest:
    return GenerateRequest(name, prompt, seed, 4, 1.0)


def drawn(request: GenerateRequest, version: int) -> Sample:
    """A function of the request alone, as a reply is; the version shows who drew it."""
    tokens = tuple((request.seed * 31 + t) % 97 for t in range(4))
    return Sample(request.request_id, tokens, (-1.0,) * 4, (-1.0,) * 4, ((version, 0, 4),), "stop", 0.0)


def until(holds: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not holds():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.005)


class Versions:
    """Implements as much of `LakeLike` as a fleet reads; every version is a complete copy."""

    uri = "nowhere"

    def __init__(self, count: int):
        self.live = set(range(count))

    def read(self, table: str, where: dict[str, Any] | None = None, columns: list[str] | None = None) -> pa.Table:
        assert table == "weight_versions"
        asked = where["version"] if isinstance(where["version"], list) else [where["version"]]
        rows = [self.row(version) for version in asked if version in self.live]
        return pa.Table.from_pylist([{name: row[name] for name in columns or row} for row in rows])

    @staticmethod
    def row(version: int) -> dict[str, Any]:
        tensors = [{"name": "w", "digest": f"tensor {version}"}]
        return {"run": "r", "version": version, "state": "live", "kind": "anchor", "anchor": "base", "tensors": tensors,
                "step": version, "attempt": 1, "delta_bytes": 1, "full_bytes": 9,
                "parent": version - 1 if version else None, "digest": f"weights {version}"}  # fmt: skip
