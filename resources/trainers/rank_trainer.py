"""What every rank of a trainer does alike, whatever computes its gradients: a step from batch to record, and its state.

A backend adds a model: its masters (`masters.py`) and its passes, by which a batch goes through it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from furlong.ops.draft.settings import draft_of
from furlong.ops.draft.shape import PREFIX
from furlong.ops.policy.algorithms import algorithm_of
from furlong.ops.policy.architecture import architecture_of
from furlong.ops.policy.loss import NonFiniteError, require_finite
from furlong.ops.policy.objective import Objective
from furlong.ops.policy.packing import Masks, check_batch
from furlong.ops.policy.parallel import Layout
from furlong.ops.policy.replay import check_records
from furlong.ops.policy.schedule import learning_rate
from furlong.ops.protocols import OtherLogprobs, StepMetrics, TrainBatch
from furlong.ops.spec import RunSpec
from furlong.ops.weights.digest import tensor_digest, weights_digest
from furlong.ops.weights.layout import Piece, whole_piece
from furlong.resources.trainers import snapshots
from furlong.resources.trainers.beside import Beside
from furlong.resources.trainers.deterministic import deterministic
from furlong.resources.trainers.draft_trainer import NOTHING, DraftTrainer
from furlong.resources.trainers.masters import UPDATES, master_dtype
from furlong.resources.trainers.module import PolicyModule, load_module, module_of
from furlong.resources.trainers.ranks import Ranks, usable_cores
from furlong.resources.trainers.value_model import ValueModel

STEP, RANDOM = Piece("step", 0, 0, 1), "random"


class Passes(Protocol):
    """The two ways in which a batch goes through a model; called on all ranks, and the result is of all together."""

    def logprobs(
        self, batch: TrainBatch, masks: Masks, index: Callable[[Any], Tensor], size: int
    ) -> Float[Tensor, " size"]:
        """Log-probabilities of the tokens in `masks`, at least one, in float64, each where `index` of its micro-batch says;
        0 elsewhere."""

    def gradients(
        self, batch: TrainBatch, objective: Objective, draft: DraftTrainer | None
    ) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Int[Tensor, " trajectories"]]:
        """Gradients added up in the masters; log-probability and entropy of each trained token, and how many tokens of each
        trajectory reached them.

        Args:
            draft: is given every trajectory with the states of the same forward passes.
        """


class RankTrainer(ABC):
    """A `Trainer` (ops/protocols.py). Not safe for calls at the same time."""

    def __init__(self, spec: RunSpec, threads: int, layout: Layout, rank: int) -> None:
        """
        Args:
            threads: of PyTorch in this process, which rounding depends on; 0 for all cores it may use.
            layout: with several ranks the default process group must be there.
            rank: of this process.
        """
        if threads < 0:
            raise ValueError(f"threads={threads} is not a number of threads; give 1 or more, or 0 for all cores")
        self.threads = threads or usable_cores()
        torch.set_num_threads(self.threads)
        self.spec, self.layout, self.ranks = spec, layout, Ranks(rank, layout.world)
        self.compute = getattr(torch, spec.trainer.compute_dtype)
        self.completed = 0
        self.config: dict[str, Any] | None = None
        """The model's configuration as in its config.json; None before there is a model."""
        self.masters: Any = None
        self.passes: Passes
        self.critic: ValueModel | None = None
        """Of an algorithm with a value model, once there is a model."""
        self.draft: DraftTrainer | None = None
        """Of a spec with a draft, once there is a model."""

    @abstractmethod
    def _hold(self, config: dict[str, Any], folder: str) -> None:
        """Set config, masters and passes to those of a model whose weights are still to be filled in; `folder` is named
        in errors."""

    @abstractmethod
    def _limits(self) -> tuple[int, int, tuple[tuple[int, ...], int, int]]:
        """Vocabulary, context length, and of experts: the layers, how many a token goes through, how many there are."""

    @abstractmethod
    def _held(self) -> dict[Piece, torch.dtype]:
        """The pieces of the saved state that this rank reads."""

    def logprobs(
        self, batch: TrainBatch, masks: Masks | None = None, weights: dict[str, Tensor] | None = None
    ) -> list[list[float]]:
        """Log-probability (nat) of every reply token, or of those in `masks` (NaN elsewhere), under the current weights or
        under published `weights`.

        Raises:
            NonFiniteError: names the trajectories, or the tensor, with the first bad number.
            PackingError: a batch that does not fit the model or the micro-batch budget.
            ValueError: masks or weights of another batch or model.
        """
        self._check(batch)
        sizes = [len(reply) for reply in batch.replies]
        masks = masks if masks is not None else tuple((True,) * size for size in sizes)
        if [len(mask) for mask in masks] != sizes:
            raise ValueError("the masks do not fit the batch's replies; give one entry for each reply token")
        starts = torch.tensor([sum(sizes[:index]) for index in range(len(sizes))])
        wanted = torch.tensor([on for mask in masks for on in mask], dtype=torch.bool)
        names = [batch.trajectory_ids[index] for index, mask in enumerate(masks) for on in mask if on]
        flat = torch.full((sum(sizes),), math.nan, dtype=torch.float64)
        if weights is not None:
            weights = {name: tensor for name, tensor in weights.items() if not name.startswith(PREFIX)}
        with deterministic(), nullcontext() if weights is None else self.masters.placed(weights), self._blaming():
            if names:
                found = self.passes.logprobs(batch, masks, lambda m: starts[m.trajectory] + m.offset, len(flat))
                require_finite("log-probability of the trainer", found[wanted], names)
                flat[wanted] = found[wanted]
        return [row.tolist() for row in flat.split(sizes)]

    def step(self, batch: TrainBatch, others: OtherLogprobs) -> StepMetrics:
        """One optimiser step; a non-finite loss or gradient raises, on all ranks, and changes nothing.

        A batch without a trained token counts as a step and leaves weights and optimiser as they are, AdamW's own
        step count too. Its metrics are 0 where there was nothing to measure, beside the schedule's learning rate.

        Raises:
            NonFiniteError: names the trajectories, or the tensor, with the first bad number.
            PackingError: a batch that does not fit the model or the micro-batch budget.
            ValueError: not the step after the last one.
        """
        self._check(batch)
        if batch.step != self.completed + 1:
            raise ValueError(
                f"asked for step {batch.step} after step {self.completed}; restore the state after step "
                f"{batch.step - 1} first"
            )
        rate = learning_rate(self.spec.algorithm, self.spec.steps, batch.step)
        objective, draft = Objective(batch, self.spec, others), self._learner()
        norm, reached = 0.0, torch.zeros(len(batch.replies), dtype=torch.int64)
        logprobs = entropy = torch.zeros(0, dtype=torch.float64)
        if objective.tokens:
            with deterministic(), self._blaming():
                if self.critic:
                    values = self.critic.values(batch, objective)
                    objective.value(values)
                self.masters.begin()
                if draft:
                    draft.begin(batch)
                logprobs, entropy, reached = self.passes.gradients(batch, objective, draft)
                norm = self.masters.gradient_norm()
                metrics = objective.metrics(logprobs, entropy)
                if self.critic:
                    metrics |= self.critic.learn(batch, objective, values, objective.targets(logprobs))
                if draft:
                    metrics |= draft.update()
                self.masters.update(rate, norm)
        else:
            metrics = objective.metrics(logprobs, entropy)
            if draft:
                metrics |= {"draft_tokens": 0, "draft_skipped": NOTHING}
        self.completed = batch.step
        metrics |= {"tokens_reached": tuple(reached.tolist()), "scores": objective.scores(logprobs)}
        return StepMetrics(**metrics, grad_norm=norm, learning_rate=rate)

    def export(self) -> dict[str, Tensor]:
        """Master weights rounded to `model.dtype`, by Hugging Face name; copies, tied tensors once. Rank 0 has them.

        From step 1 on with the draft, so that version 0 is the model as it was found.
        """
        self._loaded()
        dtype = getattr(torch, self.spec.model.dtype)
        drafted = self.draft.export(dtype) if self.draft and self.completed else {}
        return self.masters.export(dtype) | drafted

    def master_digest(self) -> str:
        """Digest of the complete master weights, whatever the layout. Rank 0 has it; one that gets no masters, nothing."""
        self._loaded()
        digests = {name: tensor_digest(whole) for name, whole in self.masters.complete()}
        has_them = bool(digests) or self.ranks.first
        for model in self._beside():
            digests |= {name: tensor_digest(whole) for name, whole in model.complete()}
        return weights_digest(digests) if has_them else ""

    def save(self, folder: str) -> None:
        """Write masters, optimiser, random state and step without copying them first: no step may run meanwhile."""
        self._loaded()
        held = self.masters.state()
        for model in self._beside():
            held |= model.state()
        if self.ranks.first:
            random = torch.get_rng_state()
            held |= {STEP: torch.tensor([self.completed]), whole_piece(RANDOM, random.shape): random}
        about = {"architecture": self.config, "trainer": self.fingerprint()}
        snapshots.write(folder, held, self._shapes(), about, self.ranks)

    def restore(self, folder: str) -> int:
        """Load what `save` wrote, under any layout and by any backend, on a fresh trainer too; the trainer is unchanged when
        this raises.

        Returns:
            the step after which it was saved.
        Raises:
            SnapshotError: a missing, damaged or foreign state.
        """
        saved = self._agreed(lambda: snapshots.Saved(folder))
        before = vars(self).copy()
        try:
            if self.config != saved.about["architecture"]:
                config = saved.about["architecture"]
                self._hold(config, folder)
                self.critic = self._value_model(lambda: module_of(config))
                self.draft = self._draft(
                    lambda: DraftTrainer.empty(architecture_of(config, Path(folder)), self.spec, self.ranks)
                )
            self._agreed(lambda: self._require_fit(saved, folder))
        except ValueError:
            vars(self).update(before)
            raise
        self.masters.load_state(saved.piece)
        for model in self._beside():
            model.load_state(saved.piece)
        torch.set_rng_state(saved.tensor(RANDOM))
        self.completed = int(saved.tensor(STEP.name))
        return self.completed

    def fingerprint(self) -> str:
        """Class, model shape, dtypes, layout, threads, torch version."""
        self._loaded()
        c = self.config
        wide = str(master_dtype(self.compute)).removeprefix("torch.")
        return (
            f"{type(self).__name__}/{c['model_type']}-L{c['num_hidden_layers']}-H{c['hidden_size']}-V{c['vocab_size']}/"
            f"master={wide}/compute={self.spec.trainer.compute_dtype}/layout={self.layout}/threads={self.threads}/"
            f"torch={torch.__version__}"
        )

    def _begin(self, folder: str) -> None:
        """After the weights of a folder were loaded."""
        self.critic = self._value_model(lambda: load_module(folder))
        self.draft = self._draft(lambda: DraftTrainer.of_folder(folder, self.spec, self.ranks))
        if bad := self.masters.bad_weight():
            raise NonFiniteError(f"{folder}: tensor {bad} has a NaN or an infinity; convert or download it again")
        torch.manual_seed(self.spec.seed)
        self.completed = 0

    def _value_model(self, make: Callable[[], PolicyModule]) -> ValueModel | None:
        if not algorithm_of(self.spec.algorithm).valued:
            return None
        return ValueModel(make(), self.spec, self.layout.recompute, self.ranks)

    def _draft(self, make: Callable[[], DraftTrainer]) -> DraftTrainer | None:
        return make() if draft_of(self.spec) else None

    def _learner(self) -> DraftTrainer | None:
        """The draft, if it learns."""
        return self.draft if self.draft and self.draft.settings.train else None

    def _beside(self) -> list[Beside]:
        return [model for model in (self.critic, self.draft) if model]

    def _loaded(self) -> None:
        if self.config is None:
            raise RuntimeError("the trainer holds no weights yet; call load(folder) or restore(folder) first")

    def _check(self, batch: TrainBatch) -> None:
        self._loaded()
        vocabulary, context, experts = self._limits()
        check_batch(batch, vocabulary, context)
        check_records(batch, *experts)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self.masters.shapes()
        for model in self._beside():
            shapes |= model.shapes()
        return shapes | {STEP.name: (1,), RANDOM: tuple(torch.get_rng_state().shape)}

    def _require_fit(self, saved: snapshots.Saved, folder: str) -> None:
        """Raise SnapshotError unless the state is one of this model, and the bytes that this rank will read are intact."""
        shapes, held, counts = self._shapes(), self._held(), [UPDATES]
        for model in self._beside():
            held |= model.reads()
            counts.append(model.prefix + UPDATES)
        odd = {name for name in shapes.keys() | saved.shapes if shapes.get(name) != saved.shapes.get(name)}
        odd |= {piece.name for piece, dtype in held.items() if saved.dtypes.get(piece.name) != dtype}
        if odd:
            raise snapshots.SnapshotError(
                f"{folder} does not fit the model, the algorithm or trainer.compute_dtype at {sorted(odd)[:3]}; restore "
                "another save"
            )
        saved.check([*held, *(whole_piece(name, shapes[name]) for name in (*counts, STEP.name, RANDOM))])

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """What `work` gives here, unless it raised ValueError on any rank: then that, on all."""
        result = error = None
        try:
            result = work()
        except ValueError as err:
            error = err
        self.ranks.agree(error)
        return result

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Where a number is not finite because a weight is not, say so."""
        try:
            yield
        except NonFiniteError as err:
            bad = self.masters.bad_weight()
            if not bad and self.critic:
                bad = self.critic.bad_weight()
            if bad:
                raise NonFiniteError(f"master weight {bad} has a NaN or an infinity, so: {err}") from err
            raise
