"""An engine that is a real SGLang server: this process holds the bytes of its weights and proves what it serves."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from furlong.ops.draft.settings import DraftSettings
from furlong.ops.policy.architecture import Architecture, read_architecture, read_stop_ids
from furlong.ops.policy.checkpoint import DTYPES, is_extra, read_tensors
from furlong.ops.policy.manifest import ModelError
from furlong.ops.policy.score import Scored
from furlong.ops.protocols import Attestation, GenerateRequest, Sample
from furlong.ops.weights.delta import apply
from furlong.ops.weights.digest import tensor_digest, weights_digest
from furlong.ops.weights.layout import Offer, Piece, whole_piece
from furlong.resources.engines.incoming import check_base, check_digests, check_origin
from furlong.resources.engines.sglang_draft import launch_flags, served_shape
from furlong.resources.engines.sglang_http import CONTROL_DEADLINE
from furlong.resources.engines.sglang_pause import ServerPause
from furlong.resources.engines.sglang_push import PUSH_DEADLINE, Parcel, Push, Pusher, make_pusher
from furlong.resources.engines.sglang_requests import ServerRequests
from furlong.resources.engines.sglang_score import server_scores
from furlong.resources.engines.sglang_server import VERSION, OtherServer, SGLangServer
from furlong.resources.engines.sglang_weights import Weights, compare, weigh
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.weights.draft_folder import FOLDER, check_draft_config, read_draft_folder
from furlong.resources.weights.fence import FenceGuard

if TYPE_CHECKING:
    import pyarrow as pa


HEALTH_DEADLINE = 20.0
"""Seconds for the scheduler to answer, which takes as long as the step under way."""


@dataclass(frozen=True)
class _Staged:
    """A version beside the live one, and what the server has to be given for it."""

    weights: Weights
    parcel: Parcel


class SGLangEngine:
    """Implements `ops.protocols.Engine`: any thread may use any method, also while replies are drawn.

    SGLang has one set of weights and no shadow. The shadow is in this process; `activate` pauses the server, writes the
    changed tensors into it, reads checksums of all its parameters back, and writes the old ones again if anything is
    not as it should be. A reply that is to be retracted is ended and asked for again with what it has as a prefix: the
    server's own way would record other experts for tokens that had been sampled already.

    Tokens are drawn by the code of `LocalEngine` with the same random numbers, so a reply is a function of its logits and
    its seed, interrupted or not, and either engine draws the same one. Its bits are not: SGLang's matrix products are
    blocked by batch, and by how much of a prompt is in its cache. In float32 that moves log-probabilities by about 1e-6,
    and another token is drawn where a random number falls that close to the edge between two.
    """

    def __init__(
        self,
        folder: str,
        version: int,
        dtype: str,
        threads: int,
        stop_ids: Sequence[int] = (),
        url: str = "",
        push: Push = "auto",
        draft: DraftSettings | None = None,
    ):
        """
        Args:
            folder: a model in Hugging Face layout, served as `version`.
            version: its weights version.
            dtype: `bfloat16` or `float32`: format of the weights and of all computation.
            threads: of PyTorch in the server; 0 for as many as this process was started with.
            stop_ids: tokens that end a reply besides those of the folder's configuration.
            url: `http://host:port` of a server that somebody else has started for this engine alone, on a CPU (on a GPU
                its checksums are of another kind) and with Furlong's shim; empty to start one. It must serve the folder's
                weights, or be left over from an engine of this kind.
            push: how new weights get into the server: through shared memory, a process group, or a file.
            draft: how to draw with the draft that lies in the folder's `draft/`; None to draw without. A server on a CPU
                refuses it (`sglang_draft`).
        Raises:
            ModelError: the folder or its draft cannot be used; the message names file and tensor.
            EngineError: SGLang is not installed, the server does not start (with its last lines), or what it holds is
                not what the folder says.
        """
        if dtype not in DTYPES:
            raise EngineError(f"dtype {dtype!r} is unknown; give one of {', '.join(DTYPES)}")
        self._architecture = read_architecture(folder)
        if len(self._architecture.expert_layers) not in (0, self._architecture.layers):
            raise EngineError(
                f"{folder} has experts in layers {self._architecture.expert_layers} only; SGLang {VERSION} gives every "
                "layer experts: use the embedded engine"
            )
        if draft is not None and url:
            raise EngineError(
                f"{url} is a server on a CPU, and none of those speculates in SGLang {VERSION}; leave the draft out, or use "
                "the embedded engine"
            )
        self._dtype, self._threads = dtype, threads or torch.get_num_threads()
        self._draft = None if draft is None else served_shape(draft, self._architecture)
        self._fence = FenceGuard()
        # The first is for what is staged; the second, taken inside it, for what is in the server.
        self._staging, self._serving = threading.Lock(), threading.Lock()
        self._staged: _Staged | None = None
        self._previous: Weights | None = None
        # Keys and values that a server has kept for another engine, of whatever weights, are not for this one.
        self._tag, self._flips = secrets.token_hex(4), 0
        self._scratch = Path(tempfile.mkdtemp(prefix="furlong-sglang-"))
        try:
            stops = _all_stop_ids(folder, stop_ids, self._architecture)
            flags = [] if draft is None else launch_flags(draft, self._draft, folder)
            if url:
                self._server = OtherServer(url, self._architecture, dtype)
            else:
                where = (dtype, self._threads, self._scratch, flags)
                self._server = SGLangServer(folder, self._architecture, version, *where)
            self._pause = ServerPause(self._server)
            tensors = read_tensors(folder, self._architecture, DTYPES[dtype])
            if self._draft is not None:
                tensors |= read_draft_folder(Path(folder) / FOLDER)
                check_draft_config(Path(folder) / FOLDER, tensors, self._draft)
            self._live = self._weigh(version, tensors)
            if isinstance(self._server, SGLangServer):
                self._server.wait()
            capacity = self._server.capacity
            self._requests = ServerRequests(self._server, capacity, self._architecture, stops, self._cache_key)
            self._pusher: Pusher = make_pusher(push, self._server, self._scratch)
            if url:
                self._take_over()
            else:
                self._read_back(self._live)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: list[GenerateRequest]) -> None:
        """See `ServerRequests.submit`."""
        self._requests.submit(requests)

    def collect(self, seconds: float, taken: list[str]) -> list[Sample]:
        return self._requests.collect(seconds, taken)

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """See `ServerRequests.generate`."""
        return self._requests.generate(requests)

    def score(self, rows: list[Scored], temperature: float) -> list[list[float]]:
        """See `server_scores`; the weights stay the same from the first row to the last."""
        with self._serving:
            return server_scores(self._server, rows, temperature, self._architecture, self._cache_key())

    def abort(self, request_ids: list[str] | None = None) -> int:
        return self._requests.abort(request_ids)

    def pause(self, lease: float) -> None:
        self._pause.pause(lease)

    def resume(self) -> None:
        self._pause.resume()

    def layout(self) -> list[dict[str, Piece]]:
        """One rank with whole tensors, of the policy; drafts and adapters, whose shapes may change, are not named."""
        tensors = _policy(self._live.tensors)
        return [{name: whole_piece(name, tensor.shape) for name, tensor in tensors.items()}]

    @torch.inference_mode()
    def load_anchor(
        self, path: str, version: int, chain: list[pa.Table], fence: int, digests: dict[str, str] | None = None
    ) -> Attestation:
        """Serve complete weights from now on; a staged version is dropped, as its base is gone."""
        with self._as_publisher(fence):
            tensors = read_tensors(path, self._architecture, DTYPES[self._dtype])
            for deltas in chain:
                tensors |= apply(deltas, tensors)
            weights = self._weigh(version, tensors)
            check_digests(version, self._live.version, self._attestation(weights).tensors, digests)
            self._drop_staged()
            weights.check_maps(self._live)
            parcel = self._pusher.pack(weights.served())
            try:
                # Everything is pushed: what the server holds may not be what we think, and this is how to mend it.
                self._exchange(weights, parcel)
            finally:
                self._pusher.drop(parcel)
            self._previous = None
            return self._attestation(weights)

    @torch.inference_mode()
    def stage(self, version: int, base_version: int, deltas: pa.Table, fence: int) -> Attestation:
        """Make `version` in this process's memory; the server does not notice.

        Raises:
            EngineError: `base_version` is not live, or the rows are of other versions or tensors.
            DeltaError: rows that do not give the exact new tensors.
        """
        with self._as_publisher(fence):
            check_base(version, base_version, self._live.version)
            check_origin(version, base_version, deltas)
            return self._stage(version, self._live.tensors | apply(deltas, self._live.tensors))

    @torch.inference_mode()
    def receive(self, offer: Offer, engine: int) -> Attestation:
        """Stage what a transfer brings."""
        from furlong.resources.weights.receive import take

        with self._as_publisher(offer.fence):
            live = self._live.version
            check_base(offer.version, live if offer.base_version is None else offer.base_version, live)
            return self._stage(offer.version, take(offer, engine, 0, self.layout()[0], self._live.tensors))

    def activate(self, version: int, fence: int, inflight: str = "in_place") -> None:
        """Put the staged version into the server and read it back; harmless when it is live and nothing is staged.

        Raises:
            EngineError: `version` is not the one staged; or the server did not take it. Then the version before serves
                again, or, where even that failed, the server has been ended; the message says which.
        """
        if inflight not in ("in_place", "retract"):
            raise EngineError(f"inflight={inflight!r} is unknown; give in_place or retract")
        with self._as_publisher(fence):
            if self._staged is None and self._live.version == version:
                return
            if self._staged is None or self._staged.weights.version != version:
                held = "nothing" if self._staged is None else f"version {self._staged.weights.version}"
                raise EngineError(f"version {version} is not staged ({held} is); stage it first")
            self._exchange(self._staged.weights, self._staged.parcel, inflight == "retract")
            self._drop_staged()

    def revert(self, version: int, fence: int) -> None:
        """Put the version before the last `activate` back; EngineError when it is another one or is not at hand."""
        with self._as_publisher(fence):
            if self._live.version == version:
                # So that an `activate` that comes late fails.
                self._drop_staged()
                return
            if self._previous is None or self._previous.version != version:
                held = "none" if self._previous is None else f"version {self._previous.version}"
                raise EngineError(f"version {version} is not at hand ({held} is); load it with load_anchor")
            self._drop_staged()
            parcel = self._pusher.pack(self._previous.changed_from(self._live))
            try:
                self._exchange(self._previous, parcel)
            finally:
                self._pusher.drop(parcel)
            self._previous = None

    def attest(self) -> Attestation:
        """Digests of the live weights, given out only when the server reports the checksums of the same bytes."""
        with self._serving:
            self._read_back(self._live)
            return self._attestation(self._live)

    def health(self) -> dict[str, Any]:
        """As in the protocol; EngineError when the server does not answer. `digest` is what was last read back from it."""
        # Answered by the scheduler, also while it is paused; /health is answered without it.
        self._server.get("/server_info", HEALTH_DEADLINE)
        live, staged, capacity = self._live, self._staged, self._server.capacity
        return {
            "engine": self.fingerprint(),
            "version": live.version,
            "digest": weights_digest(live.digests),
            "staged": None if staged is None else staged.weights.version,
            "fence": self._fence.highest,
            "running": self._requests.running,
            "waiting": self._requests.waiting,
            "paused": self._pause.paused,
            "most_running": capacity.running,
            "most_tokens": capacity.tokens,
            "longest": capacity.longest,
            "resident_bytes": psutil.Process().memory_info().rss + self._server.resident_bytes,
        }

    def fingerprint(self) -> str:
        """Everything that may change a reply's last bits, in words."""
        arch = self._architecture
        return (
            f"SGLangEngine {arch.kind} {arch.layers}x{arch.hidden} {self._dtype} attention=torch_native "
            f"cpu={torch.backends.cpu.get_cpu_capability()} threads={self._threads} torch={torch.__version__}"
        )

    def close(self) -> None:
        """End the server; the engine is of no use afterwards."""
        for part in ("_requests", "_pause", "_pusher", "_server"):
            # One that failed to start has not all of them.
            if hasattr(self, part):
                getattr(self, part).close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    @contextmanager
    def _as_publisher(self, fence: int) -> Iterator[None]:
        self._fence.check(fence)
        with self._staging:
            # Again, as a newer publisher may have come while this one waited.
            self._fence.check(fence)
            yield

    def _stage(self, version: int, tensors: dict[str, Tensor]) -> Attestation:
        self._drop_staged()
        weights = self._weigh(version, tensors, self._live)
        weights.check_maps(self._live)
        self._staged = _Staged(weights, self._pusher.pack(weights.changed_from(self._live)))
        return self._attestation(weights)

    def _cache_key(self) -> str:
        return f"{self._tag}.{self._flips}"

    def _drop_staged(self) -> None:
        staged, self._staged = self._staged, None
        if staged:
            self._pusher.drop(staged.parcel)

    def _exchange(self, weights: Weights, parcel: Parcel, retract: bool = False) -> None:
        """Make `weights` live while nothing is decoded; after a failure the ones before are live, or no server is."""
        before = self._live
        with self._serving, self._pause.changing():
            try:
                if retract:
                    self._requests.retract(before.version)
                self._put(weights, parcel)
            except BaseException as err:
                self._put_back(before, parcel, err)
                if not isinstance(err, Exception):
                    raise
                raise EngineError(
                    f"version {weights.version} could not be put into the server, which serves version {before.version} "
                    f"again: {err}"
                ) from err
            self._previous, self._live = before, weights
            # Prompts that come now must not find keys and values that other weights have computed.
            self._flips += 1

    def _put(self, weights: Weights, parcel: Parcel) -> None:
        if parcel.tensors:
            self._pusher.push(parcel, weights.version)
        else:
            body = {"new_version": str(weights.version), "abort_all_requests": False}
            self._server.post("/update_weight_version", body, CONTROL_DEADLINE)
        self._read_back(weights)

    def _put_back(self, before: Weights, over: Parcel, err: BaseException) -> None:
        try:
            parcel = self._pusher.pack({name: before.tensors[name] for name in over.tensors})
            self._put(before, parcel)
            self._pusher.drop(parcel)
        except BaseException as second:
            self._server.close()
            raise EngineError(
                f"new weights could not be put into the server ({err}), nor version {before.version} back ({second}); "
                "the server was ended so that it cannot serve a mix: start the engine again"
            ) from second

    def _read_back(self, weights: Weights) -> None:
        compare(weights, self._reported(), self._architecture)

    def _reported(self) -> dict[str, str]:
        answer = self._server.post("/weights_checker", {"action": "checksum"}, PUSH_DEADLINE)
        return answer["ranks"][0]["checksums"]

    def _take_over(self) -> None:
        """Make sure of a server that somebody else started: its sampler is ours, its weights are those of the folder."""
        self._pause.resume()
        weights = self._live
        try:
            compare(weights, self._reported(), self._architecture)
        except EngineError:
            # A number is what an engine before this one has put there; a server that nobody has touched has a word.
            if not self._server.weight_version.isdecimal():
                raise
        self._exchange(weights, self._pusher.pack(weights.served()))
        self._previous = None
        self._requests.generate([GenerateRequest("probe", (0,), 0, 1, 0.0)])

    def _weigh(self, version: int, tensors: dict[str, Tensor], known: Weights | None = None) -> Weights:
        return weigh(version, tensors, self._architecture, DTYPES[self._dtype], known, self._draft)

    def _attestation(self, weights: Weights) -> Attestation:
        # Adapters, and drafts that no server draws with, are held in this process's memory.
        extras = {name: tensor_digest(tensor) for name, tensor in weights.tensors.items() if is_extra(name)}
        digests = weights.digests | extras
        return Attestation(self.fingerprint(), weights.version, weights_digest(digests), digests)


def _policy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not is_extra(name)}


def _all_stop_ids(folder: str, stop_ids: Sequence[int], architecture: Architecture) -> tuple[int, ...]:
    """Those asked for and those of the folder, at which the server ends a reply in any case."""
    try:
        own = read_stop_ids(folder)
    except ModelError:
        if not stop_ids:
            raise
        own = ()
    odd = [token for token in stop_ids if not 0 <= token < architecture.vocab]
    if odd:
        raise EngineError(f"stop id {odd[0]} is outside the vocabulary of {architecture.vocab}; correct it")
    return tuple(dict.fromkeys((*stop_ids, *own)))
