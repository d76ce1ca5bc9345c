"""Detached, named actors: found again by any later process, replaced when their code is old, mourned in plain words.

An actor's name is `furlong:<role>:<run>:<code hash>`. It is never restarted by Ray, which would silently reset its
state: whoever starts one brings it to a known state from the lake.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from furlong.ops.spec import Placement
from furlong.resources.actor_host import BANNER, ActorHost, Failure, recipe
from furlong.resources.cluster import ClusterError, cluster_lives, ensure_cluster, namespace
from furlong.resources.processes import last_lines
from furlong.resources.run_lock import is_driven

CONTROL_THREADS = 4
"""Threads of an actor that answer while its work goes on."""
SHOWN_LINES = 20
GONE_SECONDS = 10.0
"""How long an ended actor's name may stay taken."""


class ActorLost(RuntimeError):
    """An actor's process ended, or cannot be reached; the message has the last lines it wrote."""


class ActorTimeout(RuntimeError):
    """A call did not return within its deadline; the actor was ended, as nobody knows what it was at."""


@dataclass(frozen=True)
class ActorName:
    """What an actor's name says."""

    role: str
    run: str
    code: str

    def __str__(self) -> str:
        return f"furlong:{self.role}:{self.run}:{self.code}"

    @classmethod
    def parse(cls, name: str) -> ActorName | None:
        """None for an actor that is not one of ours."""
        prefix, _, rest = name.partition(":")
        parts = rest.split(":")
        if prefix != "furlong" or len(parts) < 3:
            return None
        return cls(parts[0], ":".join(parts[1:-1]), parts[-1])


@dataclass(frozen=True)
class Actor:
    """A live actor as its driver sees it."""

    handle: Any
    name: ActorName
    log: Path
    placement: Placement


@cache
def code_hash() -> str:
    """12 hex digits over Furlong's own source files, as they were when this process first asked."""
    home = Path(__file__).resolve().parent.parent
    digest = hashlib.blake2b(digest_size=6)
    for folder in ("kernels", "ops", "resources"):
        for path in sorted((home / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(home)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def live_actors(placement: Placement) -> list[ActorName]:
    """All actors of this root; the process must be connected."""
    import ray

    rows = ray.util.list_named_actors(all_namespaces=True)
    names = [ActorName.parse(row["name"]) for row in rows if row["namespace"] == namespace(placement)]
    return [name for name in names if name]


def end_actors(placement: Placement, keep: Callable[[ActorName], bool]) -> list[str]:
    """End the actors that `keep` does not want, wait until their names are free, and return those names."""
    import ray

    ended = [str(name) for name in live_actors(placement) if not keep(name)]
    for name in ended:
        try:
            ray.kill(ray.get_actor(name, namespace(placement)))
        except ValueError:
            continue  # it ended between the look and the kill
    until = time.monotonic() + GONE_SECONDS
    while left := {str(name) for name in live_actors(placement)} & set(ended):
        if time.monotonic() > until:
            raise ClusterError(f"Ray did not end {sorted(left)} within {GONE_SECONDS:g} s; run `make down`, try again")
        time.sleep(0.05)
    return ended


def keep_beside(role: str, run: str, placement: Placement) -> Callable[[ActorName], bool]:
    """Which actors may live on when `run` is about to use its own of this role.

    Other roles stay. Of this role, the run's own stays if its code is today's, and another run's stays while that run
    is driven, whatever its code. The rest would hold gigabytes for nobody, or answer with old code.
    """

    def keep(name: ActorName) -> bool:
        if name.role != role:
            return True
        if name.run == run:
            return name.code == code_hash()
        return is_driven(placement.folder, name.run)

    return keep


def find_or_start(
    role: str, run: str, factory: str, args: tuple[Any, ...], placement: Placement, concurrency: int = 1
) -> Actor:
    """The actor of this role and run: the one that lives, else a new one holding `factory(*args)`.

    The caller drives the run (see `run_lock`). A found actor keeps the object it has, in whatever state it is.

    Args:
        role: e.g. `engine`.
        run: the run's name.
        factory: `module:name` of the object's class; only the actor imports it.
        args: the factory's arguments, plain data; an actor whose object was made from others is replaced.
        placement: threads, GPUs and deadlines; an actor started with other threads or GPUs is replaced.
        concurrency: calls to the object that may be under way at once, besides those with `control=True`.
    Raises:
        ClusterError: Ray is unreachable, or lacks the GPUs.
        ActorLost, ActorTimeout: it died, or took longer than `placement.start_deadline`.
        Exception: whatever the factory raised.
    """
    ensure_cluster(placement)
    until = time.monotonic() + placement.start_deadline
    end_actors(placement, keep_beside(role, run, placement))
    _require_gpus(placement)
    actor = _named(ActorName(role, run, code_hash()), placement, concurrency)
    wanted = {"threads": placement.threads, "gpus": placement.gpus}
    try:
        found = _ask(actor, "describe", (), "control", until)
        stale = found != wanted | {"made": found["made"] and recipe(factory, args)}
    except ActorLost:
        stale = True  # found by name in the moment of its death
    if stale:
        end_actors(placement, lambda name: name != actor.name)
        actor = _named(actor.name, placement, concurrency)
    try:
        _unwrap(actor, "start", _ask(actor, "hold", (factory, args), "work", until))
    except BaseException:
        _end(actor)
        raise
    return actor


def call(actor: Actor, method: str, *args: Any, deadline: float | None = None, control: bool = False) -> Any:
    """Call a method of the actor's object and wait for its result; Ctrl-C works meanwhile.

    Args:
        actor: from `find_or_start`.
        method: its name.
        args: plain data, Arrow tables; large buffers are not copied twice.
        deadline: seconds; by default `placement.stage_deadline`.
        control: answer even while as many calls as the actor takes at once are under way.
    Raises:
        ActorLost: the process ended or cannot be reached.
        ActorTimeout: no result within the deadline.
        Exception: what the method raised, of the same type, with the actor's traceback as a note; RuntimeError with
            type and message where the exception itself cannot be sent.
    """
    until = time.monotonic() + (deadline or actor.placement.stage_deadline)
    result = _ask(actor, "perform", (method, args), "control" if control else "work", until)
    return _unwrap(actor, method, result)


def _named(name: ActorName, placement: Placement, concurrency: int) -> Actor:
    import ray

    log = placement.folder / "logs" / f"{name.role}-{name.run}.log"
    options = {
        "name": str(name), "namespace": namespace(placement), "lifetime": "detached", "get_if_exists": True,
        "max_restarts": 0, "max_task_retries": 0, "num_cpus": 1, "num_gpus": placement.gpus,
    }  # fmt: skip
    groups = {"work": concurrency, "control": CONTROL_THREADS}
    handle = (
        ray.remote(concurrency_groups=groups)(ActorHost)
        .options(**options)
        .remote(name.role, name.run, str(log), placement.threads, placement.gpus)
    )
    return Actor(handle, name, log, placement)


def _require_gpus(placement: Placement) -> None:
    import ray

    there = ray.cluster_resources().get("GPU", 0)
    if placement.gpus > there:
        raise ClusterError(f"FURLONG_GPUS={placement.gpus}, but Ray has {there:g} GPUs; set it to {there:g} or less")


def _ask(actor: Actor, method: str, args: tuple[Any, ...], group: str, until: float) -> Any:
    import ray

    begin, what = time.monotonic(), args[0] if method == "perform" else "start"
    ref = getattr(actor.handle, method).options(concurrency_group=group).remote(*args)
    try:
        # Short waits: a signal is seen between two of them, and so is a head that went away.
        while not ray.wait([ref], timeout=1.0)[0]:
            if time.monotonic() > until:
                _end(actor)
                raise ActorTimeout(_overrun(actor, what, until - begin))
            if not cluster_lives(actor.placement):
                raise ActorLost(_obituary(actor, what, "Ray's head has ended"))
        return ray.get(ref)
    except SystemError as err:
        if isinstance(err.__cause__, Exception | None):
            raise
        # A signal handler raised within Ray's compiled code, which says so in its own way.
        raise err.__cause__ from None
    except ray.exceptions.RayTaskError as err:
        raise RuntimeError(f"{actor.name.role}.{what} could not be called: {err.cause!r}; see {actor.log}") from err
    except ray.exceptions.RayError as err:
        _end(actor)
        raise ActorLost(_obituary(actor, what, _cause(actor, err))) from None


def _unwrap(actor: Actor, method: str, result: Any) -> Any:
    if not isinstance(result, Failure):
        return result
    error = result.error or RuntimeError(result.summary)
    error.add_note(f"raised in {actor.name.role}.{method} of run {actor.name.run}:\n{result.traceback.rstrip()}")
    raise error


def _end(actor: Actor) -> None:
    """End an actor whose state nobody knows, so that the next call for it starts afresh."""
    import ray

    if cluster_lives(actor.placement):
        ray.kill(actor.handle)


def _cause(actor: Actor, err: Exception) -> str:
    if not cluster_lives(actor.placement):
        return "Ray's head has ended"
    text = " ".join(str(err).split())
    return f"{type(err).__name__}: {text.rpartition('Worker exit detail: ')[2] or text}"[:400]


def _obituary(actor: Actor, method: str, cause: str) -> str:
    return (
        f"the {actor.name.role} of run {actor.name.run} was lost in {method}: {cause}. Run the same command again: it "
        f"continues from the last committed step. Last lines of {actor.log}:\n"
        f"{last_lines(actor.log, SHOWN_LINES, BANNER)}"
    )


def _overrun(actor: Actor, method: str, seconds: float) -> str:
    import ray

    setting, slow = "FURLONG_STAGE_DEADLINE", "it was only slow"
    if method == "start":
        free = {kind: ray.available_resources().get(kind, 0) for kind in ("CPU", "GPU")}
        setting, slow = (
            "FURLONG_START_DEADLINE",
            f"it was only slow, not waiting for one of Ray's free resources {free}",
        )
    return (
        f"{actor.name.role}.{method} of run {actor.name.run} did not return within {seconds:.0f} s, and its process "
        f"was ended; raise {setting} if {slow}, and run the same command again. Last lines of {actor.log}:\n"
        f"{last_lines(actor.log, SHOWN_LINES, BANNER)}"
    )
