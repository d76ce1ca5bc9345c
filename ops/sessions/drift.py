"""Whether the tokens of a conversation are still what its messages say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from furlong.ops.rollouts.trajectory import Trajectory
from furlong.ops.sessions.template import ChatTemplate


class DriftError(ValueError):
    """Kept tokens that the messages do not render to, where nothing may differ; says what differs and where."""


@dataclass
class _Segment:
    """Tokens between two special ones."""

    begin: int
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)


def check_drift(template: ChatTemplate, trajectory: Trajectory, tools: Any = None) -> int:
    """Render the messages again and compare with the tokens.

    Special tokens, and text that was not sampled, must be the same. What the policy wrote may be encoded or spelled
    otherwise, as the template writes tool calls its own way: it is counted only. The stop token of the last reply is left
    out of the comparison, as templates differ in writing one.

    Returns:
        Number of stretches of sampled text that differ.
    Raises:
        DriftError: anything else differs; the message names the position in `trajectory.tokens`.
    """
    kept = list(trajectory.tokens)
    sampled = [value is not None for value in trajectory.logprobs]
    if kept and sampled[-1] and kept[-1] in template.stop_ids:
        del kept[-1], sampled[-1]
    mine = _split(kept, sampled, template.special_ids)
    ids = template.encode(template.without_end(template.text(trajectory.messages, tools, prompt=False)))
    theirs = _split(ids, [False] * len(ids), template.special_ids)
    where = trajectory.trajectory_id or "the conversation"
    for a, b in zip(mine[1:], theirs[1:], strict=False):
        one, other = kept[a.begin - 1], ids[b.begin - 1]
        if one != other:
            raise DriftError(
                f"{where}: token {a.begin - 1} is {template.decode([one])!r}, where the messages render to "
                f"{template.decode([other])!r} (special_token); {_MEND}"
            )
    if len(mine) != len(theirs):
        more = min(len(mine), len(theirs))
        at = mine[more].begin - 1 if more < len(mine) else len(kept)
        raise DriftError(
            f"{where}: {len(mine) - 1} special tokens are kept and the messages render to {len(theirs) - 1}, from token "
            f"{at} on (special_token_count); {_MEND}"
        )
    return sum(_differs(template, a, b, where) for a, b in zip(mine, theirs, strict=True))


_MEND = "the session is not trained on; check the chat template, or the reply that wrote template text"


def _split(ids: Sequence[int], sampled: Iterable[bool], special: frozenset[int]) -> list[_Segment]:
    segments = [_Segment(0)]
    for at, (token, drawn) in enumerate(zip(ids, sampled, strict=True)):
        if token in special:
            segments.append(_Segment(at + 1))
        else:
            segments[-1].ids.append(token)
            segments[-1].sampled.append(drawn)
    return segments


def _differs(template: ChatTemplate, mine: _Segment, theirs: _Segment, where: str) -> bool:
    """Whether sampled text differs; DriftError when other text does."""
    if mine.ids == theirs.ids:
        return False
    wanted = template.decode(theirs.ids)
    if not any(mine.sampled):
        if (found := template.decode(mine.ids)) == wanted:
            return False
        raise DriftError(
            f"{where}: tokens {mine.begin} to {mine.begin + len(mine.ids)} say {found[:80]!r}, where the messages render to "
            f"{wanted[:80]!r} (non_assistant_text); {_MEND}"
        )
    first = mine.sampled.index(True)
    last = len(mine.sampled) - mine.sampled[::-1].index(True)
    head, tail = template.decode(mine.ids[:first]), template.decode(mine.ids[last:])
    if not (wanted.startswith(head) and wanted.endswith(tail) and len(wanted) >= len(head) + len(tail)):
        raise DriftError(
            f"{where}: text around the reply at token {mine.begin + first} is {head[-40:]!r} and {tail[:40]!r}, where the "
            f"messages render to {wanted[:80]!r} (non_assistant_text); {_MEND}"
        )
    return template.decode(mine.ids) != wanted
