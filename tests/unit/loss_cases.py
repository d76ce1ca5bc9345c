"""Steps to take losses of, and every loss written out once more: plain loops over float64 scalars, token by token."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import torch
from torch import Tensor

from furlong.ops.policy.objective import Objective
from furlong.ops.protocols import OtherLogprobs, TrainBatch
from furlong.ops.spec import RunSpec, load_spec

Token = tuple[int, int]


def spec_of(**algorithm: object) -> RunSpec:
    return load_spec("tiny", {f"algorithm.{name}": value for name, value in algorithm.items()})


def random_step(
    seed: int, algorithm: str = "grpo", spread: float = 0.5
) -> tuple[TrainBatch, OtherLogprobs, dict[Token, float]]:
    """A batch with masked tokens, one fully masked trajectory, log-probabilities of reference and teacher, and the
    trainer's of every trained token."""
    rng = random.Random(seed)
    group = [g for g in range(rng.randint(1, 3)) for _ in range(rng.randint(1, 5))]
    lengths = [rng.randint(1, 6) for _ in group]
    masks = [[rng.random() < 0.75 for _ in range(length)] for length in lengths]
    masks[0][0] = True
    if len(masks) > 2:
        masks[1] = [False] * lengths[1]
    engine = [[rng.uniform(-3, -0.1) for _ in row] for row in masks]

    def near(rows: list[list[float]]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(value + rng.gauss(0, spread) for value in row) for row in rows)

    reference, teacher, trainer = near(engine), near(engine), near(engine)
    signs = [(-1.0) ** i for i in range(len(group))] if algorithm == "dpo" else [rng.gauss(0, 1) for _ in group]
    batch = TrainBatch(
        step=1,
        temperature=1.0,
        prompts=tuple((1,) for _ in range(max(group) + 1)),
        group=tuple(group),
        replies=tuple(tuple(range(length)) for length in lengths),
        logprobs=tuple(tuple(row) for row in engine),
        masks=tuple(tuple(row) for row in masks),
        sampled_by=tuple(tuple(4 for _ in row) for row in masks),
        version=4,
        advantages=tuple([1.0] * len(group) if algorithm == "sft" else signs),
        rewards=tuple(rng.random() for _ in group),
        routing=(None,) * len(group),
        trajectory_ids=tuple(f"trajectory-{i}" for i in range(len(group))),
    )
    return (
        batch,
        OtherLogprobs(reference=reference, teacher=teacher),
        {k: trainer[k[0]][k[1]] for k in tokens_of(batch)},
    )


def tokens_of(batch: TrainBatch) -> list[Token]:
    return [(i, t) for i, mask in enumerate(batch.masks) for t, on in enumerate(mask) if on]


def objective_of(batch: TrainBatch, spec: RunSpec, others: OtherLogprobs) -> Objective:
    """The step's objective; of `ppo` with values that differ from token to token."""
    objective = Objective(batch, spec, others)
    if spec.algorithm.name == "ppo":
        objective.value(torch.tensor([value_at(batch, i, t) for i, t in tokens_of(batch)], dtype=torch.float64))
    return objective


def value_at(batch: TrainBatch, i: int, t: int) -> float:
    """By the trajectory's name, wherever it stands."""
    return math.sin(7 * int(batch.trajectory_ids[i].split("-")[1]) + t)


def literal_loss(batch: TrainBatch, spec: RunSpec, others: OtherLogprobs, x: dict[Token, Tensor]) -> Tensor:
    """The step's loss from scalars `x`, by the formulas of `ops/policy/algorithms.py` taken word by word."""
    a, tokens = spec.algorithm, tokens_of(batch)
    of = defaultdict(list)
    for i, t in tokens:
        of[i].append(t)
    if a.name == "dpo":
        return _pairs(batch, others, a.kl_coef, x, of)
    start = {k: v.item() for k, v in x.items()}
    engine = {(i, t): batch.logprobs[i][t] for i, t in tokens}
    advantage = token_advantages(batch, a, others, start, of)
    weight = literal_weights(a, {k: start[k] - engine[k] for k in tokens}, advantage, of)
    total = sum(x.values()) * 0.0
    for i, t in tokens:
        n = {"sequence": len(of) * len(of[i]), "token": len(tokens)}[a.loss_mean]
        n = len(of) * spec.sampling.max_new_tokens if a.name == "dr_grpo" else n
        if a.name == "sft":
            loss = -x[i, t]
        else:
            behaviour = engine if a.correction == "ratio" else start
            if a.name == "gspo":
                ratio = torch.ones((), dtype=torch.float64)
                for s in of[i]:
                    now = x[i, s] if weight[i, s] else x[i, s].detach()  # what is rejected gets no gradient
                    ratio = ratio * torch.exp(now - behaviour[i, s])
                ratio = ratio ** (1 / len(of[i]))
            else:
                ratio = torch.exp(x[i, t] - behaviour[i, t])
            bounded = min(max(float(ratio.detach()), 1 - a.clip_low), 1 + a.clip_high)
            plain, cut = ratio * advantage[i, t], bounded * advantage[i, t]
            loss = -plain if plain.item() <= cut else torch.tensor(-cut, dtype=torch.float64)
        if a.kl_coef and a.name not in ("reinforce_pp", "ppo", "distill"):
            gap = x[i, t] - others.reference[i][t]
            loss = loss + a.kl_coef * {"k1": gap, "k2": gap * gap / 2, "k3": torch.exp(-gap) - 1 + gap}[a.kl_estimator]
        total = total + weight[i, t] * loss / n
    return total


def _pairs(batch: TrainBatch, others: OtherLogprobs, beta: float, x: dict, of: dict) -> Tensor:
    losses = []
    for g in sorted(set(batch.group)):
        sides = {}
        for sign in (1.0, -1.0):
            mine = [i for i in of if batch.group[i] == g and batch.advantages[i] * sign > 0]
            sides[sign] = [x[i, t] - others.reference[i][t] for i in mine for t in of[i]]
        if sides[1.0] and sides[-1.0]:
            losses.append(-torch.log(1 / (1 + torch.exp(-beta * (sum(sides[1.0]) - sum(sides[-1.0]))))))
    return sum(losses) / len(losses) if losses else sum(x.values()) * 0.0


def token_advantages(batch: TrainBatch, a, others: OtherLogprobs, start: dict, of: dict) -> dict[Token, float]:
    made = {}
    for i in of:
        for t in of[i]:
            made[i, t] = batch.advantages[i]
            if a.name == "distill":
                made[i, t] -= a.kl_coef * (start[i, t] - others.teacher[i][t])
            if a.name == "reinforce_pp" and a.kl_coef:
                made[i, t] -= a.kl_coef * sum(start[i, s] - others.reference[i][s] for s in of[i] if s >= t)
            if a.name == "ppo":
                made[i, t] = _gae(batch, a, others, start, i, of[i][of[i].index(t) :])
    if a.name in ("reinforce_pp", "reinforce_pp_baseline", "ppo"):
        mean = math.fsum(made.values()) / len(made)
        deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in made.values()) / len(made))
        made = {k: (v - mean) / (deviation + 1e-8) for k, v in made.items()}
    return made


def _gae(batch: TrainBatch, a, others: OtherLogprobs, start: dict, i: int, later: list[int]) -> float:
    """Discounted sum of the value's errors from a token on, over the trained tokens `later`."""
    gamma, lam = a.critic.get("gamma", 1.0), a.critic.get("lam", 0.95)
    total = 0.0
    for n, t in enumerate(later):
        end = t == later[-1]
        gain = batch.advantages[i] if end else gamma * value_at(batch, i, later[n + 1])
        toll = a.kl_coef * (start[i, t] - others.reference[i][t]) if a.kl_coef else 0.0
        total += (gamma * lam) ** n * (gain - toll - value_at(batch, i, t))
    return total


def literal_weights(a, d: dict[Token, float], advantage: dict[Token, float], of: dict) -> dict[Token, float]:
    """The factor of each token's loss; 0 where it is rejected."""
    defaults = {"tis": {"mode": "truncate", "high": 2.0}, "icepop": {"mode": "mask", "low": 0.5, "high": 5.0},
                "mis": {"mode": "mask", "high": 2.0}}  # fmt: skip
    options = {"level": "token", **defaults.get(a.correction, {}), **a.correction_options}
    if a.correction == "mis":
        options.setdefault("low", 1 / options["high"])

    def ratio(level: str, i: int, t: int) -> float:
        row = [d[i, s] for s in of[i]]
        return math.exp({"token": d[i, t], "sequence": sum(row), "geometric": sum(row) / len(row)}[level])

    weight, kept = {}, {}
    for i, t in d:
        keep = math.exp(min(d[i, s] for s in of[i])) >= options.get("veto", 0.0)
        if "reject" in options:
            r = ratio(options["reject"], i, t)
            keep &= options.get("reject_low", 0.0) <= r <= options.get("reject_high", math.inf)
        drift = -sum(d[i, s] for s in of[i]) / len(of[i])
        if options.get("off_policy") and advantage[i, t] < 0 and drift > options["off_policy"]:
            keep = False
        w = 1.0
        if a.correction in defaults:
            w, low, high = ratio(options["level"], i, t), options.get("low", 0.0), options["high"]
            if options["mode"] == "mask":
                keep &= low <= w <= high
            else:
                w = min(w, high) if options["mode"] == "truncate" else min(max(w, low), high)
        weight[i, t], kept[i, t] = w, keep
    if options.get("normalise"):
        used = [weight[k] for k in d if kept[k]]
        weight = {k: w / (sum(used) / len(used)) if used else w for k, w in weight.items()}
    return {k: w if kept[k] else 0.0 for k, w in weight.items()}
