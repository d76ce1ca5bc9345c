"""A head of our own: shared, replaced when dead, ended without a trace; and addresses that are no Ray."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from distributed.conftest import result

from furlong.ops.spec import Placement
from furlong.resources.cluster import ClusterError, ensure_cluster, stop_cluster
from furlong.resources.processes import mark, root_hash
from furlong.resources.ray_head import ray_processes, running_head, start_head, token_file

CONNECT = """
from furlong.resources.cluster import ensure_cluster
ensure_cluster(placement)
import ray
print(ray.get_runtime_context().gcs_address, ray.get_runtime_context().namespace)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("a-root-whose-path-is-far-too-long-for-the-sockets-of-ray")
    yield path
    stop_cluster(Placement(root=str(path)))


def heads(root: Path) -> list[int]:
    return [p.pid for p in ray_processes(root) if "ray.scripts.scripts" in p.cmdline()]


def test_two_starters_at_once_share_one_head(root: Path, drive: Callable[..., subprocess.Popen]) -> None:
    drivers = [drive(root, CONNECT) for _ in range(2)]
    first, second = (result(driver) for driver in drivers)
    assert first == second
    assert first.startswith("127.0.0.1:")
    assert first.endswith(" furlong")
    assert heads(root) == [running_head(root).pid]
    assert stat.S_IMODE(token_file(root).stat().st_mode) == 0o600


def test_head_listens_on_loopback_alone(root: Path, drive: Callable[..., subprocess.Popen]) -> None:
    result(drive(root, CONNECT))
    listening = [c.laddr.ip for p in ray_processes(root) for c in p.net_connections("inet") if c.status == "LISTEN"]
    assert listening
    assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}


def test_dead_head_is_replaced_quickly(root: Path, drive: Callable[..., subprocess.Popen]) -> None:
    before = result(drive(root, CONNECT))
    os.kill(running_head(root).pid, signal.SIGKILL)
    begin = time.monotonic()
    after = result(drive(root, CONNECT))
    assert after != before
    assert time.monotonic() - begin < 30  # a connection to a dead head alone hangs for 80 s
    assert heads(root) == [running_head(root).pid]


def test_stop_ends_ours_and_only_ours(root: Path, drive: Callable[..., subprocess.Popen]) -> None:
    result(drive(root, CONNECT))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=mark("ray", root / "other"))
    try:
        ended = stop_cluster(Placement(root=str(root)))
        assert len(ended) >= 5  # head, GCS, raylet, two agents
        assert ray_processes(root) == []
        assert running_head(root) is None
        assert not list(Path("/tmp").glob(f"furlong-*-{root_hash(root)}"))
        assert other.poll() is None
        assert stop_cluster(Placement(root=str(root))) == []
    finally:
        other.communicate(b"\n", timeout=10)


def test_orphans_of_a_dead_head_are_found_and_ended(root: Path, drive: Callable[..., subprocess.Popen]) -> None:
    result(drive(root, CONNECT))
    agents = [p for p in ray_processes(root) if p.name().startswith("ray::")]
    assert len(agents) == 2  # of the dashboard's and of runtime environments; both have renamed themselves
    for process in agents:
        process.suspend()  # as if hanging, so that they outlive the head
    os.kill(running_head(root).pid, signal.SIGKILL)
    time.sleep(0.5)
    assert running_head(root) is None
    assert {p.pid for p in agents} <= {p.pid for p in ray_processes(root)}
    stop_cluster(Placement(root=str(root)))
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in agents)


def test_port_in_use_is_tried_no_further(tmp_path: Path) -> None:
    with socket.socket() as taken, socket.socket() as probe:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        probe.bind(("127.0.0.1", 0))
        free = probe.getsockname()[1]
        probe.close()
        try:
            head = start_head(tmp_path, time.monotonic() + 120, iter([taken.getsockname()[1], free]))
            assert head.address == f"127.0.0.1:{free}"
            assert heads(tmp_path) == [head.pid]
        finally:
            stop_cluster(Placement(root=str(tmp_path)))


def test_start_that_takes_too_long_says_what_to_set_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="FURLONG_START_DEADLINE") as caught:
        ensure_cluster(Placement(root=str(tmp_path), start_deadline=0.3))
    assert "FURLONG_RAY_ADDRESS" in str(caught.value)
    assert str(tmp_path / "ray" / "head.log") in str(caught.value)
    assert ray_processes(tmp_path) == []
    stop_cluster(Placement(root=str(tmp_path)))


def test_addresses_that_are_no_ray_fail_soon_and_say_why(
    root: Path, drive: Callable[..., subprocess.Popen], tmp_path: Path
) -> None:
    """Closed port, a listener that is not Ray, and a Ray with another token; at the same time, to save some."""
    real = result(drive(root, CONNECT)).split()[0]
    (tmp_path / "token").write_text("0" * 64)
    with socket.socket() as mute, socket.socket() as closed:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        closed.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        addresses = {
            "refused": f"127.0.0.1:{closed.getsockname()[1]}",
            "does not speak gRPC": f"127.0.0.1:{mute.getsockname()[1]}",
            "RAY_AUTH_TOKEN_PATH": real,
        }
        code = (
            "import sys, time\n"
            "from furlong.resources.cluster import ClusterError, ensure_cluster\n"
            "begin = time.monotonic()\n"
            "try:\n"
            "    ensure_cluster(placement.model_copy(update={'ray_address': ADDRESS}))\n"
            "except ClusterError as err:\n"
            "    print(time.monotonic() - begin, err)\n"
        )
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
        drivers = {
            reason: drive(tmp_path, code.replace("ADDRESS", repr(address)), **token)
            for reason, address in addresses.items()
        }
        for reason, driver in drivers.items():
            seconds, _, message = result(driver).partition(" ")
            assert reason in message
            assert addresses[reason] in message
            assert float(seconds) < 30


@pytest.mark.parametrize("address", ["somewhere", "ray://host:10001", "host:", "1.2.3.4:http"])
def test_malformed_address_is_refused_at_once(tmp_path: Path, address: str) -> None:
    with pytest.raises(ClusterError, match="host:port"):
        ensure_cluster(Placement(root=str(tmp_path), ray_address=address))
