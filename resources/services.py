"""The Dagster UI of one root as child processes, and what of a root is running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from furlong.ops.spec import Placement
from furlong.resources.dagster_home import close_orphaned_runs, ensure_dagster_home
from furlong.resources.processes import end_all, last_lines, mark, marked
from furlong.resources.tracking import MLFLOW_PORT

HOST = "127.0.0.1"
USUAL_PORT = 3000
POLITE_SECONDS = 10.0
END_DEADLINE = 30.0
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


@contextmanager
def ui(placement: Placement, port: int | None = None) -> Iterator[Ui]:
    """Dagster's web server and daemon, answering on the loopback address; both are ended on leaving.

    Args:
        placement: its `start_deadline` bounds the start.
        port: to listen on; None for the usual one or, where that is taken, any free one.
    Raises:
        ServiceError: the port is taken, the UI of this root runs already, or a child ended before it answered.
    """
    if others := marked(mark("ui", placement.folder)):
        raise ServiceError(f"the UI of {placement.folder} runs already (process {others[0].pid}); `make down` ends it")
    port = _choose_port(port)
    ensure_dagster_home(placement)
    close_orphaned_runs(placement)
    common = ["-w", str(WORKSPACE), "--log-level", "warning"]
    web = ["-m", "dagster_webserver", "-h", HOST, "-p", str(port), *common]
    try:
        children = {
            "webserver": _spawn(placement, "webserver", web),
            "daemon": _spawn(placement, "daemon", ["-m", "dagster._daemon", "run", *common]),
        }
        mlflow = _serve_mlflow(placement, children)
        running = Ui(f"http://{HOST}:{port}", port, mlflow, children)
        _wait_until_up(placement, running)
        yield running
    finally:
        stop_ui(placement)


def serve(placement: Placement, running: Ui) -> None:
    """Wait until something ends it: ServiceError when a child ends, KeyboardInterrupt on Ctrl-C."""
    while True:
        _check(placement, running)
        time.sleep(0.5)


def stop_ui(placement: Placement) -> list[str]:
    """End the UI's processes of this root, whoever started them; returns a line for each."""
    return end_all(lambda: marked(mark("ui", placement.folder)), POLITE_SECONDS, END_DEADLINE)


def _serve_mlflow(placement: Placement, children: dict[str, subprocess.Popen]) -> str:
    """Serve the runs' metrics, unless a server of their own does; the address that links use, or nothing."""
    uri = placement.mlflow_uri()
    if uri.startswith("http"):
        return uri
    if not _is_free(MLFLOW_PORT):
        return ""
    address = ["--host", HOST, "--port", str(MLFLOW_PORT), "--workers", "1"]
    children["mlflow"] = _spawn(placement, "mlflow", ["-m", "mlflow", "ui", "--backend-store-uri", uri, *address])
    return f"http://{HOST}:{MLFLOW_PORT}"


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
    with open(path, "wb") as log:
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
