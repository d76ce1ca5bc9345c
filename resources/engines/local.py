"""The embedded engine: the policy in this process's memory, on its CPU cores, or split over several processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy.architecture import read_architecture, read_stop_ids
from furlong.ops.policy.checkpoint import DTYPES
from furlong.ops.policy.generate import check_requests
from furlong.ops.policy.live import Live
from furlong.ops.policy.packed_linear import kernel_name
from furlong.ops.policy.score import Scored, score
from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.ops.weights.delta import DeltaError
from furlong.ops.weights.digest import weights_digest
from furlong.ops.weights.layout import Offer, Piece
from furlong.resources.engines.incoming import (
    check_base,
    check_chain,
    check_digests,
    check_offer,
    check_origin,
    check_rows,
)
from furlong.resources.engines.one_rank import OneRank
from furlong.resources.engines.outbox import Outbox
from furlong.resources.engines.scheduler import Scheduler
from furlong.resources.engines.step_gate import EngineError, StepGate
from furlong.resources.engines.turns import short_turns
from furlong.resources.weights.fence import FenceGuard

if TYPE_CHECKING:
    import pyarrow as pa

    from furlong.resources.engines.tp_leader import TpRanks

LOOK_SECONDS = 10.0
"""How often a thread that waits for replies looks whether they can still come."""
INFLIGHT = ("in_place", "retract")
"""What `activate` may do to the keys and values of replies under way."""
STAGING_DEADLINE = 600.0
"""Seconds a call that changes or digests weights waits for the one before it."""


class LocalEngine:
    """Implements `ops.protocols.Engine`: one thread draws, any others submit, collect, stage, attest, pause, abort or flip.

    Two versions at most are held, the live one and either a staged or the previous one: the others are forgotten as
    soon as a new version has passed its first checks, so that a machine needs memory for two.
    """

    def __init__(
        self, folder: str, version: int, dtype: str, threads: int, stop_ids: Sequence[int] = (), tp: int = 1,
        batch_invariant: bool = True, draft: DraftSettings | None = None,
    ):  # fmt: skip
        """
        Args:
            folder: a model in Hugging Face layout, served as `version`.
            version: its weights version.
            dtype: `bfloat16` or `float32`: format of the weights and of the projections.
            threads: of PyTorch in all ranks together; 0 for as many as this process was started with.
            stop_ids: tokens that end a reply; those of the folder's configuration when empty.
            tp: processes that the weights are split over, this one included.
            batch_invariant: tokens and log-probabilities of a reply are the same bits whatever runs beside it and
                however its tokens came to be fed; costs what `benchmarks/rollout_decode.py` prints.
            draft: how to draw with the drafts of weights versions that have one; None to draw without.
        Raises:
            ModelError: the folder or the draft cannot be used; the message names file and tensor.
            EngineError: an unknown dtype, a stop id outside the vocabulary, a model that cannot be split by `tp`, or
                a rank that did not start.
        """
        if dtype not in DTYPES:
            raise EngineError(f"dtype {dtype!r} is unknown; give one of {', '.join(DTYPES)}")
        self._threads = max(1, (threads or torch.get_num_threads()) // max(1, tp))
        self._dtype = dtype
        self._tp = tp
        self._invariant = batch_invariant
        self._draft = draft
        self._architecture = read_architecture(folder)
        if tp not in (sizes := self._architecture.splits()):
            raise EngineError(
                f"{folder} cannot be split over tp={tp} processes: each needs whole key/value heads and equal parts of "
                f"the feed-forward width; tp may be {', '.join(map(str, sizes))}"
            )
        self._stop_ids = tuple(stop_ids) or read_stop_ids(folder)
        odd = [token for token in self._stop_ids if not 0 <= token < self._architecture.vocab]
        if odd:
            raise EngineError(f"stop id {odd[0]} is outside the vocabulary of {self._architecture.vocab}; correct it")
        self._fence = FenceGuard()
        self._outbox = Outbox()
        self._staging = threading.Lock()
        self._staged: Live | None = None
        self._previous: Live | None = None
        self._proved: dict[int, str] = {}
        self._use_threads()
        self._ranks = self._make_ranks()
        try:
            with torch.inference_mode():
                self._gate = StepGate(self._ranks.load(folder, version, []))
        except BaseException:
            self._ranks.close()
            raise
        self._scheduler = Scheduler(
            self._ranks, self._gate, self._outbox, self._architecture, partial(torch.set_num_threads, self._threads)
        )

    def submit(self, requests: list[GenerateRequest]) -> None:
        """See `Engine.submit`.

        Raises:
            RequestError: an unusable request; none has begun.
            EngineError: a rank is lost.
        """
        self._ranks.check()
        check_requests(requests, self._architecture)
        self._scheduler.submit([replace(r, stop_ids=(*r.stop_ids, *self._stop_ids)) for r in requests])

    def collect(self, seconds: float, taken: list[str]) -> list[Sample]:
        """See `Engine.collect`.

        Raises:
            NonFiniteLogits: naming requests that the weights cannot serve, once; they are forgotten.
            Others: whatever ended all requests, once; they are forgotten.
        """
        self._ranks.check()
        return self._outbox.collect(seconds, taken)

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """See `Engine.generate`; errors as of `submit` and `collect`, upon which the other requests are ended."""
        names = [request.request_id for request in requests]
        check_requests(requests, self._architecture)
        with self._outbox.claimed(names):
            try:
                self.submit(requests)
                while True:
                    try:
                        return self._outbox.wait(names, LOOK_SECONDS)
                    except TimeoutError:
                        self._ranks.check()
            except BaseException:
                # Ended before this returns, so that the same ids may be asked for again at once.
                self._gate.abort(names)
                self._gate.wait_finished(names, LOOK_SECONDS)
                raise

    def score(self, rows: list[Scored], temperature: float) -> list[list[float]]:
        """See `Engine.score`; errors as of `ops.policy.score.score`, and EngineError for a split model."""
        if self._tp > 1:
            raise EngineError(f"an engine of tp={self._tp} processes does not score; start one of tp=1 to score with")
        with self._changing(None):
            return score(self._gate.live.decoder, rows, temperature, self._invariant)

    def abort(self, request_ids: list[str] | None = None) -> int:
        self._ranks.check()
        return self._gate.abort(request_ids)

    def pause(self, lease: float) -> None:
        self._ranks.check()
        self._gate.pause(lease)

    def resume(self) -> None:
        self._ranks.check()
        self._gate.resume()

    def layout(self) -> list[dict[str, Piece]]:
        """Of the policy; drafts and adapters, whose shapes may change, are not named: every rank has them whole."""
        self._ranks.check()
        return self._ranks.layout()

    def load_anchor(
        self, path: str, version: int, chain: Sequence[pa.Table], fence: int, digests: dict[str, str] | None = None
    ) -> Attestation:
        """Serve what the path and the chain give from the next step on; other versions are forgotten.

        Raises:
            ModelError: the file cannot be used; the message names it and the tensor.
            EngineError: a model of another architecture, deltas that do not lead from one version to the next, or
                tensors of other digests than asked for.
            DeltaError: rows that do not give the exact new tensors.
            StaleFence: a newer publisher has been here.
        """
        with self._changing(fence):
            if Path(path).is_dir() and (other := read_architecture(path)) != self._architecture:
                raise EngineError(
                    f"{path} holds a {other}, this engine serves a {self._architecture}; start another engine"
                )
            check_chain(version, chain)
            for deltas in chain:
                check_rows(self._architecture, self._dtype, deltas)
            with self._making():
                made = self._ranks.load(path, version, chain)
                proof = self._prove(made, chain)
                check_digests(version, self._gate.live.version, proof.tensors, digests)
                self._gate.exchange(made)
            self._forget_others()
            return proof

    def stage(self, version: int, base_version: int, deltas: pa.Table, fence: int) -> Attestation:
        """Make `version` beside the live one, which it shares unchanged tensors with, and prove what it holds.

        Raises:
            EngineError: `base_version` is not live, the rows are of other versions, or name a tensor that the model
                does not have.
            DeltaError: rows that do not give the exact new tensors.
            StaleFence: a newer publisher has been here.
        """
        with self._changing(fence):
            live = self._builds_on(version, base_version)
            check_origin(version, base_version, deltas)
            check_rows(self._architecture, self._dtype, deltas)
            with self._making():
                made = self._ranks.stage(version, deltas, live)
                proof = self._prove(made, [deltas])
                self._staged = made
            return proof

    def receive(self, offer: Offer, engine: int) -> Attestation:
        """See `Engine.receive`; drafts and adapters that the offer does not name are not part of the new version.

        Raises:
            EngineError: the offer's base is not live, or it is of another model.
            StaleFence: a newer publisher has been here.
            Others: from `resources.weights.receive.take`.
        """
        with self._changing(offer.fence):
            base = self._gate.live.version if offer.base_version is None else offer.base_version
            live = self._builds_on(offer.version, base)
            check_offer(self._architecture, self._dtype, offer, engine, self._tp)
            with self._making():
                made = self._ranks.receive(offer, engine, live)
                proof = self._prove(made)
                self._staged = made
            return proof

    def activate(self, version: int, fence: int, inflight: str = "in_place") -> None:
        """Flip; harmless when `version` is live and nothing is staged; EngineError when it is not the one staged.

        A reply that was put off because memory for keys and values ran out has them computed again either way.
        """
        if inflight not in INFLIGHT:
            raise EngineError(f"inflight={inflight!r} is unknown; give one of {', '.join(INFLIGHT)}")
        with self._changing(fence):
            live, staged = self._gate.live, self._staged
            if staged is None and live.version == version:
                return
            if staged is None or staged.version != version:
                held = "nothing" if staged is None else f"version {staged.version}"
                raise EngineError(f"version {version} is not staged ({held} is); stage it first")
            self._gate.exchange(staged, retract=inflight == "retract")
            self._staged, self._previous = None, live

    def revert(self, version: int, fence: int) -> None:
        """Flip back; when `version` is live, only forget what is staged, so that an `activate` that comes late fails."""
        with self._changing(fence):
            if self._gate.live.version == version:
                self._forget_others()
                return
            if self._previous is None or self._previous.version != version:
                held = "none" if self._previous is None else f"version {self._previous.version}"
                raise EngineError(
                    f"version {version} cannot be gone back to: {held} is kept as the previous one, and version "
                    f"{self._gate.live.version} is live; load it from its anchor"
                )
            self._gate.exchange(self._previous)
            self._forget_others()

    def attest(self) -> Attestation:
        """Digests of the weights read back from the memory that generation multiplies with, packed or not."""
        with self._changing(None):
            return self._prove(self._gate.live)

    def health(self) -> dict[str, Any]:
        """`digest` is that of the live version, None until it was attested; `fence` the highest seen; `running` are the
        requests that have not finished, `waiting` those of them that have not begun; `speculation` is what
        `SpeculationCounts.report` says, there with `draft` only."""
        self._ranks.check()
        live, staged = self._gate.live, self._staged
        return {
            "engine": self.fingerprint(),
            "version": live.version,
            "digest": self._proved.get(live.serial),
            "staged": None if staged is None else staged.version,
            "fence": self._fence.highest,
            "tp": self._tp,
            "running": self._gate.running,
            "waiting": self._scheduler.waiting,
            "paused": self._gate.paused,
            "resident_bytes": self._ranks.resident_bytes(),
        } | ({} if self._draft is None else {"speculation": self._ranks.speculation()})

    def fingerprint(self) -> str:
        """Everything that may change a reply's last bits, in words."""
        arch = self._architecture
        split = f"tp={self._tp} " if self._tp > 1 else ""
        rows = "" if self._invariant else "rows=any "
        return (
            f"LocalEngine {arch.kind} {arch.layers}x{arch.hidden} {self._dtype} kernel={kernel_name(DTYPES[self._dtype])} "
            f"cpu={torch.backends.cpu.get_cpu_capability()} {split}{rows}threads={self._threads} torch={torch.__version__}"
        )

    def close(self) -> None:
        """End running requests and the other ranks' processes; these also end with this one."""
        self._gate.abort(None)
        self._ranks.close()

    def _make_ranks(self) -> OneRank | TpRanks:
        if self._tp == 1:
            return OneRank(self._architecture, DTYPES[self._dtype], self._threads, self._invariant, self._draft)
        from furlong.resources.engines.tp_leader import TpRanks

        return TpRanks(self._architecture, self._dtype, self._tp, self._threads, self._invariant, self._draft)

    @contextmanager
    def _changing(self, fence: int | None) -> Iterator[None]:
        """One at a time; the fence is compared inside, so that a publisher that waited here may turn out too late."""
        if not self._staging.acquire(timeout=STAGING_DEADLINE):
            raise EngineError(
                f"another call has been staging or digesting weights for over {STAGING_DEADLINE:.0f} s; restart the engine"
            )
        try:
            self._ranks.check()
            if fence is not None:
                self._fence.check(fence)
            self._use_threads()
            with short_turns(), torch.inference_mode():
                yield
        finally:
            self._staging.release()

    def _builds_on(self, version: int, base_version: int) -> Live:
        live = self._gate.live
        check_base(version, base_version, live.version)
        return live

    @contextmanager
    def _making(self) -> Iterator[None]:
        """A new version: others than the live one make room for it, and what a failure leaves of it goes too."""
        self._forget_others()
        try:
            yield
        except BaseException:
            self._forget_others()
            raise

    def _prove(self, live: Live, chain: Sequence[pa.Table] = ()) -> Attestation:
        digests = self._ranks.digests(live)
        recorded: dict[str, str] = {}
        for deltas in chain:
            recorded |= dict(zip(deltas["name"].to_pylist(), deltas["digest"].to_pylist(), strict=True))
        # Ranks that hold parts could not compare while they applied the rows.
        odd = sorted(name for name in recorded if digests[name] != recorded[name])
        if odd:
            raise DeltaError(
                f"{odd[0]} of version {live.version}: the result has digest {digests[odd[0]]}, recorded is "
                f"{recorded[odd[0]]} ({len(odd)} differ in all); the base is another one or rows were altered: load "
                "that base, or rebuild the version from an anchor"
            )
        whole = weights_digest(digests)
        self._proved[live.serial] = whole
        return Attestation(self.fingerprint(), live.version, whole, digests)

    def _forget_others(self) -> None:
        live = self._gate.live
        self._staged = self._previous = None
        self._proved = {serial: digest for serial, digest in self._proved.items() if serial == live.serial}
        self._ranks.keep(live)

    def _use_threads(self) -> None:
        """PyTorch keeps the count per calling thread, and an actor's methods run in several."""
        torch.set_num_threads(self._threads)
