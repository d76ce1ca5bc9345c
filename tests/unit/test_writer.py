"""Commits in the order in which rows and events were added, whatever fails between two of them."""

import pytest

from furlong.ops import records
from furlong.resources.rollouts.writer import Writer

RUN = "quick"
BLANK = {"stri": "", "int6": 0, "int3": 0, "floa": 0.0, "doub": 0.0, "list": []}
"""By how a column's type begins."""


class Table:
    """As much of a lake as a writer needs, whose commit number `breaks` fails, before or after it took place."""

    def __init__(self, breaks: int, when: str, error: type[BaseException]):
        self.breaks, self.when, self.error = breaks, when, error
        self.commits: list[tuple[str, str]] = []
        self._tries = 0

    def commit_once(self, table, key, data):
        self._tries += 1
        entry = (table, str(key))
        if self._tries == self.breaks and self.when == "before":
            raise self.error
        if entry not in self.commits:
            self.commits.append(entry)
        if self._tries == self.breaks and self.when == "after":
            raise self.error


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("breaks", [1, 2])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_a_flush_did_not_commit_the_next_one_does_before_all_else(when, breaks, error):
    """An event without those before it would make the ledger unreadable for good."""
    lake = Table(breaks, when, error)
    writer = Writer(lake, RUN)

    def tell(seq):
        row = {"run": RUN, "seq": seq, "group_id": "g", "state": "reserved", "reason": "", "step": None, "at": 0.0}
        writer.add("failures", [{"run": RUN, "step": 1, "attempt": 1, "trajectory_id": f"t{seq}", "try": 0,
                                 "kind": "deadline", "detail": "", "tokens": 0, "engine": "", "at": 0.0}])  # fmt: skip
        writer.tell(records.rows("ledger", [row]))

    tell(1)
    with pytest.raises(error):
        writer.flush()
    tell(2)
    writer.flush()
    assert [table for table, _ in lake.commits] == ["failures", "ledger", "failures", "ledger"]
    assert [key.count("1") for table, key in lake.commits if table == "ledger"] == [1, 0]


def test_rewards_stand_only_beside_their_trajectories():
    """A trajectory that a crash took is drawn anew, perhaps by newer weights: its old reward must not be there first."""
    lake = Table(2, "before", KeyboardInterrupt)
    writer = Writer(lake, RUN)
    for table in ("rewards", "trajectories"):
        full = {field.name: BLANK[str(field.type)[:4]] for field in records.TABLES[table] if not field.nullable}
        writer.add(table, [dict.fromkeys(records.TABLES[table].names) | full | {"run": RUN}])
    with pytest.raises(KeyboardInterrupt):
        writer.flush()
    assert [table for table, _ in lake.commits] == ["trajectories"]
    writer.flush()
    assert [table for table, _ in lake.commits] == ["trajectories", "rewards"]
