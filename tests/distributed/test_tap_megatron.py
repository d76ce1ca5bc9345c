"""Taps under megatron-core's own schedules: bitwise the unsplit policy's features, and a policy that notices nothing.

Bitwise is asked for with reason: a stage computes with the same kernels, shapes and one thread what the unsplit policy
does in one place (`tap_megatron_ranks.py`), and sends and slots move bytes. Where tensor parallelism splits sums, the
policy that is not split over the pipeline is split by them alike.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from kernel_ranks import run_ranks
from tap_megatron_cases import break_down, compare
from tap_megatron_ranks import TINY, stage_of

from furlong.kernels.tap_channel import LANDING
from furlong.kernels.tap_protocol import EMBEDDING, FINAL, HEADER_BYTES, slots_per_stage
from furlong.ops.policy.parallel import Layout, parse_layout

USUAL = [1, 3, 4]
"""A low, a middle and a late one of eight layers (EAGLE-3's)."""
ALL = [EMBEDDING, 0, 1, 3, 4, 7, FINAL]
"""Several on a stage and on a chunk, on the draft's own stage, and at chunks' and stages' first and last layers."""
QUICK = [
    {"layout": "pp2", "taps": ALL, "slow": "all"},
    {"layout": "pp2-vpp2-recompute", "taps": ALL, "late": True},
    {"layout": "dp2", "taps": USUAL, "count": 3},
]
"""dp2 has no pipeline: the draft's stage is the only one."""
SLOW = {
    2: [
        {"layout": "pp2-recompute", "taps": ALL, "dtype": "float32", "verify": True},
        {"layout": "pp2-vpp2", "taps": USUAL, "dtype": "bfloat16"},
        {"layout": "pp2", "taps": USUAL, "count": 64, "slow": "draft", "late": True},
        {"layout": "pp2-vpp2", "taps": ALL, "count": 64, "slow": "draft"},
        {"layout": "pp2-vpp2", "taps": ALL, "slow": "stages"},
        {"layout": "pp2", "taps": [4, FINAL]},
        {"layout": "pp2", "taps": [EMBEDDING]},
    ],
    4: [
        {"layout": "pp4", "taps": ALL, "count": 12, "slow": "all"},
        {"layout": "pp4-vpp2-recompute", "taps": ALL, "slow": "draft", "late": True},
        {"layout": "pp4-vpp2", "taps": USUAL, "count": 64},
        {"layout": "tp2-pp2-sp", "taps": ALL},
        {"layout": "tp2-pp2-vpp2-sp-recompute", "taps": ALL, "slow": "all"},
    ],
}
ASSEMBLED = 1e-12
"""In float64: tensor parallelism adds up in another order what one place adds up at once."""


def check(case: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """All that a case has to show, of every rank's results."""
    layout, taps, count = parse_layout(case["layout"]), case["taps"], case.get("count", 8)
    last = layout.pp - 1
    for rank in found:
        on_last = rank["stage"] == last
        alone, without, with_taps, no_backward = rank["losses"]
        assert len(alone) == count
        assert without == with_taps == no_backward == (alone if on_last else [])
        assert rank["moved"] == [], "gradients of the policy changed"
        if layout.tp == 1:  # The tied embedding's gradient is the sum of two stages', added up in another order.
            assert set(rank["unlike_unsplit"]) <= {"model.embed_tokens.weight"}
        assert rank["taken"] == ([(m, layer) for m in range(count) for layer in taps] if on_last else [])
        assert rank["wrong"] == []
        assert rank["draft_moved"] == []
        if layout.tp > 1 and on_last:
            assert len(rank["apart"]) == len(rank["taken"])
            assert max(rank["apart"]) < ASSEMBLED
        assert len(rank["live"]) == (2 if count >= 64 and on_last else 0)
        check_traffic(case, layout, rank)


def check_traffic(case: dict[str, Any], layout: Layout, rank: dict[str, Any]) -> None:
    """As many messages and bytes as there are features that cross stages, none in recomputation or without a backward,
    in slots that were there from the start."""
    stage, last, stats = rank["stage"], layout.pp - 1, rank["stats"]
    size = {"float64": 8, "float32": 4, "bfloat16": 2}[case.get("dtype", "float64")]
    own = sum(stage_of(layer, layout, TINY.layers) == stage for layer in case["taps"])
    messages = len(rank["rows"]) if own and stage != last else 0
    payload = sum(rank["rows"]) * TINY.hidden * size * own if messages else 0
    assert rank["sent"] == {"messages": messages, "bytes": payload + messages * HEADER_BYTES}
    assert rank["later"] == rank["sent"]
    assert (stats["messages"], stats["payload_bytes"]) == (messages, payload)
    slots = slots_per_stage(layout.pp, layout.vpp, schedule(layout))
    assert stats["slots_high_water"] <= slots[stage]
    tap = max(rank["rows"]) * TINY.hidden * size
    held = [sum(stage_of(layer, layout, TINY.layers) == one for layer in case["taps"]) for one in range(layout.pp)]
    if stage != last:
        assert stats["allocated_bytes"] == (slots[stage] * (tap * own + HEADER_BYTES) if own else 0)
    else:
        landing = sum(LANDING * (tap * count + HEADER_BYTES) for count in held[:last] if count)
        assert stats["allocated_bytes"] == landing + slots[last] * tap * own
    if rank["live"]:
        early, late = rank["live"]
        assert late - early < tap, "memory grows with the number of micro-batches"


def schedule(layout: Layout) -> str:
    return "none" if layout.pp == 1 else "interleaved" if layout.vpp > 1 else "1f1b"


def check_all(world: int, cases: list[dict[str, Any]], deadline: float) -> None:
    found = run_ranks(world, compare, cases, deadline=deadline)
    for case, results in zip(cases, zip(*found, strict=True), strict=True):
        try:
            check(case, list(results))
        except AssertionError as error:
            error.add_note(f"in {case}")
            raise


def test_features_are_the_unsplit_policys_and_the_policy_notices_nothing():
    check_all(2, QUICK, deadline=120)


@pytest.mark.slow
@pytest.mark.parametrize("world", SLOW)
def test_in_every_schedule_slow_and_with_64_micro_batches(world):
    check_all(world, SLOW[world], deadline=280)


def broken(world: int, layout: str, how: str, folder: Path) -> list[dict[str, Any] | None]:
    """What each rank was told, None of one that ended without a word. All have to end."""
    run_ranks(world, break_down, layout, how, 3, str(folder), deadline=120, lost=range(world))
    files = [folder / f"{rank}.json" for rank in range(world)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


WITHIN = 10.0
"""Seconds to the end of every stage's pass; the channel's deadline is 2, the pipeline's own 60."""


@pytest.mark.parametrize(
    ("world", "layout"),
    [(2, "pp2"), *(pytest.param(*more, marks=pytest.mark.slow) for more in ((4, "pp4"), (2, "pp2-vpp2")))],
)
def test_every_stage_is_told_of_a_dead_draft(world, layout, tmp_path):
    *stages, draft = broken(world, layout, "dies", tmp_path)
    assert draft is None
    for stage, report in enumerate(stages):
        assert report["seconds"] < WITHIN
        assert len(report["told"]) == 2, "the pass and the channel both have to fail"
        kind, message = report["told"][-1]
        assert kind == "TapPeerLost"
        assert message.startswith(f"stage {stage}: stage {world - 1} ended")


@pytest.mark.slow
def test_a_draft_that_forgets_to_take_is_an_error_on_every_stage(tmp_path):
    source, draft = broken(2, "pp2", "forgets", tmp_path)
    kind, message = source["told"][0]
    assert kind == "TapTimeout"
    # Micro-batches 0 to 2 were taken; the draft's stage landed two more, and the next two wait in the source's slots.
    assert "micro-batch 5, whose slot (3, 7) needs" in message
    assert draft["told"][-1][0] == "TapPeerLost"
    assert max(source["seconds"], draft["seconds"]) < WITHIN
