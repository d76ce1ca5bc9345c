"""FSDPTrainer: the Hugging Face module under PyTorch, one optimiser step per call.

One process holds the whole model. Where a step sums over micro-batches (`_accumulate`) and where masters live
(`MasterWeights`) are the two places that a sharded version replaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from furlong.ops.policy.loss import NonFiniteError, mismatch, policy_loss, require_finite, token_denominators
from furlong.ops.policy.packing import MicroBatch, check_batch, pack
from furlong.ops.policy.schedule import learning_rate
from furlong.ops.protocols import StepMetrics, TrainBatch
from furlong.ops.spec import RunSpec
from furlong.ops.weights.digest import tensor_digest, weights_digest
from furlong.resources.trainers import snapshots
from furlong.resources.trainers.masters import KINDS, MasterWeights
from furlong.resources.trainers.module import PolicyModule, load_module, module_of


@dataclass
class _Tally:
    """What the micro-batches of one step add up to; the lists run over trained tokens."""

    loss: float = 0.0
    clipped: int = 0
    entropy: float = 0.0
    trainer: list[Tensor] = field(default_factory=list)
    engine: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


class FSDPTrainer:
    """A `Trainer` (ops/protocols.py). Not safe for calls at the same time, save those of `write_snapshot`."""

    def __init__(self, spec: RunSpec, threads: int) -> None:
        """`threads` of PyTorch in this process, which rounding depends on; 0 for all cores it may use."""
        if threads < 0:
            raise ValueError(f"threads={threads} is not a number of threads; give 1 or more, or 0 for all cores")
        self.threads = threads or _usable_cores()
        torch.set_num_threads(self.threads)
        self.spec = spec
        self.compute = getattr(torch, spec.trainer.compute_dtype)
        self.completed = 0
        self.module: PolicyModule | None = None

    def load(self, folder: str) -> None:
        """Start from a Hugging Face folder with a fresh optimiser, at step 0.

        Raises:
            ValueError: an architecture without a packed forward, tensors missing from the files, or a NaN weight.
        """
        self._hold(load_module(folder))
        if bad := self.masters.bad_weight():
            raise NonFiniteError(f"{folder}: tensor {bad} has a NaN or an infinity; convert or download it again")
        self.completed = 0

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probability (nat) of every reply token, masked or not, under the current weights."""
        self._check(batch)
        values = [[0.0] * len(reply) for reply in batch.replies]
        everything = tuple((True,) * len(reply) for reply in batch.replies)
        with torch.no_grad(), _deterministic():
            for micro in pack(batch, everything, self.spec.trainer.micro_batch_tokens):
                logprobs, _ = self.module(micro, batch.temperature)
                self._require("log-probability of the trainer", logprobs, _names(batch, micro))
                where = zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True)
                for (index, offset), value in zip(where, logprobs.tolist(), strict=True):
                    values[index][offset] = value
        return values

    def step(self, batch: TrainBatch) -> StepMetrics:
        """One optimiser step; a non-finite loss or gradient raises and changes nothing.

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
        trained = sum(sum(mask) for mask in batch.masks)
        if not trained:
            self.completed = batch.step
            return StepMetrics(0.0, 0.0, rate, 0, 0.0, 0.0, 0.0, None, None, None, None)
        with _deterministic():
            tally = self._accumulate(batch)
            gap = mismatch(torch.cat(tally.trainer), torch.cat(tally.engine), tally.names) if tally.names else None
            norm = self.masters.gradient_norm()
            self.masters.update(rate, norm)
        self.completed = batch.step
        return StepMetrics(
            loss=tally.loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens_trained=trained,
            clip_fraction=tally.clipped / trained,
            entropy=tally.entropy / trained,
            mismatch_coverage=len(tally.names) / trained,
            mismatch_mean=gap and gap.mean,
            mismatch_max=gap and gap.max,
            mismatch_p99=gap and gap.p99,
            mismatch_k3=gap and gap.k3,
        )

    def export(self) -> dict[str, Tensor]:
        """Master weights rounded to `model.dtype`, by Hugging Face name; copies, tied tensors once."""
        self._loaded()
        dtype = getattr(torch, self.spec.model.dtype)
        return {name: w.detach().to(dtype, copy=True).contiguous() for name, w in self.masters.weights.items()}

    def master_digest(self) -> str:
        """Digest of the float32 master weights."""
        self._loaded()
        return weights_digest({name: tensor_digest(w.detach()) for name, w in self.masters.weights.items()})

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the whole state, to be written while training goes on."""
        self._loaded()
        return {name: tensor.clone() for name, tensor in self._state().items()}

    def write_snapshot(self, folder: str, snapshot: dict[str, Tensor]) -> None:
        """Write what `snapshot` gave, atomically; may run in another thread beside `step`."""
        about = {"architecture": self.module.architecture(), "trainer": self.fingerprint()}
        snapshots.write(folder, snapshot, about)

    def save(self, folder: str) -> None:
        """Write masters, optimiser and step without copying them first: no step may run meanwhile."""
        self._loaded()
        self.write_snapshot(folder, self._state())

    def restore(self, folder: str) -> int:
        """Load what `save` wrote, on a fresh trainer too; the trainer is unchanged when this raises.

        Returns:
            the step after which it was saved.
        Raises:
            SnapshotError: a missing, damaged or foreign state.
        """
        saved = snapshots.Saved(folder)
        same = self.module is not None and self.module.architecture() == saved.about["architecture"]
        module = self.module if same else module_of(saved.about["architecture"])
        shapes = {f"{kind}/{name}": tuple(w.shape) for name, w in module.named_weights().items() for kind in KINDS}
        shapes |= {"updates": (1,), "step": (1,)}
        odd = sorted(name for name in shapes.keys() | saved.shapes if shapes.get(name) != saved.shapes.get(name))
        if odd:
            raise snapshots.SnapshotError(f"{folder} does not fit its own config at {odd[:3]}; restore another save")
        if not same:
            self._hold(module)
        self.masters.load_state(saved.tensor)
        self.completed = int(saved.tensor("step"))
        return self.completed

    def fingerprint(self) -> str:
        """Class, model shape, dtypes, threads, torch version."""
        self._loaded()
        c = self.module.causal.config
        return (
            f"{type(self).__name__}/{c.model_type}-L{c.num_hidden_layers}-H{c.hidden_size}-V{c.vocab_size}/"
            f"master=float32/compute={self.spec.trainer.compute_dtype}/threads={self.threads}/torch={torch.__version__}"
        )

    def _hold(self, module: PolicyModule) -> None:
        self.module = module
        self.masters = MasterWeights(module.named_weights(), self.spec.algorithm, self.compute)

    def _loaded(self) -> None:
        if self.module is None:
            raise RuntimeError("the trainer holds no weights yet; call load(folder) or restore(folder) first")

    def _state(self) -> dict[str, Tensor]:
        return {**self.masters.state(), "step": torch.tensor([self.completed])}

    def _check(self, batch: TrainBatch) -> None:
        self._loaded()
        config = self.module.causal.config
        check_batch(batch, config.vocab_size, config.max_position_embeddings)

    def _accumulate(self, batch: TrainBatch) -> _Tally:
        """Forward and backward of every micro-batch; gradients add up in the masters."""
        self.masters.begin()
        tally, algorithm = _Tally(), self.spec.algorithm
        shares = token_denominators([sum(mask) for mask in batch.masks], algorithm.loss_mean)
        for micro in pack(batch, batch.masks, self.spec.trainer.micro_batch_tokens):
            names = _names(batch, micro)
            where = list(zip(micro.trajectory.tolist(), micro.offset.tolist(), strict=True))
            engine = torch.tensor([batch.logprobs[i][t] for i, t in where])
            advantages = torch.tensor([batch.advantages[i] for i, _ in where])
            self._require("log-probability of the engine", engine, names)
            self._require("advantage", advantages, names)
            logprobs, entropy = self.module(micro, batch.temperature)
            now = logprobs.detach()
            self._require("log-probability of the trainer", now, names)
            self._require("probability ratio of trainer to engine", torch.exp(now - engine), names)
            counts = torch.tensor([shares[i] for i, _ in where])
            loss, clipped = policy_loss(logprobs, engine, advantages, algorithm.clip_low, algorithm.clip_high, counts)
            self._require("loss", loss.detach(), names)
            loss.sum().backward()
            tally.loss += float(loss.detach().double().sum())
            tally.clipped += int(clipped.sum())
            tally.entropy += float(entropy[micro.place].double().sum())
            fresh = torch.tensor([batch.fresh[i][t] for i, t in where])
            tally.trainer.append(now[fresh])
            tally.engine.append(engine[fresh])
            tally.names += [name for name, new in zip(names, fresh.tolist(), strict=True) if new]
        return tally

    def _require(self, what: str, values: Tensor, names: list[str]) -> None:
        try:
            require_finite(what, values, names)
        except NonFiniteError as err:
            if bad := self.masters.bad_weight():
                raise NonFiniteError(f"master weight {bad} has a NaN or an infinity, so: {err}") from err
            raise


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _names(batch: TrainBatch, micro: MicroBatch) -> list[str]:
    return [batch.trajectory_ids[index] for index in micro.trajectory.tolist()]


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
