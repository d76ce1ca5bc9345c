"""Which proposals of a draft the policy keeps, and what it says after them: losslessly, by either of two rules.

Write p for the policy's distribution after some context (temperature, top-k, top-p and min-p included) and q for the one
that the draft's proposals after the same context were drawn from. Numbers are independent uniforms: each is a function
of (seed, position, stream), and each position has streams of its own for the policy's draw, and for every child's
proposal and acceptance.

**match.** At a position t the policy's token is the inversion of p at u_t, the number that it is drawn with when there is
no draft. A proposal is kept when it equals that token, and else the walk ends. So the token at each position is the same
function of context and u_t with any proposals, good, bad or none: equal bits, not only an equal distribution. This needs
that logits do not depend on how tokens are fed (`ops/policy/row_bits.py`). Proposals drawn with numbers of their own are
kept with probability sum p q; drawn with u_t itself they are kept more often, as like distributions inverted at one number
mostly give one token.

**rejection** (Leviathan, Kalman, Matias 2023, Theorem 1; Chen et al. 2023; for several children Miao et al. 2024,
SpecInfer, "multi-step speculative sampling"). Children x_1, x_2, ... of a node are tried in order, with p_1 = p:
x_j is kept with probability min(1, p_j(x_j) / q(x_j)), else p_{j+1} = (p_j - q)_+ / sum (p_j - q)_+ takes its place. When
no child is left, the token is drawn from the last p_j. Claim: if the children are independent draws from q, the token
that the walk goes on with, kept or drawn, has exactly the distribution p, given the context.

Proof, by induction over the number n of children. With none the token is drawn from p_1 = p. With n >= 1, for any token y
P(first is kept and is y) = q(y) min(1, p(y)/q(y)) = min(p(y), q(y)), which is 0 = q(y) where q(y) = 0. So the first is
rejected with probability R = 1 - sum min(p, q) = sum (p - min(p, q)) = sum (p - q)_+. Rejection tells nothing about the
other children, which are independent of the first and of its number; so given rejection, by the induction hypothesis for
the n - 1 others and p_2, the token has the distribution p_2. P(y) = min(p(y), q(y)) + R p_2(y)
= min(p(y), q(y)) + (p(y) - q(y))_+ = p(y). If R = 0, rejection has probability 0 and p_2 is not needed.
Over several positions: what is said of one holds given all tokens before it, as the numbers at a position are independent
of those before; proposals behind a token that was not kept are never looked at, so their numbers are fresh when the next
step proposes anew. The chain rule gives the joint distribution of the whole reply. The number of proposals, the shape of
the tree, and whether there are any, may depend on the context and on earlier steps, so on measured acceptance, as long as
it is settled before the children of a node are drawn: dropping children for what they are would not be lossless, nor
would children that are made to differ, nor proposals drawn with u_t, which the token after a rejection is drawn with.
So whether a node has children may depend on the tokens of all nodes up to its level, its siblings among them.
P(first is kept) = sum min(p, q) = 1 - total variation.

Under `rejection` the tokens themselves, though not their distribution, depend on how many proposals there were; see
`ops/draft/cost.py` for what that means for reproducibility.

Greedy rows (temperature 0) keep the child that is the policy's most likely token, under either rule. Rounding: p and q
are float32 shares divided by float64 sums, so what is proved holds for probabilities within 1e-6 of softmax's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt64
from torch import Tensor

from furlong.ops.draft.proposed import Drafted, Proposed
from furlong.ops.policy.sampling import Laws, Rules, invert, laws_of, uniforms

Choose = Callable[[int, Int[np.ndarray, " r"], Int[np.ndarray, " r"]], Int[np.ndarray, " r"]]


def accept_stream(child: int) -> int:
    """Of the numbers that decide whether a node's child number `child`, from 0, is kept."""
    return 1 + 2 * child


def propose_stream(child: int) -> int:
    """Of the numbers that a node's child number `child`, from 0, is drawn with."""
    return 2 + 2 * child


@dataclass(frozen=True)
class Numbers:
    """Uniforms (float64) in [0, 1) of one step."""

    draw: Float[Tensor, "b depth_1"]
    """For the policy's token at each of the next positions: the ones that it is drawn with without a draft."""
    accept: Float[Tensor, "b depth width"]
    """For each child of the node that the walk has come to."""

    @staticmethod
    def of(seeds: UInt64[np.ndarray, " b"], positions: Int[np.ndarray, " b"], proposed: Proposed) -> Numbers:
        """
        Args:
            positions: how many tokens of each reply there are, not counting its prompt.
        """
        at = positions[:, None] + np.arange(proposed.depth + 1)
        streams = np.array([accept_stream(child) for child in range(proposed.width)])
        accept = uniforms(seeds[:, None, None], at[:, :-1, None], streams)
        return Numbers(torch.from_numpy(uniforms(seeds[:, None], at)), torch.from_numpy(accept))


@dataclass(frozen=True)
class Verified:
    """What one step adds to each reply: `accepted` proposals and one token more. Columns beyond mean nothing."""

    accepted: Int[Tensor, " b"]
    nodes: Int[Tensor, "b depth_1"]
    """Node 0 and those of the accepted proposals, in order: what was fed and stays; -1 beyond."""
    tokens: Int[Tensor, "b depth_1"]
    """The accepted proposals, then the policy's own token; -1 beyond."""
    logprobs: Float[Tensor, "b depth_1"]
    """As `Drawn.logprobs`, of the policy alone, bit for bit what `draw` gives for the token. NaN for the last token of a
    reply whose logits are not finite there; none is kept behind such a node."""
    model_logprobs: Float[Tensor, "b depth_1"]
    """As `Drawn.model_logprobs`."""
    unusable: Bool[Tensor, " b"]
    """Whether proposals were set aside because what they were drawn from is no distribution (a broken draft)."""


def match(logits: Float[Tensor, "rows vocab"], rules: Rules, proposed: Proposed, numbers: Numbers) -> Verified:
    """Keep the proposals that are what the policy would have drawn anyhow; see above.

    Args:
        logits: after each node that is there, in the order of `Proposed.rows`.
        rules: of each reply.
    """
    laws = laws_of(logits, rules.of(proposed.owners))
    drawn = laws.draw(torch.from_numpy(numbers.draw.numpy()[proposed.owners, proposed.depths[proposed.there]]))
    wanted = np.where(_sound(laws), drawn.numpy(), -1)

    def choose(depth: int, replies: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        return _same(proposed, replies, nodes, wanted[proposed.rows[replies, nodes]])

    walked = _walk(proposed, choose)
    _, rows = _ends(proposed, walked)
    return _verified(laws, proposed, walked, drawn.numpy()[rows], np.zeros(len(walked), dtype=np.bool_))


def rejection(
    logits: Float[Tensor, "rows vocab"], rules: Rules, proposed: Proposed, numbers: Numbers, drafted: Drafted
) -> Verified:
    """Keep each proposal with probability min(1, p/q); see above.

    Args:
        logits, rules: as for `match`.
        drafted: what the children of each node were drawn from; not looked at for greedy replies.
    Raises:
        ValueError: a proposal has probability 0 in what it was drawn from, so it was not drawn from that.
    """
    walk = _Rejection(laws_of(logits, rules.of(proposed.owners)), proposed, numbers, drafted)
    walked = _walk(proposed, walk.choose)
    return _verified(walk.laws, proposed, walked, walk.last(walked), walk.unusable)


class _Rejection:
    """One step's state: what each reply whose walk has ended by a rejection draws its token from."""

    def __init__(self, laws: Laws, proposed: Proposed, numbers: Numbers, drafted: Drafted):
        self.laws, self._proposed, self._numbers, self._drafted = laws, proposed, numbers, drafted
        self._sound, self._greedy = _sound(laws), laws.likeliest.numpy() >= 0
        self._wanted = np.where(self._sound, laws.likeliest.numpy(), -1)
        self._flat, self._mass = laws.chances.flatten(1), laws.mass
        self._accept, self._rows = numbers.accept.numpy(), drafted.rows.numpy()
        self._rest: list[tuple[Int[np.ndarray, " r"], Float[Tensor, "r vocab"]]] = []
        self.unusable = np.zeros(len(proposed.above), dtype=np.bool_)

    def choose(self, depth: int, replies: Int[np.ndarray, " r"], nodes: Int[np.ndarray, " r"]) -> np.ndarray:
        """The child that each reply's walk goes on with, -1 for none."""
        rows = self._proposed.rows[replies, nodes]
        found = _same(self._proposed, replies, nodes, self._wanted[rows])
        drafted = self._rows[replies, nodes]
        sampled = (self._proposed.children[replies, nodes, 0] >= 0) & ~self._greedy[rows]
        if (drafted[sampled] < 0).any():
            raise ValueError(
                f"a node of reply {int(replies[sampled & (drafted < 0)][0])} has children and no row of the chances they "
                "were drawn from; set Drafted.rows for every node with children"
            )
        usable = sampled.copy()
        usable[sampled] = self._drafted.usable[drafted[sampled]]
        self.unusable[replies[sampled & ~usable]] = True
        trying = np.flatnonzero(usable & self._sound[rows])
        if len(trying):
            found[trying] = self._try(depth, replies[trying], nodes[trying], rows[trying], drafted[trying])
        return found

    def _try(
        self, depth: int, replies: np.ndarray, nodes: np.ndarray, rows: np.ndarray, drafted: np.ndarray
    ) -> Int[np.ndarray, " r"]:
        """Each node's children, one after the other, until one is kept."""
        children = self._proposed.children[replies, nodes]
        found, left, rest = np.full(len(replies), -1), np.arange(len(replies)), None
        for place in range(children.shape[1]):
            more = children[left, place] >= 0
            if not more.all():
                # At the first place all have a child, as they would not be tried otherwise.
                self._rest.append((replies[left[~more]], rest[~more]))
                left, rest = left[more], rest[more]
            if not len(left):
                return found
            tokens = self._proposed.ids[replies[left], children[left, place]]
            q = self._chances(drafted[left], tokens)
            kept = keeps(self._accept[replies[left], depth, place], self._policy(rows[left], rest, tokens), q)
            found[left[kept]] = children[left[kept], place]
            left = left[~kept]
            if not len(left):
                return found
            before = self._whole(rows[left]) if rest is None else rest[~kept]
            rest = residual(before, self._drafted.whole(drafted[left], self._flat.shape[1]))
        self._rest.append((replies[left], rest))
        return found

    def _policy(self, rows: np.ndarray, rest: Tensor | None, tokens: np.ndarray) -> Float[np.ndarray, " r"]:
        """Each token's probability in what is left after earlier children."""
        if rest is None:
            return self._flat.numpy()[rows, tokens] / self._mass.numpy()[rows]
        return rest.numpy()[np.arange(len(rest)), tokens]

    def _chances(self, drafted: np.ndarray, tokens: np.ndarray) -> Float[np.ndarray, " r"]:
        q = self._drafted.of(drafted, tokens)
        if (q <= 0).any():
            raise ValueError(
                f"token {int(tokens[q <= 0][0])} was proposed with probability 0, so it was not drawn from the chances "
                "given; pass those that the proposals were drawn from, under the same rules and temperature"
            )
        return q

    def _whole(self, rows: np.ndarray) -> Float[Tensor, "r vocab"]:
        at = torch.from_numpy(rows)
        return self._flat[at].double() / self._mass[at][:, None]

    def last(self, walked: Int[np.ndarray, "b depth_1"]) -> Int[np.ndarray, " b"]:
        """Each reply's token after the nodes it has kept."""
        accepted, rows = _ends(self._proposed, walked)
        numbers = self._numbers.draw.numpy()[np.arange(len(rows)), accepted]
        tokens = self.laws.likeliest.numpy()[rows]
        whole = tokens < 0
        for replies, rest in self._rest:
            whole[replies] = False
            blocks = rest.view(len(rest), *self.laws.chances.shape[1:])
            tokens[replies] = invert(blocks, blocks.sum(dim=-1), torch.from_numpy(numbers[replies])).numpy()
        at = torch.from_numpy(rows[whole])
        if len(at):
            drawn = invert(self.laws.chances[at], self.laws.masses[at], torch.from_numpy(numbers[whole]))
            tokens[whole] = drawn.numpy()
        return tokens


def keeps(
    numbers: Float[np.ndarray, " r"], p: Float[np.ndarray, " r"], q: Float[np.ndarray, " r"]
) -> Bool[np.ndarray, " r"]:
    """Whether a proposal is kept: with probability min(1, p/q). A number is below 1 by 2^-53 at least, so number * q rounds
    to less than q: what p makes at least as likely as q is always kept, and what p excludes never."""
    return numbers * q < p


def residual(p: Float[Tensor, "r vocab"], q: Float[Tensor, "r vocab"]) -> Float[Tensor, "r vocab"]:
    """norm((p - q)_+). Where nothing is left, p and q differ by rounding only and rejection has probability 0 but for
    that: then p."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def _sound(laws: Laws) -> Bool[np.ndarray, " rows"]:
    """Dividing finite logits by the temperature may overflow, too."""
    return (laws.finite & laws.mass.isfinite()).numpy()


def _same(
    proposed: Proposed, replies: Int[np.ndarray, " r"], nodes: Int[np.ndarray, " r"], wanted: Int[np.ndarray, " r"]
) -> Int[np.ndarray, " r"]:
    """Each node's first child that is the wanted token, -1 when none is."""
    children = proposed.children[replies, nodes]
    tokens = proposed.ids[replies[:, None], children]
    same = (children >= 0) & (tokens == wanted[:, None]) & (wanted >= 0)[:, None]
    first = same.argmax(axis=1)
    at = np.arange(len(first))
    return np.where(same[at, first], children[at, first], -1)


def _walk(proposed: Proposed, choose: Choose) -> Int[np.ndarray, "b depth_1"]:
    """Nodes from node 0 on, each the child of the one before that `choose` picks; -1 beyond."""
    b = len(proposed.above)
    walked = np.full((b, proposed.depth + 1), -1)
    walked[:, 0] = 0
    replies, at = np.arange(b), np.zeros(b, dtype=np.int64)
    for level in range(proposed.depth):
        found = choose(level, replies, at)
        replies, at = replies[found >= 0], found[found >= 0]
        if not len(replies):
            break
        walked[replies, level + 1] = at
    return walked


def _ends(
    proposed: Proposed, walked: Int[np.ndarray, "b depth_1"]
) -> tuple[Int[np.ndarray, " b"], Int[np.ndarray, " b"]]:
    """How many proposals each walk has kept, and the row that its last node has."""
    accepted, replies = (walked >= 0).sum(axis=1) - 1, np.arange(len(walked))
    return accepted, proposed.rows[replies, walked[replies, accepted]]


def _verified(
    laws: Laws,
    proposed: Proposed,
    walked: Int[np.ndarray, "b depth_1"],
    last: Int[np.ndarray, " b"],
    unusable: Bool[np.ndarray, " b"],
) -> Verified:
    accepted, _ = _ends(proposed, walked)
    on, replies = walked >= 0, np.arange(len(walked))
    tokens = np.full_like(walked, -1)
    tokens[:, :-1] = np.where(on[:, 1:], proposed.ids[replies[:, None], walked[:, 1:]], -1)
    tokens[replies, accepted] = last
    rows = proposed.rows[replies[:, None], walked][on]
    columns = [torch.full(walked.shape, torch.nan, dtype=torch.float64) for _ in range(2)]
    found = laws.logprobs(torch.from_numpy(tokens[on]), torch.from_numpy(rows))
    for column, some in zip(columns, found, strict=True):
        column.numpy()[on] = some.numpy()
    whole = (torch.from_numpy(x) for x in (accepted, walked, tokens))
    return Verified(*whole, *columns, torch.from_numpy(unusable))
