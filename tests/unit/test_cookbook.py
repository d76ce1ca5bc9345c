"""Every query of docs/cookbook.md, as it stands there, on a lake whose answers are known."""

import re
from pathlib import Path

import pytest
import sample_lake

from furlong.ops.lineage.views import VIEWS
from furlong.resources.lake import Lake
from furlong.resources.sql import Sql

TEXT = (Path(__file__).parents[2] / "docs" / "cookbook.md").read_text()
QUERIES = {int(number): query for number, query in re.findall(r"\*\*(\d+)\. .*?```sql\n(.*?)```", TEXT, re.DOTALL)}
BEST = "<script>alert(1)</script> \u00fc"
ANSWERS = {
    1: [(1, 0.25), (2, 0.5)],
    2: [(1, 1, 1), (2, 2, 3)],
    3: [("p1", 6), ("p3", 6)],
    4: [("demo", 2), ("demo", 3), ("demo", 4)],
    5: [("trained", 4, 12, 31.6), ("stale", 2, 6, 15.8), ("superseded", 2, 6, 15.8), ("waiting", 2, 6, 15.8),
        ("zero_variance", 2, 6, 15.8), ("failed: engine_lost", 1, 2, 5.3)],
    6: [(2, 10, 0, -0.1), (3, 11, 1, -0.2), (4, 12, 1, -0.3)],
    7: [("g1-s0", 4, -0.3, -0.25, 0.05), ("g1-s1", 4, -0.3, -0.25, 0.05), ("g1-s0", 2, -0.1, -0.1, 0.0),
        ("g1-s0", 3, -0.2, -0.2, 0.0), ("g1-s1", 2, -0.1, -0.1, 0.0), ("g1-s1", 3, -0.2, -0.2, 0.0)],
    8: [(1, 1, 0.05 / 3, 0.05), (2, 1, 0.05 / 3, 0.05), (2, 2, 0.05 / 3, 0.05)],
    9: [(1, 1, 0, 12), (2, 1, 0, 6), (2, 2, 0, 4), (2, 2, 1, 2)],
    10: [(sample_lake.QUESTION, BEST, 1.0, BEST, 0.0)] * 2,
    11: [("exact", "v1", "incorrect", 7, 0.0), ("exact", "v1", "correct", 5, 1.0)],
    12: [("rollouts", 6.0, 4.5, 3), ("train_step", 6.0, 4.5, 3)],
    13: [(1, 0.25, 12), (2, 0.5, 6), (3, 0.5, 6)],
    14: [(version, "e", True, "p2p", 0.1, 0.01) for version in range(5)],
    15: [("p4", 0, 1)],
}  # fmt: skip
"""Number of the query -> its rows on `sample_lake`."""


@pytest.fixture(scope="module")
def sql(tmp_path_factory):
    with Sql(sample_lake.fill(Lake(str(tmp_path_factory.mktemp("root") / "lake")))) as sql:
        yield sql


def test_there_are_fifteen():
    assert sorted(QUERIES) == sorted(ANSWERS) == list(range(1, 16))


def test_every_view_is_named():
    assert not [name for name in VIEWS if f"`{name}`" not in TEXT]


@pytest.mark.parametrize("number", ANSWERS)
def test_query(sql, number):
    found = [tuple(row.values()) for row in sql.rows(QUERIES[number])]
    assert len(found) == len(ANSWERS[number]), found
    for row, wanted in zip(found, ANSWERS[number], strict=True):
        for value, answer in zip(row, wanted, strict=True):
            assert value == (pytest.approx(answer, rel=1e-5, abs=1e-6) if isinstance(answer, float) else answer)
