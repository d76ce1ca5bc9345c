"""The engine in its actor, behind the same protocol as one in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from furlong.ops.draft.settings import draft_of
from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.ops.spec import Placement, RunSpec, SpecError
from furlong.resources.actors import Actor, ActorLost, ActorName, ActorTimeout, call, end_actors, find_or_start
from furlong.resources.cluster import ensure_cluster
from furlong.resources.replies import GONE, Replies
from furlong.resources.run_lock import is_driven

if TYPE_CHECKING:
    import pyarrow as pa

    from furlong.ops.weights.layout import Offer, Piece
    from furlong.resources.models import ModelFolder

CONCURRENCY = 4
"""Calls under way at once: a version can be staged and attested while replies are asked for."""
CONTROL_DEADLINE = 60.0
"""Seconds for what an engine answers between two decode steps."""
HEALTH_DEADLINE = 30.0
"""Seconds for an engine to say that it lives, which it does while it decodes."""
GRACE = 60.0
"""Seconds that a reply may come after its own deadline, at which the engine was to end it."""
TEACHER = "teacher"
"""What the engine of a teacher (`resources.teacher`) is called among the actors; it is none of the run's engines."""


def start_engine(run: str, spec: RunSpec, model: ModelFolder, placement: Placement, number: int) -> RemoteEngine:
    """Engine `number` of the run, found or started with the base model as version 0.

    A found engine serves whatever version it last activated and goes on with the replies that a dead driver had asked
    for: whoever asks for the same gets them. One that is broken inside, such as a split one that lost a rank, is
    replaced.

    Raises:
        SpecError: placement and spec do not go together.
        Others: as `find_or_start`.
    """
    factory, args = _recipe(spec, model, placement, number)

    def find() -> RemoteEngine:
        return RemoteEngine(find_or_start(role(number), run, factory, args, placement, CONCURRENCY))

    engine = find()
    try:
        engine.resume()
        engine.health()
    except RuntimeError as err:
        print(f"engine {number} of run {run} is replaced: {err}", flush=True)
        engine.end()
        engine = find()
    return engine


def engine_count(placement: Placement) -> int:
    """How many engines a run has there: one for each address, or as many as are to be started."""
    return len(_urls(placement)) or placement.engines


def end_superfluous(run: str, placement: Placement) -> None:
    """End the engines that `placement` has no number for, and those of runs that nobody drives, teachers' too; they would
    hold copies of the weights for nobody."""
    ensure_cluster(placement)
    wanted = {role(number) for number in range(engine_count(placement))}

    def keep(name: ActorName) -> bool:
        if not name.role.startswith((role(0), TEACHER)):
            return True
        return name.role in wanted | {TEACHER} if name.run == run else is_driven(placement.folder, name.run)

    end_actors(placement, keep)


def role(number: int) -> str:
    """What an engine is called among the actors: `engine`, `engine-1`, `engine-2`, ..."""
    return f"engine-{number}" if number else "engine"


def _urls(placement: Placement) -> list[str]:
    return [url.strip() for url in placement.engine_urls.split(",") if url.strip()]


def _recipe(spec: RunSpec, model: ModelFolder, placement: Placement, number: int) -> tuple[str, tuple[Any, ...]]:
    """Class and arguments of an engine."""
    urls, tp = _urls(placement), placement.engine_tp
    args = (str(model.path), 0, spec.model.dtype, placement.threads, tuple(model.stop_token_ids))
    if spec.engine == "local":
        if urls:
            raise SpecError(
                "FURLONG_ENGINE_URLS is set, but the run's engine is `local`, which has no address; unset it, or begin a "
                "run with engine: sglang"
            )
        return "furlong.resources.engines.local:LocalEngine", (*args, tp, True, draft_of(spec))
    if tp > 1:
        raise SpecError(
            f"FURLONG_ENGINE_TP={tp} splits the embedded engine; an SGLang server is split by its own --tp: unset it, and "
            "give the address of such a server in FURLONG_ENGINE_URLS"
        )
    if len(set(urls)) < len(urls):
        raise SpecError(
            f"FURLONG_ENGINE_URLS={placement.engine_urls} names one server twice, and two engines cannot both hold its "
            "weights; name each once"
        )
    return "furlong.resources.engines.sglang:SGLangEngine", (
        *args,
        urls[number] if urls else "",
        "auto",
        draft_of(spec),
    )


class RemoteEngine:
    """Implements `ops.protocols.Engine`; methods raise ActorLost and ActorTimeout besides the engine's errors.

    Once one of them has raised either, so has every `generate` under way.
    """

    def __init__(self, actor: Actor):
        self.actor = actor
        self._replies = Replies(self.submit, self.collect, lambda ids: self._control("abort", ids))

    def submit(self, requests: list[GenerateRequest]) -> None:
        self._call("submit", requests, deadline=CONTROL_DEADLINE)

    def collect(self, seconds: float, taken: list[str]) -> list[Sample]:
        return self._call("collect", seconds, taken, deadline=seconds + CONTROL_DEADLINE, control=True)

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """See `Engine.generate`; an interrupt aborts these requests.

        Raises:
            ActorTimeout: a reply has not come `GRACE` seconds after its own deadline, or, without one, within
                `placement.stage_deadline`; the actor was ended.
        """
        placement, own = self.actor.placement, [request.deadline for request in requests]
        deadline = max(own) + GRACE if own and min(own) > 0 else placement.stage_deadline
        try:
            return self._replies.generate(requests, deadline)
        except TimeoutError as err:
            raise self._overrun(requests, deadline) from err

    def score(self, rows: list[tuple[tuple[int, ...], int]], temperature: float) -> list[list[float]]:
        return self._call("score", rows, temperature)

    def abort(self, request_ids: list[str] | None = None) -> int:
        return self._replies.abort(request_ids)

    def pause(self, lease: float) -> None:
        self._control("pause", lease)

    def resume(self) -> None:
        self._control("resume")

    def layout(self) -> list[dict[str, Piece]]:
        return self._control("layout")

    def load_anchor(
        self, path: str, version: int, chain: list[pa.Table], fence: int, digests: dict[str, str] | None = None
    ) -> Attestation:
        return self._call("load_anchor", path, version, chain, fence, digests)

    def stage(self, version: int, base_version: int, deltas: pa.Table, fence: int) -> Attestation:
        return self._call("stage", version, base_version, deltas, fence)

    def receive(self, offer: Offer, engine: int) -> Attestation:
        return self._call("receive", offer, engine)

    def activate(self, version: int, fence: int, inflight: str = "in_place") -> None:
        self._control("activate", version, fence, inflight)

    def revert(self, version: int, fence: int) -> None:
        self._control("revert", version, fence)

    def attest(self) -> Attestation:
        return self._call("attest")

    def health(self) -> dict[str, Any]:
        return self._call("health", deadline=HEALTH_DEADLINE, control=True)

    def close(self) -> None:
        """Whoever waits for replies here gets ActorLost, and no thread is left; the actor goes on, and whoever asks for the
        same replies later, here or in another process, gets them."""
        self._replies.fail(
            ActorLost(f"nobody waits for the {self.actor.name.role} of run {self.actor.name.run} any more")
        )

    def end(self) -> None:
        """End the engine's process, whatever it is at."""
        self._replies.fail(ActorLost(f"the {self.actor.name.role} of run {self.actor.name.run} is being ended"))
        end_actors(self.actor.placement, lambda name: name != self.actor.name)

    def _control(self, method: str, *args: Any) -> Any:
        return self._call(method, *args, deadline=CONTROL_DEADLINE, control=True)

    def _call(self, method: str, *args: Any, deadline: float | None = None, control: bool = False) -> Any:
        try:
            return call(self.actor, method, *args, deadline=deadline, control=control)
        except GONE as err:
            self._replies.fail(err)
            raise

    def _overrun(self, requests: list[GenerateRequest], deadline: float) -> ActorTimeout:
        self.end()
        return ActorTimeout(
            f"the {self.actor.name.role} of run {self.actor.name.run} answers, but gave no {requests[0].request_id} "
            f"({len(requests)} in this call) within {deadline:.0f} s, and was ended; see {self.actor.log}; raise "
            "FURLONG_REPLY_DEADLINE or FURLONG_STAGE_DEADLINE if it was only slow"
        )
