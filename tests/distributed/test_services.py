"""DAGSTER_HOME, the UI as child processes, and the commands around them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from furlong.ops.spec import Placement
from furlong.resources.dagster_home import SETTINGS, close_orphaned_runs, ensure_dagster_home
from furlong.resources.processes import mark, marked
from furlong.resources.run_launcher import TAG, DetachedRunLauncher
from furlong.resources.services import ServiceError, serve, ui
from furlong.resources.workers import Worker


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Placement:
    monkeypatch.setenv("DAGSTER_HOME", "to be restored")
    return Placement(root=str(tmp_path), start_deadline=120.0)


def furlong(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [str(Path(sys.executable).with_name("furlong")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"FURLONG_ROOT": root})


def test_home_has_the_repositorys_settings(at: Placement) -> None:
    from dagster import DagsterInstance

    home = ensure_dagster_home(at)
    assert os.environ["DAGSTER_HOME"] == str(home) == str(ensure_dagster_home(at))
    assert (home / "dagster.yaml").resolve() == SETTINGS
    with DagsterInstance.get() as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled
        assert instance.run_retries_enabled
        assert not instance.run_retries_retry_on_asset_or_op_failure
        assert instance.run_monitoring_enabled
        assert isinstance(instance.run_launcher, DetachedRunLauncher)
        pools = instance.get_concurrency_config().pool_config
        assert (pools.default_pool_limit, pools.pool_granularity.value) == (1, "run")


def test_a_persons_own_settings_stay(at: Placement) -> None:
    own = at.folder / "dagster" / "dagster.yaml"
    own.parent.mkdir()
    own.write_text("telemetry: {enabled: false}\n")
    ensure_dagster_home(at)
    assert own.read_text() == "telemetry: {enabled: false}\n"
    assert not own.is_symlink()


def test_only_runs_without_a_process_are_closed(at: Placement) -> None:
    from dagster import DagsterInstance, DagsterRunStatus, job

    @job
    def nothing(): ...

    dead = Worker(socket.gethostname(), 2**22 - 1, 1.0)
    ensure_dagster_home(at)
    with DagsterInstance.get() as instance:

        def run(status: DagsterRunStatus, worker: Worker | None) -> str:
            tags = {TAG: str(worker)} if worker else {}
            return instance.create_run_for_job(nothing, status=status, tags=tags).run_id

        lost = run(DagsterRunStatus.STARTED, dead)
        canceling = run(DagsterRunStatus.CANCELING, dead)
        kept = {
            run(DagsterRunStatus.STARTED, Worker.of(os.getpid())): DagsterRunStatus.STARTED,
            run(DagsterRunStatus.STARTED, Worker("another-machine", 1, 1.0)): DagsterRunStatus.STARTED,
            run(DagsterRunStatus.STARTING, None): DagsterRunStatus.STARTING,  # it has not told its process yet
            run(DagsterRunStatus.SUCCESS, dead): DagsterRunStatus.SUCCESS,
        }
        assert set(close_orphaned_runs(at)) == {lost, canceling}
        assert instance.get_run_by_id(lost).status == DagsterRunStatus.FAILURE
        assert instance.get_run_by_id(canceling).status == DagsterRunStatus.CANCELED
        assert {each: instance.get_run_by_id(each).status for each in kept} == kept
        assert close_orphaned_runs(at) == []


def test_commands_where_nothing_runs(tmp_path: Path) -> None:
    status = furlong(tmp_path, "status")
    assert status.returncode == 0
    assert status.stdout.count("not running") == 2
    down = furlong(tmp_path, "down")
    assert down.returncode == 0
    assert "nothing of" in down.stdout


def test_help_is_fast_and_loads_nothing_heavy() -> None:
    code = "import sys, furlong.cli.main; print([m for m in ('torch', 'ray', 'dagster', 'mlflow') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def answers(url: str, seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.status == 200
        except OSError:
            time.sleep(0.5)
    return False


def test_ui_ends_what_a_killed_one_left_answers_and_leaves_nothing(at: Placement) -> None:
    left = subprocess.Popen(["sleep", "600"], env=os.environ | mark("ui", at.folder), start_new_session=True)
    with ui(at) as running:
        assert left.wait(10) == -signal.SIGTERM
        assert answers(f"{running.url}/server_info", 10)
        # Empty when another process on this machine holds MLflow's port.
        assert running.mlflow == "" or answers(running.mlflow, 60)
        with pytest.raises(ServiceError, match="runs already"), ui(at):
            pass
        daemon = running.children["daemon"]
        os.kill(daemon.pid, signal.SIGKILL)

        def told(words: str) -> None:
            raise KeyboardInterrupt(words)

        with pytest.raises(KeyboardInterrupt, match="daemon ended with status -9 and is started again"):
            serve(at, running, told)
        # It tells before it starts.
        assert running.children["daemon"] is daemon
        assert "ended" in furlong(at.folder, "down").stdout
        with pytest.raises(ServiceError, match="ended by `make down`"):
            serve(at, running, told)
    assert marked(mark("ui", at.folder)) == []


def test_ui_on_a_taken_port_says_so(at: Placement) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServiceError, match="in use"), ui(at, taken.getsockname()[1]):
            pass
