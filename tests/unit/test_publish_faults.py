"""What goes wrong between the lake and the engines: damaged files, lost rows, lost parties, calls that come too late."""

import time
from pathlib import Path

import pyarrow as pa
import pytest
from test_stages import RUN, live, new_engine, new_fleet, new_trainer, restart, take

from furlong.ops.policy.manifest import ModelError
from furlong.ops.protocols import StaleFence
from furlong.ops.stages.context import StageError
from furlong.ops.weights.delta import DeltaError
from furlong.resources.actors import ActorLost
from furlong.resources.engines.local import LocalEngine
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.weights import anchors
from furlong.resources.weights.anchors import AnchorError
from furlong.resources.weights.fleet import Fleet

BEFORE_PUBLISHING = ("prompts", "rollouts", "rewards", "train_step")
TENSOR = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture(params=["broadcast", "p2p", "disk_delta"])
def transport(request, run):
    run.placement = run.placement.model_copy(update={"transport": request.param})
    return request.param


def publish(run, step=1, attempt=1):
    return take(run, step, attempt, stages=("weight_publish",))["weight_publish"].values


def serving(engine):
    health = engine.health()
    return health["version"], health["paused"]


def staged_in_lake(run, monkeypatch):
    """Step 1 up to the commit of its staged version, as a driver leaves it that is killed there."""
    take(run, 1, stages=BEFORE_PUBLISHING)
    monkeypatch.setattr(run, "publish", lambda row: (_ for _ in ()).throw(OSError("killed here")))
    with pytest.raises(OSError, match="killed here"):
        publish(run)
    monkeypatch.undo()
    assert run.lake.read("weight_versions", {"run": RUN, "version": 1})["state"].to_pylist() == ["staged"]


def rows_of(run, version):
    return run.lake.read("weight_deltas", {"run": RUN, "version": version})


def put_rows(run, version, rows):
    run.lake.replace("weight_deltas", {"run": RUN, "version": version}, rows)


def without(rows, name):
    return pa.Table.from_pylist([row for row in rows.to_pylist() if row["name"] != name], schema=rows.schema)


def altered(rows, name):
    """One bit of one payload of this tensor turned over."""
    table = rows.to_pylist()
    row = next(row for row in table if row["name"] == name)
    row["data"] = row["data"][:-1] + bytes([row["data"][-1] ^ 1])
    return pa.Table.from_pylist(table, schema=rows.schema)


def anchored_run(run):
    """Two steps, the second one's version a complete copy; the path of that."""
    run.spec = run.spec.model_copy(update={"trainer": run.spec.trainer.model_copy(update={"anchor_every": 2})})
    for step in (1, 2):
        take(run, step)
    row = run.lake.read("weight_versions", {"run": RUN, "version": 2}, ["anchor"]).to_pylist()[0]
    return Path(anchors.anchor_path(run.lake.uri, row["anchor"]))


@pytest.mark.parametrize("fault", ["bit", "truncated", "gone"])
def test_an_engine_refuses_a_damaged_anchor_and_keeps_what_it_serves(run, fault):
    path = anchored_run(run)
    whole = path.read_bytes()
    restart(run, engines=new_fleet(run))
    engine = run.engines.members[0]
    before = engine.attest()
    kind, told = {
        "bit": (EngineError, r"tensor model.* of version 2 has digest .*version 0 goes on serving"),
        "truncated": (ModelError, r"2-\w+\.safetensors cannot be read"),
        "gone": (AnchorError, r"has no file anchors/quick/2-"),
    }[fault]
    path.unlink() if fault == "gone" else path.write_bytes(
        whole[:-9] if fault == "truncated" else whole[:-1] + bytes([whole[-1] ^ 1])
    )
    for _ in range(2):
        with pytest.raises(kind, match=told):
            run.engines_at(2)
        assert engine.attest() == before
    path.write_bytes(whole)
    run.engines_at(2)
    assert engine.attest().digest == live(run)[2]
    take(run, 3)


def test_a_proof_does_not_outlive_what_it_proved(run):
    """An engine whose load failed, or which another driver has used meanwhile, proves itself again before it serves."""
    take(run, 1)
    engine, base = run.engines.members[0], str(run.model.path)
    engine.load_anchor(base, 1, [], run.fence)  # the right number on the wrong bytes
    run.renew()
    run.engines_at(1)
    assert engine.attest().digest == live(run)[1]
    honest = engine.load_anchor

    def wrong(path, version, chain, fence, digests):
        honest(base, version, [], fence)
        raise EngineError("broke off here")

    engine.load_anchor(base, 0, [], run.fence)
    engine.load_anchor = wrong
    with pytest.raises(EngineError, match="broke off here"):
        run.engines_at(1)
    engine.load_anchor = honest
    run.engines_at(1)
    assert engine.attest().digest == live(run)[1]


def test_rows_lost_between_staging_and_publishing_stop_it_by_tensor(run, transport, monkeypatch):
    staged_in_lake(run, monkeypatch)
    rows = rows_of(run, 1)
    put_rows(run, 1, without(rows, TENSOR))
    with pytest.raises(StageError, match=rf"tensor {TENSOR} has digest"):
        publish(run)
    assert (serving(run.engines.members[0]), set(live(run))) == ((0, False), {0})
    put_rows(run, 1, rows)
    assert publish(run)["transport"] == transport
    assert set(live(run)) == {0, 1}


def test_rows_altered_between_staging_and_publishing_stop_it_by_tensor_even_where_none_is_sent(
    run, transport, monkeypatch
):
    staged_in_lake(run, monkeypatch)
    rows = rows_of(run, 1)
    put_rows(run, 1, altered(rows, TENSOR))
    with pytest.raises(StageError, match=TENSOR):
        publish(run)
    assert (serving(run.engines.members[0]), set(live(run))) == ((0, False), {0})
    put_rows(run, 1, rows)
    publish(run)
    assert set(live(run)) == {0, 1}


@pytest.mark.parametrize("fault", [without, altered])
def test_a_new_engine_refuses_damaged_rows_by_tensor(run, fault):
    take(run, 1)
    rows = rows_of(run, 1)
    put_rows(run, 1, fault(rows, TENSOR))
    restart(run, engines=new_fleet(run))
    with pytest.raises((EngineError, DeltaError), match=TENSOR):
        run.engines_at(1)
    assert serving(run.engines.members[0]) == (0, False)
    put_rows(run, 1, rows)
    take(run, 2)
    assert set(live(run)) == {0, 1, 2}


def test_a_missing_row_of_a_version_is_named(run):
    take(run, 1)
    where = {"run": RUN, "version": 1}
    row = run.lake.read("weight_versions", where)
    run.lake.replace("weight_versions", where, row.slice(0, 0))
    restart(run, engines=new_fleet(run))
    with pytest.raises(StageError, match="version 1 is not in the lake"):
        run.engines_at(1)
    run.lake.replace("weight_versions", where, row)
    take(run, 2)


def test_nothing_is_drawn_from_a_version_that_is_not_live(run, monkeypatch):
    staged_in_lake(run, monkeypatch)
    with pytest.raises(StageError, match=r"version 1 is staged.*run the weight_publish"):
        run.engines_at(1)
    assert serving(run.engines.members[0]) == (0, False)
    # Nor when the engines have it already, as after a publisher that was lost before it could say so.
    deltas = rows_of(run, 1)
    run.engines.members[0].stage(1, 0, deltas, run.fence)
    run.engines.members[0].activate(1, run.fence)
    with pytest.raises(StageError, match="version 1 is staged"):
        run.engines_at(1)


def test_a_step_that_was_repeated_is_not_published_late(run, monkeypatch):
    staged_in_lake(run, monkeypatch)
    take(run, 1, attempt=2)
    assert set(live(run)) == {0, 2}
    with pytest.raises(StageError, match="attempt 2 stands in its place"):
        publish(run, 1, 1)
    assert (set(live(run)), serving(run.engines.members[0])) == ({0, 2}, (2, False))
    take(run, 2)


def test_a_disk_that_is_full_while_a_complete_copy_is_written_costs_nothing_but_time(run, monkeypatch):
    run.spec = run.spec.model_copy(update={"trainer": run.spec.trainer.model_copy(update={"anchor_every": 1})})
    take(run, 1, stages=BEFORE_PUBLISHING)

    def full(tensors, path):
        Path(path).write_bytes(b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(anchors, "write_file", full)
    with pytest.raises(AnchorError, match=r"version 1 of run quick could not be stored.*No space left"):
        publish(run)
    assert (set(live(run)), serving(run.engines.members[0])) == ({0}, (0, False))
    assert list(Path(run.lake.uri).glob("anchors/quick/*")) == list(Path(run.lake.uri).glob("anchors/quick/.*")) == []
    monkeypatch.undo()
    take(run, 1)
    row = run.lake.read("weight_versions", {"run": RUN, "version": 1}).to_pylist()[0]
    assert (row["state"], row["kind"]) == ("live", "anchor")


class Mortal:
    """An engine whose process dies in the middle of a method."""

    def __init__(self, engine, dies_in):
        self._engine, self._dies_in, self._dead = engine, dies_in, False

    def __getattr__(self, method):
        def call(*args):
            self._dead = self._dead or method in self._dies_in
            if self._dead:
                raise ActorLost(f"the engine was lost in {method}")
            return getattr(self._engine, method)(*args)

        return call


@pytest.mark.parametrize("dies_in", ["stage receive", "pause", "activate", "resume", "attest"])
@pytest.mark.parametrize("dying", [1, 2])
def test_engines_that_die_during_a_publication_are_replaced_and_it_is_finished(run, dies_in, dying):
    take(run, 1, stages=BEFORE_PUBLISHING)
    members = [Mortal(new_engine(run), dies_in.split() if n < dying else ()) for n in range(2)]
    restart(run, engines=Fleet(RUN, run.lake, str(run.model.path), members, lambda _: new_engine(run)))
    run.engines._proved = [0, 0]
    values = publish(run)
    assert "the engine was lost in" in values["retried_because"]
    assert len(run.lake.read("weight_versions", {"run": RUN, "version": 1})["attestations"][0]) == (
        1 if dying == 1 else 2
    )
    # Where another could go on, the lost one is not waited for: whoever draws next has it back.
    run.engines_at(1)
    until = time.monotonic() + 60
    while len(run.engines.serving()) < 2:
        assert time.monotonic() < until, run.router.loads()
        time.sleep(0.05)
    assert [type(engine) for engine in run.engines.members] == [LocalEngine] * dying + [Mortal] * (2 - dying)
    assert [engine.attest().digest for engine in run.engines.members] == [live(run)[1]] * 2


def test_a_trainer_that_dies_after_it_was_asked_is_not_needed(run, monkeypatch):
    take(run, 1, stages=BEFORE_PUBLISHING)

    def dies(offer):
        raise ActorLost("the trainer was lost in send")

    monkeypatch.setattr(run.trainer, "send", dies)
    values = publish(run)
    assert values["transport"] == "disk_delta"
    assert "the trainer was lost in send" in values["retried_because"]
    assert set(live(run)) == {0, 1}
    run.trainer = new_trainer(run)
    take(run, 2)


def test_a_second_try_shuts_out_what_the_first_left_behind(run, monkeypatch):
    take(run, 1, stages=BEFORE_PUBLISHING)
    engine, first = run.engines.members[0], run.fence
    monkeypatch.setattr(engine, "receive", lambda *_: (_ for _ in ()).throw(ConnectionError("cut off")))
    assert publish(run)["retried_because"]
    for late in (engine.activate, engine.revert):
        with pytest.raises(StaleFence):
            late(0, first)
    row = run.lake.read("weight_versions", {"run": RUN, "version": 1}, ["fence"]).to_pylist()[0]
    assert row["fence"] == run.fence > first


def test_an_overtaken_driver_does_not_try_again(run, monkeypatch):
    take(run, 1, stages=BEFORE_PUBLISHING)
    monkeypatch.setattr(run.engines.members[0], "receive", lambda *_: (_ for _ in ()).throw(ConnectionError("cut off")))
    assert run.fence
    staged = []
    monkeypatch.setattr(run.engines.members[0], "stage", lambda *args: staged.append(args))
    take_fence = run.lake.take_fence
    monkeypatch.setattr(run.trainer, "holds", lambda digest: take_fence(RUN) > 0)  # another driver, in the middle
    with pytest.raises(StaleFence):
        publish(run)
    assert staged == []
    assert set(live(run)) == {0}
