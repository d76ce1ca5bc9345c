"""Our own Ray head on this machine: where it keeps its things, how it starts, how it is ended.

It runs in a session of its own so that it outlives whoever started it, listens on the loopback address only, and wants
the token in `<root>/ray/token`. Its state is in `<root>/ray/head.json`, its output in `<root>/ray/head.log`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from furlong.resources.processes import end_all, last_lines, mark, marked, renamed_with_files_in, root_hash, running

HOST = "127.0.0.1"
LOGICAL_CPUS = 64
"""More than there are: each actor asks for one, and how many threads it uses is the placement's business."""
OBJECT_STORE_BYTES = 1 << 30
"""Holds the largest message, a step's weight deltas, several times over."""
LONGEST_TEMP_DIR = 38
"""A socket's path may have 107 bytes, of which Ray adds up to 69 below its temporary folder."""
ATTEMPTS = 3
"""Ports tried before giving up; between choosing a free port and binding it another process may take it."""
END_DEADLINE = 30.0
NOT_INHERITED = (
    "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_gcs_server_port_wait_time_s",
)  # fmt: skip
"""A driver's settings that would mean something else to a head."""


class ClusterError(RuntimeError):
    """Ray cannot be started or reached; the message says what to set."""


@dataclass(frozen=True)
class Head:
    """A head that was started and, when last looked at, ran."""

    pid: int
    address: str
    """host:port of the cluster."""
    started_at: float
    """Seconds since the epoch."""


def token_file(root: Path) -> Path:
    """The project's own token, made on first use and readable by its owner alone."""
    path = root / "ray" / "token"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"token.{os.getpid()}")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        part.replace(path)
    return path


def authentication(root: Path) -> dict[str, str]:
    """Environment by which head, workers and drivers know each other."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file(root)),
        # The loopback address for everything; despite its name this acts on every system, and it has to be the same in
        # head and drivers, or each resolves 127.0.0.1 to another of the machine's addresses.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def running_head(root: Path) -> Head | None:
    """The head of this root if its process lives; a killed one, or one from before a reboot, is no head."""
    path = root / "ray" / "head.json"
    if not path.is_file():
        return None
    head = Head(**json.loads(path.read_text()))
    return head if running(head.pid, mark("ray", root)) else None


def start_head(root: Path, until: float, ports: Iterator[int] | None = None) -> Head:
    """Start a head after clearing away what an earlier one left; the caller holds the lock.

    Args:
        root: the placement's folder.
        until: `time.monotonic()` by which it must be up.
        ports: ports to try; by default free ones.
    Raises:
        ClusterError: it did not come up, with the last lines of its log.
    """
    (root / "ray").mkdir(parents=True, exist_ok=True)
    stop_head(root)
    temporary = _temporary_folder(root)
    for port in ports or (_free_port() for _ in range(ATTEMPTS)):
        if head := _launch(root, temporary, f"{HOST}:{port}", until):
            _write_state(root, head)
            return head
        stop_head(root)
    log = root / "ray" / "head.log"
    raise ClusterError(
        f"Ray did not start on this machine; raise FURLONG_START_DEADLINE if it was only slow, or start Ray yourself "
        f"and set FURLONG_RAY_ADDRESS=host:port. More is in {temporary}/session_latest/logs. Last lines of {log}:\n"
        f"{last_lines(log, 15)}"
    )


def stop_head(root: Path) -> list[str]:
    """End all Ray processes of this root, wait until they are gone, and forget the head; returns a line for each."""
    # At once, since nothing is lost: whatever is worth keeping is committed, and agents outlive a polite request.
    ended = end_all(lambda: ray_processes(root), 0.0, END_DEADLINE)
    (root / "ray" / "head.json").unlink(missing_ok=True)
    return ended


def ray_processes(root: Path) -> list[psutil.Process]:
    """All Ray processes of this root, orphaned ones too."""
    found = [*marked(mark("ray", root)), *renamed_with_files_in(_home(root) / "t", "ray::")]
    return list({process.pid: process for process in found}.values())


def clear_head(root: Path) -> None:
    """Remove the sockets and logs that a stopped head left in its temporary folder."""
    shutil.rmtree(_home(root) / "t", ignore_errors=True)
    if _home(root) != root / "ray":
        shutil.rmtree(_home(root), ignore_errors=True)


def _launch(root: Path, temporary: Path, address: str, until: float) -> Head | None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
        "--port", address.rsplit(":", 1)[1], "--node-ip-address", HOST, "--temp-dir", str(temporary),
        "--include-dashboard", "false", "--include-log-monitor", "false", "--no-monitor",
        "--dashboard-agent-listen-port", "0", "--num-cpus", str(LOGICAL_CPUS),
        "--object-store-memory", str(OBJECT_STORE_BYTES),
    ]  # fmt: skip
    inherited = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
    settings = {
        "RAY_START_HOOK": "furlong.resources.ray_hook.trim",
        # Actors get processes of their own; spare ones would hold 80 MB each for nothing.
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "PYTHONUNBUFFERED": "1",
    }
    with open(root / "ray" / "head.log", "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=root,
            env=inherited | settings | authentication(root) | mark("ray", root),
        )  # fmt: skip
    # Ray writes this file when the whole node is up; the port alone answers seconds before actors can start.
    ready = temporary / "ray_current_cluster"
    while process.poll() is None and time.monotonic() < until and not _lost_server(process.pid):
        if ready.is_file() and ready.read_text() == address:
            return Head(process.pid, address, time.time())
        time.sleep(0.05)
    return None


def _lost_server(head: int) -> bool:
    """True when the cluster's server has ended, e.g. for want of its port; `ray start` would wait 40 s for it."""
    try:
        children = psutil.Process(head).children()
        return any(c.name() == "gcs_server" and c.status() == psutil.STATUS_ZOMBIE for c in children)
    except psutil.NoSuchProcess:
        return True


def _write_state(root: Path, head: Head) -> None:
    part = root / "ray" / f"head.json.{os.getpid()}"
    part.write_text(json.dumps(asdict(head)))
    part.replace(root / "ray" / "head.json")


def _home(root: Path) -> Path:
    """Where Ray's temporary folder `t` is: below the root when that is short enough for sockets, else in /tmp.

    Not in TMPDIR, which may differ between the process that starts the head and the one that ends it.
    """
    near = root / "ray"
    if len(os.fsencode(near / "t")) <= LONGEST_TEMP_DIR:
        return near
    return Path("/tmp") / f"furlong-{os.getuid()}-{root_hash(root)}"


def _temporary_folder(root: Path) -> Path:
    home = _home(root)
    home.mkdir(parents=True, exist_ok=True)
    if home.stat().st_uid != os.getuid():
        raise ClusterError(f"{home} belongs to another user, and Ray needs it; remove it or set a shorter FURLONG_ROOT")
    # Ray opens its folder to everybody, so the one above it keeps them out.
    home.chmod(0o700)
    return home / "t"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]
