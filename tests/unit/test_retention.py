"""Collection: what may go goes, and no version that is not collected is ever without its bytes, whoever dies or races."""

import random
import shutil
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weights_lake import RUN, WeightsLake, same_bits

from furlong.ops import records
from furlong.ops.protocols import StaleFence
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.ops.weights.retention import RetentionError, plan_collection
from furlong.resources.lake import Lake
from furlong.resources.weights import retention
from furlong.resources.weights.anchors import list_anchors
from furlong.resources.weights.rebuild import RebuildError, rebuild
from furlong.resources.weights.retention import collect, collection_plan
from furlong.resources.weights.tags import TagError, drop_void_tags, list_tags, remove_tag, set_tag, tagged_version
from furlong.resources.weights.verify import verify_run

ONE = {"a": torch.zeros(40, dtype=torch.bfloat16)}
"""80 bytes, so that few deltas outweigh a complete copy."""


def assert_all_there(made: WeightsLake) -> None:
    """Every version that is not collected rebuilds to exactly what was published, and no tag names a collected one."""
    verdicts = list(verify_run(made.lake, RUN, made.base))
    assert [v for v in verdicts if v.fault] == []
    states = made.states()
    assert states.keys() == made.truth.keys()
    assert {v.version for v in verdicts} == {version for version, state in states.items() if state != "collected"}
    rows = made.lake.read("weight_versions", {"run": RUN}, ["version", "digest"]).to_pylist()
    for row in rows:
        digests = {entry["name"]: entry["digest"] for entry in manifest(made.truth[row["version"]])}
        assert row["digest"] == weights_digest(digests)
    assert not [tag for tag, version in list_tags(made.lake, RUN).items() if states[version] == "collected"]


def collected(made: WeightsLake) -> set[int]:
    return {version for version, state in made.states().items() if state == "collected"}


def with_bytes(made: WeightsLake) -> set[int]:
    return set(made.lake.read("weight_deltas", {"run": RUN}, ["version"])["version"].to_pylist())


def line(root: Path, count: int, tensors: dict | None = None) -> WeightsLake:
    made = WeightsLake(root, tensors or ONE)
    for _ in range(count):
        made.publish(share=0.5)
    return made


def test_old_versions_go_and_the_oldest_kept_becomes_complete(tmp_path):
    made = line(tmp_path, 10)
    plan = collection_plan(made.lake, RUN, 3)
    assert (plan.kept, plan.needed, plan.anchored) == ((0, 8, 9, 10), (), (8,))
    assert plan.collected == (1, 2, 3, 4, 5, 6, 7)
    assert made.states() == dict.fromkeys(range(11), "live")
    done = collect(made.lake, RUN, 3, made.base)
    assert done == plan
    assert done.freed_bytes == sum(made.row(v)["delta_bytes"] for v in plan.collected) - 80
    assert collected(made) == set(plan.collected)
    assert with_bytes(made) == {8, 9, 10}
    assert made.row(8)["kind"] == "anchor"
    assert_all_there(made)
    with pytest.raises(RebuildError, match="weights version 5 was collected, so its bytes are gone"):
        rebuild(made.lake, RUN, 5, made.base)
    assert collect(made.lake, RUN, 3, made.base).collected == ()
    made.publish()
    assert collect(made.lake, RUN, 3, made.base).needed == (8,)  # a copy of 9 is more than the deltas of 8
    assert_all_there(made)


def test_history_that_weighs_less_than_a_copy_is_kept(tmp_path):
    made = WeightsLake(tmp_path, {"a": torch.zeros(20_000, dtype=torch.bfloat16)})
    for _ in range(6):
        made.publish(share=0.001)
    plan = collect(made.lake, RUN, 1, made.base)
    assert (plan.kept, plan.needed, plan.anchored, plan.collected) == ((0, 5, 6), (1, 2, 3, 4), (), ())
    assert plan.freed_bytes == 0
    assert collected(made) == set()


def test_the_served_version_and_its_parent_always_stay(tmp_path):
    made = line(tmp_path, 8)
    repeat = made.publish(parent=7, share=0.5)  # 8 was drawn once more: 9 on 7
    plan = collect(made.lake, RUN, 1, made.base)
    assert {7, repeat} <= set(plan.kept)
    assert 8 in plan.collected
    assert_all_there(made)
    with pytest.raises(RetentionError, match="keep_last=0 would collect the version that engines serve"):
        collect(made.lake, RUN, 0, made.base)


def test_staged_and_tagged_versions_stay_with_all_they_need(tmp_path):
    made = line(tmp_path, 4)
    staged = made.publish(parent=2, state="staged", share=0.5)
    for _ in range(4):
        made.publish(parent=max(made.truth) if max(made.truth) != staged else 4, share=0.5)
    set_tag(made.lake, RUN, "stable", 3)
    plan = collect(made.lake, RUN, 2, made.base)
    assert {2, 3, staged} <= set(plan.kept)
    assert staged not in plan.anchored
    assert_all_there(made)
    assert same_bits(rebuild(made.lake, RUN, 3, made.base), made.truth[3])
    assert same_bits(rebuild(made.lake, RUN, staged, made.base), made.truth[staged])
    remove_tag(made.lake, RUN, "stable")
    made.alter(staged, state="live")
    plan = collect(made.lake, RUN, 2, made.base)
    assert {3, staged} <= set(plan.collected)
    assert_all_there(made)


def test_anchor_files_go_with_their_versions_and_left_overs_after_a_grace(tmp_path):
    made = WeightsLake(tmp_path, ONE)
    for number in range(1, 7):
        made.publish(anchor=number in (2, 4))
    named = {made.row(2)["anchor"], made.row(4)["anchor"]}
    stray = Path(made.lake.uri) / "anchors" / RUN / "99-0123456789ab.safetensors"
    partial = stray.with_name(".part-0")
    for path in (stray, partial):
        path.write_bytes(b"x")
    collect(made.lake, RUN, 1, made.base)
    assert set(list_anchors(made.lake.uri, RUN)) >= {f"anchors/{RUN}/{p.name}" for p in (stray, partial)}
    assert not (Path(made.lake.uri) / made.row(2)["anchor"]).exists()
    assert {made.row(version)["anchor"] for version in made.truth} >= named  # the rows tell for ever
    collect(made.lake, RUN, 1, made.base, grace=-1.0)
    assert not stray.exists()
    assert not partial.exists()
    assert_all_there(made)


def test_only_the_files_of_collected_versions_are_touched_and_vacuum_frees_them(tmp_path):
    made = line(tmp_path, 6)
    table = Path(made.lake.uri) / "weight_deltas"
    before = set(table.rglob("*.parquet"))
    collect(made.lake, RUN, 2, made.base)
    assert set(table.rglob("*.parquet")) == before  # nothing was written again
    would = made.lake.vacuum("weight_deltas", 0, dry_run=True)
    assert set(table.rglob("*.parquet")) == before
    gone = made.lake.vacuum("weight_deltas", 0)
    assert sorted(gone) == sorted(would)
    assert len(set(table.rglob("*.parquet"))) == len(before) - 4
    assert_all_there(made)
    assert made.lake.vacuum("weight_deltas", 168) == []
    assert made.lake.vacuum("evals", 0) == []


def test_a_kept_version_that_is_broken_stops_the_collection(tmp_path):
    made = line(tmp_path, 6)
    made.lake.replace("weight_versions", {"run": RUN, "version": 2}, records.TABLES["weight_versions"].empty_table())
    with pytest.raises(
        RetentionError, match="weights version 5 is to be kept, but 3 is built on 2, whose bytes are gone"
    ):
        collect(made.lake, RUN, 1, made.base)
    assert "collected" not in made.states().values()
    assert with_bytes(made) == set(range(1, 7))


# ---- tags


def test_tags_are_moved_listed_and_removed(tmp_path):
    made = line(tmp_path, 3)
    set_tag(made.lake, RUN, "stable", 1)
    set_tag(made.lake, RUN, "candidate", 2)
    set_tag(made.lake, RUN, "stable", 2)
    assert list_tags(made.lake, RUN) == {"candidate": 2, "stable": 2}
    assert (tagged_version(made.lake, RUN, "stable"), tagged_version(made.lake, RUN, "17")) == (2, 17)
    assert remove_tag(made.lake, RUN, "stable") == 2
    with pytest.raises(TagError, match="run r has no tag 'stable'; it has candidate"):
        remove_tag(made.lake, RUN, "stable")
    assert list_tags(made.lake, "other") == {}


@pytest.mark.parametrize("name", ["", "1", "1a", "Stable", "a b", "-x"])
def test_tag_names_cannot_be_numbers(tmp_path, name):
    with pytest.raises(TagError, match="could be taken for something else"):
        set_tag(line(tmp_path, 1).lake, RUN, name, 1)


def test_what_is_not_live_and_lasting_cannot_be_tagged(tmp_path):
    made = line(tmp_path, 5)
    staged = made.publish(state="staged", share=0.5)
    for state, message in [("collected", "was collected"), ("collecting", "2 is just being collected")]:
        made.alter(2, state=state)
        for version in (2, 3):  # 3 depends on 2
            with pytest.raises(TagError, match=message):
                set_tag(made.lake, RUN, "stable", version)
    made.alter(2, state="live")
    with pytest.raises(TagError, match="is staged: no engine has proved it yet"):
        set_tag(made.lake, RUN, "stable", staged)
    with pytest.raises(TagError, match="version 99 is not in the lake"):
        set_tag(made.lake, RUN, "stable", 99)
    assert list_tags(made.lake, RUN) == {}


def test_a_tag_left_by_a_killed_tagger_does_not_outlive_the_version(tmp_path):
    made = line(tmp_path, 6)
    collect(made.lake, RUN, 1, made.base)
    key = {"run": RUN, "tag": "late"}
    made.lake.replace("weight_tags", key, records.rows("weight_tags", [key | {"version": 2, "tagged_at": 0.0}]))
    drop_void_tags(made.lake, RUN)
    assert list_tags(made.lake, RUN) == {}


# ---- death


class Killed(BaseException):
    """Stands for SIGKILL: nothing on the way may catch it."""


class Mortal:
    """A lake that dies before or after its n-th write; the anchor functions count as writes too."""

    def __init__(self, lake: Lake, fatal: int, after: bool):
        self._lake, self.fatal, self.after, self.writes = lake, fatal, after, 0
        self.uri, self.read = lake.uri, lake.read

    def write(self, call, *args, **named):
        self.writes += 1
        if self.writes == self.fatal and not self.after:
            raise Killed
        result = call(*args, **named)
        if self.writes == self.fatal:
            raise Killed
        return result

    def replace(self, *args, **named):
        return self.write(self._lake.replace, *args, **named)

    def take_fence(self, *args):
        return self.write(self._lake.take_fence, *args)


@contextmanager
def mortal(lake: Lake, fatal: int, after: bool):
    """The lake, and the module's file functions, dying together."""
    dying = Mortal(lake, fatal, after)
    files = {name: getattr(retention, name) for name in ("write_anchor", "remove_anchor")}
    for name, call in files.items():
        setattr(retention, name, lambda *args, _call=call: dying.write(_call, *args))
    try:
        yield dying
    except Killed:
        pass
    finally:
        for name, call in files.items():
            setattr(retention, name, call)


def outcome(made: WeightsLake) -> tuple:
    rows = made.lake.read("weight_versions", {"run": RUN}, ["version", "state", "kind", "anchor"]).to_pylist()
    files = sorted(name for name in list_anchors(made.lake.uri, RUN) if not name.rsplit("/", 1)[-1].startswith("."))
    return sorted(tuple(row.values()) for row in rows), sorted(with_bytes(made)), files, list_tags(made.lake, RUN)


def test_killed_at_any_write_nothing_is_lost_and_the_next_run_ends_the_same(tmp_path):
    made = line(tmp_path, 3)
    made.publish(anchor=True, share=0.5)
    for parent in (4, 5, 6, 6, 8, 9, 10):
        made.publish(parent, share=0.5)
    set_tag(made.lake, RUN, "stable", 6)
    start = tmp_path / "start"
    shutil.copytree(made.lake.uri, start)
    with mortal(made.lake, 10**9, after=False) as counted:
        collect(counted, RUN, 2, made.base)
    wanted = outcome(made)
    assert counted.writes == 9  # fence, 2 files and their 2 rows, mark, collected, deltas, the old anchor's file
    assert {state for _, state, _, _ in wanted[0]} == {"live", "collected"}
    for fatal in range(1, counted.writes + 1):
        for after in (False, True):
            shutil.rmtree(made.lake.uri)
            shutil.copytree(start, made.lake.uri)
            made.lake = Lake(made.lake.uri)
            with mortal(made.lake, fatal, after) as dying:
                collect(dying, RUN, 2, made.base)
            assert dying.writes == fatal
            assert_all_there(made)
            collect(made.lake, RUN, 2, made.base)
            assert outcome(made) == wanted, (fatal, after)
    assert_all_there(made)


STEP = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 3), st.sampled_from([0.02, 0.5, 1.0]), st.booleans()),
    st.tuples(st.just("publish"), st.integers(0, 1), st.sampled_from([0.02, 0.5, 1.0]), st.booleans()),
    st.tuples(st.just("tag"), st.sampled_from(["stable", "candidate"]), st.integers(0, 20)),
    st.tuples(st.just("untag"), st.sampled_from(["stable", "candidate"])),
    st.tuples(st.just("collect"), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 9)), st.booleans()),
    st.tuples(st.just("vacuum")),
)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=6, max_size=14))
def test_whatever_is_done_every_version_that_is_not_collected_rebuilds(steps):
    with tempfile.TemporaryDirectory() as folder:
        made = line(Path(folder), 5)
        for step in steps:
            _do(made, *step)
            if step[0] in ("collect", "vacuum"):
                assert_all_there(made)


def _do(made: WeightsLake, what: str, *how) -> None:
    versions = sorted(made.truth)
    if what == "publish":
        back, share, anchor = how
        live = sorted(version for version, state in made.states().items() if state == "live")
        # A run builds on the newest version, or repeats the newest step on its parent.
        parent = live[-1] if back else max(made.parents[live[-1]] or 0, 0)
        made.publish(parent, share=share, anchor=anchor, state="staged" if back == 3 and anchor else "live")
    elif what == "tag":
        name, version = how
        state = made.states()[versions[version % len(versions)]]
        if state == "live":
            set_tag(made.lake, RUN, name, versions[version % len(versions)])
    elif what == "untag" and how[0] in list_tags(made.lake, RUN):
        remove_tag(made.lake, RUN, how[0])
    elif what == "collect":
        keep_last, fatal, after = how
        with mortal(made.lake, fatal or 10**9, after) as dying:
            collect(dying, RUN, keep_last, made.base, grace=-1.0)
    elif what == "vacuum":
        for table in ("weight_deltas", "weight_versions", "weight_tags"):
            made.lake.vacuum(table, 0)


# ---- races


class Turns:
    """Lets two threads go on only in the given order, one call on the lake each; freely once one of them is done."""

    def __init__(self, order: list[int]):
        self._order, self._done, self._change = order, set(), threading.Condition()

    def take(self, party: int) -> None:
        with self._change:
            free = self._change.wait_for(lambda: self._done or not self._order or self._order[0] == party, timeout=30)
            assert free, "the other party never took its turn"
            if self._order and not self._done:
                self._order.pop(0)
            self._change.notify_all()

    def leave(self, party: int) -> None:
        with self._change:
            self._done.add(party)
            self._change.notify_all()


class InTurn:
    """A lake whose every call waits for its party's turn."""

    def __init__(self, uri: str, turns: Turns, party: int):
        self.uri, self._lake, self._turns, self._party = uri, Lake(uri), turns, party

    def __getattr__(self, name):
        def call(*args, **named):
            self._turns.take(self._party)
            return getattr(self._lake, name)(*args, **named)

        return call


def race(uri: str, order: list[int], *parties) -> list:
    """Run both on lakes of their own; returns what each returned or raised."""
    turns, results = Turns(order), [None, None]

    def run(number: int) -> None:
        try:
            results[number] = parties[number](InTurn(uri, turns, number))
        except Exception as err:  # handed to the test
            results[number] = err
        finally:
            turns.leave(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> WeightsLake:
    made = line(tmp_path_factory.mktemp("prepared"), 7)
    set_tag(made.lake, RUN, "stable", 1)
    return made


def fresh_copy(prepared: WeightsLake, root: Path) -> WeightsLake:
    shutil.copytree(prepared.lake.uri, root / "lake")
    made = WeightsLake.__new__(WeightsLake)
    vars(made).update(vars(prepared) | {"lake": Lake(str(root / "lake"))})
    return made


@pytest.mark.parametrize(("before", "between"), [(b, m) for b in (1, 2, 3) for m in range(4, 24, 2)])
def test_a_tag_and_a_collection_at_once_never_leave_a_tagged_collected_version(prepared, tmp_path, before, between):
    """The tagger makes so many calls, then the collector so many, then the tagger ends, then the collector."""
    made = fresh_copy(prepared, tmp_path)
    order, target = [1] * before + [0] * between + [1] * 20, 3
    told = race(
        made.lake.uri,
        order,
        lambda lake: collect(lake, RUN, 2, made.base),
        lambda lake: set_tag(lake, RUN, "stable", target),
    )
    assert not isinstance(told[0], Exception), told
    tags, states = list_tags(made.lake, RUN), made.states()
    if told[1] is None:
        assert tags == {"stable": target}
        assert states[target] == "live"
    else:
        assert isinstance(told[1], TagError), told
        assert tags in ({"stable": 1}, {})
    assert_all_there(made)


@pytest.mark.parametrize("seed", range(10))
def test_two_collections_at_once_break_nothing(prepared, tmp_path, seed):
    made = fresh_copy(prepared, tmp_path)
    draw = random.Random(seed)
    order = [party for _ in range(12) for party in [draw.randrange(2)] * draw.randint(1, 3)]
    told = race(
        made.lake.uri,
        order,
        lambda lake: collect(lake, RUN, 1, made.base),
        lambda lake: collect(lake, RUN, 4, made.base),
    )
    # The one that is shut out says so; at worst it stumbles over bytes that the other freed while it copied a version.
    assert all(not isinstance(one, Exception) or isinstance(one, StaleFence | RebuildError) for one in told), told
    assert not all(isinstance(one, Exception) for one in told), told
    assert_all_there(made)
    collect(made.lake, RUN, 1, made.base)
    assert set(made.states().values()) == {"live", "collected"}
    assert_all_there(made)


@pytest.mark.parametrize("seed", range(10))
def test_a_publication_and_a_collection_at_once_break_nothing(prepared, tmp_path, seed):
    made = fresh_copy(prepared, tmp_path)
    made.truth, made.parents = dict(made.truth), dict(made.parents)
    draw = random.Random(seed)
    order = [party for _ in range(12) for party in [draw.randrange(2)] * draw.randint(1, 3)]

    def publish(lake):
        writer = WeightsLake.__new__(WeightsLake)
        vars(writer).update(vars(made) | {"lake": lake})
        writer.publish(draw.choice([6, 7]), share=0.5)
        return writer.publish(share=0.5)

    told = race(made.lake.uri, order, lambda lake: collect(lake, RUN, 1, made.base), publish)
    assert not any(isinstance(one, Exception) for one in told), told
    assert made.states()[9] == "live"
    assert_all_there(made)


# ---- the plan alone


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_plan_never_frees_what_a_kept_version_needs_and_never_grows_the_lake(data):
    count = data.draw(st.integers(0, 25))
    rows = []
    for version in range(count + 1):
        anchor = "base" if version == 0 else data.draw(st.sampled_from([None, None, None, "file"]))
        rows.append(
            {
                "version": version, "kind": "anchor" if anchor else "delta", "anchor": anchor,
                "state": "live" if version == 0 else data.draw(st.sampled_from(["live"] * 5 + ["staged", "collecting"])),
                "parent": data.draw(st.integers(max(0, version - 4), version - 1)) if version else None,
                "full_bytes": 100, "delta_bytes": data.draw(st.integers(0, 60)) if version else 0,
            }
        )  # fmt: skip
    tagged = data.draw(st.sets(st.integers(0, count), max_size=3))
    plan = plan_collection(rows, tagged, data.draw(st.integers(1, 6)))
    by = {row["version"]: row for row in rows}
    assert sorted([*plan.kept, *plan.needed, *plan.collected]) == sorted(by)
    assert tagged <= set(plan.kept)
    for version in plan.kept:
        at = version
        while by[at]["kind"] != "anchor" and at not in plan.anchored:
            at = by[at]["parent"]
            assert at not in plan.collected
    assert plan.freed_bytes >= 0
