"""Bring one weights version to all engines like a database commit: stage, verify, then flip everywhere or nowhere."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from furlong.ops.protocols import Attestation, Engine, StaleFence, WeightSource
from furlong.ops.stages.context import StageError
from furlong.ops.stages.weight_publish import verify
from furlong.ops.weights.costs import TRANSPORTS
from furlong.ops.weights.delta import check_rows
from furlong.ops.weights.layout import Offer, specs
from furlong.ops.weights.plan import broadcast_plan, p2p_plan
from furlong.resources.weights.group import open_store
from furlong.resources.weights.session import report_failure
from furlong.resources.weights.together import together

if TYPE_CHECKING:
    import pyarrow as pa

PHASES = ("plan", "stage", "verify", "pause", "flip", "resume", "attest", "done")
"""In this order; the phases from `stage` to `resume` are left out when every engine serves the version already."""
_LEASE = 30.0
"""Seconds after which engines go on by themselves when the publisher ends between pause and resume."""
_PATIENCE = 3.0
"""Seconds that parties of a failed transfer get to tell what they know."""
_HEALTH = 10.0
"""Seconds for an engine to say, after a failure, which version it serves."""


class PublishError(StageError):
    """A version that is not live; the message names engines, tensor and phase, and which version each engine serves."""

    def __init__(self, message: str, phase: str):
        super().__init__(message)
        self.phase = phase


@dataclass(frozen=True)
class Publication:
    """A version that every engine has proved to serve."""

    attestations: list[Attestation]
    """One per engine, of its live weights, each compared with the manifest."""
    transport: str
    wire_bytes: int
    """Bytes that went to engines; a broadcast counts once, a delta once for each engine that read it."""
    stage_seconds: float
    """From the start of staging to the last engine's proof of its shadow; serving went on meanwhile."""
    pause_seconds: float
    """From the first engine's pause to the last one's resumption."""


def publish(
    engines: list[Engine], source: WeightSource | None, row: dict[str, Any], deltas: pa.Table, transport: str,
    fence: int, deadline: float, watch: Callable[[str], None] = lambda phase: None, host: str = "127.0.0.1",
    inflight: str = "in_place",
) -> Publication:  # fmt: skip
    """Make every engine serve the version of `row`, or leave every engine at its parent.

    Args:
        engines: all of them, each serving the parent, or the version itself where a dead publisher came so far.
        source: the trainer; needed by `broadcast` and `p2p` only.
        row: of `weight_versions`; deltas: all `weight_deltas` rows of that version.
        transport: `broadcast`, `p2p` or `disk_delta`.
        fence: from `LakeLike.take_fence`.
        deadline: seconds for each phase and for each wait in a transfer.
        watch: told each of `PHASES` before it begins; what it raises fails the publication there.
        host: address at which engines and trainer reach this process.
        inflight: what becomes of replies under way, see `Engine.activate`.
    Raises:
        PublishError: with a StaleFence as its cause if there was one, else the first failure. Nothing was marked; the
            version may be published again.
    """
    work = _Work(engines, source, row, deltas, transport, fence, deadline, watch, host, inflight)
    try:
        return work.run()
    except Exception as err:
        failures = err.failures if isinstance(err, _Failed) else {"publisher": err}
        stale = [failure for failure in failures.values() if isinstance(failure, StaleFence)]
        raise PublishError(work.account(failures), work.phase) from [*stale, *failures.values()][0]


class _Failed(Exception):
    """Errors by party, the first first; becomes a PublishError."""

    def __init__(self, failures: dict[str, Exception]):
        super().__init__("; ".join(f"{name}: {err}" for name, err in failures.items()))
        self.failures = failures


@dataclass
class _Work:
    engines: list[Engine]
    source: WeightSource | None
    row: dict[str, Any]
    deltas: pa.Table
    transport: str
    fence: int
    deadline: float
    watch: Callable[[str], None]
    host: str
    inflight: str
    phase: str = "plan"
    turned: bool = False
    """Some engine may serve the new version by now."""
    notes: list[str] = field(default_factory=list)

    def run(self) -> Publication:
        wire_bytes, stage_seconds, pause_seconds = 0, 0.0, 0.0
        try:
            self._enter("plan")
            behind = self._behind()
            if behind:
                offer = self._plan(behind)
                self._enter("stage")
                began = time.monotonic()
                shadows, wire_bytes = self._transfer(behind, offer) if offer else self._read(behind)
                stage_seconds = time.monotonic() - began
                self._enter("verify")
                self._verify(shadows)
                if offer:
                    # It needed no rows, but whoever starts an engine later does: what is live can be rebuilt.
                    check_rows(self.deltas, {tensor["name"]: tensor["digest"] for tensor in self.row["tensors"]})
                pause_seconds = self._flip(behind)
            self._enter("attest")
            proofs = self._ask({name: engine.attest for name, engine in self._named().items()})
            self._verify(proofs)
            self._enter("done")
        except BaseException:
            self._go_back()
            raise
        attestations = [proofs[name] for name in self._named()]
        return Publication(attestations, self.transport, wire_bytes, stage_seconds, pause_seconds)

    def account(self, failures: dict[str, Exception]) -> str:
        """What failed where, and which version each engine serves now."""
        healths, _ = together(
            {name: engine.health for name, engine in self._named().items()}, min(self.deadline, _HEALTH)
        )
        serving = [
            f"{name} serves version {healths[name]['version']}" if name in healths else f"{name} does not answer"
            for name in self._named()
        ]
        what = [f"{name}: {err}" for name, err in failures.items()] + self.notes
        return (
            f"weights version {self.row['version']} was not published ({self.transport}, phase {self.phase}): "
            f"{'; '.join(what)}. Now {', '.join(serving)}; publish it again"
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.watch(phase)

    def _named(self) -> dict[str, Engine]:
        return {_name(number): engine for number, engine in enumerate(self.engines)}

    def _ask(self, calls: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        answers, failures = together(calls, self.deadline)
        if failures:
            raise _Failed(failures)
        return answers

    def _behind(self) -> dict[str, Engine]:
        """The engines that still serve the parent; the others have proved that they serve the version."""
        named, version, parent = self._named(), self.row["version"], self.row["parent"]
        if not named:
            raise StageError(f"version {version} has no engine to go to; start engines before publishing")
        serving = {
            name: health["version"] for name, health in self._ask({n: e.health for n, e in named.items()}).items()
        }
        if parent is None or any(at not in (parent, version) for at in serving.values()):
            where = ", ".join(f"{name} serves version {serving[name]}" for name in named)
            raise StageError(f"version {version} builds on {parent}, but {where}; bring every engine to {parent} first")
        ahead = [name for name in named if serving[name] == version]
        self.turned = bool(ahead)
        self._verify(self._ask({name: named[name].attest for name in ahead}))
        # The publisher that turned them may have died before it resumed them.
        if failures := self._resume({name: named[name] for name in ahead}):
            raise _Failed(failures)
        return {name: engine for name, engine in named.items() if name not in ahead}

    def _plan(self, behind: dict[str, Engine]) -> Offer | None:
        """The transfer to the engines that are behind, in which the others have no ranks; None for a delta."""
        if self.transport not in TRANSPORTS:
            raise StageError(f"transport {self.transport!r} is unknown; use one of {', '.join(TRANSPORTS)}")
        if self.transport == "disk_delta":
            return None
        if self.source is None:
            raise StageError(f"transport {self.transport} needs a trainer that holds the weights; use disk_delta")
        told = self._ask({"source": self.source.holdings} | {name: engine.layout for name, engine in behind.items()})
        tensors = {spec.name: spec for spec in specs(self.row["tensors"])}
        changed = set(self.deltas["name"].to_pylist())
        if extra := sorted(changed - tensors.keys()):
            raise StageError(
                f"`weight_deltas` has rows of {extra[0]}, which the manifest lacks; stage the version anew"
            )
        layouts = [told.get(name, []) for name in self._named()]
        return Offer(
            session=uuid.uuid4().hex, address="", version=self.row["version"], base_version=self.row["parent"],
            fence=self.fence, tensors=tuple(tensors.values()), engine_ranks=tuple(len(ranks) for ranks in layouts),
            sources=len(told["source"]), deadline=self.deadline,
            buckets=broadcast_plan(told["source"], tensors, changed) if self.transport == "broadcast" else (),
            routes=p2p_plan(told["source"], layouts, tensors, changed) if self.transport == "p2p" else (),
        )  # fmt: skip

    def _read(self, behind: dict[str, Engine]) -> tuple[dict[str, Attestation], int]:
        """Every engine makes its shadow from the rows; the proofs, and the bytes that were read."""
        version, parent = self.row["version"], self.row["parent"]
        stage = {name: partial(e.stage, version, parent, self.deltas, self.fence) for name, e in behind.items()}
        payload = sum(len(data.as_buffer()) for data in self.deltas["data"])
        return self._ask(stage), payload * len(behind)

    def _transfer(self, behind: dict[str, Engine], offer: Offer) -> tuple[dict[str, Attestation], int]:
        """Source and engines make the shadows between them; the proofs, and the bytes on the wire."""
        store, address = open_store(self.host)
        held = [store]
        del store

        def tell(name: str, err: Exception) -> None:
            if held:
                report_failure(held[0], offer, name, err)

        offer = replace(offer, address=address)
        calls: dict[str, Callable[[], Any]] = {"source": partial(self.source.send, offer)}
        for number, name in enumerate(self._named()):
            if name in behind:
                calls[name] = partial(behind[name].receive, offer, number)
        # The parties have the same deadline for each wait and know better than this process who failed: let them tell.
        answers, failures = together(calls, self.deadline + _PATIENCE, held.clear, _PATIENCE, tell)
        held.clear()
        if failures:
            raise _Failed(failures)
        return answers, answers.pop("source")

    def _verify(self, proofs: dict[str, Attestation]) -> None:
        """Compare all proofs with the manifest, and report all that differ."""
        failures: dict[str, Exception] = {}
        for name, proof in proofs.items():
            try:
                verify(self.row, proof)
            except StageError as err:
                failures[name] = err
        if failures:
            raise _Failed(failures)

    def _flip(self, behind: dict[str, Engine]) -> float:
        """Pause, activate and resume; seconds from the first pause to the last resumption."""
        lease = min(self.deadline, _LEASE)
        try:
            self._enter("pause")
            began = time.monotonic()
            self._ask({name: partial(engine.pause, lease) for name, engine in behind.items()})
            self._enter("flip")
            self.turned = True
            self._ask(
                {n: partial(e.activate, self.row["version"], self.fence, self.inflight) for n, e in behind.items()}
            )
            self._enter("resume")
        except BaseException:
            # Before anything is decoded with a version that is not going to be live.
            self._go_back()
            self._resume(behind)
            raise
        if failures := self._resume(behind):
            raise _Failed(failures)
        return time.monotonic() - began

    def _resume(self, behind: dict[str, Engine]) -> dict[str, Exception]:
        _, failures = together({name: engine.resume for name, engine in behind.items()}, self.deadline)
        self.notes += [
            f"{name} did not resume ({err}); it does so when its lease ends" for name, err in failures.items()
        ]
        return failures

    def _go_back(self) -> None:
        """Every engine to the parent, those that a dead publisher had turned as well."""
        if not self.turned:
            return
        self.turned = False
        calls = {name: partial(engine.revert, self.row["parent"], self.fence) for name, engine in self._named().items()}
        _, failures = together(calls, self.deadline)
        self.notes += [f"{name} did not go back to version {self.row['parent']}: {e}" for name, e in failures.items()]


def _name(number: int) -> str:
    return f"engine {number}"
