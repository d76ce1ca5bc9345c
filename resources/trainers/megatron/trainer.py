"""MegatronTrainer: megatron-core's GPT model, laid over ranks by tensor, pipeline, context, expert and data parallelism."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from furlong.ops.policy.architecture import Architecture, architecture_of, read_architecture
from furlong.ops.policy.checkpoint import read_tensors
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
from furlong.resources.trainers.deterministic import deterministic
from furlong.resources.trainers.masters import UPDATES, master_dtype
from furlong.resources.trainers.megatron import parallel, schedule, shims
from furlong.resources.trainers.megatron.lora import MegatronLora
from furlong.resources.trainers.megatron.model import build
from furlong.resources.trainers.megatron.passes import Passes
from furlong.resources.trainers.megatron.state import MegatronMasters
from furlong.resources.trainers.ranks import Ranks

STEP, RANDOM = Piece("step", 0, 0, 1), "random"


class MegatronTrainer:
    """A `Trainer` (ops/protocols.py). Not safe for calls at the same time."""

    def __init__(self, spec: RunSpec, threads: int, layout: Layout, rank: int, deadline: float = 1800.0) -> None:
        """
        Args:
            threads: of PyTorch in this process, which rounding depends on; 0 for all cores it may use.
            layout: with several ranks the default process group must be there.
            rank: of this process.
            deadline: seconds that any wait for another rank may take.
        Raises:
            ShimError: megatron-core is missing or untested.
            SpecError: the layout is for another number of ranks.
        """
        self.threads = threads or len(os.sched_getaffinity(0))
        torch.set_num_threads(self.threads)
        self.spec, self.layout = spec, layout
        self.ranks = Ranks(rank, layout.world)
        self.place = parallel.initialise(layout, rank, layout.world, deadline)
        self.compute = getattr(torch, spec.trainer.compute_dtype)
        self.completed = 0
        self.config: dict[str, Any] | None = None
        """The model's config.json."""
        self.architecture: Architecture | None = None
        self.masters: MegatronMasters | MegatronLora | None = None

    def load(self, folder: str) -> None:
        """Start from a Hugging Face folder with a fresh optimiser, at step 0.

        Raises:
            ModelError: an architecture that is unknown or does not fit the layout, or tensors missing from the files.
            NonFiniteError: a NaN or infinite weight.
        """
        read_architecture(folder)  # for its error, where there is no model
        self._hold(json.loads((Path(folder) / "config.json").read_text()), folder)
        nothing = {name: Piece(name, 0, 0, 0) for name in self.architecture.shapes()}
        held = read_tensors(folder, self.architecture, self.masters.dtype, nothing | self.masters.pieces)
        self.masters.load_weights(lambda piece: held[piece.name])
        if bad := self.masters.bad_weight():
            raise NonFiniteError(f"{folder}: tensor {bad} has a NaN or an infinity; convert or download it again")
        torch.manual_seed(self.spec.seed)
        self.completed = 0

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
        with deterministic(), nullcontext() if weights is None else self.masters.placed(weights), self._blaming():
            flat = torch.full((sum(sizes),), math.nan, dtype=torch.float64)
            if names:
                flat = self.passes.logprobs(
                    batch, masks, lambda feed: starts[feed.trajectory] + feed.offset, sum(sizes)
                )
            require_finite("log-probability of the trainer", flat[wanted], names)
        flat[~wanted] = math.nan
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
        objective = Objective(batch, self.spec, others)
        norm, reached = 0.0, torch.zeros(len(batch.replies), dtype=torch.int64)
        logprobs = entropy = torch.zeros(0, dtype=torch.float64)
        if objective.tokens:
            with deterministic(), self._blaming():
                self.masters.begin()
                logprobs, entropy, reached = self.passes.gradients(batch, objective)
                metrics = objective.metrics(logprobs, entropy)
                norm = self.masters.gradient_norm()
                self.masters.update(rate, norm)
        else:
            metrics = objective.metrics(logprobs, entropy)
        self.completed = batch.step
        return StepMetrics(**metrics, grad_norm=norm, learning_rate=rate, tokens_reached=tuple(reached.tolist()))

    def export(self) -> dict[str, Tensor]:
        """Master weights rounded to `model.dtype`, by Hugging Face name; copies, tied tensors once. Rank 0 has them."""
        self._loaded()
        return self.masters.export(getattr(torch, self.spec.model.dtype))

    def master_digest(self) -> str:
        """Digest of the complete master weights, whatever the layout."""
        self._loaded()
        found = {name: tensor_digest(whole) for name, whole in self.masters.complete()}
        return self.ranks.exchange(weights_digest(found) if self.ranks.first else "")[0]

    def save(self, folder: str) -> None:
        """Write masters, optimiser, random state and step: no step may run meanwhile."""
        self._loaded()
        held = self.masters.state()
        if self.ranks.first:
            random = torch.get_rng_state()
            held |= {STEP: torch.tensor([self.completed]), whole_piece(RANDOM, random.shape): random}
        about = {"architecture": self.config, "trainer": self.fingerprint()}
        snapshots.write(folder, held, self._shapes(), about, self.ranks)

    def restore(self, folder: str) -> int:
        """Load what `save` wrote, under any layout and by either backend, on a fresh trainer too; the trainer is unchanged
        when this raises.

        Returns:
            the step after which it was saved.
        Raises:
            SnapshotError: a missing, damaged or foreign state.
        """
        saved = self._agreed(lambda: snapshots.Saved(folder))
        before = vars(self).copy()
        try:
            if self.config != saved.about["architecture"]:
                self._hold(saved.about["architecture"], folder)
            self._agreed(lambda: self._require_fit(saved, folder))
        except ValueError:
            vars(self).update(before)
            raise
        self.masters.load_state(saved.piece)
        torch.set_rng_state(saved.tensor(RANDOM))
        self.completed = int(saved.tensor(STEP.name))
        return self.completed

    def fingerprint(self) -> str:
        """Class, model shape, dtypes, layout, threads, torch and megatron-core versions."""
        self._loaded()
        a = self.architecture
        wide = str(master_dtype(self.compute)).removeprefix("torch.")
        return (
            f"{type(self).__name__}/{a.kind}-L{a.layers}-H{a.hidden}-V{a.vocab}/master={wide}/"
            f"compute={self.spec.trainer.compute_dtype}/layout={self.layout}/threads={self.threads}/"
            f"torch={torch.__version__}/megatron-core={shims.VERSION}"
        )

    def _hold(self, config: dict[str, Any], folder: str) -> None:
        self.architecture = architecture_of(config, Path(folder) / "config.json")
        chunks = build(self.architecture, self.place, self.compute)
        schedule.prepare(chunks)
        if self.spec.trainer.lora_rank:
            self.masters = MegatronLora(chunks, self.spec, self.ranks)
        else:
            self.masters = MegatronMasters(chunks, self.spec.algorithm, self.ranks)
        self.passes = Passes(self.masters.chunks, self.place, self.ranks, self.spec.trainer.micro_batch_tokens)
        self.config = config

    def _loaded(self) -> None:
        if self.config is None:
            raise RuntimeError("the trainer holds no weights yet; call load(folder) or restore(folder) first")

    def _check(self, batch: TrainBatch) -> None:
        self._loaded()
        a = self.architecture
        check_batch(batch, a.vocab, a.context)
        check_records(batch, a.expert_layers, a.top_k, a.experts)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self.masters.shapes() | {STEP.name: (1,), RANDOM: tuple(torch.get_rng_state().shape)}

    def _require_fit(self, saved: snapshots.Saved, folder: str) -> None:
        """Raise SnapshotError unless the state is one of this model, and the bytes that this rank will read are intact."""
        shapes, dtypes = self._shapes(), self.masters.dtypes()
        odd = {name for name in shapes.keys() | saved.shapes if shapes.get(name) != saved.shapes.get(name)}
        odd |= {name for name, dtype in dtypes.items() if saved.dtypes.get(name) != dtype}
        if odd:
            raise snapshots.SnapshotError(
                f"{folder} does not fit the model or trainer.compute_dtype at {sorted(odd)[:3]}; restore another save"
            )
        rest = [whole_piece(name, shapes[name]) for name in (UPDATES, STEP.name, RANDOM)]
        saved.check([*self.masters.state_pieces(), *rest])

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """The result of `work`, or on all ranks the error that any had."""
        result, error = None, None
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
            if bad := self.masters.bad_weight():
                raise NonFiniteError(f"master weight {bad} has a NaN or an infinity, so: {err}") from err
            raise
