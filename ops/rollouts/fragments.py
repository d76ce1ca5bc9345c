"""Replies in parts: what an interruption left of a reply, how to go on from there, and the whole put together.

A reply keeps one name through all interruptions: the request_id it is first asked for by. The engine is asked for its
parts as `<name>.0`, `<name>.1` and so on, since it draws a request of a known id only once. Table `fragments` has a row,
under the part's id, for each part that was ended before its time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from furlong.ops.protocols import GenerateRequest, Routing, Sample
from furlong.ops.rollouts.spans import Span, cover, merge, shifted

LEAST_SECONDS = 0.001
"""Time given to a reply whose time is up, since a deadline of 0 would mean none: the engine ends it at once."""


class FragmentError(ValueError):
    """Parts that are not the consecutive parts of one reply; the message names the request."""


def resume(request: GenerateRequest, parts: Sequence[Sample]) -> GenerateRequest:
    """The request for the next part of a reply.

    Args:
        request: the whole reply's, under its name and without prefix.
        parts: all samples drawn for the reply so far, in order, each ended with reason `abort`; none to begin.
    Returns:
        Request `<name>.<number of parts>` with all their tokens as prefix; time they took counts against its deadline.
    Raises:
        FragmentError: parts of another reply or out of order, one that ended by itself, or nothing left to draw.
    """
    name = request.request_id
    if request.prefix:
        raise FragmentError(f"request {name} has a prefix; give the whole reply's request and its tokens as parts")
    if not parts:
        return replace(request, request_id=part_id(name, 0))
    whole = join(parts)
    if whole.request_id != name:
        raise FragmentError(f"parts of {whole.request_id} do not belong to reply {name}; look them up by its name")
    if whole.finish_reason != "abort":
        raise FragmentError(
            f"{parts[-1].request_id} ended with {whole.finish_reason}: there is nothing to resume; use join"
        )
    if len(whole.tokens) >= request.max_new_tokens:
        raise FragmentError(
            f"reply {name} has {len(whole.tokens)} of max_new_tokens={request.max_new_tokens}: there is nothing to resume; "
            "were its parts drawn with a larger limit?"
        )
    left = max(LEAST_SECONDS, request.deadline - whole.seconds) if request.deadline else 0.0
    return replace(request, request_id=part_id(name, len(parts)), prefix=whole.tokens, deadline=left)


def join(parts: Sequence[Sample]) -> Sample:
    """One sample, under the reply's name, out of its consecutive parts, as if it had never been interrupted.

    Raises:
        FragmentError: no parts, a part missing or of another reply, an earlier one that ended by itself, lists of
            different lengths, versions that leave a token out, or routing that some parts have and others lack.
    """
    if not parts:
        raise FragmentError("no parts were given to join; draw the reply first")
    name = reply_name(parts[0].request_id)
    for number, part in enumerate(parts):
        _check_part(part, name, number, last=number == len(parts) - 1)
    spans: list[Span] = []
    before = 0
    for part in parts:
        spans += shifted(part.versions, before)
        before += len(part.tokens)
    return Sample(
        request_id=name,
        tokens=tuple(token for part in parts for token in part.tokens),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        model_logprobs=tuple(value for part in parts for value in part.model_logprobs),
        versions=merge(spans),
        finish_reason=parts[-1].finish_reason,
        seconds=sum(part.seconds for part in parts),
        routing=_joined_routing(parts),
        drafted=_joined_drafted(parts),
    )


def reply_name(request_id: str) -> str:
    """The reply's name, of the id of one of its parts."""
    name, dot, part = request_id.rpartition(".")
    if not (name and dot and part.isdecimal()):
        raise FragmentError(f"request {request_id!r} does not end in `.<part>`; make it with resume")
    return name


def part_id(name: str, part: int) -> str:
    """The id that the engine is asked by after `part` interruptions."""
    return f"{name}.{part}"


def to_row(run: str, request: GenerateRequest, part: int, sample: Sample) -> dict[str, Any]:
    """The row of table `fragments` for a part that was ended before its time.

    Args:
        request: the part's, as `resume` made it.
        part: interruptions before.
    Raises:
        FragmentError: the sample is not that part, or was not ended before its time.
    """
    from furlong.ops.policy.routing import as_row

    name = reply_name(request.request_id)
    if request.request_id != part_id(name, part):
        raise FragmentError(f"request {request.request_id} is not for part {part} of its reply; make it with resume")
    _check_part(sample, name, part, last=False)
    return {
        "run": run, "request_id": request.request_id, "part": part, "prompt": list(request.prompt),
        "tokens": list(sample.tokens), "logprobs": list(sample.logprobs), "model_logprobs": list(sample.model_logprobs),
        "version_spans": [{"version": v, "start": a, "end": b} for v, a, b in sample.versions],
        "routing": as_row(sample.routing) if sample.routing else None, "seconds": sample.seconds,
    }  # fmt: skip


def from_rows(rows: Sequence[Mapping[str, Any]]) -> list[Sample]:
    """The samples of rows of `fragments`, in the order given.

    Use them only for a request with the very prompt of their rows: a conversation that is played again after a restart
    may come to another one (a tool answered otherwise), and tokens drawn for one prompt must not answer another.
    """
    return [_sample(row) for row in rows]


def _check_part(part: Sample, name: str, number: int, last: bool) -> None:
    if part.request_id != part_id(name, number):
        raise FragmentError(
            f"{part.request_id} was given as part {number} of {name}; give all parts of one reply in order"
        )
    if not last and part.finish_reason != "abort":
        raise FragmentError(
            f"{part.request_id} ended with {part.finish_reason}, so it is not the part of a reply to go on with"
        )
    if not len(part.tokens) == len(part.logprobs) == len(part.model_logprobs):
        raise FragmentError(
            f"{part.request_id} has {len(part.tokens)} tokens, {len(part.logprobs)} and {len(part.model_logprobs)} "
            "log-probabilities; draw it again"
        )
    if not cover(part.versions, len(part.tokens)):
        raise FragmentError(
            f"{part.request_id}: versions {part.versions} do not cover its {len(part.tokens)} tokens once; draw it again"
        )


def _joined_routing(parts: Sequence[Sample]) -> Routing | None:
    from furlong.ops.policy.routing import join as join_routings

    # A part without tokens was followed by one that began at the same place and recorded it all again.
    drawn = [part for part in parts if part.tokens]
    lacking = [part.request_id for part in drawn if part.routing is None]
    if len(lacking) == len(drawn):
        return None
    if lacking:
        raise FragmentError(f"{lacking[0]} has no routing, though other parts of the reply have; draw the reply again")
    return join_routings([part.routing for part in drawn if part.routing])


def _joined_drafted(parts: Sequence[Sample]) -> tuple[bool, ...] | None:
    """Table `fragments` does not tell of a part what was proposed: there it counts as drawn without."""
    if all(part.drafted is None for part in parts):
        return None
    return tuple(flag for part in parts for flag in part.drafted or (False,) * len(part.tokens))


def _sample(row: Mapping[str, Any]) -> Sample:
    from furlong.ops.policy.routing import from_row

    return Sample(
        request_id=row["request_id"],
        tokens=tuple(row["tokens"]),
        logprobs=tuple(row["logprobs"]),
        model_logprobs=tuple(row["model_logprobs"]),
        versions=tuple((span["version"], span["start"], span["end"]) for span in row["version_spans"]),
        finish_reason="abort",
        seconds=row["seconds"],
        routing=from_row(row["routing"]) if row["routing"] else None,
    )
