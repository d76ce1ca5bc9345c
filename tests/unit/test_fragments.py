"""A reply cut anywhere, kept in the lake and joined again is the reply; what does not belong together is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops import records
from furlong.ops.policy import routing
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.rollouts.fragments import (
    LEAST_SECONDS,
    FragmentError,
    from_rows,
    join,
    reply_name,
    resume,
    to_row,
)

NAME = "run-00001.1-g000-s00:0.0"
PROMPT = (5, 6, 7)


def request(**more) -> GenerateRequest:
    return GenerateRequest(NAME, PROMPT, 11, 64, 1.0, **more)


def whole(tokens: int, spans: list[tuple[int, int, int]], seed: int = 0, moe: bool = False) -> Sample:
    rng = np.random.default_rng(seed)
    values = [tuple(float(v) for v in np.float32(-rng.random(tokens))) for _ in range(2)]
    rows = np.argsort(rng.random((len(PROMPT) + tokens - 1, 2, 4)), axis=-1)[..., :2] if moe and tokens else None
    routed = None if rows is None else routing.encode(0, rows, (1, 3), 4)
    ids = tuple(int(v) for v in rng.integers(0, 1000, tokens))
    return Sample(NAME, ids, *values, tuple(spans), "stop", float(tokens), routed)


def spans_of(versions: list[int]) -> list[tuple[int, int, int]]:
    """Runs of equal versions, one per token."""
    found: list[tuple[int, int, int]] = []
    for at, version in enumerate(versions):
        if found and found[-1][0] == version:
            found[-1] = (version, found[-1][1], at + 1)
        else:
            found.append((version, at, at + 1))
    return found


def cut(sample: Sample, edges: list[int]) -> list[Sample]:
    """The parts that an engine would have given when interrupted after these numbers of tokens."""
    versions = [v for v, a, b in sample.versions for _ in range(a, b)]
    rows = None if sample.routing is None else routing.decode(sample.routing)
    bounds = [0, *edges, len(sample.tokens)]
    parts = []
    for number, (a, b) in enumerate(pairwise(bounds)):
        routed = None
        if rows is not None:
            first = len(PROMPT) + a - 1 if a else 0
            # Whether a part without tokens recorded anything depends on how far the engine got.
            last = len(PROMPT) + b - 1 if b > a or number % 2 else first
            routed = routing.encode(first, rows[first:last], (1, 3), 4)
        parts.append(
            Sample(
                f"{NAME}.{number}", sample.tokens[a:b], sample.logprobs[a:b], sample.model_logprobs[a:b],
                tuple(spans_of(versions[a:b])), "abort" if number < len(bounds) - 2 else "stop", float(b - a), routed,
            )
        )  # fmt: skip
    return parts


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.lists(st.integers(0, 3), min_size=1, max_size=24).map(sorted), st.booleans())
def test_any_cut_joined_is_the_whole(data: st.DataObject, versions: list[int], moe: bool):
    sample = whole(len(versions), spans_of(versions), len(versions), moe)
    edges = sorted(data.draw(st.lists(st.integers(0, len(versions)), max_size=4)))
    parts = cut(sample, edges)
    assert join(parts) == sample

    asked = request(deadline=100.0)
    rows = []
    for number, part in enumerate(parts):
        # Each part is asked for with all before it as prefix, and its time taken off the deadline.
        ask = resume(asked, parts[:number])
        done = sample.tokens[: sum(len(p.tokens) for p in parts[:number])]
        assert ask == replace(asked, request_id=part.request_id, prefix=done, deadline=100.0 - len(done))
        if part.finish_reason == "abort":
            rows.append(to_row("run", ask, number, part))
    kept = from_rows(records.rows("fragments", rows).to_pylist())
    assert kept == parts[:-1]
    assert join([*kept, parts[-1]]) == sample


def test_spans_of_one_version_merge_across_a_cut_and_others_do_not():
    parts = cut(whole(6, [(1, 0, 2), (4, 2, 6)]), [3, 3])
    assert [part.versions for part in parts] == [((1, 0, 2), (4, 2, 3)), (), ((4, 0, 3),)]
    assert join(parts).versions == ((1, 0, 2), (4, 2, 6))


def test_parts_read_back_count_as_drawn_without_a_draft():
    parts = cut(whole(6, [(0, 0, 6)]), [2, 4])
    assert join(parts).drafted is None
    flags = (None, (True, False), (False, True))
    assert join([replace(part, drafted=some) for part, some in zip(parts, flags, strict=True)]).drafted == (
        False, False, True, False, False, True,
    )  # fmt: skip


def test_a_part_that_ends_at_once_ends_the_reply():
    parts = cut(whole(3, [(0, 0, 3)], moe=True), [3])
    late = replace(parts[1], finish_reason="deadline")
    assert join([parts[0], late]) == replace(whole(3, [(0, 0, 3)], moe=True), finish_reason="deadline")


def test_a_reply_without_a_part_begins_at_part_zero():
    assert resume(request(deadline=3.0), []) == replace(request(deadline=3.0), request_id=f"{NAME}.0")


def test_a_deadline_that_is_over_stays_one_and_none_stays_none():
    parts = cut(whole(8, [(0, 0, 8)]), [5])[:1]
    assert resume(request(deadline=4.0), parts).deadline == LEAST_SECONDS > 0
    assert resume(request(), parts).deadline == 0.0


def test_resume_refuses_what_is_not_a_part_to_go_on_from():
    parts = cut(whole(8, [(0, 0, 8)]), [5])
    for asked, parts_so_far, said in [
        (request(prefix=(1,)), parts[:1], "has a prefix"),
        (request(), parts, "nothing to resume"),
        (replace(request(), request_id="another:0.0"), parts[:1], "do not belong"),
        (replace(request(), max_new_tokens=5), parts[:1], "5 of max_new_tokens=5"),
    ]:
        with pytest.raises(FragmentError, match=said):
            resume(asked, parts_so_far)


def break_off(parts: list[Sample], number: int, **more) -> list[Sample]:
    return [replace(part, **more) if at == number else part for at, part in enumerate(parts)]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda p: [], "no parts"),
        (lambda p: p[1:], "in order"),
        (lambda p: [p[0], p[2]], "in order"),
        (lambda p: [p[1], p[0], p[2]], "in order"),
        (lambda p: [*p[:2], replace(p[2], request_id="another:0.0.2")], "in order"),
        (lambda p: break_off(p, 1, finish_reason="length"), "ended with length"),
        (lambda p: break_off(p, 1, logprobs=p[1].logprobs[1:]), "log-probabilities"),
        (lambda p: break_off(p, 2, model_logprobs=()), "log-probabilities"),
        (lambda p: break_off(p, 0, versions=()), "do not cover"),
        (lambda p: break_off(p, 2, versions=((0, 0, 1),)), "do not cover"),
        (lambda p: break_off(p, 2, versions=((0, 0, 2), (1, 1, 3))), "do not cover"),
        (lambda p: break_off(p, 1, routing=None), "no routing"),
        (lambda p: break_off(p, 0, request_id="nameless"), "does not end in"),
    ],
)
def test_join_refuses_parts_that_do_not_make_a_reply(broken, said: str):
    parts = cut(whole(9, [(0, 0, 9)], moe=True), [3, 6])
    assert len(join(parts).tokens) == 9
    with pytest.raises(FragmentError, match=said):
        join(broken(parts))


def test_routing_that_leaves_a_gap_or_was_recorded_twice_is_refused():
    parts = cut(whole(9, [(0, 0, 9)], moe=True), [3, 6])
    for shift in (-1, 1):
        with pytest.raises(routing.RoutingError, match="is followed by"):
            join(break_off(parts, 1, routing=replace(parts[1].routing, first=parts[1].routing.first + shift)))


def test_a_row_is_only_made_of_the_interrupted_part_it_is_for():
    first, last = cut(whole(8, [(0, 0, 8)]), [5])
    asked = resume(request(), [])
    for ask, part, sample, said in [
        (asked, 1, first, "not for part 1"),
        (asked, 0, replace(first, request_id=f"{NAME}.1"), "in order"),
        (resume(request(), [first]), 1, last, "ended with stop"),
    ]:
        with pytest.raises(FragmentError, match=said):
            to_row("run", ask, part, sample)


def test_the_name_of_a_reply():
    assert reply_name("r-s00:0.1.12") == "r-s00:0.1"
    for odd in ("r", "r.", ".1", "r.x", ""):
        with pytest.raises(FragmentError, match="does not end in"):
            reply_name(odd)
