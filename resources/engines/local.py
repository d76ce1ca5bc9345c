"""The embedded engine: the policy in this process's memory, on its CPU cores."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import psutil
import torch

from furlong.ops.policy.architecture import read_architecture, read_stop_ids
from furlong.ops.policy.checkpoint import DTYPES, read_tensors
from furlong.ops.policy.decoder import Decoder
from furlong.ops.policy.generate import generate
from furlong.ops.policy.kv_cache import CachePool
from furlong.ops.policy.packed_linear import kernel_name
from furlong.ops.policy.wave import Live
from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.ops.weights.delta import apply
from furlong.ops.weights.digest import tensor_digest, weights_digest
from furlong.resources.engines.step_gate import EngineError, StepGate

if TYPE_CHECKING:
    import pyarrow as pa

BUSY_DEADLINE = 60.0
"""Seconds a call to generate waits for the one before it, which may be winding down after an abort."""


class LocalEngine:
    """Implements `ops.protocols.Engine`: one thread generates, any other may stage, attest, pause, abort or flip."""

    def __init__(self, folder: str, version: int, dtype: str, threads: int, stop_ids: Sequence[int] = ()):
        """
        Args:
            folder: a model in Hugging Face layout, served as `version`.
            version: its weights version.
            dtype: `bfloat16` or `float32`: format of the weights and of the projections.
            threads: of PyTorch in this process; 0 for as many as it was started with.
            stop_ids: tokens that end a reply; those of the folder's configuration when empty.
        Raises:
            ModelError: the folder cannot be used; the message names file and tensor.
            EngineError: an unknown dtype, or a stop id outside the vocabulary.
        """
        if dtype not in DTYPES:
            raise EngineError(f"dtype {dtype!r} is unknown; give one of {', '.join(DTYPES)}")
        self._threads = threads or torch.get_num_threads()
        self._dtype = dtype
        self._architecture = read_architecture(folder)
        self._stop_ids = tuple(stop_ids) or read_stop_ids(folder)
        odd = [token for token in self._stop_ids if not 0 <= token < self._architecture.vocab]
        if odd:
            raise EngineError(f"stop id {odd[0]} is outside the vocabulary of {self._architecture.vocab}; correct it")
        self._gate = StepGate(self._read(folder, version))
        self._pool = CachePool()
        self._generating = threading.Lock()
        self._staging = threading.Lock()
        self._staged: Live | None = None

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """See `ops.policy.generate.generate`; EngineError when another call is under way and does not end."""
        if not self._generating.acquire(timeout=BUSY_DEADLINE):
            raise EngineError(
                f"another generate has been running for over {BUSY_DEADLINE:.0f} s; wait for it, or abort() it first"
            )
        try:
            self._use_threads()
            with self._gate.admitted(request.request_id for request in requests):
                return generate(requests, self._architecture, self._stop_ids, self._gate, self._pool)
        finally:
            self._generating.release()

    def abort(self, request_ids: list[str] | None = None) -> int:
        return self._gate.abort(request_ids)

    def pause(self) -> None:
        self._gate.pause()

    def resume(self) -> None:
        self._gate.resume()

    def load_anchor(self, folder: str, version: int) -> Attestation:
        """Serve the folder's weights from the next step on; a staged version is dropped, as its base is gone."""
        with self._staging:
            architecture = read_architecture(folder)
            if architecture != self._architecture:
                raise EngineError(
                    f"{folder} holds a {architecture}, this engine serves a {self._architecture}; start another engine"
                )
            self._gate.exchange(self._read(folder, version))
            self._staged = None
            return self.attest()

    @torch.inference_mode()
    def stage(self, version: int, base_version: int, deltas: pa.Table) -> Attestation:
        """Make `version` beside the live one, which it shares unchanged tensors with, and prove what it holds.

        Raises:
            EngineError: `base_version` is not live, or the rows are of other versions.
            DeltaError: rows that do not give the exact new tensors.
        """
        self._use_threads()
        with self._staging:
            live = self._gate.live
            if base_version != live.version:
                raise EngineError(
                    f"version {version} builds on {base_version}, but version {live.version} is live; load the anchor "
                    f"and deltas up to {base_version} first"
                )
            if version == live.version:
                raise EngineError(f"version {version} is live already; give the new weights a number of their own")
            found = set(zip(deltas["version"].to_pylist(), deltas["base_version"].to_pylist(), strict=True))
            if found - {(version, base_version)}:
                raise EngineError(
                    f"rows of (version, base_version) {sorted(found)[:2]} were given for ({version}, {base_version}); "
                    "select the version's own rows"
                )
            self._staged = None
            tensors = live.decoder.tensors | apply(deltas, live.decoder.tensors)
            self._staged = Live(version, Decoder(self._architecture, tensors, live.decoder))
            return self._attestation(self._staged)

    def activate(self, version: int) -> None:
        """Flip; EngineError when `version` is not the one staged."""
        with self._staging:
            if self._staged is None or self._staged.version != version:
                held = "nothing" if self._staged is None else f"version {self._staged.version}"
                raise EngineError(f"version {version} is not staged ({held} is); stage it first")
            self._gate.exchange(self._staged)
            self._staged = None

    @torch.inference_mode()
    def attest(self) -> Attestation:
        """Digests of the weights read back from the memory that generation multiplies with, packed or not."""
        self._use_threads()
        return self._attestation(self._gate.live)

    def health(self) -> dict[str, Any]:
        staged = self._staged
        return {
            "engine": self.fingerprint(),
            "version": self._gate.live.version,
            "staged": None if staged is None else staged.version,
            "running": self._gate.running,
            "paused": self._gate.paused,
            "resident_bytes": psutil.Process().memory_info().rss,
        }

    def fingerprint(self) -> str:
        """Everything that may change a reply's last bits, in words."""
        arch = self._architecture
        return (
            f"LocalEngine {arch.kind} {arch.layers}x{arch.hidden} {self._dtype} kernel={kernel_name(DTYPES[self._dtype])} "
            f"cpu={torch.backends.cpu.get_cpu_capability()} threads={self._threads} torch={torch.__version__}"
        )

    @torch.inference_mode()
    def _read(self, folder: str, version: int) -> Live:
        self._use_threads()
        return Live(version, Decoder(self._architecture, read_tensors(folder, self._architecture, DTYPES[self._dtype])))

    def _attestation(self, live: Live) -> Attestation:
        tensors = live.decoder.served()
        with ThreadPoolExecutor(self._threads) as pool:
            digests = dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))
        return Attestation(self.fingerprint(), live.version, weights_digest(digests), digests)

    def _use_threads(self) -> None:
        """PyTorch keeps the count per calling thread, and an actor's methods run in several."""
        torch.set_num_threads(self._threads)
