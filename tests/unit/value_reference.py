"""PPO once more: plain transformers modules in float64, one unpacked sequence at a time, scalars where there are few."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from furlong.ops.protocols import OtherLogprobs, TrainBatch


class Ppo:
    """A policy and a value model of the same base, and a step of both."""

    def __init__(self, folder: str, algorithm: Any, gamma: float, lam: float, clip: float, updates: int) -> None:
        self.policy, self.critic = (_wide(folder) for _ in range(2))
        self.head = torch.zeros(self.critic.config.hidden_size, dtype=torch.float64, requires_grad=True)
        self.a, self.gamma, self.lam, self.clip, self.updates = algorithm, gamma, lam, clip, updates
        self.moments: dict[str, tuple[Tensor, Tensor, int]] = {}

    def named(self, which: str) -> dict[str, Tensor]:
        """Weights by the names that the trainer has for them."""
        if which == "policy":
            return dict(self.policy.named_parameters())
        inner = {n: p for n, p in self.critic.named_parameters() if n != "lm_head.weight"}
        return inner | {"lm_head.weight": self.head}

    def step(
        self, batch: TrainBatch, others: OtherLogprobs, rate: float, value_rate: float, most: float
    ) -> dict[str, float]:
        """Moves all weights; returns what the trainer's metrics should be."""
        lengths = [sum(mask) for mask in batch.masks]
        rows = [i for i, length in enumerate(lengths) if length]
        logprobs, values = ([f(batch, i) for i in rows] for f in (self._logprobs, self._values))
        advantages, targets = [], []
        for i, now, value in zip(rows, logprobs, values, strict=True):
            reference = [x for x, on in zip(others.reference[i], batch.masks[i], strict=True) if on]
            made, goal = self._gae(batch.rewards[i], now.tolist(), reference, value.tolist())
            advantages += made
            targets.append(torch.tensor(goal, dtype=torch.float64))
        mean = math.fsum(advantages) / len(advantages)
        deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in advantages) / len(advantages))
        white = iter([(x - mean) / (deviation + 1e-8) for x in advantages])
        loss = torch.zeros((), dtype=torch.float64)
        for i, now in zip(rows, logprobs, strict=True):
            engine = [x for x, on in zip(batch.logprobs[i], batch.masks[i], strict=True) if on]
            for t, x in enumerate(now):
                ratio, advantage = torch.exp(x - engine[t]), next(white)
                bounded = ratio.clamp(1 - self.a.clip_low, 1 + self.a.clip_high)
                loss = loss - torch.minimum(ratio * advantage, bounded * advantage) / (len(rows) * lengths[i])
        norm = self._move("policy", loss, rate, self.a.max_grad_norm)
        old, first, norms = [value.detach() for value in values], None, []
        for _ in range(self.updates):
            total = torch.zeros((), dtype=torch.float64)
            for i, before, goal in zip(rows, old, targets, strict=True):
                now = self._values(batch, i)
                near = before + (now - before).clamp(-self.clip, self.clip)
                worst = torch.maximum((now - goal) ** 2, (near - goal) ** 2)
                total = total + worst.sum() / (2 * len(rows) * lengths[i])
            first = float(total.detach()) if first is None else first
            norms.append(self._move("value", total, value_rate, most))
        goals, gaps = torch.cat(targets), torch.cat(targets) - torch.cat(old)
        explained = 1 - float(((gaps - gaps.mean()) ** 2).mean() / ((goals - goals.mean()) ** 2).mean())
        return {
            "loss": float(loss.detach()), "grad_norm": norm, "value_loss": first, "value_explained": explained,
            "value_grad_norm": max(norms),
        }  # fmt: skip

    def _gae(self, reward: float, now: list, reference: list, values: list) -> tuple[list[float], list[float]]:
        """By the sum over later errors, each with its own power of gamma lam."""
        end = len(values) - 1
        errors = [
            -self.a.kl_coef * (now[t] - reference[t]) + (reward if t == end else self.gamma * values[t + 1]) - values[t]
            for t in range(end + 1)
        ]
        made = [
            math.fsum((self.gamma * self.lam) ** (s - t) * errors[s] for s in range(t, end + 1)) for t in range(end + 1)
        ]
        return made, [a + v for a, v in zip(made, values, strict=True)]

    def _logprobs(self, batch: TrainBatch, i: int) -> Tensor:
        prompt, reply = batch.prompts[batch.group[i]], batch.replies[i]
        logits = self.policy(torch.tensor([prompt + reply]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        row = torch.log_softmax(logits / batch.temperature, -1)[range(len(reply)), list(reply)]
        return row[torch.tensor(batch.masks[i])]

    def _values(self, batch: TrainBatch, i: int) -> Tensor:
        prompt, reply = batch.prompts[batch.group[i]], batch.replies[i]
        hidden = self.critic.model(torch.tensor([prompt + reply]), use_cache=False).last_hidden_state[0]
        return (hidden[len(prompt) - 1 : -1] @ self.head)[torch.tensor(batch.masks[i])]

    def _move(self, which: str, loss: Tensor, rate: float, most: float) -> float:
        """AdamW, with its running means, after the clip by global norm."""
        named = self.named(which)
        grads = torch.autograd.grad(loss, list(named.values()))
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        b1, b2 = self.a.betas
        with torch.no_grad():
            for (name, weight), grad in zip(named.items(), grads, strict=True):
                g = grad * min(1.0, most / norm) if norm else grad
                m, v, t = self.moments.get(f"{which}/{name}", (torch.zeros_like(g), torch.zeros_like(g), 0))
                m, v, t = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2, t + 1
                self.moments[f"{which}/{name}"] = (m, v, t)
                weight.mul_(1 - rate * self.a.weight_decay)
                weight.sub_(rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-8))
        return norm


def _wide(folder: str) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    for norm in model.modules():
        if type(norm).__name__ == "LlamaRMSNorm":
            norm.forward = lambda x, n=norm: (
                n.weight * x / (x.pow(2).mean(-1, keepdim=True) + n.variance_epsilon).sqrt()
            )
    return model
