"""What the stages ask of the things that live longer than a step: Engine, Trainer, Verifier, Lake.

Every method may be a call into another process. Arguments and results are plain data, Arrow tables or
contiguous CPU tensors; nothing here depends on Ray, Dagster or a storage format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from furlong.ops.weights.layout import Offer, Piece


@dataclass(frozen=True)
class GenerateRequest:
    """One reply to draw."""

    request_id: str
    """Names the reply for ever: an engine that has a request of this id draws no second one."""
    prompt: tuple[int, ...]
    """Token ids, at least one, each in [0, vocabulary)."""
    seed: int
    """63-bit root; the uniform number for reply position t is a function of (seed, t) alone."""
    max_new_tokens: int
    """Longest reply, `prefix` included, at least 1."""
    temperature: float
    """Softmax temperature; 0 means greedy."""
    top_k: int = 0
    """Only the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens with at least this probability, in (0, 1]."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one, in [0, 1]."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the reply besides the model's own."""
    prefix: tuple[int, ...] = ()
    """Reply tokens drawn before an interruption: the reply goes on after them, at position t = len(prefix)."""
    deadline: float = 0.0
    """Seconds from submission until the reply ends as it is, with reason `deadline`; 0 for none."""
    task: str = ""
    """Family of the question, by which an engine counts; decides nothing."""


@dataclass(frozen=True)
class Routing:
    """Which experts a run of tokens went through, recorded when their forward pass used them."""

    first: int
    """Position, in prompt + reply, of the token that row 0 belongs to."""
    rows: int
    """Number of tokens; the last token of a reply has had no forward pass, and no row."""
    layers: tuple[int, ...]
    """Index in the model of each layer with experts, in order."""
    top_k: int
    """Experts per token and layer."""
    experts: int
    """Experts to choose from."""
    data: bytes
    """zstd of rows x len(layers) x top_k expert ids, row-major, uint8 up to 256 experts, else little-endian uint16."""


@dataclass(frozen=True)
class Sample:
    """One drawn reply, or what was drawn of it after the request's `prefix`."""

    request_id: str
    """As in the request."""
    tokens: tuple[int, ...]
    """Sampled ids, the stop token included when it was sampled; empty only when ended before the first."""
    logprobs: tuple[float, ...]
    """Log-probability (nat) of each token under the distribution it was drawn from: after temperature, top-k, top-p and
    min-p (the model's own for greedy)."""
    model_logprobs: tuple[float, ...]
    """Log-probability (nat) of each token under the unmodified model, softmax(logits)."""
    versions: tuple[tuple[int, int, int], ...]
    """Spans (weights version, start, end) over `tokens`, end exclusive, without gaps: the version that sampled each."""
    finish_reason: str
    """`stop`, `length`, `deadline` or `abort`."""
    seconds: float
    """From the request's submission to its last token."""
    routing: Routing | None = None
    """For models with experts: every forward pass that was the first of its token. It begins at position 0, or, after
    a prefix, at the prefix's last token, since the earlier ones were recorded with it."""
    drafted: tuple[bool, ...] | None = None
    """Whether each token was a draft's proposal that was accepted; None from an engine without a draft."""


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

    def submit(self, requests: list[GenerateRequest]) -> None:
        """Begin to draw these replies beside those under way; all or, when one is unusable (RequestError), none.

        A request whose id the engine knows, running or finished and not yet taken, is not begun again: so a driver that
        died can be followed by one that submits the same.
        """

    def collect(self, seconds: float, taken: list[str]) -> list[Sample]:
        """Forget the samples `taken`, which an earlier call returned; then all finished ones, as soon as there is one, or
        none after `seconds`. A sample is returned again and again until it is named in `taken`."""

    def generate(self, requests: list[GenerateRequest]) -> list[Sample]:
        """Submit, wait for all, and return them in the order asked; several threads may, at once."""

    def score(self, rows: list[tuple[tuple[int, ...], int]], temperature: float) -> list[list[float]]:
        """For each token sequence and the index of its first scored token, at least 1: the log-probability (nat) of every
        token from there on under softmax(logits / temperature) of the live weights. Replies go on meanwhile. Where an
        engine gives a token the same bits in any company, these are the bits that it records when it draws it."""

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

    def activate(self, version: int, fence: int, inflight: str = "in_place") -> None:
        """Flip the staged version live, atomically between two decode steps; the one before stays at hand.

        Replies under way go on with the new weights: `in_place` keeps their keys and values as the old ones computed
        them, `retract` computes them again. Their tokens, and the routing recorded for them, stay either way.
        """

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
    """Token ids of each trajectory after its group's prompt: what was sampled, and what tools or agents said between."""
    logprobs: tuple[tuple[float, ...], ...]
    """The engine's log-probability of each reply token that was sampled; any number for the others."""
    masks: tuple[tuple[bool, ...], ...]
    """True where a reply token enters the loss."""
    sampled_by: tuple[tuple[int, ...], ...]
    """Weights version that sampled each reply token; -1 for tokens that nobody sampled."""
    version: int
    """Weights version that the step starts from."""
    advantages: tuple[float, ...]
    """One per trajectory, as `ops.policy.algorithms` makes them from the rewards."""
    rewards: tuple[float, ...]
    """One per trajectory, as the verifier gave it."""
    routing: tuple[Routing | None, ...]
    """For models with experts, the recorded experts of each trajectory, prompt included; they are replayed."""
    trajectory_ids: tuple[str, ...]
    """Named in errors."""


@dataclass(frozen=True)
class OtherLogprobs:
    """Log-probabilities (nat, at the batch's temperature) of the batch's reply tokens under weights that the step does not
    start from, in the shape of `TrainBatch.replies`; NaN where they were not computed."""

    sampling: tuple[tuple[float, ...], ...] | None = None
    """By the trainer's arithmetic, under the weights version that sampled the token: what `TrainBatch.logprobs` is compared
    with where the token was not sampled by the step's own starting weights."""
    reference: tuple[tuple[float, ...], ...] | None = None
    """Under the base model, where the algorithm has a divergence from it."""
    teacher: tuple[tuple[float, ...], ...] | None = None
    """Under the teacher, for distillation."""


@dataclass(frozen=True)
class StepMetrics:
    """What one optimiser step measured; every number is finite. The mismatch is None where no token was compared."""

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
    ess: float
    """Effective sample size (sum w)^2 / sum w^2 as a share of the trained tokens, w = exp(trainer - engine) before any
    bound: 1 when nothing has to be corrected."""
    rejected_fraction: float
    """Share of trained tokens that the correction took out of the loss."""
    kl: float | None
    """Mean estimate (nat) of the divergence of the policy from the base model (for `distill`: from the teacher), at trained
    tokens and under the step's starting weights; None where the loss has none."""
    mismatch_coverage: float
    """Share of trained tokens that the mismatch is measured on."""
    mismatch_mean: float | None
    """Mean |log-probability of the trainer - of the engine|, both under the weights version that sampled the token."""
    mismatch_max: float | None
    mismatch_p99: float | None
    mismatch_k3: float | None
    """k3 estimate of KL(engine || trainer): mean of exp(d) - 1 - d with d = trainer - engine."""
    mismatch_ess: float | None
    """Effective sample size, as a share, of the weights exp(d)."""
    tokens_reached: tuple[int, ...]
    """For each trajectory, the tokens whose gradient went through the whole network and into the optimiser."""
    scores: tuple[float | None, ...] = field(default=(), compare=False)
    """Of each trained token, in order: the trainer's log-probability that the mismatch is made of; None where the token was
    not compared."""
    value_loss: float | None = None
    """Loss of the value model before its first update; None, as what follows, where there is none."""
    value_explained: float | None = None
    """Explained variance of the returns by the values: 1 when it foretells all; None too where all returns are the same."""
    value_grad_norm: float | None = None
    """Largest global L2 norm, before clipping, of the value model's gradients in this step."""
    draft_loss: float | None = None
    """Loss of the draft before its update; None, as what follows, where no draft learns or its update was skipped."""
    draft_agreement: float | None = None
    """Share of tokens at which the likeliest token of draft and policy is the same, one ahead."""
    draft_acceptance: float | None = None
    """Acceptance length that the draft's distributions promise at these tokens: 1 + a_1 + a_1 a_2 + ..., with a_d the mean
    chance that a proposal of depth d is accepted."""
    draft_tokens: int | None = None
    """Tokens that the draft learned to foretell, one ahead."""
    draft_grad_norm: float | None = None
    """Global L2 norm, before clipping, of the draft's gradients."""
    draft_seconds: float | None = field(default=None, compare=False)
    """Part of the step's time that went into the draft."""
    draft_skipped: str | None = None
    """Why the draft did not learn in this step, which leaves it as it was."""


class Trainer(Protocol):
    """Holds master weights and optimiser; one call of `step` is one optimiser step.

    With several ranks each has one, and every method is called on all of them with the same arguments; the results of
    rank 0 count.
    """

    def load(self, folder: str) -> None:
        """Start from a Hugging Face folder with a fresh optimiser, at step 0."""

    def logprobs(
        self,
        batch: TrainBatch,
        masks: tuple[tuple[bool, ...], ...] | None = None,
        weights: dict[str, Any] | None = None,
    ) -> list[list[float]]:
        """Log-probability of each reply token (of those in `masks`; NaN elsewhere) at the batch's temperature, under the
        current weights, or under published `weights` as `export` gives them; the trainer is the same afterwards."""

    def step(self, batch: TrainBatch, others: OtherLogprobs) -> StepMetrics:
        """One optimiser step; a non-finite loss or gradient raises, naming what was bad, and changes nothing."""

    def export(self) -> dict[str, Any]:
        """Weights by Hugging Face name as contiguous CPU tensors in the published dtype; tied tensors once. With adapters,
        the base weights and `adapter.*` (`ops.policy.lora`); with a draft, from step 1 on, `draft.*` (`ops.draft.shape`). A
        value model is never part of it."""

    def master_digest(self) -> str:
        """Digest of the master weights, value model's and draft's included, the same however they are laid over ranks."""

    def save(self, folder: str) -> None:
        """Write masters, optimisers, random state and step; `restore` in the same layout gives bitwise the same trainer."""

    def restore(self, folder: str) -> int:
        """Load what `save` wrote, under this or another layout; returns the step it was saved after."""

    def fingerprint(self) -> str:
        """Class, model shape, dtypes, layout, threads, torch version."""


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
