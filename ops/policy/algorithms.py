"""What each `algorithm.name` of a spec means. Torch-free, so that a spec is checked before anything is loaded.

With r_t the probability ratio of token t, A its advantage, n_t its denominator (`loss.token_denominators`), and k the
divergence's estimator (`divergence.estimate`), a step minimises the sum over its trained tokens of

    clipped               -1/n_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
    sequence_clipped      the same with s_i, the geometric mean of the trajectory's r_t, in place of r_t
    preference            -log sigmoid(kl_coef (margin of the better - margin of the worse reply)), per pair
    likelihood            -1/n_t log pi(t)

plus kl_coef / n_t k_t where the divergence is in the loss. `ppo` is `clipped` with the advantages that a value model
gives each token (`ops/policy/gae.py`), and trains that model beside. The ratio is to the engine's log-probabilities with
`correction: ratio`. Otherwise it is to the trainer's own, under the weights that the step starts from: with one optimiser
step per batch it is 1, and its gradient A_t grad(log pi); the correction's weight then multiplies the token's whole
loss. What the correction rejects gives nothing, and the denominators stay; in s_i it stays too, as a constant.

DAPO (Yu et al. 2025) is `grpo` with clip_high above clip_low, `loss_mean: token` and `rollout.filter: zero_variance`.
"""

from __future__ import annotations

from dataclasses import dataclass

from furlong.ops.policy.corrections import WEIGHTED, correction_of
from furlong.ops.policy.critic import critic_of
from furlong.ops.spec import AlgorithmSpec, SpecError


@dataclass(frozen=True)
class Algorithm:
    """The parts an algorithm is made of."""

    loss: str = "clipped"
    """`clipped`, `sequence_clipped`, `preference` or `likelihood`."""
    divergence: str = "loss"
    """Where kl_coef enters: `loss` (kl_coef / n_t k_t is added to each token's loss), `reward` (subtracted from the
    returns), `preference` (DPO's beta) or `teacher` (subtracted from the advantages)."""
    whitened: bool = False
    """Token advantages get mean 0 and deviation 1 over the step's trained tokens."""
    compares: bool = True
    """Rewards count by their difference from those of the other replies to the prompt, and by nothing else."""
    valued: bool = False
    """Token advantages are estimated by a value model, from the trajectory's reward."""
    constant_mean: bool = False
    """Every token is divided by sampling.max_new_tokens times the step's trajectories, whatever `loss_mean` says."""


ALGORITHMS = {
    "grpo": Algorithm(),
    "dr_grpo": Algorithm(constant_mean=True),
    "rloo": Algorithm(),
    "reinforce_pp": Algorithm(divergence="reward", whitened=True, compares=False),
    "reinforce_pp_baseline": Algorithm(whitened=True),
    "gspo": Algorithm(loss="sequence_clipped"),
    "ppo": Algorithm(divergence="reward", whitened=True, compares=False, valued=True),
    "dpo": Algorithm(loss="preference", divergence="preference"),
    "sft": Algorithm(loss="likelihood", compares=False),
    "distill": Algorithm(divergence="teacher", compares=False),
}
"""By `algorithm.name`. How each makes trajectory advantages of rewards: `ops/policy/advantages.py`."""


def algorithm_of(algorithm: AlgorithmSpec) -> Algorithm:
    """The parts of the spec's algorithm."""
    return ALGORITHMS[algorithm.name]


def needs(algorithm: AlgorithmSpec) -> frozenset[str]:
    """Which fields of `OtherLogprobs` the loss reads: `reference`, `teacher`, or none of them."""
    place = algorithm_of(algorithm).divergence
    if place == "teacher":
        return frozenset({"teacher"})
    return frozenset({"reference"}) if algorithm.kl_coef > 0 or place == "preference" else frozenset()


def check(algorithm: AlgorithmSpec) -> None:
    """SpecError on settings that this algorithm, or its correction, cannot use."""
    parts = algorithm_of(algorithm)
    correction_of(algorithm)
    critic_of(algorithm)
    if algorithm.critic and not parts.valued:
        raise SpecError(f"algorithm.critic trains a value model, which {algorithm.name} has none of; set name: ppo")
    if parts.compares and algorithm.samples_per_prompt < 2:
        raise SpecError(
            f"algorithm.samples_per_prompt=1 leaves {algorithm.name} nothing to compare a reply with; set 2 or more, or an "
            "algorithm that judges replies by themselves, e.g. name: ppo"
        )
    if parts.divergence in ("preference", "teacher") and not algorithm.kl_coef:
        raise SpecError(f"algorithm.name={algorithm.name} learns nothing with kl_coef=0; set it above 0, e.g. 0.1")
    if parts.divergence == "loss" and algorithm.kl_coef and algorithm.kl_estimator == "k1":
        raise SpecError(
            f"algorithm.kl_estimator=k1 in the loss of {algorithm.name} has a gradient of mean 0, which pulls nowhere; "
            "set k2 or k3"
        )
    if parts.loss in ("preference", "likelihood") and algorithm.correction in WEIGHTED:
        raise SpecError(
            f"algorithm.correction={algorithm.correction} weights probability ratios, which {algorithm.name} has none "
            "of; leave it at ratio"
        )
    if parts.loss in ("preference", "likelihood") and algorithm.correction_options:
        raise SpecError(f"algorithm.correction_options do nothing for {algorithm.name}; remove them")
