"""Batches are chosen in order of position, within the window, never too stale; the length bias is told as it is."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furlong.ops import records
from furlong.ops.rollouts.admission import AdmissionError, Candidate, Choice, choose, staleness, tokens_by_step, too_old
from furlong.ops.rollouts.bias import length_bias

START = 10


def group(position: int, finished: bool = True, step: int | None = START, tokens: float = 8.0) -> Candidate:
    return Candidate(f"g{position}", position, finished, {} if step is None else {step: 8}, tokens)


@st.composite
def candidates(draw: st.DrawFn) -> list[Candidate]:
    """Open groups at any positions, in any order, some sampled by several versions."""
    found = []
    for position in draw(st.sets(st.integers(0, 24), max_size=14)):
        finished = draw(st.booleans())
        steps = draw(st.dictionaries(st.integers(START - 3, START), st.integers(1, 9), min_size=finished, max_size=3))
        found.append(Candidate(f"g{position}", position, finished, steps, draw(st.floats(1, 50))))
    return draw(st.permutations(found))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(candidates(), st.integers(1, 4), st.integers(0, 3), st.sampled_from([1.0, 1.5, 2.0, 3.0]))
def test_every_choice_keeps_the_rules(found: list[Candidate], wanted: int, bound: int, window: float):
    choice = choose(found, wanted, START, bound, window)
    at = {c.group_id: c for c in found}
    usable = [c for c in found if c.finished and START - min(c.sampled) <= bound]
    others = sorted(c.position for c in found if c not in usable)
    if choice is None:
        # Nobody could have chosen: even the most generous reading of the window lacks groups, or a straggler is waited for.
        in_order = [c for c in usable if not others or c.position < others[0]]
        assert len(in_order) < wanted
        if others:
            reach = [c for c in usable if c.position < others[0] + window * wanted - len(in_order)]
            assert len({*map(id, reach), *map(id, in_order)}) < wanted
        return
    taken = [at[name] for name in choice.taken]
    positions = [c.position for c in taken]
    assert len(taken) == wanted
    assert positions == sorted(set(positions))
    assert all(c in usable for c in taken)
    overtaken = [p for p in others if p < positions[-1]]
    assert choice.passed_over == len(overtaken)
    assert all(positions[-1] - p < window * wanted for p in overtaken)
    assert not (window == 1 and overtaken)
    # Only ready groups of higher positions are left.
    assert set(choice.waiting) == {c.group_id for c in usable} - set(choice.taken)
    assert all(at[name].position > positions[-1] for name in choice.waiting)
    lags = [START - step for c in taken for step, tokens in c.sampled.items() for _ in range(tokens)]
    assert (choice.staleness_max, choice.staleness_mean) == (max(lags), pytest.approx(sum(lags) / len(lags)))
    assert choice.staleness_max <= bound
    assert choose(list(reversed(found)), wanted, START, bound, window) == choice


@settings(max_examples=200, deadline=None, derandomize=True)
@given(candidates(), st.integers(0, 3))
def test_too_old_are_exactly_those_that_no_batch_can_have(found: list[Candidate], bound: int):
    old = too_old(found, START, bound)
    begun = sorted((c for c in found if c.sampled), key=lambda c: c.position)
    assert old == [c.group_id for c in begun if START - min(c.sampled) > bound]
    rest = [c for c in found if c.group_id not in old]
    assert too_old(rest, START, bound) == []


def test_a_straggler_is_passed_within_the_window_only():
    straggler = group(4, finished=False)
    assert choose([straggler, *map(group, (5, 6, 7))], 4, START, 0, 1.0) is None
    assert choose([straggler, *map(group, (5, 6, 7, 12))], 4, START, 0, 2.0) is None
    choice = choose([straggler, *map(group, (5, 6, 7, 11, 12))], 4, START, 0, 2.0)
    assert choice == Choice(("g5", "g6", "g7", "g11"), 1, ("g12",), 8.0, 0.0, 0)
    assert choice.columns() == {
        "staleness_mean": 0.0, "staleness_max": 0, "passed_over": 1, "waiting_groups": 1, "waiting_tokens": 8.0,
    }  # fmt: skip


def test_gaps_left_by_the_filter_do_not_hold_up_what_is_in_order():
    far = [group(p) for p in (0, 30, 61, 95)]
    assert choose(far, 4, START, 0, 1.0).taken == ("g0", "g30", "g61", "g95")
    assert choose([*far, group(96, finished=False)], 4, START, 0, 1.0).taken == ("g0", "g30", "g61", "g95")
    assert choose([*far, group(94, finished=False)], 4, START, 0, 1.0) is None


def test_a_stale_group_is_waited_for_like_an_unfinished_one():
    stale, fresh = group(0, step=START - 2), [group(p) for p in (1, 2)]
    assert choose([stale, *fresh], 2, START, 2, 1.0).taken == ("g0", "g1")
    assert choose([stale, *fresh], 2, START, 1, 1.0) is None
    assert choose([stale, *fresh], 2, START, 1, 2.0).passed_over == 1


def test_a_missing_or_impossible_version_is_an_error_and_never_fresh():
    for odd, said in [(group(0, step=None), "no weights version"), (group(0, step=START + 1), "start"),
                      (group(0, step=-1), "steps -1")]:  # fmt: skip
        with pytest.raises(AdmissionError, match=said):
            choose([odd, group(1)], 1, START, 5, 1.0)
        with pytest.raises(AdmissionError, match=said):
            too_old([odd], START, 5)
    assert too_old([group(0, finished=False, step=None)], START, 0) == []
    with pytest.raises(AdmissionError, match="weights version 7"):
        tokens_by_step([(0, 0, 3), (7, 3, 4)], {0: 0})
    with pytest.raises(AdmissionError, match="no sampled token"):
        choose([Candidate("g0", 0, True, {START: 0})], 1, START, 0, 1.0)


def test_two_groups_for_one_prompt_and_senseless_numbers_are_refused():
    with pytest.raises(AdmissionError, match="g1 and other both hold"):
        choose([group(1), Candidate("other", 1, False)], 1, START, 0, 1.0)
    for wanted, bound, window in [(0, 0, 1.0), (1, -1, 1.0), (1, 0, 0.5), (1, 0, float("nan"))]:
        with pytest.raises(AdmissionError, match="cannot choose"):
            choose([group(0)], wanted, START, bound, window)
    assert choose([], 1, START, 0, 1.0) is None


def test_tokens_are_counted_by_the_step_that_made_their_weights():
    counted = tokens_by_step([(0, 5, 9), (2, 9, 10), (3, 0, 4)], {0: 0, 2: 1, 3: 1})
    assert counted == {0: 4, 1: 5}
    assert staleness(Candidate("g", 0, True, counted), 3) == 3


def play(window: float, bound: int, per_step: int = 4, steps: int = 60) -> tuple[list[list[int]], dict[int, int]]:
    """Batches of positions of a loop with heavy-tailed lengths, one token a tick, and the length of every prompt."""
    rng = random.Random(5)
    length: dict[int, int] = {}
    running: dict[int, tuple[int, int]] = {}
    done: dict[int, tuple[int, int]] = {}
    redraw, fresh, batches = [], 0, []

    def seen() -> list[Candidate]:
        return [
            *(group(p, False, begun) for p, (begun, _) in running.items()),
            *(group(p, True, begun, tokens) for p, (begun, tokens) in done.items()),
        ]

    while len(batches) < steps:
        published = len(batches)
        for name in too_old(seen(), published, bound):
            place = int(name[1:])
            redraw = sorted([*redraw, place])
            running.pop(place, None)
            done.pop(place, None)
        while len(running) + len(done) < per_step * (bound + 1):
            place, fresh = (redraw.pop(0), fresh) if redraw else (fresh, fresh + 1)
            length.setdefault(place, rng.choice([1, 2, 3, 40]))
            running[place] = (published, length[place])
        running = {p: (begun, left - 1) for p, (begun, left) in running.items()}
        done |= {p: (begun, length[p]) for p, (begun, left) in running.items() if left == 0}
        running = {p: at for p, at in running.items() if at[1]}
        if choice := choose(seen(), per_step, published, bound, window):
            batches.append([int(name[1:]) for name in choice.taken])
            for place in batches[-1]:
                del done[place]
    return batches, length


@pytest.mark.parametrize("window", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_prompt_is_overtaken_beyond_the_window_and_none_is_left_out(window: float, bound: int):
    batches, _ = play(window, bound)
    order = [p for batch in batches for p in batch]
    assert len(order) == len(set(order))
    for number, batch in enumerate(batches):
        for position in batch:
            before = [p for earlier in batches[:number] for p in earlier if p > position]
            assert max(before, default=position) - position < window * 4
    if window == 1 or bound == 0:
        assert order == sorted(order)
    # Whoever is missing among the trained is at most a window behind the newest.
    assert set(range(int(max(order) - window * 4))) <= set(order)


def tables(batches: list[list[int]], length: dict[int, int]) -> tuple[pa.Table, pa.Table, pa.Table]:
    def only(table: str, *names: str) -> pa.Schema:
        return pa.schema([records.TABLES[table].field(name) for name in names])

    rows = [
        {"step": n + 1, "attempt": 1, "passed_over": n, "waiting_groups": n, "waiting_tokens": 10.0 * n if n else None,
         "groups": [{"step": 1, "attempt": 1, "group_id": f"g{p}"} for p in batch]}
        for n, batch in enumerate(batches)
    ]  # fmt: skip
    masks = [{"group_id": f"g{p}", "loss_mask": [False] * 7 + [True] * n} for p, n in length.items()]
    return (
        pa.Table.from_pylist(
            rows, only("batches", "step", "attempt", "passed_over", "waiting_groups", "waiting_tokens", "groups")
        ),
        pa.Table.from_pylist(
            [{"group_id": f"g{p}", "position": p} for p in length], only("groups", "group_id", "position")
        ),
        pa.Table.from_pylist(masks, only("trajectories", "group_id", "loss_mask")),
    )


def test_the_bias_report_by_hand():
    # In order: (0 1) (2 3) (4 5). Long 1 was trained a batch late, in the place of 2; 6 was never.
    report = length_bias(*tables([[0, 2], [1, 3], [4, 5]], {0: 10, 1: 90, 2: 10, 3: 10, 4: 10, 5: 20, 6: 70}))
    assert report == {
        "groups": 6, "tokens_admitted": 25.0, "tokens_left": 70.0, "tokens_waiting": pytest.approx(50 / 3),
        "passed_over": 1.0, "displacement_max": 1, "tokens_overtaken": 90.0, "tokens_on_time": 12.0,
        "correlation": pytest.approx(80 / (2 * 5150) ** 0.5),
    }  # fmt: skip


def test_the_bias_report_of_nothing_claims_nothing():
    report = length_bias(*tables([], {}))
    assert report.pop("groups") == 0
    assert set(report.values()) == {None}


def test_the_bias_report_tells_strict_order_from_a_window():
    strict, loose = (length_bias(*tables(*play(window, 3))) for window in (1.0, 3.0))
    assert (strict["displacement_max"], strict["correlation"], strict["tokens_overtaken"]) == (0, None, None)
    assert loose["displacement_max"] >= 1
    assert loose["correlation"] > 0.2
    assert loose["tokens_overtaken"] > loose["tokens_on_time"]
