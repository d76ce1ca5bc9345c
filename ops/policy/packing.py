"""Packs a step's trajectories into few, dense micro-batches.

A packed row is a prefix tree: the prompt of one group once, then the replies, and what several replies begin with
once as well. A token sees its own prefix only, so its hidden state is that of the unpacked sequence. Where experts
were recorded, trajectories share a token only if it went through the same experts in both, and so did its prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from furlong.ops.policy.routing import RoutingError, decode
from furlong.ops.protocols import TrainBatch

Masks = tuple[tuple[bool, ...], ...]
Experts = Int[np.ndarray, "positions layers top_k"]
"""Of one trajectory, prompt included; -1 where none were recorded."""


class PackingError(ValueError):
    """A batch that cannot be packed; the message names the trajectory or the group."""


@dataclass(frozen=True)
class MicroBatch:
    """One forward/backward. Padding is token 0 that sees only itself and is read by nobody."""

    tokens: Int[Tensor, "rows width"]
    positions: Int[Tensor, "rows width"]
    """Distance from the sequence's first token: the depth in the tree."""
    visible: Bool[Tensor, "rows 1 width width"]
    """visible[r, 0, q, k]: query q attends to key k, i.e. k is q or before it in q's sequence."""
    places: Int[Tensor, " places"]
    """Flat indices into rows * width at which a next token is wanted: the only ones the LM head runs at."""
    place: Int[Tensor, " tokens"]
    """For each wanted token, the index into `places` of the position that predicts it."""
    target: Int[Tensor, " tokens"]
    trajectory: Int[Tensor, " tokens"]
    """Index of its trajectory in the batch."""
    offset: Int[Tensor, " tokens"]
    """Index of the token in its reply."""
    experts: Int[Tensor, "rows width layers top_k"] | None = None
    """The experts that each token was sampled through, in every layer that has experts, in the order recorded; -1, all
    along a token, where there is no record, so at padding, and the model chooses. None when the batch has no record."""


Node = tuple[int, bytes]
"""A token and, as bytes, the experts it went through: what must be equal for two trajectories to share it."""


@dataclass
class _Row:
    """A prefix tree under construction; node 0 is the prompt's first token."""

    nodes: list[Node] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    children: dict[tuple[int, Node], int] = field(default_factory=dict)
    wanted: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(node, target, trajectory, offset) of each wanted token."""

    def missing(self, sequence: list[Node]) -> int:
        """How many nodes adding `sequence` would make."""
        at = -1
        for depth, node in enumerate(sequence):
            at = self.children.get((at, node), -2)
            if at == -2:
                return len(sequence) - depth
        return 0

    def add(self, sequence: list[Node]) -> list[int]:
        """Where the nodes of `sequence` are, made where missing."""
        at, path = -1, []
        for node in sequence:
            child = self.children.setdefault((at, node), len(self.nodes))
            if child == len(self.nodes):
                self.nodes.append(node)
                self.parents.append(at)
            path.append(at := child)
        return path


def pack(batch: TrainBatch, masks: Masks, budget: int, shares: int = 1) -> list[MicroBatch]:
    """Micro-batches that compute every reply token whose mask is true, in an order that depends on the batch alone.

    A reply is cut after its last wanted token, and that token itself is only predicted, never fed. Trajectories
    without a wanted token are left out. Rows are sorted by width (longest first, ties in the batch's order) so that
    rows padded to one width differ little, and a micro-batch takes rows while rows * width stays within the budget.

    Args:
        batch: valid by `check_batch`.
        masks: which reply tokens are wanted; `batch.masks` for training.
        budget: padded tokens per micro-batch at most. A group's tree that is larger is spread over several rows.
        shares: ranks that take every so many-th micro-batch: they are cut smaller where that makes the shares more equal.
    Raises:
        PackingError: one trajectory alone is longer than the budget.
        RoutingError: a record of experts that does not fit its trajectory, or the others' records.
    """
    shape = _record_shape(batch)
    rows = [row for group in range(len(batch.prompts)) for row in _rows_of_group(batch, masks, group, budget, shape)]
    rows.sort(key=lambda row: -len(row.nodes))
    packed, taken = [], 0
    for count in _counts([len(row.nodes) for row in rows], budget, shares):
        packed.append(_micro_batch(rows[taken : taken + count], shape))
        taken += count
    return packed


def _counts(widths: list[int], budget: int, shares: int) -> list[int]:
    """Rows of each micro-batch, given all rows' widths, longest first: the smallest budget that needs no more rounds of
    `shares` micro-batches than the whole one does."""

    def counts(limit: int) -> list[int]:
        found, taken = [], 0
        while taken < len(widths):
            found.append(min(limit // widths[taken], len(widths) - taken))
            taken += found[-1]
        return found

    if shares == 1 or not widths:
        return counts(budget)
    most = -(-len(counts(budget)) // shares) * shares
    low, high = widths[0], budget
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(counts(middle)) <= most else (middle + 1, high)
    return counts(low)


def empty_like(micro: MicroBatch) -> MicroBatch:
    """One padding token and nothing wanted: what a rank computes while others still have micro-batches like `micro`."""
    none = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, 1, dtype=torch.int64)
    experts = None if micro.experts is None else torch.full_like(micro.experts[:1, :1], -1)
    return MicroBatch(one, one, torch.ones(1, 1, 1, 1, dtype=torch.bool), none, none, none, none, none, experts)


def recorded_experts(batch: TrainBatch, index: int) -> Experts | None:
    """The experts that trajectory `index` was sampled through, by position in prompt + reply; None without a record.

    Raises:
        RoutingError: the record is damaged or longer than the trajectory.
    """
    routing = batch.routing[index]
    if routing is None:
        return None
    length, stop = len(batch.prompts[batch.group[index]]) + len(batch.replies[index]), routing.first + routing.rows
    if stop > length:
        raise RoutingError(
            f"trajectory {batch.trajectory_ids[index]}: experts are recorded for positions {routing.first} to {stop}, but "
            f"prompt and reply have {length} tokens; the record is another trajectory's: sample this one again"
        )
    experts = np.full((length, len(routing.layers), routing.top_k), -1, np.int64)
    try:
        experts[routing.first : stop] = decode(routing)
    except RoutingError as err:
        raise RoutingError(f"trajectory {batch.trajectory_ids[index]}: {err}") from err
    return experts


def _record_shape(batch: TrainBatch) -> tuple[int, int] | None:
    """(layers, top_k) of the batch's records, which must be of one model; None when there are none."""
    records = [(name, r) for name, r in zip(batch.trajectory_ids, batch.routing, strict=True) if r is not None]
    for name, record in records:
        of, other = ((r.layers, r.top_k, r.experts) for r in (record, records[0][1]))
        if of != other:
            raise RoutingError(
                f"trajectory {name}: its experts were recorded as (layers, top_k, experts) {of}, those of trajectory "
                f"{records[0][0]} as {other}; train on what one model sampled"
            )
    return (len(records[0][1].layers), records[0][1].top_k) if records else None


def _rows_of_group(
    batch: TrainBatch, masks: Masks, group: int, budget: int, shape: tuple[int, int] | None
) -> list[_Row]:
    rows: list[_Row] = []
    for index in (i for i, of in enumerate(batch.group) if of == group and any(masks[i])):
        wanted = [offset for offset, on in enumerate(masks[index]) if on]
        prompt, reply = batch.prompts[group], batch.replies[index]
        sequence = _sequence(batch, index, prompt + reply[: wanted[-1]], shape)
        if len(sequence) > budget:
            raise PackingError(
                f"trajectory {batch.trajectory_ids[index]} needs {len(sequence)} tokens in one row, more than "
                f"trainer.micro_batch_tokens={budget}; raise it or shorten prompts or sampling.max_new_tokens"
            )
        if not rows or len(rows[-1].nodes) + rows[-1].missing(sequence) > budget:
            rows.append(_Row())
        path = rows[-1].add(sequence)
        rows[-1].wanted += [(path[len(prompt) - 1 + offset], reply[offset], index, offset) for offset in wanted]
    return rows


def _sequence(batch: TrainBatch, index: int, tokens: tuple[int, ...], shape: tuple[int, int] | None) -> list[Node]:
    if shape is None:
        return [(token, b"") for token in tokens]
    experts = recorded_experts(batch, index)
    if experts is None:
        experts = np.full((len(tokens), *shape), -1, np.int64)
    return [(token, row.tobytes()) for token, row in zip(tokens, experts, strict=False)]


def _micro_batch(rows: list[_Row], shape: tuple[int, int] | None) -> MicroBatch:
    width = len(rows[0].nodes)
    tokens = np.zeros((len(rows), width), np.int64)
    positions = np.zeros((len(rows), width), np.int64)
    visible = np.zeros((len(rows), 1, width, width), np.bool_)
    visible[:, 0, np.arange(width), np.arange(width)] = True
    experts = None if shape is None else np.full((len(rows), width, *shape), -1, np.int64)
    wanted = []
    for r, row in enumerate(rows):
        tokens[r, : len(row.nodes)] = [token for token, _ in row.nodes]
        if experts is not None:
            ids = np.frombuffer(b"".join(ids for _, ids in row.nodes), np.int64)
            experts[r, : len(row.nodes)] = ids.reshape(len(row.nodes), *shape)
        for node, parent in enumerate(row.parents):
            if parent >= 0:
                visible[r, 0, node] |= visible[r, 0, parent]
                positions[r, node] = positions[r, parent] + 1
        wanted += [(r * width + node, *rest) for node, *rest in row.wanted]
    flat, target, trajectory, offset = (torch.tensor(column, dtype=torch.int64) for column in zip(*wanted, strict=True))
    places, place = torch.unique(flat, return_inverse=True)
    arrays = (torch.from_numpy(array) for array in (tokens, positions, visible))
    chosen = None if experts is None else torch.from_numpy(experts)
    return MicroBatch(*arrays, places, place, target, trajectory, offset, chosen)


def check_batch(batch: TrainBatch, vocabulary: int, context: int) -> None:
    """Raise PackingError unless the batch's parts fit together and every token fits the model.

    Args:
        vocabulary: token ids must be below it.
        context: longest prompt + reply the model takes, in tokens.
    """
    count = len(batch.trajectory_ids)
    for name in ("group", "replies", "logprobs", "masks", "sampled_by", "advantages", "rewards", "routing"):
        if len(getattr(batch, name)) != count:
            raise PackingError(f"{len(getattr(batch, name))} {name} for {count} trajectories; give one for each")
    if not batch.temperature > 0:
        raise PackingError(f"temperature {batch.temperature} has no distribution to train on; sample above 0")
    for group, prompt in enumerate(batch.prompts):
        if not prompt or not 0 <= min(prompt) <= max(prompt) < vocabulary:
            raise PackingError(f"prompt of group {group} is empty or has a token outside [0, {vocabulary}); rebuild it")
    for index, name in enumerate(batch.trajectory_ids):
        reply, group = batch.replies[index], batch.group[index]
        if not len(reply) == len(batch.logprobs[index]) == len(batch.masks[index]) == len(batch.sampled_by[index]):
            raise PackingError(
                f"trajectory {name}: {len(reply)} tokens, {len(batch.logprobs[index])} log-probabilities, "
                f"{len(batch.masks[index])} mask entries and {len(batch.sampled_by[index])} versions; give one per token"
            )
        if not 0 <= group < len(batch.prompts):
            raise PackingError(f"trajectory {name}: group {group} of {len(batch.prompts)}; index into `prompts`")
        if reply and not 0 <= min(reply) <= max(reply) < vocabulary:
            raise PackingError(f"trajectory {name}: a token outside [0, {vocabulary}); use the model's own tokenizer")
        if len(batch.prompts[group]) + len(reply) > context:
            raise PackingError(
                f"trajectory {name}: prompt and reply have {len(batch.prompts[group]) + len(reply)} tokens, the model "
                f"takes {context}; shorten prompts or sampling.max_new_tokens"
            )
