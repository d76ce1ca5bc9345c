"""The engine in its actor, behind the same protocol as one in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.ops.spec import Placement, RunSpec
from furlong.resources.actors import Actor, call, find_or_start

if TYPE_CHECKING:
    import pyarrow as pa

    from furlong.resources.models import ModelFolder

CONCURRENCY = 4
"""Calls under way at once: a version can be staged and attested while replies are drawn."""
CONTROL_DEADLINE = 60.0
"""Seconds for what an engine answers between two decode steps."""


def start_engine(run: str, spec: RunSpec, model: ModelFolder, placement: Placement) -> RemoteEngine:
    """The run's engine, found or started with the base model as version 0.

    A found engine serves whatever version it last activated; replies that a dead driver had asked for are ended.
    """
    args = (str(model.path), 0, spec.model.dtype, placement.threads, tuple(model.stop_token_ids))
    factory = "furlong.resources.engines.local:LocalEngine"
    engine = RemoteEngine(find_or_start("engine", run, factory, args, placement, CONCURRENCY))
    engine.resume()
    engine.abort()
    return engine


class RemoteEngine:
    """Implements `ops.protocols.Engine`; methods raise ActorLost and ActorTimeout besides the engine's errors."""

    def __init__(self, actor: Actor):
        self.actor = actor

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        try:
            return call(self.actor, "generate", requests)
        except KeyboardInterrupt:
            self.abort()
            raise

    def abort(self, request_ids: list[str] | None = None) -> int:
        return self._control("abort", request_ids)

    def pause(self) -> None:
        self._control("pause")

    def resume(self) -> None:
        self._control("resume")

    def load_anchor(self, folder: str, version: int) -> Attestation:
        return call(self.actor, "load_anchor", folder, version)

    def stage(self, version: int, base_version: int, deltas: pa.Table) -> Attestation:
        return call(self.actor, "stage", version, base_version, deltas)

    def activate(self, version: int) -> None:
        self._control("activate", version)

    def attest(self) -> Attestation:
        return call(self.actor, "attest")

    def health(self) -> dict[str, Any]:
        return self._control("health")

    def _control(self, method: str, *args: Any) -> Any:
        return call(self.actor, method, *args, deadline=CONTROL_DEADLINE, control=True)
