"""The Dagster UI of one root as child processes, and what of a root is running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from furlong.ops.spec import Placement
from furlong.resources.dagster_home import close_orphaned_runs, ensure_dagster_home
from furlong.resources.processes import end_all, last_lines, mark, marked
from furlong.resources.run_lock import FREE_AFTER, LockHeld, exclusive
from furlong.resources.tracking import MLFLOW_PORT
from furlong.resources.workers import PART, end_workers

HOST = "127.0.0.1"
USUAL_PORT = 3000
POLITE_SECONDS = 10.0
END_DEADLINE = 30.0
RESTARTS = 5
RESTARTS_WITHIN = 600.0
"""More restarts than that within so many seconds, and `serve` gives up: it is not bad luck."""
# MLflow asks for usage data and starts seven workers for jobs that nothing here submits.
_QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
WORKSPACE = Path(__file__).resolve().parent.parent / "workspace.yaml"


class ServiceError(RuntimeError):
    """A service cannot start or has ended; the message holds its last lines."""


@dataclass(frozen=True)
class Ui:
    """A UI that answers."""

    url: str
    port: int
    mlflow: str
    """Page of MLflow, where the links in Dagster's metadata lead; empty when its port is taken."""
    children: dict[str, subprocess.Popen]
    """By name; each one's output is in `<root>/logs/<name>.log`."""
    commands: dict[str, list[str]]
    """What each child was started with, by name."""


@contextmanager
def ui(placement: Placement, port: int | None = None) -> Iterator[Ui]:
    """Dagster's web server and daemon, answering on the loopback address; both are ended on leaving.

    The runs that they launch are no children of theirs and go on, now and when this process is killed; what a killed one
    left of its children is ended first.

    Args:
        placement: its `start_deadline` bounds the start.
        port: to listen on; None for the usual one or, where that is taken, any free one.
    Raises:
        ServiceError: the port is taken, the UI of this root runs already, or a child ended before it answered.
    """
    with _only_one(placement):
        _down(placement).unlink(missing_ok=True)
        stop_ui(placement)
        port = _choose_port(port)
        ensure_dagster_home(placement)
        close_orphaned_runs(placement)
        mlflow, commands = _commands(placement, port)
        try:
            children = {name: _spawn(placement, name, arguments) for name, arguments in commands.items()}
            running = Ui(f"http://{HOST}:{port}", port, mlflow, children, commands)
            _wait_until_up(placement, running)
            yield running
        finally:
            stop_ui(placement)


def serve(placement: Placement, running: Ui, tell: Callable[[str], None] = print) -> None:
    """Start again what ends of the UI, until Ctrl-C.

    Args:
        tell: told of each restart, in words.
    Raises:
        ServiceError: a child ended again and again, or somebody called `down`; KeyboardInterrupt: somebody had enough.
    """
    ends: deque[float] = deque(maxlen=RESTARTS)
    while True:
        for name, child in running.children.items():
            if child.poll() is None:
                continue
            if _down(placement).is_file():
                raise ServiceError("the UI was ended by `make down`; start it again with `make ui`")
            if len(ends) == RESTARTS and time.monotonic() - ends[0] < RESTARTS_WITHIN:
                _check(placement, running)
            ends.append(time.monotonic())
            tell(
                f"the UI's {name} ended with status {child.returncode} and is started again; runs are not touched by that"
            )
            running.children[name] = _spawn(placement, name, running.commands[name])
        time.sleep(0.5)


def stop_ui(placement: Placement) -> list[str]:
    """End the UI's processes of this root, whoever started them; returns a line for each."""
    return end_all(lambda: marked(mark("ui", placement.folder)), POLITE_SECONDS, END_DEADLINE)


def end_ui(placement: Placement) -> list[str]:
    """As `stop_ui`, for good: a process that serves the UI ends too, instead of starting its children again."""
    placement.folder.mkdir(parents=True, exist_ok=True)
    _down(placement).touch()
    return stop_ui(placement)


def _down(placement: Placement) -> Path:
    """A file whose existence tells whoever serves the UI that it is to end."""
    return placement.folder / "ui.down"


def stop_workers(placement: Placement) -> list[str]:
    """End the processes that execute Dagster runs, whose runs count as terminated by a person; a line for each."""
    if not marked(mark(PART, placement.folder)):
        return []
    from dagster import DagsterInstance, RunsFilter
    from dagster._core.storage.dagster_run import IN_PROGRESS_RUN_STATUSES

    from furlong.resources.run_launcher import worker_of

    with DagsterInstance.from_config(str(placement.folder / "dagster")) as instance:
        for run in instance.get_runs(RunsFilter(statuses=IN_PROGRESS_RUN_STATUSES)):
            if worker_of(run):
                instance.report_run_canceling(run)
        ended = end_workers(placement.folder, POLITE_SECONDS, END_DEADLINE)
    close_orphaned_runs(placement)
    return ended


@contextmanager
def _only_one(placement: Placement) -> Iterator[None]:
    path = placement.folder / "ui.lock"
    try:
        with exclusive(path, FREE_AFTER, f"the UI of {placement.folder} runs already, kept", "`make down` ends it"):
            yield
    except LockHeld as err:
        raise ServiceError(str(err)) from err


def _commands(placement: Placement, port: int) -> tuple[str, dict[str, list[str]]]:
    """The address of MLflow's pages, or nothing, and the arguments of each child by its name."""
    common = ["-w", str(WORKSPACE), "--log-level", "warning"]
    commands = {
        "webserver": ["-m", "dagster_webserver", "-h", HOST, "-p", str(port), *common],
        "daemon": ["-m", "dagster._daemon", "run", *common],
    }
    uri = placement.mlflow_uri()
    if uri.startswith("http"):
        return uri, commands
    if not _is_free(MLFLOW_PORT):
        return "", commands
    address = ["--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1"]
    commands["mlflow"] = ["-m", "mlflow", "ui", "--backend-store-uri", uri, *address]
    return f"http://{HOST}:{MLFLOW_PORT}", commands


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def _choose_port(asked: int | None) -> int:
    for port in [asked] if asked else [USUAL_PORT, 0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise ServiceError(f"port {asked} is in use; give another --port, or none to have a free one chosen")


def _spawn(placement: Placement, name: str, arguments: list[str]) -> subprocess.Popen:
    path = _log(placement, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | mark("ui", placement.folder) | {"FURLONG_ROOT": str(placement.folder)}
    with open(path, "ab") as log:
        # A session of its own: Ctrl-C in the terminal is for us, and we end the children in good order.
        return subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env=environment | _QUIET | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip


def _wait_until_up(placement: Placement, running: Ui) -> None:
    until = time.monotonic() + placement.start_deadline
    while time.monotonic() < until:
        _check(placement, running)
        try:
            with urllib.request.urlopen(f"{running.url}/server_info", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise ServiceError(
        f"the UI did not answer within {placement.start_deadline:g} s; raise FURLONG_START_DEADLINE. Last lines of "
        f"{_log(placement, 'webserver')}:\n{last_lines(_log(placement, 'webserver'), 15)}"
    )


def _check(placement: Placement, running: Ui) -> None:
    for name, child in running.children.items():
        if child.poll() is not None:
            path = _log(placement, name)
            raise ServiceError(
                f"the UI's {name} ended with status {child.returncode}; correct what it says, and start again. Last "
                f"lines of {path}:\n{last_lines(path, 15)}"
            )


def _log(placement: Placement, name: str) -> Path:
    return placement.folder / "logs" / f"{name}.log"
