"""A trainer of two ranks in processes of their own: it is one trainer, and it ends as one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "unit"))

from tiny_policy import make_batch, make_folder, make_spec, near_policy

from furlong.ops.policy.packing import PackingError
from furlong.ops.policy.parallel import Layout
from furlong.ops.protocols import OtherLogprobs
from furlong.ops.spec import Placement
from furlong.resources.cluster import ensure_cluster
from furlong.resources.processes import writer_of
from furlong.resources.trainers.fsdp import FSDPTrainer
from furlong.resources.trainers.group import TrainerError
from furlong.resources.trainers.make import make_trainer
from furlong.resources.trainers.snapshots import SnapshotError

ALONE = OtherLogprobs()
DEADLINE = 120.0
LOG = "trainer-tiny-rank1.log"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("group"))


@pytest.fixture(scope="module")
def home(placement: Placement, folder, tmp_path_factory):
    """Where the ranks' logs are, with Ray up."""
    ensure_cluster(placement)
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def started(folder, home):
    """One group for all tests, as its processes take seconds to start; each test loads or restores first."""
    group = make_trainer(make_spec(folder), 1, Layout(dp=2), 0, DEADLINE, home)
    yield group
    group.close()
    assert gone(home)


@pytest.fixture
def group(started, folder):
    started.load(folder)
    return started


def long_step(step: int = 1):
    """A step of many micro-batches, so that there is time to interfere."""
    return make_batch(step, sizes=(8,) * 600, step=step)


def gone(home: Path) -> bool:
    """Whether rank 1's process ends within seconds."""
    until = time.monotonic() + 15
    while writer_of(home / LOG) is not None and time.monotonic() < until:
        time.sleep(0.05)
    return writer_of(home / LOG) is None


def kill_rank(home: Path, after: float = 0.0) -> threading.Timer:
    pid = writer_of(home / LOG).pid
    timer = threading.Timer(after, lambda: os.kill(pid, signal.SIGKILL))
    timer.start()
    return timer


def test_a_group_is_a_trainer(group, folder, tmp_path):
    """Every method, against one rank; float32, so close: the same sums in another order, after one AdamW step of 1e-3."""
    one = FSDPTrainer(make_spec(folder), 1)
    one.load(folder)
    batch = near_policy(make_batch(1), one.logprobs(make_batch(1)))
    assert group.master_digest() == one.master_digest()
    for got, want in zip(group.logprobs(batch), one.logprobs(batch), strict=True):
        assert got == pytest.approx(want, abs=2e-5)
    weights = one.export()
    assert {name: tensor.shape for name, tensor in group.export().items()} == {n: w.shape for n, w in weights.items()}
    metrics, wanted = group.step(batch, ALONE), one.step(batch, ALONE)
    assert metrics.loss == pytest.approx(wanted.loss, abs=1e-5)
    assert metrics.tokens_reached == wanted.tokens_reached
    for got, want in zip(
        group.logprobs(batch, batch.masks, weights), one.logprobs(batch, batch.masks, weights), strict=True
    ):
        assert got == pytest.approx(want, abs=2e-5, nan_ok=True)
    digest = group.master_digest()
    group.save(str(tmp_path / "state"))
    group.step(make_batch(2, step=2), ALONE)
    assert group.restore(str(tmp_path / "state")) == 1
    assert group.master_digest() == digest
    assert one.restore(str(tmp_path / "state")) == 1
    assert one.master_digest() == digest
    assert "layout=dp2" in group.fingerprint()


def test_what_all_ranks_raise_is_raised_and_the_group_goes_on(group, tmp_path):
    ended = group._team
    with pytest.raises(ValueError, match="asked for step 3 after step 0"):
        group.step(make_batch(1, step=3), ALONE)
    with pytest.raises(SnapshotError, match="no readable state"):
        group.restore(str(tmp_path / "nothing"))
    with pytest.raises(PackingError, match="outside"):
        group.logprobs(make_batch(1, letters=99))
    group.step(make_batch(1), ALONE)
    assert group._team is ended


def test_a_rank_killed_in_a_step_ends_the_group_within_seconds(group, home, folder, tmp_path):
    group.step(make_batch(1), ALONE)
    group.save(str(tmp_path / "state"))
    digest = group.master_digest()
    timer = kill_rank(home, after=0.1)
    begin = time.monotonic()
    with pytest.raises(TrainerError, match=r"rank 1 of run tiny was lost in step: .*(?s:.*)Last lines of .*rank1\.log"):
        group.step(long_step(2), ALONE)
    assert time.monotonic() - begin < 20
    timer.join()
    assert gone(home)
    with pytest.raises(RuntimeError, match="call load"):
        group.step(make_batch(2, step=2), ALONE)
    assert group.restore(str(tmp_path / "state")) == 1, "a fresh group, where the old one was saved"
    assert group.master_digest() == digest
    group.step(make_batch(2, step=2), ALONE)


def test_a_rank_killed_between_steps_is_noticed_by_the_next(group, home):
    kill_rank(home).join()
    with pytest.raises(TrainerError, match=r"rank 1 of run tiny was lost in step"):
        group.step(make_batch(1), ALONE)


@pytest.mark.slow
def test_a_rank_that_fails_alone_ends_the_group(group, home):
    """Rank 1 is a step ahead: it refuses what rank 0 begins, and would leave it waiting."""
    import ray

    (actor,) = group._team._actors.values()
    ray.get(actor.perform.remote("lead", ("__setattr__", ("completed", 1))), timeout=DEADLINE)
    begin = time.monotonic()
    with pytest.raises(
        TrainerError, match=r"rank 1 of run tiny failed in step: ValueError: asked for step 1 after step 1"
    ):
        group.step(make_batch(1), ALONE)
    assert time.monotonic() - begin < 20
    assert gone(home)


@pytest.mark.slow
def test_a_rank_that_hangs_meets_the_deadline(group, home, monkeypatch):
    monkeypatch.setattr(group._team, "_deadline", 2.0)
    os.kill(writer_of(home / LOG).pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(TrainerError, match=r"ranks \[0, 1\] of run tiny were not through step within 2 s"):
        group.step(make_batch(1), ALONE)
    assert time.monotonic() - begin < 30
    assert gone(home)


def test_layouts_that_the_backend_cannot_do_are_refused(folder, home):
    with pytest.raises(ValueError, match=r"not tp.*trainer.backend=megatron"):
        make_trainer(make_spec(folder), 1, Layout(tp=2), 0, DEADLINE, home)


HOST = """
import os, signal
from pathlib import Path
from tiny_policy import make_spec
from furlong.ops.policy.parallel import Layout
from furlong.resources.cluster import ensure_cluster
from furlong.resources.trainers.make import make_trainer
ensure_cluster(placement)
group = make_trainer(make_spec({folder!r}), 1, Layout(dp=2), 0, 60.0, Path({home!r}))
group.load({folder!r})
print("loaded", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them(placement, drive, started, folder, home, tmp_path):
    started.close()
    unit = str(Path(__file__).parent.parent / "unit")
    path = os.pathsep.join([unit, os.environ.get("PYTHONPATH", "")])
    process = drive(placement.folder, HOST.format(folder=folder, home=str(tmp_path)), PYTHONPATH=path)
    out, err = process.communicate(timeout=120)
    assert "loaded" in out, err
    assert gone(tmp_path)
