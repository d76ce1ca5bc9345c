"""One step's loss as a function of its trained tokens' log-probabilities: independent of packing, ranks and backend.

Trained tokens are numbered 0 .. N-1, trajectory by trajectory in the batch's order, then by offset in the reply.
Everything is float64 on the CPU. Every denominator is over the whole step, so losses and gradients of micro-batches
and of data-parallel ranks are summed, never averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from furlong.ops.policy import importance, returns
from furlong.ops.policy.algorithms import algorithm_of, check, needs
from furlong.ops.policy.corrections import WEIGHTED, correction_of
from furlong.ops.policy.critic import critic_of
from furlong.ops.policy.divergence import effective_share, estimate, mismatch
from furlong.ops.policy.gae import estimates
from furlong.ops.policy.loss import (
    clipped_loss,
    constant_denominators,
    require_finite,
    sequence_means,
    token_denominators,
)
from furlong.ops.policy.preference import preference_loss
from furlong.ops.protocols import OtherLogprobs, TrainBatch
from furlong.ops.spec import RunSpec


@dataclass(frozen=True)
class TokenLoss:
    """What some trained tokens bring to the step; all float64, in the order they were asked for."""

    loss: Float[Tensor, " tokens"]
    """Each token's share; those of all trained tokens sum to the step's loss."""
    slope: Float[Tensor, " tokens"]
    """Derivative of the step's loss by the token's log-probability."""
    clipped: Bool[Tensor, " tokens"]
    """The ratio was clipped, and the policy's loss gives no gradient."""
    rejected: Bool[Tensor, " tokens"]
    """The correction took the token out of the loss; loss and slope are 0."""
    weight: Float[Tensor, " tokens"]
    """exp(trainer - engine), before any bound."""


class Objective:
    """The loss of one step. Build it once per step; it keeps no state between calls, save the values of `ppo`."""

    def __init__(self, batch: TrainBatch, spec: RunSpec, others: OtherLogprobs):
        """Gather what the loss reads at trained tokens.

        Raises:
            NonFiniteError: a NaN or infinity among it, naming the trajectories; at other tokens nothing is read.
            ValueError: log-probabilities of the reference or the teacher that the algorithm needs are not there.
            SpecError: settings that contradict each other (`algorithms.check`).
        """
        check(spec.algorithm)
        self.spec, self.algorithm, self.parts = spec, spec.algorithm, algorithm_of(spec.algorithm)
        self.correction = correction_of(spec.algorithm)
        lengths = [sum(mask) for mask in batch.masks]
        self.trajectory = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
        self.names = [name for name, length in zip(batch.trajectory_ids, lengths, strict=True) for _ in range(length)]
        self.tokens = len(self.names)
        """N, the trained tokens of the step."""
        self._number(batch)
        self.group = torch.tensor(batch.group, dtype=torch.long)[self.trajectory]
        self.engine = self._gather("log-probability of the engine", batch.logprobs)
        self.advantages = torch.tensor(batch.advantages, dtype=torch.float64)[self.trajectory]
        self._require("advantage", self.advantages)
        self.other = self._other(others)
        self.denominators = self._denominators(lengths)
        self.whole = self._whole()
        """Whether `slopes` needs the log-probabilities of all trained tokens at once."""
        self._values: Tensor | None = None
        self._estimated: tuple[Tensor, Tensor] | None = None
        if self.parts.whitened and not self.parts.valued and not self._divergence_in_returns:
            self.advantages = returns.whitened(self.advantages)
        self._compared(batch, others)
        if self.parts.valued and not self.tokens:
            self.value(torch.zeros(0))

    def index(self, trajectory: Int[Tensor, " tokens"], offset: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
        """Numbers of tokens given by trajectory (index in the batch) and offset (in the reply).

        Raises:
            ValueError: a token that is not trained.
        """
        numbers = self._numbers[self._starts[trajectory.cpu()] + offset.cpu()]
        if bool((numbers < 0).any()):
            raise ValueError(
                "a token with a false mask has no number in the objective; pack the batch with its own masks"
            )
        return numbers

    def value(self, values: Float[Tensor, " tokens"]) -> None:
        """Take over what the value model says before each trained token, by number, under the weights that the step starts
        from; `ppo` needs it before anything that follows.

        Raises:
            NonFiniteError: a value that is not finite, naming the trajectories.
        """
        values = values.detach().to("cpu", torch.float64)
        if len(values) != self.tokens:
            raise ValueError(f"{len(values)} values for {self.tokens} trained tokens; give one for each")
        self._require("value", values)
        self._values = values
        self._estimated = None if self._divergence_in_returns else self._estimate(torch.zeros_like(values))

    def targets(self, trainer: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
        """Returns, which the value model learns, of all trained tokens by number.

        Args:
            trainer: log-probabilities under the weights that the step starts from; read where kl_coef is above 0.
        """
        return self._estimates(trainer.detach().to("cpu", torch.float64))[1]

    def slopes(self, index: Int[Tensor, " tokens"], logprobs: Float[Tensor, " tokens"]) -> TokenLoss:
        """Loss and its derivative at some trained tokens (all of them, in any order, where `whole`).

        Args:
            index: their numbers, each at most once.
            logprobs: the trainer's (nat), under the weights that the step starts from; any float type and device.
        Raises:
            NonFiniteError: a log-probability, ratio or loss that is not finite, naming the trajectories.
            ValueError: a part of the tokens where all are needed.
        """
        index, values = index.cpu(), logprobs.detach().to("cpu", torch.float64)
        if len(index) != len(values) or (self.whole and len(index) != self.tokens):
            raise ValueError(
                f"slopes of {len(index)} tokens with {len(values)} log-probabilities, in a step of {self.tokens} trained "
                f"tokens; give one each{', and all tokens at once: this loss compares them' if self.whole else ''}"
            )
        # Sums over tokens are taken in the step's order, whatever order they were asked for in.
        order = torch.argsort(index)
        sorted_index = index[order]
        if len(sorted_index) != len(torch.unique(sorted_index)):
            raise ValueError("slopes were asked for one token twice; number the micro-batch's tokens with `index`")
        x = values[order].requires_grad_()
        with torch.enable_grad():
            loss, clipped, rejected, weight = self._losses(sorted_index, x)
            (slope,) = torch.autograd.grad(loss.sum(), x)
        self._require("loss", loss.detach(), sorted_index)
        self._require("derivative of the loss", slope, sorted_index)
        back = torch.argsort(order)
        return TokenLoss(*(part.detach()[back] for part in (loss, slope, clipped, rejected, weight)))

    def metrics(
        self, trainer: Float[Tensor, " tokens"], entropy: Float[Tensor, " tokens"]
    ) -> dict[str, float | int | None]:
        """The fields of `StepMetrics` that follow from log-probabilities: `StepMetrics(**objective.metrics(...), ...)`.

        Args:
            trainer: of all trained tokens by number, under the weights that the step starts from.
            entropy: (nat) of the trainer's distribution at each.
        Returns:
            loss, tokens_trained, clip_fraction, entropy, ess, rejected_fraction, kl and mismatch_*. For `distill`, kl is
            the divergence from the teacher. Without trained tokens all are 0 or None.
        """
        trainer, entropy = (values.detach().to("cpu", torch.float64) for values in (trainer, entropy))
        count = max(self.tokens, 1)
        step = self.slopes(torch.arange(self.tokens), trainer)
        self._require("entropy", entropy)
        return {
            "loss": float(step.loss.sum()),
            "tokens_trained": self.tokens,
            "clip_fraction": int(step.clipped.sum()) / count,
            "entropy": float(entropy.sum()) / count,
            "ess": effective_share(trainer - self.engine) if self.tokens else 0.0,
            "rejected_fraction": int(step.rejected.sum()) / count,
            "kl": self._divergence(trainer),
            **self._mismatch(trainer),
        }

    def scores(self, trainer: Float[Tensor, " tokens"]) -> tuple[float | None, ...]:
        """Log-probability of each trained token, by number, under the weights that sampled it; None where it is unknown.

        Args:
            trainer: under the weights that the step starts from.
        """
        found = self._same_weights(trainer.detach().to("cpu", torch.float64)).tolist()
        return tuple(None if math.isnan(value) else value for value in found)

    def _number(self, batch: TrainBatch) -> None:
        flat = torch.tensor([on for mask in batch.masks for on in mask], dtype=torch.bool)
        sizes = torch.tensor([len(mask) for mask in batch.masks], dtype=torch.long)
        self._starts = torch.cumsum(sizes, 0) - sizes
        self._trained = flat
        self._numbers = torch.where(flat, torch.cumsum(flat.long(), 0) - 1, -1)

    def _gather(self, what: str, rows: tuple[tuple[float, ...], ...], absent: bool = False) -> Tensor:
        """Values at trained tokens; `absent` ones may be NaN."""
        values = torch.tensor([value for row in rows for value in row], dtype=torch.float64)
        if len(values) != len(self._trained):
            raise ValueError(f"{what} at {len(values)} of {len(self._trained)} reply tokens; give one for each")
        values = values[self._trained]
        self._require(
            what, torch.nan_to_num(values, nan=0.0, posinf=torch.inf, neginf=-torch.inf) if absent else values
        )
        return values

    def _other(self, others: OtherLogprobs) -> Tensor | None:
        """Of the reference or the teacher, whichever the algorithm reads."""
        for name in needs(self.algorithm):
            rows = getattr(others, name)
            if rows is None:
                raise ValueError(
                    f"algorithm.name={self.algorithm.name} with kl_coef={self.algorithm.kl_coef} needs log-probabilities "
                    f"of the {name}, and none were given; compute OtherLogprobs.{name} for the batch"
                )
            return self._gather(f"log-probability of the {name}", rows)
        return None

    def _denominators(self, lengths: list[int]) -> Tensor:
        if self.parts.constant_mean:
            values = constant_denominators(lengths, self.spec.sampling.max_new_tokens)
        else:
            values = token_denominators(lengths, self.algorithm.loss_mean)
        return torch.tensor(values, dtype=torch.float64)[self.trajectory]

    @property
    def _divergence_in_returns(self) -> bool:
        return self.parts.divergence == "reward" and self.algorithm.kl_coef > 0

    def _whole(self) -> bool:
        if self.parts.loss == "likelihood":
            return False
        compares = self.parts.loss in ("sequence_clipped", "preference")
        return compares or self._divergence_in_returns or self.correction.whole

    def _losses(self, index: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        now, engine, trajectory = x.detach(), self.engine[index], self.trajectory[index]
        self._require("log-probability of the trainer", now, index)
        d = now - engine
        weight = torch.exp(d)
        self._require("probability ratio of trainer to engine", weight, index)
        nothing = torch.zeros_like(x, dtype=torch.bool)
        if self.parts.loss == "preference":
            group, sides = self.group[index], self.advantages[index]
            loss = preference_loss(x, self.other[index], sides, group, self.algorithm.kl_coef)
            return loss, nothing, nothing, weight
        if self.parts.loss == "likelihood":
            return (self._with_divergence(-x, x, index)) / self.denominators[index], nothing, nothing, weight
        advantages = self._advantages(index, now)
        rejected = importance.rejections(self.correction, d, trajectory, advantages)
        factors = torch.ones_like(now)
        if self.algorithm.correction in WEIGHTED:
            factors, outside = importance.weigh(self.correction, d, trajectory)
            # Trainers' gradients are float32, in which a weight so small would be lost without being counted.
            vanished = factors < importance.VANISHED
            rejected = rejected | outside
            factors = importance.normalised(factors, rejected) if self.correction.normalise else factors
            rejected = rejected | vanished
        # A trajectory's ratio has all its tokens in it, and would give those that are rejected a gradient after all.
        kept = torch.where(rejected, now, x)
        log_ratio = kept - (engine if self.algorithm.correction == "ratio" else now)
        if self.parts.loss == "sequence_clipped":
            log_ratio = sequence_means(log_ratio, trajectory)
        loss, clipped = clipped_loss(log_ratio, advantages, self.algorithm.clip_low, self.algorithm.clip_high)
        loss = self._with_divergence(loss, x, index) * factors
        loss = torch.where(rejected, torch.zeros_like(loss), loss)
        return loss / self.denominators[index], clipped & ~rejected, rejected, weight

    def _with_divergence(self, loss: Tensor, x: Tensor, index: Tensor) -> Tensor:
        if self.parts.divergence != "loss" or not self.algorithm.kl_coef:
            return loss
        return loss + self.algorithm.kl_coef * estimate(self.algorithm.kl_estimator, x - self.other[index])

    def _advantages(self, index: Tensor, now: Tensor) -> Tensor:
        if self.parts.valued:
            return self._estimates(now)[0][index]
        advantages, coefficient = self.advantages[index], self.algorithm.kl_coef
        if self.parts.divergence == "teacher":
            return returns.towards_teacher(advantages, now, self.other[index], coefficient)
        if self._divergence_in_returns:
            k1 = now - self.other[index]
            made = returns.returns_after_divergence(advantages, k1, self.trajectory[index], coefficient)
            return returns.whitened(made)
        return advantages

    def _estimates(self, now: Tensor) -> tuple[Tensor, Tensor]:
        """Whitened advantages and returns of all trained tokens, of which `now` is read where the divergence counts."""
        if self._values is None:
            raise ValueError("ppo makes its advantages of values, and none were given; call Objective.value first")
        return self._estimated or self._estimate(self.algorithm.kl_coef * (now - self.other))

    def _estimate(self, penalties: Tensor) -> tuple[Tensor, Tensor]:
        critic = critic_of(self.algorithm)
        advantages, targets = estimates(
            self.advantages, penalties, self._values, self.trajectory, critic.gamma, critic.lam
        )
        return returns.whitened(advantages), targets

    def _divergence(self, trainer: Tensor) -> float | None:
        if self.other is None or not self.tokens:
            return None
        return float(estimate(self.algorithm.kl_estimator, trainer - self.other).mean())

    def _compared(self, batch: TrainBatch, others: OtherLogprobs) -> None:
        """Which tokens the step's own log-probabilities are comparable at, and what stands in for them elsewhere."""
        by = torch.tensor([version for row in batch.sampled_by for version in row], dtype=torch.long)[self._trained]
        self._own = by == batch.version
        what = "log-probability of the trainer under the sampling weights"
        blank = torch.full_like(self.engine, torch.nan)
        found = blank if others.sampling is None else self._gather(what, others.sampling, absent=True)
        self._sampling = torch.where(by >= 0, found, blank)

    def _same_weights(self, trainer: Tensor) -> Tensor:
        return torch.where(self._own, trainer, self._sampling)

    def _mismatch(self, trainer: Tensor) -> dict[str, float | None]:
        same_weights = self._same_weights(trainer)
        compared = ~torch.isnan(same_weights)
        names = [self.names[i] for i in compared.nonzero().flatten().tolist()]
        gap = mismatch(same_weights[compared], self.engine[compared], names) if names else None
        return {"mismatch_coverage": len(names) / max(self.tokens, 1)} | {
            f"mismatch_{name}": gap and getattr(gap, name) for name in ("mean", "max", "p99", "k3", "ess")
        }

    def _require(self, what: str, values: Tensor, index: Tensor | None = None) -> None:
        if not bool(torch.isfinite(values).all()):
            names = self.names if index is None else [self.names[i] for i in index.tolist()]
            require_finite(what, values, names)
