"""The exact distribution of what verification emits: the very code is asked, as a black box, where its answers change.

Everything but the uniform numbers is enumerated. Given the proposals, an acceptance is a step function of its own number,
and the token drawn at the end is a step function of its number; bisection finds the steps to 2^-27, and their lengths are
the probabilities. No sampling, and nothing about p, q or residuals is assumed here.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from furlong.ops.draft import verify
from furlong.ops.draft.proposed import Drafted, Proposed
from furlong.ops.policy.sampling import Rules, laws_of

BELOW_ONE = math.nextafter(1.0, 0.0)
ROUNDS = 27


def rules_of(count, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    temperatures = np.full(count, temperature, dtype=np.float32)
    return Rules(temperatures, np.full(count, top_k), np.full(count, top_p), np.full(count, min_p))


@dataclass(frozen=True)
class Model:
    """Logits after every context, of the policy and of the draft, from a seed."""

    vocabulary: int
    seed: int
    spread: float = 1.5
    rules: dict | None = None

    def logits(self, who: str, context: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, who == "draft", *context)) % 2**31)
        return self.spread * torch.randn(self.vocabulary, generator=generator)

    def chances(self, who: str, context: tuple[int, ...]) -> Tensor:
        """float64, the slow way; without top-k and the like."""
        heat = (self.rules or {}).get("temperature", 1.0)
        return torch.softmax(self.logits(who, context).double() / heat, dim=-1)


@dataclass(frozen=True)
class Branch:
    """Some answers of one instance of proposals: numbers that lead here, and the probability of such numbers."""

    instance: int
    accept: Tensor
    weight: float
    node: int
    depth: int
    child: int


def law_of_a_step(model: Model, context: tuple[int, ...], parents: list[int]) -> tuple[dict, float]:
    """Probability of each sequence of tokens that one step may emit after the context, and the expected number of
    proposals kept."""
    return laws_of_steps(model, [context], parents)[context]


def laws_of_steps(model: Model, contexts: list[tuple[int, ...]], parents: list[int]) -> dict[tuple, tuple[dict, float]]:
    """`law_of_a_step` after each context, together."""
    nodes, instances = len(parents), []
    paths = [_path(parents, node) for node in range(nodes)]
    shares, known = {}, {}
    for context, one in itertools.product(contexts, itertools.product(range(model.vocabulary), repeat=nodes - 1)):
        after = [(*context, *(one[n - 1] for n in path[1:])) for path in paths]
        for c in {*after} - {*known}:
            known[c] = model.logits("policy", c), model.logits("draft", c)
            law = laws_of(known[c][1][None], rules_of(1, **(model.rules or {})))
            shares[c] = (law.chances.flatten().double() / law.mass).tolist()
        odds = math.prod(shares[after[parents[n]]][one[n - 1]] for n in range(1, nodes))
        if odds > 0:
            instances.append((context, one, after, odds))
    logits = [
        torch.stack([torch.stack([known[c][who] for c in after]) for _, _, after, _ in instances]) for who in (0, 1)
    ]
    box = _Box(model, [one for _, one, _, _ in instances], parents, *logits)
    ends = _ends(box, len(instances))
    found = {context: (defaultdict(float), []) for context in contexts}
    for (branch, tokens), lengths in zip(ends, _last_tokens(box, [branch for branch, _ in ends]), strict=True):
        context, _, _, odds = instances[branch.instance]
        law, kept = found[context]
        for last, length in enumerate(lengths):
            law[(*tokens, last)] += odds * branch.weight * length
        kept.append(odds * branch.weight * branch.depth)
    return {context: (dict(law), sum(kept)) for context, (law, kept) in found.items()}


def joint_law(model: Model, horizon: int, shape: Callable[[int], list[int]]) -> dict:
    """Probability of each sequence of the first `horizon` tokens, decoded in steps until there are that many.

    Args:
        shape: parents of the nodes proposed when so many tokens are left.
    """
    reached, found = {(): 1.0}, defaultdict(float)
    for length in range(horizon):
        contexts = [context for context in reached if len(context) == length]
        steps = laws_of_steps(model, contexts, shape(horizon - length))
        for context, (law, _) in steps.items():
            for tokens, weight in law.items():
                after = (*context, *tokens)[:horizon]
                target = found if len(after) == horizon else reached
                target[after] = target.get(after, 0.0) + reached[context] * weight
    return dict(found)


def true_law(model: Model, horizon: int) -> dict:
    """The product of the policy's probabilities, in float64."""
    found = {}
    for tokens in itertools.product(range(model.vocabulary), repeat=horizon):
        found[tokens] = math.prod(model.chances("policy", tokens[:at])[t].item() for at, t in enumerate(tokens))
    return found


def distance(a: dict, b: dict) -> float:
    """The largest difference of a probability."""
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


class _Box:
    """One step's verification of many instances, for any numbers."""

    def __init__(self, model: Model, instances: list, parents: list[int], policy: Tensor, draft: Tensor):
        count = len(instances)
        self.parents, self.vocabulary = parents, model.vocabulary
        self._rules = model.rules or {}
        self._tokens = torch.tensor([(-1, *one) for one in instances])
        self._policy = policy
        n = len(parents)
        laws = laws_of(draft.flatten(0, 1), rules_of(count * n, **self._rules))
        self._drafted = laws.chances.view(count, n, *laws.chances.shape[1:])
        shape = Proposed(self._tokens[:1], torch.tensor([parents]))
        self.depth, self.width, self.children = shape.depth, shape.width, shape.children[0].tolist()

    def run(self, which: list[int], draw: Tensor, accept: Tensor) -> verify.Verified:
        b, n = len(which), len(self.parents)
        proposed = Proposed(self._tokens[which], torch.tensor([self.parents]).expand(b, -1))
        drafted = Drafted(self._drafted[which].flatten(0, 1), torch.arange(b * n).view(b, n))
        numbers = verify.Numbers(draw, accept)
        return verify.rejection(
            self._policy[which].flatten(0, 1), rules_of(b, **self._rules), proposed, numbers, drafted
        )


def _bisect(count: int, holds: Callable[[Tensor], Tensor]) -> Tensor:
    """For each of `count` questions, where in [0, 1] the answer turns from yes to no."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    always, ever = holds(torch.full_like(low, BELOW_ONE)), holds(low)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        yes = holds(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return torch.where(always, 1.0, torch.where(ever, low, 0.0))


def _ends(box: _Box, instances: int) -> list[tuple[Branch, tuple[int, ...]]]:
    """All ways that walks can take, with the tokens kept."""
    blank = torch.zeros((max(1, box.depth), box.width), dtype=torch.float64)
    open_, ends = [Branch(i, blank, 1.0, 0, 0, 0) for i in range(instances)], []
    while open_:
        asking = []
        for branch in open_:
            more = branch.child < box.width and box.children[branch.node][branch.child] >= 0
            (asking if more else ends).append(branch)
        open_ = []
        if not asking:
            break
        for branch, edge in zip(asking, _edges(box, asking), strict=True):
            child = box.children[branch.node][branch.child]
            if edge > 0:
                open_.append(Branch(branch.instance, branch.accept, branch.weight * edge, child, branch.depth + 1, 0))
            if edge < 1:
                accept = branch.accept.clone()
                accept[branch.depth, branch.child] = BELOW_ONE
                open_.append(
                    Branch(
                        branch.instance, accept, branch.weight * (1 - edge), branch.node, branch.depth, branch.child + 1
                    )
                )
    return [(b, tuple(box._tokens[b.instance, n].item() for n in _path(box.parents, b.node)[1:])) for b in ends]


def _edges(box: _Box, branches: list[Branch]) -> list[float]:
    """The probability that each branch's next child is kept."""
    which, at = [b.instance for b in branches], torch.arange(len(branches))
    depth, child = torch.tensor([b.depth for b in branches]), torch.tensor([b.child for b in branches])
    wanted = torch.tensor([box.children[b.node][b.child] for b in branches])
    draw = torch.full((len(which), box.depth + 1), 0.5, dtype=torch.float64)

    def holds(numbers: Tensor) -> Tensor:
        accept = torch.stack([b.accept for b in branches])
        accept[at, depth, child] = numbers
        return box.run(which, draw, accept).nodes[at, depth + 1] == wanted

    return _bisect(len(which), holds).tolist()


def _last_tokens(box: _Box, branches: list[Branch]) -> list[list[float]]:
    """The probability of each token at the end of each branch."""
    V = box.vocabulary
    which = [b.instance for b in branches for _ in range(V)]
    depth = torch.tensor([b.depth for b in branches for _ in range(V)])
    most = torch.arange(V).repeat(len(branches))
    accept = torch.stack([b.accept for b in branches for _ in range(V)])
    at = torch.arange(len(which))

    def holds(numbers: Tensor) -> Tensor:
        draw = torch.full((len(which), box.depth + 1), 0.5, dtype=torch.float64)
        draw[at, depth] = numbers
        verified = box.run(which, draw, accept)
        assert torch.equal(verified.accepted, depth)
        return verified.tokens[at, depth] <= most

    edges = _bisect(len(which), holds).view(len(branches), V)
    return torch.diff(edges, dim=1, prepend=torch.zeros(len(edges), 1, dtype=torch.float64)).tolist()


def _path(parents: list[int], node: int) -> list[int]:
    return [*(_path(parents, parents[node]) if node else []), node]
