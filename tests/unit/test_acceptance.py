"""Numbers about a draft, from counts known by hand; and how the counts of several engines become those of a step."""

import random
from types import SimpleNamespace

import pytest

from furlong.ops.policy.speculation import _judged
from furlong.ops.policy.speculation_counts import SpeculationCounts
from furlong.ops.rollouts.acceptance import DROP, WINDOW, added, counted, fallen, numbers, since, speedup, together
from furlong.resources.rollouts.meter import Meter


def step(kind: str, replies: int, count: int, tokens: int, seconds: float) -> dict:
    return {"kind": kind, "replies": replies, "count": count, "tokens": tokens, "seconds": seconds}


def play(counts: SpeculationCounts, rng: random.Random, turns: int) -> None:
    """As `Speculation.end` calls it."""
    for _ in range(turns):
        replies, proposed = rng.randint(1, 9), rng.choice([0, 2, 4])
        accepted = [rng.randint(0, proposed) for _ in range(replies)]
        # Powers of two, whose sums are exact.
        seconds = rng.choice([0.25, 0.5])
        for some in accepted:
            counts.replied(rng.random() < 0.2, some + 1, seconds)
            if proposed:
                counts.verified(rng.choice([0, 70, 5000]), proposed, some, rng.choice(["sums", "sorts"]))
        counts.turned("on: pays" if proposed else "off: costs", replies, sum(accepted) + replies, seconds, 0.125)


def test_numbers_are_those_of_the_counts():
    counts = SpeculationCounts()
    counts.verified(10, 4, 4, "sums")
    counts.verified(70, 4, 0, "sums")
    counts.verified(5000, 2, 1, "sorts")
    counts.replied(False, 8, 2.0)
    counts.replied(True, 3, 1.5)
    counts.turned("on: pays", 2, 8, 2.0, 0.5)
    counts.turned("off: costs", 2, 4, 2.0, 0.0)
    counts.turned("off: no draft", 8, 8, 1.0, 0.0)
    assert numbers(counted(counts.report())) == {
        "acceptance_length": pytest.approx(8 / 3),
        "accepted_depth_1": pytest.approx(2 / 3),
        "accepted_depth_2": pytest.approx(1 / 3),
        "accepted_depth_3": pytest.approx(1 / 2),
        "accepted_depth_4": pytest.approx(1 / 2),
        "acceptance_length_below_64": 5.0,
        "acceptance_length_below_256": 1.0,
        "acceptance_length_beyond": 2.0,
        "acceptance_length_sums": 3.0,
        "acceptance_length_sorts": 2.0,
        "speculation_off_share": pytest.approx(2 / 3),
        "speculation_off_because": "costs 33%, no draft 33%",
        # Of size 2: 12 tokens, which at 2 tokens/s would have taken 6 s in place of 4.
        "speculation_speedup": pytest.approx(1.5),
        "tokens_per_second_with_draft": pytest.approx(3.0),
        "tokens_per_second_without": pytest.approx(2.0),
        "draft_rollout_share": pytest.approx(0.1),
        "reply_tokens_per_second_drafted": pytest.approx(4.0),
        "reply_tokens_per_second_shadow": pytest.approx(2.0),
    }


def test_without_a_draft_or_counts_nothing_is_made_up():
    assert numbers(None) == {}
    assert added([]) is None
    assert together([]) is None
    assert numbers(counted(SpeculationCounts().report())) == {}


def test_the_engine_and_the_lake_agree_about_the_speed_up():
    counts, rng = SpeculationCounts(), random.Random(3)
    play(counts, rng, 200)
    report = counts.report()
    assert numbers(counted(report))["speculation_speedup"] == pytest.approx(report["speedup"])
    assert numbers(counted(report))["acceptance_length"] == pytest.approx(report["acceptance_length"])


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [step("on: pays", 4, 3, 30, 1.0)],
        [step("off: costs", 4, 3, 30, 1.0)],
        [step("off: costs", 4, 3, 30, 1.0), step("on: pays", 8, 3, 30, 1.0)],
        [step("off: costs", 4, 0, 0, 0.0), step("on: pays", 4, 3, 30, 1.0)],
    ],
)
def test_no_speed_up_without_both_kinds_at_one_size(steps):
    assert speedup(steps) is None


def test_differences_add_up_to_the_whole():
    counts, rng, readings = SpeculationCounts(), random.Random(1), []
    for turns in (7, 0, 1, 30):
        play(counts, rng, turns)
        readings.append(counted(counts.report()))
    parts = [since(before, now) for before, now in zip([None, *readings], readings, strict=False)]
    assert (parts[1]["verifies"], parts[1]["decode_steps"], numbers(parts[1])) == (0, [], {})
    assert added(parts) == readings[-1]


def test_an_engine_that_began_anew_is_counted_from_its_beginning():
    first, second = SpeculationCounts(), SpeculationCounts()
    play(first, random.Random(1), 20)
    play(second, random.Random(2), 3)
    now = counted(second.report())
    assert since(counted(first.report()), now) == now


class Counting:
    """An engine of which only the counts are of interest."""

    def __init__(self, speculates: bool = True):
        self.counts, self.lost, self.speculates = SpeculationCounts(), False, speculates

    def health(self) -> dict:
        if self.lost:
            raise ConnectionError("gone")
        return {"version": 1} | ({"speculation": self.counts.report()} if self.speculates else {})


def test_a_step_gets_what_all_engines_counted_since_the_one_before():
    engines, rng = {0: Counting(), 1: Counting()}, random.Random(5)
    play(engines[0].counts, rng, 9)
    meter = Meter(lambda: engines)
    meter.begin()
    play(engines[1].counts, rng, 4)
    assert meter.take() == counted(engines[1].counts.report()) | {"engines": 2}
    # One is replaced by another, whose counts begin at nothing; what the old one counted last nobody knows.
    play(engines[0].counts, rng, 3)
    engines[0] = Counting()
    play(engines[0].counts, rng, 30)
    assert meter.take() == counted(engines[0].counts.report()) | {"engines": 2}
    engines[0].lost = True
    assert meter.take()["engines"] == 1
    engines[1].lost = True
    assert meter.take() is None


def test_engines_that_do_not_speculate_have_no_counts():
    meter = Meter(lambda: {0: Counting(speculates=False)})
    meter.begin()
    assert meter.take() is None


def test_a_fall_is_told_from_noise_and_from_a_beginning():
    assert fallen([]) == (False, None, None)
    assert fallen([3.0] * (2 * WINDOW - 1)) == (False, 3.0, None)
    assert fallen([3.0] * 50) == (False, 3.0, 3.0)
    assert not fallen([1.0] * 30)[0]
    rising = [2 + 0.02 * n + 0.05 * (-1) ** n for n in range(60)]
    assert not fallen(rising)[0]
    falling = [3 - 0.01 * n for n in range(60)]
    below, recent, best = fallen(falling)
    assert below
    assert (recent, best) == pytest.approx((3 - 0.01 * 57, 3 - 0.01 * 2))


@pytest.mark.parametrize(("share", "warned"), [(DROP - 0.01, False), (DROP + 0.01, True)])
def test_a_warning_is_about_accepted_tokens(share, warned):
    # An acceptance length of 1 is nothing accepted, so that it is no part of what may be lost.
    assert fallen([3.0] * WINDOW + [1 + 2 * (1 - share)] * WINDOW)[0] is warned


@pytest.mark.parametrize(
    ("proposals", "drawn", "judged"),
    [
        ([4, 5, 6], [4, 5, 6, 9], (3, 3)),
        ([4, 5, 6], [4, 9], (3, 1)),
        ([4, 5, 6], [9], (3, 0)),
        # The proposed 5 ended the reply: it was accepted, nothing came after it, and nobody looked at the 6.
        ([4, 5, 6], [4, 5], (2, 2)),
        ([5], [5], (1, 1)),
    ],
)
def test_a_proposal_that_ends_the_reply_was_accepted(proposals, drawn, judged):
    accepted = sum(1 for proposal, token in zip(proposals, drawn, strict=False) if proposal == token)
    feed = SimpleNamespace(path=list(range(accepted + 1)), depth=len(proposals))
    assert _judged(feed, len(drawn)) == judged
