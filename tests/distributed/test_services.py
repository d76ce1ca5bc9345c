"""DAGSTER_HOME, the UI as child processes, and the commands around them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from furlong.ops.spec import Placement
from furlong.resources.dagster_home import SETTINGS, close_orphaned_runs, ensure_dagster_home
from furlong.resources.processes import mark, marked
from furlong.resources.run_lock import run_lock
from furlong.resources.services import ServiceError, ui


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
        assert not instance.run_retries_enabled
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 1


def test_a_persons_own_settings_stay(at: Placement) -> None:
    own = at.folder / "dagster" / "dagster.yaml"
    own.parent.mkdir()
    own.write_text("telemetry: {enabled: false}\n")
    ensure_dagster_home(at)
    assert own.read_text() == "telemetry: {enabled: false}\n"
    assert not own.is_symlink()


def test_runs_without_a_process_are_closed_unless_something_is_driven(at: Placement) -> None:
    from dagster import DagsterInstance, DagsterRunStatus, job

    @job
    def nothing(): ...

    ensure_dagster_home(at)
    with DagsterInstance.get() as instance:
        run = instance.create_run_for_job(nothing, status=DagsterRunStatus.STARTED)
        done = instance.create_run_for_job(nothing, status=DagsterRunStatus.SUCCESS)
        with run_lock(at.folder, "some"):
            assert close_orphaned_runs(at) == []
        assert close_orphaned_runs(at) == [run.run_id]
        assert instance.get_run_by_id(run.run_id).status == DagsterRunStatus.FAILURE
        assert instance.get_run_by_id(done.run_id).status == DagsterRunStatus.SUCCESS


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


def test_ui_answers_and_leaves_nothing(at: Placement) -> None:
    with ui(at) as running:
        assert answers(f"{running.url}/server_info", 10)
        # Empty when another process on this machine holds MLflow's port.
        assert running.mlflow == "" or answers(running.mlflow, 60)
        with pytest.raises(ServiceError, match="runs already"), ui(at):
            pass
        os.kill(running.children["daemon"].pid, signal.SIGKILL)
    assert marked(mark("ui", at.folder)) == []


def test_ui_on_a_taken_port_says_so(at: Placement) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServiceError, match="in use"), ui(at, taken.getsockname()[1]):
            pass
