"""From the tree of a session to what is trained on."""

from __future__ import annotations

from collections.abc import Sequence

from furlong.ops.rollouts.spans import Span, merge
from furlong.ops.rollouts.trajectory import Trajectory
from furlong.ops.sessions.node import Node, path, tokens_of
from furlong.ops.sessions.routings import of_conversation


def kept_leaves(nodes: Sequence[Node]) -> list[int]:
    """Replies that nothing follows, except those that were asked for once more after they had been given."""
    parents = {node.parent for node in nodes}
    return [index for index in range(len(nodes)) if index not in parents and not _superseded(nodes, index)]


def to_trajectory(
    nodes: Sequence[Node],
    leaf: int,
    trained: dict[int, int],
    trajectory_id: str,
    sample: int,
    number: int,
    seed: int,
) -> Trajectory:
    """The conversation that ends with reply `leaf`.

    Args:
        trained: how many tokens of each reply are in the loss of earlier leaves; brought up to date.
        number: of the leaf.
    """
    indices = [leaf]
    while (parent := nodes[indices[-1]].parent) is not None:
        indices.append(parent)
    logprobs: list[float | None] = []
    model_logprobs: list[float | None] = []
    versions: list[int | None] = []
    mask: list[bool] = []
    drafted: list[bool] = []
    columns = (logprobs, model_logprobs, versions, mask, drafted)
    for place, index in enumerate(reversed(indices)):
        node = nodes[index]
        blank = len(node.extra)
        following = nodes[indices[-place - 2]] if place + 1 < len(indices) else None
        reply_begin = node.kept + blank
        count = min(len(node.sample.tokens), following.kept - reply_begin) if following else len(node.sample.tokens)
        owned = trained.get(index, 0)
        logprobs += [None] * blank + list(node.sample.logprobs[:count])
        model_logprobs += [None] * blank + list(node.sample.model_logprobs[:count])
        mask += [False] * blank + [at >= owned for at in range(count)]
        drawn = [version for version, begin, end in node.sample.versions for _ in range(begin, end)]
        versions += [None] * blank + drawn[:count]
        drafted += [False] * blank + list(node.sample.drafted or [False] * count)[:count]
        trained[index] = max(owned, count)
    tokens = tokens_of(nodes, leaf)
    if {len(column) for column in columns} != {len(tokens)}:
        raise ValueError(
            f"{trajectory_id}: {len(tokens)} tokens but columns of {[len(c) for c in columns]}; report this"
        )
    way, last = path(nodes, leaf), nodes[leaf]
    return Trajectory(
        trajectory_id=f"{trajectory_id}-l{number}" if number else trajectory_id,
        sample=sample,
        leaf=number,
        turns=len(way),
        messages=[message for node in way for message in (*node.appended, node.reply)],
        prompt=len(way[0].extra),
        tokens=tokens,
        logprobs=tuple(logprobs),
        model_logprobs=tuple(model_logprobs),
        loss_mask=tuple(mask),
        versions=_spans(versions),
        finish_reason=last.sample.finish_reason,
        seed=seed,
        text=last.text,
        seconds=sum(node.sample.seconds for node in way),
        routing=of_conversation(way),
        drafted=None if all(node.sample.drafted is None for node in way) else tuple(drafted),
    )


def _superseded(nodes: Sequence[Node], index: int) -> bool:
    """Whether its request was repeated by someone who could have seen it; what was drawn side by side is no retry."""
    mine = nodes[index]
    return any(
        (later.parent, later.appended, later.tools) == (mine.parent, mine.appended, mine.tools) and later.seen > index
        for later in nodes[index + 1 :]
    )


def _spans(versions: list[int | None]) -> tuple[Span, ...]:
    return merge((version, at, at + 1) for at, version in enumerate(versions) if version is not None)
