"""What the stages ask of the things that live longer than a step: Engine, Trainer, Verifier, Lake.

Every method may be a call into another process. Arguments and results are plain data, Arrow tables or
contiguous CPU tensors; nothing here depends on Ray, Dagster or a storage format.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from furlong.ops.weights.layout import Offer, Piece


@dataclass(frozen=True)
class GenerateRequest:
    """One reply to draw."""

    request_id: str
    """Unique within one call; comes back on the sample."""
    prompt: tuple[int, ...]
    """Token ids, at least one, each in [0, vocabulary)."""
    seed: int
    """63-bit root; the uniform number for reply position t is a function of (seed, t) alone."""
    max_new_tokens: int
    """Longest reply, at least 1."""
    temperature: float
    """Softmax temperature; 0 means greedy."""


@dataclass(frozen=True)
class Sample:
    """One drawn reply."""

    request_id: str
    """As in the request."""
    tokens: tuple[int, ...]
    """Sampled ids, the stop token included when it was sampled; empty only when aborted before the first."""
    logprobs: tuple[float, ...]
    """Log-probability (nat) of each sampled token under the distribution it was drawn from (the model's own for greedy)."""
    versions: tuple[tuple[int, int, int], ...]
    """Spans (weights version, start, end) over `tokens`, end exclusive, without gaps."""
    finish_reason: str
    """`stop`, `length` or `abort`."""
    seconds: float
    """From the request's admission to its last token."""


@dataclass(frozen=True)
class Attestation:
    """An engine's proof of what it holds: recomputed from its own bytes, never copied from a message."""

    engine: str
    """Fingerprint of the engine: class, model shape, dtype, threads, torch version."""
    version: int
    """Weights version."""
    digest: str
    """Digest over every tensor (`ops.weights.digest`)."""
    tensors: dict[str, str]
    """Digest of each tensor by Hugging Face name."""


class StaleFence(RuntimeError):
    """A publisher with a lower fencing token than one seen before: a newer one has taken over. Nothing was changed."""


class Engine(Protocol):
    """Serves one live weights version; a staged one waits in a shadow buffer until activated.

    `fence` is the publisher's token (`LakeLike.take_fence`): an engine remembers the highest it was given and raises
    StaleFence on a lower one, so that a late publisher cannot change anything.
    """

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Draw all replies, in the order asked. Token ids in, token ids out."""

    def abort(self, request_ids: list[str] | None = None) -> int:
        """End running requests (all when None), keeping what they have; returns how many."""

    def pause(self, lease: float) -> None:
        """Stop decoding after the current token; requests stay in flight. Ends by itself after `lease` seconds, so
        that a publisher that died cannot keep an engine silent."""

    def resume(self) -> None:
        """Go on after `pause`; harmless when not paused."""

    def layout(self) -> list[dict[str, Piece]]:
        """For each rank of the engine, the piece it holds of every tensor of the policy, by Hugging Face name; what is
        not named (drafts and adapters, whose shapes may change) every rank takes whole."""

    def load_anchor(
        self, path: str, version: int, chain: list[pa.Table], fence: int, digests: dict[str, str] | None = None
    ) -> Attestation:
        """Serve complete weights as `version`: those of a Hugging Face folder or a safetensors file, changed by the
        `weight_deltas` rows of each later version in `chain`, in order, in memory. With `digests`, by tensor, other
        weights are refused and the live version goes on serving."""

    def stage(self, version: int, base_version: int, deltas: pa.Table, fence: int) -> Attestation:
        """Apply `weight_deltas` rows to a shadow copy of live version `base_version`; serving is unaffected."""

    def receive(self, offer: Offer, engine: int) -> Attestation:
        """Take part in a transfer as engine number `engine` of the offer and stage what arrives; serving is unaffected."""

    def activate(self, version: int, fence: int) -> None:
        """Flip the staged version live, atomically between two decode steps; the one before stays at hand."""

    def revert(self, version: int, fence: int) -> None:
        """Flip back to `version`, the one that was live before the last `activate`; harmless when it is live."""

    def attest(self) -> Attestation:
        """Digest the live weights now."""

    def health(self) -> dict[str, Any]:
        """Version, requests running, resident bytes; answers while generating."""


class WeightSource(Protocol):
    """The trainer's side of a transfer: its ranks hold pieces of the new weights."""

    def holdings(self) -> list[list[Piece]]:
        """For each source rank the pieces it can send; together they cover every tensor, replicas included."""

    def send(self, offer: Offer) -> int:
        """Take part in the transfer with every source rank; returns the bytes put on the wire."""


@dataclass(frozen=True)
class TrainBatch:
    """The trajectories of one step, in a fixed order; plain numpy-free data so that it can be digested."""

    step: int
    """Step number, from 1; the learning-rate schedule reads it."""
    temperature: float
    """Temperature at which the trajectories were sampled."""
    prompts: tuple[tuple[int, ...], ...]
    """Token ids of each group's prompt, one entry per group."""
    group: tuple[int, ...]
    """For each trajectory, the index of its group."""
    replies: tuple[tuple[int, ...], ...]
    """Sampled token ids of each trajectory."""
    logprobs: tuple[tuple[float, ...], ...]
    """The engine's log-probability of each sampled token."""
    masks: tuple[tuple[bool, ...], ...]
    """True where a reply token enters the loss."""
    advantages: tuple[float, ...]
    """One per trajectory."""
    trajectory_ids: tuple[str, ...]
    """Named in errors."""


@dataclass(frozen=True)
class StepMetrics:
    """What one optimiser step measured; every number is finite."""

    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    tokens_trained: int
    """Tokens with a true mask, over the whole step."""
    clip_fraction: float
    """Share of trained tokens whose ratio was clipped."""
    entropy: float
    """Mean entropy (nat) of the trainer's next-token distribution at trained tokens."""
    mismatch_mean: float
    """Mean |log-probability of the trainer - of the engine| over trained tokens, same weights version."""
    mismatch_max: float
    mismatch_p99: float
    mismatch_k3: float
    """k3 estimate of KL(engine || trainer): mean of exp(d) - 1 - d with d = trainer - engine."""


class Trainer(Protocol):
    """Holds master weights and optimiser; one call of `step` is one optimiser step."""

    def load(self, folder: str) -> None:
        """Start from a Hugging Face folder with a fresh optimiser, at step 0."""

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probability of each reply token under the current weights, at the batch's temperature."""

    def step(self, batch: TrainBatch) -> StepMetrics:
        """One optimiser step; a non-finite loss or gradient raises, naming what was bad, and changes nothing."""

    def export(self) -> dict[str, Any]:
        """Weights by Hugging Face name as contiguous CPU tensors in the published dtype; tied tensors once."""

    def master_digest(self) -> str:
        """Digest of the float32 master weights."""

    def save(self, folder: str) -> None:
        """Write masters, optimiser and step so that `restore` gives bitwise the same trainer."""

    def restore(self, folder: str) -> int:
        """Load what `save` wrote; returns the step it was saved after."""

    def fingerprint(self) -> str:
        """Class, model shape, dtypes, threads, torch version."""


class Verifier(Protocol):
    """Scores replies in another process, each within a deadline."""

    def score(self, items: list[dict[str, str]]) -> list[dict[str, Any]]:
        """For {prompt row fields + reply, finish_reason} give {verdict, score, extracted, detail, seconds}, in order."""


@dataclass(frozen=True)
class Commit:
    """Where rows stand in the lake."""

    table: str
    version: int
    """Delta version that holds the rows."""
    rows: int
    wrote: bool
    """False when the rows were there already."""


class LakeLike(Protocol):
    """The part of `resources.lake.Lake` that stages use."""

    def read(self, table: str, where: dict[str, Any] | None = None, columns: list[str] | None = None) -> pa.Table:
        """Rows whose columns equal (or, for a list, are among) the given values; empty when the table is absent."""

    def commit_once(self, table: str, key: dict[str, Any], data: pa.Table, fence: int | None = None) -> Commit:
        """Append rows unless rows with this key exist; all or nothing."""

    def replace(self, table: str, key: dict[str, Any], data: pa.Table, fence: int | None = None) -> Commit:
        """Swap all rows with this key for `data` in one transaction."""

    def take_fence(self, run: str) -> int:
        """A fencing token higher than any given out for this run; `weight_versions` then refuses commits with lower ones."""
