"""Sampled and wasted tokens of a run whose every number is known: `ops.rollouts.usage` against sums by hand."""

from typing import Any

import pyarrow as pa
import pytest
from blank_rows import blank_row

from furlong.ops import records
from furlong.ops.rollouts.usage import usage
from furlong.resources.rollouts.group import Group


class Rows:
    """The part of a lake that `usage` reads."""

    def __init__(self, **tables: list[dict[str, Any]]):
        self._tables = {
            name: records.rows(name, [blank_row(name) | row for row in rows]) for name, rows in tables.items()
        }

    def read(self, table: str, where: dict[str, Any] | None = None, columns: list[str] | None = None) -> pa.Table:
        found = self._tables.get(table, records.TABLES[table].empty_table())
        return found.select(columns) if columns else found


def leaf(name: str, spans: list[tuple[int, int, int]], owned: int, at: float = 0.0, seconds: float = 1.0) -> dict:
    """A trajectory of 10 tokens; only the last `owned` of its sampled ones are in no earlier leaf."""
    sampled = sorted(place for _, begin, end in spans for place in range(begin, end))
    mine = set(sampled[len(sampled) - owned :])
    return {
        "trajectory_id": name, "group_id": name.split("-s")[0], "leaf": int("-l" in name), "started_at": at,
        "seconds": seconds, "version_spans": [{"version": v, "start": a, "end": b} for v, a, b in spans],
        "loss_mask": [place in mine for place in range(10)], "logprobs": [None] * 10, "model_logprobs": [None] * 10,
    }  # fmt: skip


def outcome(name: str, disposition: str) -> dict[str, Any]:
    return {"trajectory_id": name, "group_id": name.split("-s")[0], "reward": 0.0, "advantage": 0.0,
            "disposition": disposition}  # fmt: skip


def fragment(name: str, tokens: int) -> dict[str, Any]:
    return {"request_id": name, "tokens": [1] * tokens, "logprobs": [0.0] * tokens, "model_logprobs": [0.0] * tokens}


def event(seq: int, group: str, state: str, reason: str = "") -> dict[str, Any]:
    return {"seq": seq, "group_id": group, "state": state, "reason": reason}


def test_every_token_is_counted_once_with_its_cause():
    lake = Rows(
        trajectories=[
            leaf("a-s00", [(0, 2, 4), (1, 4, 8)], 6, at=0.0, seconds=2.0),
            leaf("a-s00-l1", [(0, 2, 4), (1, 4, 6), (2, 7, 10)], 3, at=0.0, seconds=4.0),  # 4 are of the first leaf
            leaf("b-s00", [(1, 3, 8)], 5, at=6.0, seconds=2.0),
            leaf("c-s00", [(0, 3, 10)], 7, at=7.0, seconds=1.0),
            leaf("d-s00", [(2, 9, 10)], 1, at=8.0, seconds=0.0),
        ],
        failures=[{"trajectory_id": "e-s00", "try": 0, "kind": "deadline", "tokens": 9}],
        fragments=[
            fragment("a-s00:0.0.ff.0", 3),  # gone on with, and so part of a trajectory
            fragment("e-s00:0.0.ff.0", 4),  # part of the failed try
            fragment("e-s00:1.0.ff.0", 2),
        ],
        ledger=[
            event(0, "a", "finished"), event(1, "a", "trained"), event(2, "b", "trained"),
            event(3, "c", "rejected", "stale"), event(4, "d", "finished"), event(5, "e", "rejected", "stale"),
        ],
        steps=[{
            "step": 1, "attempt": 1, "tokens_trained": 4,  # 5 of the 9 in this group were masked
            "outcomes": [outcome("a-s00", "trained"), outcome("a-s00-l1", "trained"), outcome("b-s00", "zero_variance")],
        }],
        weight_versions=[{"version": 0, "live_at": 1.0}, {"version": 1, "live_at": 10.0}],
    )  # fmt: skip
    found = usage(lake, "")
    assert found["sampled_tokens"] == 6 + 3 + 5 + 7 + 1 + 9 + 2
    assert found["wasted_tokens"] == {"deadline": 9, "stale": 7, "masked": 5, "zero_variance": 5, "given_up": 2}
    assert found["engine_idle_share"] == pytest.approx(1 - (4 + 2) / 10)
    assert found["tokens_per_second"] == pytest.approx(33 / 6)
    assert found["length_bias"]["tokens_left"] == pytest.approx((4.5 + 5 + 7 + 1) / 4)


def test_staleness_counts_what_leaves_share_once():
    group = Group({"group_id": "a", "position": 0}, {})
    group.trajectories = [
        leaf("a-s00", [(0, 2, 4), (1, 4, 8)], 6),
        leaf("a-s00-l1", [(0, 2, 4), (1, 4, 6), (2, 7, 10)], 3),
    ]
    group.finish({0: 0, 1: 1, 2: 2})
    assert group.sampled == {0: 2, 1: 4, 2: 3}
