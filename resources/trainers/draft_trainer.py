"""The draft that learns beside the policy: from the policy's own hidden states of the step's batch, with masters and an
optimiser of its own.

The policy never sees it: what it is given is detached, it draws no random number, its gradients are clipped by their own
norm, and a gradient of it that is not finite ends the draft's step with a reason, not the policy's.

Every rank has all of it. A backend gathers what its ranks have of a micro-batch (`DraftInputs`) and calls `learn` with it
on one of those that have the same, or, by context parallelism, on all that share it.
"""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.kernels.layout import ContextLayout, Rows
from furlong.kernels.ring import Ring
from furlong.ops.draft.gradients import MEASURES, DraftLoss, draft_gradients
from furlong.ops.draft.inputs import DraftInputs, anchor_offsets, depths_of, local_counts
from furlong.ops.draft.module import draft_module
from furlong.ops.draft.settings import DraftSettings, draft_of
from furlong.ops.draft.shape import MAPS, DraftShape
from furlong.ops.draft.start import shape_of, start_draft
from furlong.ops.draft.tensors import to_version
from furlong.ops.draft.vocabulary import maps_of
from furlong.ops.policy.architecture import Architecture, read_architecture, read_stop_ids
from furlong.ops.policy.checkpoint import read_tensors
from furlong.ops.policy.loss import NonFiniteError
from furlong.ops.policy.schedule import learning_rate
from furlong.ops.protocols import TrainBatch
from furlong.ops.spec import AlgorithmSpec, RunSpec
from furlong.ops.weights.layout import Piece, whole_piece
from furlong.resources.trainers.beside import Beside
from furlong.resources.trainers.masters import Shapes
from furlong.resources.trainers.ranks import Ranks, device
from furlong.resources.trainers.replicated import ReplicatedMasters

NOTHING = "no token to learn in this step"
"""Why a draft's step is left out."""


class DraftTrainer(Beside):
    """A run's draft. For each step, on all ranks: `begin`, `learn` for each micro-batch, then `update`."""

    prefix = "draft/"

    def __init__(self, tensors: Mapping[str, Tensor], shape: DraftShape, spec: RunSpec, ranks: Ranks) -> None:
        """
        Args:
            tensors: all of the draft's, by name without prefix, the same on all ranks.
            spec: which has a draft.
        """
        self.spec, self.shape, self.ranks = spec, shape, ranks
        self.settings = _settings(spec)
        self.module = draft_module(shape, tensors, torch.float32).to(device())
        self.rule = draft_rule(spec.algorithm, self.settings)
        compute = getattr(torch, spec.trainer.compute_dtype)
        # In the same order wherever the tensors come from: the norm's last bits depend on it.
        parameters = {name: self.module.get_parameter(name) for name in shape.parameters()}
        self.masters = ReplicatedMasters(parameters, self.rule, compute, ranks)
        self._batch: TrainBatch | None = None
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._found = self._nothing()
        self._seconds = 0.0

    @classmethod
    def of_folder(cls, folder: str, spec: RunSpec, ranks: Ranks) -> DraftTrainer:
        """What a run begins with: the draft that `draft.start` names, or one made of the model in `folder`.

        Raises:
            ModelError: it does not fit the model, or one of the two cannot be read.
        """
        settings, architecture = _settings(spec), read_architecture(folder)
        # Replies could not end by a token that cannot be proposed.
        keep = read_stop_ids(folder) if settings.vocabulary and not settings.start else ()
        tensors, shape = start_draft(settings, architecture, _Folder(folder, architecture), spec.seed, keep=keep)
        return cls(tensors, shape, spec, ranks)

    @classmethod
    def empty(cls, architecture: Architecture, spec: RunSpec, ranks: Ranks) -> DraftTrainer:
        """One whose tensors are still to be filled in, by `load_state`."""
        shape = shape_of(_settings(spec), architecture)
        tensors = {name: torch.zeros(size) for name, size in shape.parameters().items()}
        maps = maps_of(torch.arange(shape.draft_vocab), shape.vocab) if shape.reduced else {}
        return cls(tensors | maps, shape, spec, ranks)

    def begin(self, batch: TrainBatch) -> None:
        """Forget the gradients of the step before, and count what there is to learn: all ranks know the whole batch, so
        that none has to ask another before its first backward pass."""
        self.masters.begin()
        self._batch, self._found, self._seconds = batch, self._nothing(), 0.0
        self._counts = local_counts(_all_of(batch, self), self.shape, self.settings.depths)

    def offsets(self, trajectories: list[int]) -> Int[Tensor, " documents"] | None:
        """`DraftInputs.offsets` of documents, given their numbers in the step's batch."""
        if self.shape.kind != "block":
            return None
        names = [self._batch.trajectory_ids[index] for index in trajectories]
        return anchor_offsets(self.spec.seed, self._batch.step, names, self.shape.block - 1)

    def learn(
        self, inputs: DraftInputs, embedding: Float[Tensor, "vocab hidden"], head: Float[Tensor, "vocab hidden"],
        ring: Ring | None = None, layout: ContextLayout | None = None,
    ) -> None:  # fmt: skip
        """Add the gradients of a micro-batch.

        Args:
            inputs: documents of the step's batch, each in one micro-batch of one rank or ring.
            embedding, head: the policy's, as it computes with them.
            ring, layout: see `draft_gradients`.
        """
        if not len(inputs.tokens) and ring is None:
            return
        start = time.perf_counter()
        with torch.enable_grad():
            self._found += draft_gradients(
                self.module, inputs, self.settings, self._counts, embedding, head, ring, layout,
                progress=(self._batch.step - 1) / max(self.spec.steps - 1, 1),
                backend="cpu" if inputs.taps.device.type == "cpu" else "flex",
            )  # fmt: skip
        self._seconds += time.perf_counter() - start

    def update(self) -> dict[str, Any]:
        """Take the step, unless there is nothing to learn or something is not finite; the `draft_*` fields of
        StepMetrics.

        Raises:
            ValueError: on all ranks: not every token that `begin` counted was learnt from, or some were twice.
        """
        start = time.perf_counter()
        found, reason, norm = self._together(), "", None
        if not bool(self._counts.any()):
            reason = NOTHING
        elif not torch.equal(found.sums[0], self._counts.to(torch.float64)):
            raise ValueError(
                f"the draft learnt from {found.sums[0].tolist()} tokens by depth where the batch has "
                f"{self._counts.tolist()}; give each trajectory to `learn` once"
            )
        else:
            try:
                norm = self.masters.gradient_norm()
                if not math.isfinite(found.loss):
                    raise NonFiniteError(f"loss {found.loss} is not finite; nothing was changed")
                self.masters.update(learning_rate(self.rule, self.spec.steps, self._batch.step), norm)
            except NonFiniteError as err:
                bad = self.masters.bad_weight()
                reason = f"draft weight {bad} has a NaN or an infinity, so: {err}" if bad else f"of the draft, {err}"
        self._seconds += time.perf_counter() - start
        return self._measured(found, norm, reason)

    def export(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """On rank 0, the draft's tensors under their names in a weights version, on the CPU; nothing on the others."""
        if not self.ranks.first:
            return {}
        return to_version(self.masters.export(dtype) | {name: t.cpu() for name, t in self._maps().items()})

    def complete(self) -> Iterator[tuple[str, Tensor]]:
        """See `Beside.complete`; with the maps of a reduced vocabulary."""
        yield from super().complete()
        for name, tensor in self._maps().items():
            yield self.prefix + name, tensor.cpu()

    def shapes(self) -> Shapes:
        """See `Beside.shapes`."""
        return super().shapes() | {self.prefix + name: tuple(t.shape) for name, t in self._maps().items()}

    def state(self) -> dict[Piece, Tensor]:
        """See `Beside.state`."""
        maps = {self._map_piece(name): tensor.cpu() for name, tensor in self._maps().items()}
        return super().state() | (maps if self.ranks.first else {})

    def reads(self) -> dict[Piece, torch.dtype]:
        """See `Beside.reads`: all of it, on every rank."""
        wide = next(iter(self.masters.weights.values())).dtype
        whole = {whole_piece(name, shape): wide for name, shape in self.masters.shapes().items() if "/" in name}
        maps = {self._map_piece(name): tensor.dtype for name, tensor in self._maps().items()}
        return {self.stored(piece): dtype for piece, dtype in whole.items()} | maps

    def load_state(self, fetch: Callable[[Piece], Tensor]) -> None:
        """See `Beside.load_state`."""
        super().load_state(fetch)
        for name, tensor in self._maps().items():
            tensor.copy_(fetch(self._map_piece(name)))

    def _maps(self) -> dict[str, Tensor]:
        return {name: self.module.get_buffer(name) for name in MAPS} if self.shape.reduced else {}

    def _map_piece(self, name: str) -> Piece:
        return self.stored(whole_piece(name, self._maps()[name].shape))

    def _nothing(self) -> DraftLoss:
        return DraftLoss(0.0, torch.zeros(len(MEASURES), depths_of(self.shape, self.settings.depths)).double(), NOTHING)

    def _together(self) -> DraftLoss:
        """What all ranks found."""
        sums, loss = self._found.sums, torch.tensor([self._found.loss], dtype=torch.float64)
        whole = self.ranks.sum(torch.cat([sums.flatten(), loss]))
        return DraftLoss(float(whole[-1]), whole[:-1].view_as(sums))

    def _measured(self, found: DraftLoss, norm: float | None, reason: str) -> dict[str, Any]:
        # Under pipeline parallelism the ranks of one stage alone have anything to do.
        measured = {"draft_tokens": 0, "draft_seconds": max(self.ranks.exchange(self._seconds))}
        if reason:
            return measured | {"draft_skipped": reason}
        means = found.means()
        lengths = itertools.accumulate(means["accepted"], operator.mul)
        return measured | {
            "draft_loss": found.loss,
            "draft_agreement": means["agreed"][0],
            "draft_acceptance": 1.0 + sum(lengths),
            "draft_tokens": int(found.sums[0, 0]),
            "draft_grad_norm": norm,
        }


def draft_rule(algorithm: AlgorithmSpec, settings: DraftSettings) -> AlgorithmSpec:
    """The rule by which the draft's AdamW steps: the policy's, with the rates and the clip of `draft`."""
    own = {name: getattr(settings, name) for name in ("learning_rate", "warmup_steps", "max_grad_norm")}
    return algorithm.model_copy(update=own)


def _settings(spec: RunSpec) -> DraftSettings:
    settings = draft_of(spec)
    if settings is None:
        raise ValueError("the spec has no draft, so there is none to train; set draft.kind")
    return settings


def _all_of(batch: TrainBatch, draft: DraftTrainer) -> DraftInputs:
    """Which rows of which documents teach, in the whole step; without states."""
    document, position, trained = [], [], []
    for index, mask in enumerate(batch.masks):
        length = len(batch.prompts[batch.group[index]]) - 1
        document += [index] * (length + len(mask))
        position += range(length + len(mask))
        trained += [False] * length + list(mask)
    rows = Rows(torch.tensor(document, dtype=torch.int64), torch.tensor(position, dtype=torch.int64))
    none = torch.zeros(len(document), 0)
    on = torch.tensor(trained, dtype=torch.bool)
    offsets = draft.offsets(list(range(len(batch.masks))))
    return DraftInputs(rows, rows.position, none, none, on, batch.temperature, offsets)


class _Folder(Mapping[str, Tensor]):
    """The tensors of a model's folder in float32, each read when it is asked for: a draft is made of few of them."""

    def __init__(self, folder: str, architecture: Architecture) -> None:
        self._folder, self._architecture = folder, architecture
        self._shapes = architecture.shapes()

    def __getitem__(self, name: str) -> Tensor:
        pieces = {other: Piece(other, 0, 0, 0) for other in self._shapes}
        pieces[name] = whole_piece(name, self._shapes[name])
        return read_tensors(self._folder, self._architecture, torch.float32, pieces)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)
