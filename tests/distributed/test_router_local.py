"""Real engines behind the router: a reply has the same bits whoever draws it, however often it has to be begun."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from publish_samples import make_model, update, weights
from router_lake import Versions, until

from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.ops.spec import Placement
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.resources.actor_host import BANNER
from furlong.resources.actors import end_actors
from furlong.resources.remote_engine import RemoteEngine, role, start_engine
from furlong.resources.router import Router
from furlong.resources.weights.fleet import Fleet

RUN = "real"
SPEC = SimpleNamespace(engine="local", model=SimpleNamespace(dtype="bfloat16"), draft={})
LENGTH = 60


class Published(Versions):
    """The model as version 0, and version 1 as the rows that lead there."""

    def __init__(self, folder: str):
        super().__init__(2)
        tensors = manifest(weights(folder, 0))
        digest = weights_digest({row["name"]: row["digest"] for row in tensors})
        later, self.deltas = update(folder, 1)
        whole = {"tensors": tensors, "digest": digest}
        self.rows = [self.row(0) | whole, self.row(1) | later | {"kind": "delta", "anchor": None, "parent": 0}]

    def read(self, table: str, where: dict[str, Any] | None = None, columns: list[str] | None = None) -> pa.Table:
        if table == "weight_deltas":
            return self.deltas
        asked = where["version"] if isinstance(where["version"], list) else [where["version"]]
        return pa.Table.from_pylist(
            [{name: row[name] for name in columns or row} for row in self.rows if row["version"] in asked]
        )


class Ring:
    """A router over two engines in actors."""

    def __init__(self, placement: Placement, folder: str):
        self.placement, self.folder = placement, folder
        self.tamper = False
        self.fleet = Fleet(RUN, Published(folder), folder, [self.start(n) for n in range(2)], self.replace)
        self.router = Router(self.fleet, period=0.3, patience=60.0)

    def start(self, number: int) -> RemoteEngine:
        model = SimpleNamespace(path=Path(self.folder), stop_token_ids=(7,))
        engine = start_engine(RUN, SPEC, model, self.placement, number)
        for name in ("load_anchor", "attest"):
            setattr(engine, name, self.maybe_tampered(getattr(engine, name)))
        return engine

    def maybe_tampered(self, prove: Callable[..., Attestation]) -> Callable[..., Attestation]:
        def proof(*args: Any) -> Attestation:
            honest = prove(*args)
            return dataclasses.replace(honest, digest="0" * 64) if self.tamper else honest

        return proof

    def replace(self, number: int) -> RemoteEngine:
        self.fleet.members[number].end()
        return self.start(number)

    def bring(self, version: int) -> None:
        self.router.bring(version, 1)
        until(lambda: len(self.fleet.serving()) == 2)

    def pid(self, number: int) -> int:
        """Of the newest process, by what it wrote first into its log."""
        log = (self.placement.folder / "logs" / f"{role(number)}-{RUN}.log").read_text()
        return int(re.findall(rf"^{BANNER} .* process (\d+),", log, re.MULTILINE)[-1])

    def draw(self, prefix: str) -> dict[str, Sample]:
        """Twelve groups of four, each from a thread of its own."""

        def play(group: int) -> list[Sample]:
            prompt = tuple((group * 7 + t) % 61 + 1 for t in range(5 + group))
            wanted = [GenerateRequest(f"{prefix}{group}-{n}", prompt, 100 * group + n, LENGTH, 1.0) for n in range(4)]
            return self.router.generate(wanted, f"{prefix}{group}")

        with ThreadPoolExecutor(12) as pool:
            samples = [sample for part in pool.map(play, range(12)) for sample in part]
        return {sample.request_id.removeprefix(prefix): sample for sample in samples}


@pytest.fixture
def ring(placement: Placement, tmp_path: Path) -> Iterator[Ring]:
    one = Ring(placement, make_model(tmp_path))
    yield one
    one.router.close()
    end_actors(placement, lambda name: not name.role.startswith("engine"))


def bits(samples: dict[str, Sample]) -> dict[str, tuple]:
    return {name: (s.tokens, s.logprobs, s.model_logprobs, s.finish_reason) for name, s in samples.items()}


def test_replies_are_the_same_bits_when_an_engine_is_killed_and_its_successor_proves_the_version_first(
    ring: Ring,
) -> None:
    ring.bring(0)
    base = bits(ring.draw("base"))
    ring.bring(1)
    calm = bits(ring.draw("calm"))
    assert calm != base, "the version shows"
    ring.tamper = True

    def strike() -> None:
        until(lambda: all(row["in_flight"] for row in ring.router.loads()))
        os.kill(ring.pid(0), signal.SIGKILL)

    striker = threading.Thread(target=strike)
    striker.start()
    disturbed = ring.draw("disturbed")
    striker.join()
    assert bits(disturbed) == calm
    assert {span[0] for sample in disturbed.values() for span in sample.versions} == {1}
    until(lambda: "attested 1/000000000000" in ring.router.loads()[0]["trouble"])
    assert bits(ring.draw("alone")) == calm
    assert [row["serving"] for row in ring.router.loads()] == [False, True]
    ring.tamper = False
    until(lambda: len(ring.fleet.serving()) == 2)
    assert bits(ring.draw("again")) == calm
    assert ring.router.drawn_by("again0-0").startswith("LocalEngine llama")
