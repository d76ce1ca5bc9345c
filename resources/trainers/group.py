"""A trainer of several ranks that looks like one: rank 0 lives here, the others in actors that end with this process.

Whatever goes wrong on one rank alone ends the whole group, since nobody knows what the others were at: the next `load`
or `restore` starts a fresh one.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs, StepMetrics, TrainBatch
from furlong.ops.spec import RunSpec
from furlong.resources.actor_host import BANNER, ActorHost, Failure
from furlong.resources.processes import last_lines
from furlong.resources.trainers.ranks import usable_cores

GRACE = 10.0
"""Seconds in which the other ranks are expected to raise what one has raised, or to notice that it is gone."""
END_SECONDS = 30.0
"""How long what rank 0 waits for may take to fail once its peers are being ended; Ray is slow with a process that hangs."""
SHOWN_LINES = 20


class TrainerError(RuntimeError):
    """A rank died, raised what the others did not, or did not answer; the group was ended."""


class TrainerGroup:
    """Implements `ops.protocols.Trainer`; methods raise TrainerError besides the trainer's own errors."""

    def __init__(self, spec: RunSpec, threads: int, layout: Layout, gpus: int, deadline: float, logs: Path) -> None:
        """Nothing is started before `load` or `restore`. The arguments are those of `make.make_trainer`."""
        self._spec, self._layout, self._gpus = spec, layout, gpus
        self._threads = threads or max(1, usable_cores() // layout.world)
        self._deadline, self._logs = deadline, logs
        self._team: _Team | None = None
        # One call at a time, on all ranks in the same order: a save runs beside its caller.
        self._turn = threading.Lock()

    def load(self, folder: str) -> None:
        self._all("load", folder, start=True)

    def restore(self, folder: str) -> int:
        return self._all("restore", folder, start=True)

    def logprobs(
        self,
        batch: TrainBatch,
        masks: tuple[tuple[bool, ...], ...] | None = None,
        weights: dict[str, Any] | None = None,
    ) -> list[list[float]]:
        return self._all("logprobs", batch, masks, weights)

    def step(self, batch: TrainBatch, others: OtherLogprobs) -> StepMetrics:
        return self._all("step", batch, others)

    def export(self) -> dict[str, Any]:
        return self._all("export")

    def master_digest(self) -> str:
        return self._all("master_digest")

    def save(self, folder: str) -> None:
        self._all("save", folder)

    def fingerprint(self) -> str:
        """Rank 0's; it answers while the ranks work."""
        return self._require().here.trainer.fingerprint()

    def close(self) -> None:
        """End all ranks."""
        with self._turn:
            team, self._team = self._team, None
            if team:
                team.end()

    def _require(self) -> _Team:
        if self._team is None:
            raise RuntimeError("the trainer holds no weights yet; call load(folder) or restore(folder) first")
        return self._team

    def _all(self, method: str, *args: Any, start: bool = False) -> Any:
        with self._turn:
            if self._team is None and start:
                self._team = _Team(self._spec, self._threads, self._layout, self._gpus, self._deadline, self._logs)
            try:
                return self._require().call(method, args)
            except TrainerError:
                self._team = None
                raise


@dataclass(frozen=True)
class _Fault:
    """What went wrong on one rank."""

    rank: int
    summary: str
    error: Exception | None = None
    died: bool = False


class _Team:
    """The live ranks; once it has raised TrainerError it is over."""

    def __init__(self, spec: RunSpec, threads: int, layout: Layout, gpus: int, deadline: float, logs: Path) -> None:
        import torch.distributed as dist

        from furlong.resources.trainers.rank_actor import Rank

        if dist.is_initialized():
            raise TrainerError(
                "this process belongs to a group of ranks already, maybe to one that could not be ended; end the process "
                "(`furlong down`) and run the same command again"
            )
        self._deadline, self._run, self._ended = deadline, spec.name, False
        self._logs = {rank: logs / f"trainer-{spec.name}-rank{rank}.log" for rank in range(1, layout.world)}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rank0")
        recipe = (spec.canonical(), threads, layout)
        self.here = Rank(*recipe, 0)
        self._actors = {rank: self._actor(rank, log, threads, gpus) for rank, log in self._logs.items()}
        try:
            self._join(recipe)
        except BaseException:
            self.end()
            raise

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Rank 0's result of a method that all ranks are in; an error that all raise alike leaves the group as it is."""
        import ray

        told = ray.put((method, args))
        futures = {0: self._worker.submit(self.here.lead, method, args)}
        futures |= {rank: self._ask(actor, "follow", told) for rank, actor in self._actors.items()}
        self._settle(method, futures)
        return futures[0].result()

    def end(self) -> None:
        """End the other ranks, and what this process waits for of them."""
        import ray
        import torch.distributed as dist

        if self._ended:
            return
        self._ended = True
        for actor in self._actors.values():
            ray.kill(actor)
        # Its peers are gone, so that whatever rank 0 still waits for fails; what does not, blocks the next group.
        over = self._worker.submit(lambda: None)
        if dist.is_initialized() and wait([over], timeout=END_SECONDS).done:
            self.here = None
            dist.destroy_process_group()
        self._worker.shutdown(wait=False)

    def _actor(self, rank: int, log: Path, threads: int, gpus: int) -> Any:
        import ray

        # Owned by this process and never restarted: it ends with the group and takes no state over from before.
        options = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 0, "num_gpus": gpus}
        return (
            ray.remote(ActorHost).options(**options).remote(f"trainer rank {rank}", self._run, str(log), threads, gpus)
        )

    def _join(self, recipe: tuple[Any, ...]) -> None:
        """Make the ranks, and when all are there have them meet, so that none waits for one that never started."""
        import ray

        from furlong.resources.weights.group import open_store

        factory = f"{type(self.here).__module__}:{type(self.here).__qualname__}"
        made = {rank: actor.hold.remote(factory, (*recipe, rank)).future() for rank, actor in self._actors.items()}
        self._settle("start", made)
        self._store, address = open_store(ray.util.get_node_ip_address())
        told = (address, self._deadline)
        futures = {0: self._worker.submit(self.here.join, *told)}
        futures |= {rank: self._ask(actor, "join", told) for rank, actor in self._actors.items()}
        self._settle("start", futures)

    def _ask(self, actor: Any, method: str, args: Any) -> Future:
        return actor.perform.remote(method, args).future()

    def _settle(self, method: str, futures: dict[int, Future]) -> None:
        """Wait until every rank is through.

        Raises:
            TrainerError: a rank failed alone or is not through within the deadline; the group was ended.
            Exception: what all ranks have raised alike.
        """
        until, faults, waiting = time.monotonic() + self._deadline, [], dict(futures)
        while waiting and not any(fault.died for fault in faults):
            done = wait(waiting.values(), max(0.0, until - time.monotonic()), FIRST_COMPLETED).done
            if not done:
                break
            for rank in [rank for rank, future in waiting.items() if future in done]:
                fault = _fault(rank, waiting.pop(rank))
                if fault and not faults:
                    until = min(until, time.monotonic() + GRACE)
                faults += [fault] if fault else []
        if not waiting and not faults:
            return
        alike = len(faults) == len(futures) and len({fault.summary for fault in faults}) == 1
        if alike and isinstance(faults[0].error, (ValueError, OSError)):
            raise next(fault.error for fault in sorted(faults, key=lambda fault: fault.rank))
        self.end()
        if not faults:
            raise TrainerError(self._overrun(method, sorted(waiting)))
        cause = next((fault for fault in faults if fault.died), faults[0])
        raise TrainerError(self._obituary(method, cause)) from cause.error

    def _overrun(self, method: str, waiting: list[int]) -> str:
        return (
            f"trainer ranks {waiting} of run {self._run} were not through {method} within {self._deadline:g} s, and all "
            "ranks were ended; raise FURLONG_STAGE_DEADLINE if they were only slow, and run the same command again"
            f"{self._last(waiting[-1])}"
        )

    def _obituary(self, method: str, cause: _Fault) -> str:
        what = "was lost" if cause.died else "failed"
        return (
            f"trainer rank {cause.rank} of run {self._run} {what} in {method}: {cause.summary}. All ranks were ended; run "
            f"the same command again: it continues from the last saved state{self._last(cause.rank)}"
        )

    def _last(self, rank: int) -> str:
        if rank not in self._logs:
            return ""
        return f". Last lines of {self._logs[rank]}:\n{last_lines(self._logs[rank], SHOWN_LINES, BANNER)}"


def _fault(rank: int, future: Future) -> _Fault | None:
    """What went wrong in a call that is over; None when nothing did."""
    import ray

    error = future.exception()
    if isinstance(error, ray.exceptions.RayError):
        text = " ".join(str(error).split())
        return _Fault(
            rank, f"{type(error).__name__}: {text.rpartition('Worker exit detail: ')[2] or text}"[:400], died=True
        )
    if error is not None:
        return _Fault(rank, f"{type(error).__qualname__}: {error}", error)
    found = future.result()
    return _Fault(rank, found.summary, found.error) if isinstance(found, Failure) else None
