"""The engine in its actor, behind the same protocol as one in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.ops.spec import Placement, RunSpec
from furlong.resources.actors import Actor, ActorName, call, end_actors, find_or_start
from furlong.resources.cluster import ensure_cluster
from furlong.resources.run_lock import is_driven

if TYPE_CHECKING:
    import pyarrow as pa

    from furlong.ops.weights.layout import Offer, Piece
    from furlong.resources.models import ModelFolder

CONCURRENCY = 4
"""Calls under way at once: a version can be staged and attested while replies are drawn."""
CONTROL_DEADLINE = 60.0
"""Seconds for what an engine answers between two decode steps."""


def start_engine(run: str, spec: RunSpec, model: ModelFolder, placement: Placement, number: int) -> RemoteEngine:
    """Engine `number` of the run, found or started with the base model as version 0.

    A found engine serves whatever version it last activated; replies that a dead driver had asked for are ended. One
    that is broken inside, such as a split one that lost a rank, is replaced.
    """
    tp = placement.engine_tp
    args = (str(model.path), 0, spec.model.dtype, placement.threads, tuple(model.stop_token_ids), tp)
    factory = "furlong.resources.engines.local:LocalEngine"

    def find() -> RemoteEngine:
        return RemoteEngine(find_or_start(role(number), run, factory, args, placement, CONCURRENCY))

    engine = find()
    try:
        engine.resume()
        engine.abort()
    except RuntimeError as err:
        print(f"engine {number} of run {run} is replaced: {err}", flush=True)
        engine.end()
        engine = find()
    return engine


def end_superfluous(run: str, placement: Placement) -> None:
    """End the engines that `placement` has no number for, and those of runs that nobody drives; they would hold copies of
    the weights for nobody."""
    ensure_cluster(placement)
    wanted = {role(number) for number in range(placement.engines)}

    def keep(name: ActorName) -> bool:
        if not name.role.startswith(role(0)):
            return True
        return name.role in wanted if name.run == run else is_driven(placement.folder, name.run)

    end_actors(placement, keep)


def role(number: int) -> str:
    """What an engine is called among the actors: `engine`, `engine-1`, `engine-2`, ..."""
    return f"engine-{number}" if number else "engine"


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

    def pause(self, lease: float) -> None:
        self._control("pause", lease)

    def resume(self) -> None:
        self._control("resume")

    def layout(self) -> list[dict[str, Piece]]:
        return self._control("layout")

    def load_anchor(
        self, path: str, version: int, chain: list[pa.Table], fence: int, digests: dict[str, str] | None = None
    ) -> Attestation:
        return call(self.actor, "load_anchor", path, version, chain, fence, digests)

    def stage(self, version: int, base_version: int, deltas: pa.Table, fence: int) -> Attestation:
        return call(self.actor, "stage", version, base_version, deltas, fence)

    def receive(self, offer: Offer, engine: int) -> Attestation:
        return call(self.actor, "receive", offer, engine)

    def activate(self, version: int, fence: int) -> None:
        self._control("activate", version, fence)

    def revert(self, version: int, fence: int) -> None:
        self._control("revert", version, fence)

    def attest(self) -> Attestation:
        return call(self.actor, "attest")

    def health(self) -> dict[str, Any]:
        return self._control("health")

    def end(self) -> None:
        """End the engine's process, whatever it is at."""
        end_actors(self.actor.placement, lambda name: name != self.actor.name)

    def _control(self, method: str, *args: Any) -> Any:
        return call(self.actor, method, *args, deadline=CONTROL_DEADLINE, control=True)
