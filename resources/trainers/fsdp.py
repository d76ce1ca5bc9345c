"""FSDPTrainer: the Hugging Face module under PyTorch, one optimiser step per call, on one rank or several.

What differs with the number of ranks is behind two names: `Ranks` (sums over ranks) and the masters (`masters.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from furlong.ops.policy.loss import NonFiniteError, require_finite
from furlong.ops.policy.objective import Objective
from furlong.ops.policy.packing import Masks, MicroBatch, check_batch, empty_like, pack
from furlong.ops.policy.parallel import Layout
from furlong.ops.policy.replay import check_records
from furlong.ops.policy.schedule import learning_rate
from furlong.ops.policy.witness import Witness
from furlong.ops.protocols import OtherLogprobs, StepMetrics, TrainBatch
from furlong.ops.spec import RunSpec
from furlong.ops.weights.digest import tensor_digest, weights_digest
from furlong.ops.weights.layout import Piece, whole_piece
from furlong.resources.trainers import snapshots
from furlong.resources.trainers.lora import LoraWeights
from furlong.resources.trainers.lora_module import lora_of
from furlong.resources.trainers.masters import UPDATES, MasterWeights, master_dtype
from furlong.resources.trainers.module import PolicyModule, load_module, module_of
from furlong.resources.trainers.ranks import Ranks, device, require_data_parallel, usable_cores
from furlong.resources.trainers.sharded import ShardedMasters

ALONE = Layout()
STEP, RANDOM = Piece("step", 0, 0, 1), "random"


class FSDPTrainer:
    """A `Trainer` (ops/protocols.py). Not safe for calls at the same time, save those of `save`."""

    def __init__(self, spec: RunSpec, threads: int, layout: Layout = ALONE, rank: int = 0) -> None:
        """
        Args:
            threads: of PyTorch in this process, which rounding depends on; 0 for all cores it may use.
            layout: only its dp and recompute; with several ranks the default process group must be there.
            rank: of this process.
        Raises:
            ValueError: a layout that splits more than micro-batches and masters.
        """
        if threads < 0:
            raise ValueError(f"threads={threads} is not a number of threads; give 1 or more, or 0 for all cores")
        require_data_parallel(layout)
        self.threads = threads or usable_cores()
        torch.set_num_threads(self.threads)
        self.spec, self.layout, self.ranks = spec, layout, Ranks(rank, layout.world)
        self.compute = getattr(torch, spec.trainer.compute_dtype)
        self.completed = 0
        self.module: PolicyModule | None = None

    def load(self, folder: str) -> None:
        """Start from a Hugging Face folder with a fresh optimiser, at step 0.

        Raises:
            ValueError: an architecture without a packed forward, tensors missing from the files, or a NaN weight.
        """
        torch.manual_seed(self.spec.seed)
        load, _ = self._makers()
        self.module = self._prepared(load(folder))
        self.masters = self._masters(self.module)
        if bad := self.masters.bad_weight():
            raise NonFiniteError(f"{folder}: tensor {bad} has a NaN or an infinity; convert or download it again")
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
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        wanted = torch.tensor([on for mask in masks for on in mask], dtype=torch.bool)
        names = [batch.trajectory_ids[i] for i, mask in enumerate(masks) for on in mask if on]
        with _deterministic(), nullcontext() if weights is None else self.masters.placed(weights):
            micros = self._micros(batch, masks)
            index = [torch.tensor(starts)[micro.trajectory] + micro.offset for micro in micros]
            flat = self._forward(batch, micros, index, sum(sizes))
            with self._blaming():
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
            with _deterministic(), self._blaming():
                logprobs, entropy, reached = self._accumulate(batch, objective)
                norm = self.masters.gradient_norm()
                metrics = objective.metrics(logprobs, entropy)
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
        return weights_digest({name: tensor_digest(whole) for name, whole in self.masters.complete()})

    def save(self, folder: str) -> None:
        """Write masters, optimiser, random state and step without copying them first: no step may run meanwhile."""
        self._loaded()
        pieces, shapes = self.masters.state(), self.masters.shapes()
        if self.ranks.first:
            random = torch.get_rng_state()
            pieces |= {STEP: torch.tensor([self.completed]), Piece(RANDOM, 0, 0, len(random)): random}
        shapes |= {STEP.name: (1,), RANDOM: tuple(torch.get_rng_state().shape)}
        about = {"architecture": self.module.architecture(), "trainer": self.fingerprint()}
        snapshots.write(folder, pieces, shapes, about, self.ranks)

    def restore(self, folder: str) -> int:
        """Load what `save` wrote, under any layout, on a fresh trainer too; the trainer is unchanged when this raises.

        Returns:
            the step after which it was saved.
        Raises:
            SnapshotError: a missing, damaged or foreign state.
        """
        saved = self._agreed(lambda: snapshots.Saved(folder))
        same = self.module is not None and self.module.architecture() == saved.about["architecture"]
        _, make = self._makers()
        module = self.module if same else self._prepared(make(saved.about["architecture"]))
        masters = self.masters if same else self._masters(module)
        self._agreed(lambda: _require_fit(saved, masters, folder))
        self.module, self.masters = module, masters
        masters.load_state(saved.piece)
        torch.set_rng_state(saved.tensor(RANDOM))
        self.completed = int(saved.tensor(STEP.name))
        return self.completed

    def fingerprint(self) -> str:
        """Class, model shape, dtypes, layout, threads, torch version."""
        self._loaded()
        c = self.module.causal.config
        wide = str(master_dtype(self.compute)).removeprefix("torch.")
        return (
            f"{type(self).__name__}/{c.model_type}-L{c.num_hidden_layers}-H{c.hidden_size}-V{c.vocab_size}/"
            f"master={wide}/compute={self.spec.trainer.compute_dtype}/layout={self.layout}/threads={self.threads}/"
            f"torch={torch.__version__}"
        )

    def _makers(self) -> tuple[Callable[[str], PolicyModule], Callable[[dict[str, Any]], PolicyModule]]:
        """What makes a module of a folder, and of an architecture."""
        if self.spec.trainer.exact:
            from furlong.resources.trainers.exact_module import exact_of, load_exact

            return load_exact, exact_of
        return load_module, module_of

    def _prepared(self, module: PolicyModule) -> PolicyModule:
        module.to(device())
        if self.compute == torch.float64:
            module.widen()
        if self.layout.recompute:
            module.recompute()
        return module

    def _masters(self, module: PolicyModule) -> MasterWeights | ShardedMasters | LoraWeights:
        if self.spec.trainer.lora_rank:
            return lora_of(module, self.spec, self.compute, self.ranks)
        if self.ranks.world == 1:
            return MasterWeights(module.named_weights(), self.spec.algorithm, self.compute)
        return ShardedMasters(module, self.spec.algorithm, self.compute, self.ranks)

    def _agreed(self, work: Callable[[], Any]) -> Any:
        """What `work` gives here, unless it raised ValueError on any rank: then that, on all."""
        result = error = None
        try:
            result = work()
        except ValueError as err:
            error = err
        self.ranks.agree(error)
        return result

    def _loaded(self) -> None:
        if self.module is None:
            raise RuntimeError("the trainer holds no weights yet; call load(folder) or restore(folder) first")

    def _check(self, batch: TrainBatch) -> None:
        self._loaded()
        config = self.module.causal.config
        check_batch(batch, config.vocab_size, config.max_position_embeddings)
        check_records(batch, *self.module.expert_shape)

    def _micros(self, batch: TrainBatch, masks: Masks) -> list[MicroBatch]:
        """This rank's micro-batches, as many as every other rank's: where they run out, empty ones."""
        packed = pack(batch, masks, self.spec.trainer.micro_batch_tokens, self.ranks.world)
        mine = packed[self.ranks.rank :: self.ranks.world]
        rounds = -(-len(packed) // self.ranks.world)
        mine += [empty_like(packed[0]) for _ in range(rounds - len(mine))]
        return [_at(micro, device()) for micro in mine]

    @torch.no_grad()
    def _forward(
        self, batch: TrainBatch, micros: list[MicroBatch], index: list[Tensor], size: int
    ) -> Float[Tensor, " size"]:
        """All ranks' log-probabilities, each at its `index`, in float64; 0 where no token was asked for."""
        flat = torch.zeros(size, dtype=torch.float64)
        for micro, where in zip(micros, index, strict=True):
            flat[where] = self.module(micro, batch.temperature)[0].to("cpu", torch.float64)
        return self.ranks.sum(flat)

    def _accumulate(self, batch: TrainBatch, objective: Objective) -> tuple[Tensor, Tensor, Tensor]:
        """Forward and backward of every micro-batch; gradients add up in the masters.

        Returns:
            over all ranks: log-probability and entropy of each trained token, and tokens reached of each trajectory.
        """
        self.masters.begin()
        micros = self._micros(batch, batch.masks)
        index = [objective.index(micro.trajectory, micro.offset) for micro in micros]
        slopes = None
        if objective.whole:
            everything = torch.arange(objective.tokens)
            slopes = objective.slopes(everything, self._forward(batch, micros, index, objective.tokens)).slope
        values = torch.zeros(2, objective.tokens, dtype=torch.float64)
        witness, fault = Witness(len(batch.replies)), None
        for number, (micro, where) in enumerate(zip(micros, index, strict=True)):
            logprobs, entropy = self.module(micro, batch.temperature)
            values[0, where] = logprobs.detach().to("cpu", torch.float64)
            values[1, where] = entropy[micro.place].to("cpu", torch.float64)
            slope = torch.zeros(len(where), dtype=torch.float64)
            try:
                if len(where):
                    slope = objective.slopes(where, logprobs).slope if slopes is None else slopes[where]
            except NonFiniteError as err:
                # The other ranks need this one's backward pass, so they are told when it is over.
                fault = fault or err
            witness.watch(micro, logprobs, self.module.trunk)
            self.masters.expect(number == len(micros) - 1)
            (logprobs * slope.to(logprobs)).sum().backward()
        self.ranks.agree(fault)
        logprobs, entropy = self.ranks.sum(values)
        return logprobs, entropy, self.ranks.sum(witness.counts())

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Where a number is not finite because a weight is not, say so."""
        try:
            yield
        except NonFiniteError as err:
            if bad := self.masters.bad_weight():
                raise NonFiniteError(f"master weight {bad} has a NaN or an infinity, so: {err}") from err
            raise


def _require_fit(saved: snapshots.Saved, masters: MasterWeights | ShardedMasters | LoraWeights, folder: str) -> None:
    """Raise SnapshotError unless the state is one of these masters, and the bytes that this rank will read are intact."""
    shapes = masters.shapes() | {STEP.name: (1,), RANDOM: tuple(torch.get_rng_state().shape)}
    held = masters.state()
    odd = {name for name in shapes.keys() | saved.shapes if shapes.get(name) != saved.shapes.get(name)}
    odd |= {piece.name for piece, tensor in held.items() if saved.dtypes.get(piece.name) != tensor.dtype}
    if odd:
        raise snapshots.SnapshotError(
            f"{folder} does not fit the model or trainer.compute_dtype at {sorted(odd)[:3]}; restore another save"
        )
    saved.check([*held, Piece(UPDATES, 0, 0, 1), *(whole_piece(name, shapes[name]) for name in (STEP.name, RANDOM))])


def _at(micro: MicroBatch, where: torch.device) -> MicroBatch:
    """The micro-batch as the module reads it there; which token is whose stays on the CPU."""
    if where.type == "cpu":
        return micro
    read = ("tokens", "positions", "visible", "places", "place", "target", "experts")
    moved = {name: getattr(micro, name) for name in read if getattr(micro, name) is not None}
    return replace(micro, **{name: tensor.to(where) for name, tensor in moved.items()})


@contextmanager
def _deterministic() -> Iterator[None]:
    """Only algorithms that give the same bits every time, and torch as it was afterwards."""
    before, fill = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory guards against reading it, which nothing here does, and costs a pass over every tensor.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before)
