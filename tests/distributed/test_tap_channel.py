"""TapChannel between real processes on gloo: schedules with delays, wrong calls, dead stages."""

import sys
from pathlib import Path

import pytest
import tap_ranks
from kernel_ranks import run_ranks
from tap_ranks import DEADLINE, HIDDEN, ROWS, STAGES, TAPS

from furlong.kernels.tap_protocol import EMBEDDING, FINAL, HEADER_BYTES, slots_per_stage

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from tap_model import operations

MICRO_BATCHES = {"1f1b": 64, "interleaved": 12, "slow receiver": 10, "slow sender": 10}
PLAIN = {layer: (stage, 0) for layer, stage in TAPS.items()}
# Two chunks per stage: taps of both chunks of stage 0 travel together, stage 2 holds one of its own early.
CHUNKED = {EMBEDDING: (0, 0), 2: (0, 1), 5: (1, 0), 9: (2, 0), FINAL: (2, 1)}


def orders(virtual: int, micro_batches: int) -> list:
    return [operations(STAGES, stage, virtual, micro_batches) for stage in range(STAGES)]


@pytest.fixture(scope="module")
def found() -> list[dict]:
    plans = {
        "1f1b": (orders(1, MICRO_BATCHES["1f1b"]), 1, PLAIN, None),
        "interleaved": (orders(2, MICRO_BATCHES["interleaved"]), 2, CHUNKED, None),
        "slow receiver": (orders(1, MICRO_BATCHES["slow receiver"]), 1, PLAIN, STAGES - 1),
        "slow sender": (orders(1, MICRO_BATCHES["slow sender"]), 1, PLAIN, 0),
    }
    return run_ranks(STAGES, tap_ranks.all_cases, plans, deadline=120.0)


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_taps_arrive_by_key_bit_for_bit_under_a_schedule(found, name):
    good = found[-1][name]["good"]
    assert len(good) == 2 * MICRO_BATCHES[name]
    assert all(good)


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_puts_never_wait_and_memory_is_what_it_was_at_first(found, name):
    needed = slots_per_stage(
        STAGES, 2 if name == "interleaved" else 1, "interleaved" if name == "interleaved" else "1f1b"
    )
    for stage, cases in enumerate(found):
        before, after = cases[name]["before"], cases[name]["after"]
        assert after.allocated_bytes == before.allocated_bytes > 0
        assert after.slots_high_water <= needed[stage]
        # Not for want of time to wait: that one put does, with one slot fewer, is the test of waiting below.
        assert after.longest_put_wait_s < 0.5


def test_allocated_bytes_are_slots_and_nothing_else(found):
    for name, virtual in (("1f1b", 1), ("interleaved", 2)):
        needed = slots_per_stage(STAGES, virtual, name)
        taps = {0: 2, 1: 1, 2: 2}
        size = [taps[stage] * ROWS * HIDDEN * 4 for stage in range(STAGES)]
        for source in (0, 1):
            assert found[source][name]["after"].allocated_bytes == needed[source] * (HEADER_BYTES + size[source])
        landing = 2 * (2 * HEADER_BYTES + size[0] + size[1])
        assert found[2][name]["after"].allocated_bytes == landing + needed[2] * size[2]


@pytest.mark.parametrize("name", MICRO_BATCHES)
def test_bytes_sent_are_the_rows_and_one_header_per_message(found, name):
    rows = sum((step + 3 * m) % (ROWS + 1) for step in (3, 4) for m in range(MICRO_BATCHES[name]))
    for stage, taps in enumerate((2, 1, 0)):
        after = found[stage][name]["after"]
        assert after.payload_bytes == taps * rows * HIDDEN * 4
        assert after.messages == (2 * MICRO_BATCHES[name] if taps else 0)
        assert after.header_bytes == after.messages * HEADER_BYTES


def test_put_waits_for_the_draft_with_one_slot_fewer_and_not_with_enough(found):
    for stage in (0, 1):
        assert found[stage]["enough slots"] < 0.5
        assert found[stage]["one slot fewer"] > 0.5


def test_cancelled_micro_batches_free_their_slots_everywhere(found):
    draft = found[2]["cancelling"]
    assert draft["kinds"] == ["TapCancelled"] * 12
    assert draft["good"] == [True] * 7
    for cases in found:
        assert cases["cancelling"]["grew"] == 0
        ((kind, text, _),) = cases["cancelling"]["late"]
        assert kind == "TapError"
        assert "cancelled" in text


def test_wrong_calls_are_errors_that_say_what_is_wrong(found):
    bad_tap = ["carries [..., 8]"] * 3 + ["a slot holds 6", "name them in `taps`", "put each key once"]
    for cases in found[:2]:
        said = [*bad_tap, "the draft is on stage 2", "closed"]
        assert [kind for kind, *_ in cases["mistakes"]] == ["TapError"] * len(said)
        for (_, text, _), expected in zip(cases["mistakes"], said, strict=True):
            assert expected in text
    draft = found[2]["mistakes"]
    assert draft.pop(7) is True
    said = [*bad_tap, "not held here", "held already", "were not put", "project=<width>", "put each key once", "closed"]
    for (kind, text, _), expected in zip(draft, said, strict=True):
        assert kind == "TapError"
        assert expected in text


def test_takes_in_vain_end(found):
    full, unknown, after = found[2]["in vain"]
    assert full[0] == "TapError"
    assert "all 2 slots for stage 0 are held by [(0, 0), (0, 1)]" in full[1]
    assert full[2] < 0.4
    assert unknown[0] == "TapTimeout"
    assert "micro-batch 99 within 0.5 s" in unknown[1]
    assert 0.4 < unknown[2] < 3.0
    assert "broke earlier" in after[1]
    ((kind, _, seconds),) = found[0]["in vain"]
    assert kind == "TapPeerLost"
    assert seconds < 0.4


def test_flipped_bytes_and_strange_messages_are_found(found):
    said = [
        "layer -1 of step 0, micro-batch 1", "broke earlier", "no tap message", "expects layers (2,)",
        "expects width 8", "expects width 8", "at most 6 rows", "at most 6 rows", "says stage 1",
        "does not travel this way", "that key came before", "step numbers must grow",
    ]  # fmt: skip
    for (kind, text, _), expected in zip(found[2]["distrusted"], said, strict=True):
        assert kind == "TapError"
        assert expected in text


def test_projected_taps_and_their_gradients_equal_the_unprojected(found):
    for cases in found:
        ((kind, text, _),) = cases["projecting"]["found"]
        assert kind == "TapError"
        assert "load_projection" in text
    # Float64; sums in another order differ by a few units in the last place of values near 10.
    assert found[2]["projecting"]["worst"]["sum"] < 1e-12
    assert 0 < found[2]["projecting"]["worst"]["gradient"] < 1e-12


def test_what_was_cancelled_before_it_came_is_answered_before_the_step_ends(found):
    for stage, cases in enumerate(found):
        assert cases["settling"]["layers"] == (2, 1, len(tap_ranks.TAPS))[stage]
        # Sums of six float64 numbers near 1, in another order.
        assert cases["settling"]["worst"] < 1e-14
        ((kind, text, seconds),) = cases["settling"]["found"]
        assert kind == ("TapPeerLost" if stage < 2 else "TapError")
        assert ("have no answer" in text) == (stage == 2)
        assert seconds < 2.5


def test_projected_messages_are_as_wide_as_the_projection(found):
    rows = {(s, m): (s + 3 * m) % (ROWS + 1) for s in (1, 2) for m in range(9)}
    for stage in (0, 1):
        sent = sum(n for (_, m), n in rows.items() if not (m == 5 and stage == 1))
        assert found[stage]["projecting"]["stats"].payload_bytes == sent * 4 * 8
    answered = sum(n for (_, m), n in rows.items() if m not in (3, 5, 7))
    assert found[2]["projecting"]["stats"].gradient_bytes == 2 * answered * 4 * 8
    assert found[2]["projecting"]["stats"].weight_bytes == 2 * 3 * 4 * HIDDEN * 8


def test_close_drains_and_has_a_deadline(found):
    for stage, cases in enumerate(found):
        assert cases["closing"]["took"] < DEADLINE / 4
        ((kind, _, seconds),) = cases["closing"]["found"]
        assert kind in (("TapTimeout", "TapPeerLost") if stage < 2 else ("TapPeerLost",))
        assert seconds < 3.0
    assert "TapTimeout" in [cases["closing"]["found"][0][0] for cases in found[:2]]


@pytest.mark.parametrize("dead", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_stage_is_an_error_on_every_other_within_the_deadline(dead):
    alive = [stage for stage in range(STAGES) if stage != dead]
    found = run_ranks(STAGES, tap_ranks.dying, dead, deadline=60.0, lost=[dead])
    for stage in alive:
        (kind, text, seconds), (_, again, at_once) = found[stage]
        assert kind in ("TapPeerLost", "TapTimeout")
        # The draft's stage names the dead one; a source may only see the draft's stage give up because of it.
        assert f"stage {dead if stage == 2 else 2} " in text
        assert seconds < 3.5
        assert "broke earlier" in again
        assert at_once < 0.4


def test_shards_stay_shards_until_the_draft_assembles_them():
    found = run_ranks(4, tap_ranks.shards, deadline=60.0)
    for source in found[:2]:
        assert source == {"bytes": 3 * HIDDEN * 8}
    for draft in found[2:]:
        assert draft == {"whole": True, "gradient": True, "alone": True}
