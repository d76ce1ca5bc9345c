"""Connects this process to Ray: at the configured address, or with a head of our own that is started when needed."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

from furlong.ops.spec import Placement
from furlong.resources.processes import root_hash
from furlong.resources.ray_head import (
    ClusterError,
    Head,
    authentication,
    clear_head,
    running_head,
    start_head,
    stop_head,
)
from furlong.resources.run_lock import exclusive

ANSWER_SECONDS = 10.0
"""How long an address may take to answer before it counts as unreachable."""
DRIVER_SETTINGS = {"RAY_gcs_rpc_server_reconnect_timeout_s": "86400", "RAY_gcs_server_port_wait_time_s": "5"}
"""Ray would end a driver, without a word, 60 s after its head is gone; here the call that fails tells what happened.
And a refused token is tried again for 5 s instead of 20."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_connecting = threading.Lock()
_connected = ""


def ensure_cluster(placement: Placement) -> None:
    """Connect this process to Ray; harmless when it is connected already, and safe from several threads.

    With an empty `ray_address`, the head under `placement.folder` is used, and started first if none lives there. Ray's
    own authentication settings apply to an address given by hand.

    Raises:
        ClusterError: the address does not answer, is not Ray or refuses our token, or no head could be started within
            `placement.start_deadline`; the message says what to set.
    """
    with _connecting:
        os.environ.update(DRIVER_SETTINGS)
        if placement.ray_address:
            _connect(placement, placement.ray_address, "FURLONG_RAY_ADDRESS")
        else:
            os.environ.update(authentication(placement.folder))
            head = _shared_head(placement)
            _connect(placement, head.address, f"the head of our own (process {head.pid})")


def namespace(placement: Placement) -> str:
    """Ray namespace of this root's actors: on a shared cluster, other roots' actors are none of our business."""
    if not placement.ray_address:
        return "furlong"
    return f"furlong-{root_hash(placement.folder / socket.gethostname())}"


def stop_cluster(placement: Placement) -> list[str]:
    """End the head of this root with all its actors and agents; returns a line for each process ended.

    A cluster at `placement.ray_address` is not ours and stays. Works from any process, connected or not.
    """
    ray = sys.modules.get("ray")
    # Saying goodbye to a head that is gone already would take many seconds.
    if ray and ray.is_initialized() and not placement.ray_address and running_head(placement.folder):
        ray.shutdown()
    if not (placement.folder / "ray").is_dir():
        return []
    with _start_lock(placement):
        ended = stop_head(placement.folder)
        clear_head(placement.folder)
    return ended


def cluster_lives(placement: Placement) -> bool:
    """False when the head of our own is gone; True for a configured address, of which only Ray can tell."""
    return bool(placement.ray_address) or running_head(placement.folder) is not None


def _shared_head(placement: Placement) -> Head:
    until = time.monotonic() + placement.start_deadline
    if head := running_head(placement.folder):
        return head
    with _start_lock(placement):
        return running_head(placement.folder) or start_head(placement.folder, until)


def _start_lock(placement: Placement):
    path = placement.folder / "ray" / "lock"
    advice = "wait for it, or end it; raise FURLONG_START_DEADLINE if this machine is slow"
    return exclusive(path, placement.start_deadline, "Ray is being started or stopped", advice)


def _connect(placement: Placement, address: str, origin: str) -> None:
    global _connected
    import ray
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config

    if ray.is_initialized():
        if _connected == address and cluster_lives(placement):
            return
        ray.shutdown()
    _probe(address, origin)
    # Ray reads its settings once, at import or at the first connection, which may have been to another root's head.
    ray_constants.ENABLE_RAY_CLUSTER = not _loopback_only(address)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        ray.init(address, namespace=namespace(placement), log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as err:
        raise ClusterError(
            f"Ray at {address} ({origin}) refused the connection: {err.__cause__ or err}\nSet RAY_AUTH_MODE=token "
            f"and RAY_AUTH_TOKEN_PATH (now {os.environ.get('RAY_AUTH_TOKEN_PATH', 'not set')}) to its token's file, "
            "and use its versions of Ray and Python; for a head of our own, run `make down` and try again"
        ) from err
    _connected = address


def _loopback_only(address: str) -> bool:
    """True for a head that listens on the loopback address alone, as ours do.

    Ray by default replaces a loopback address by the machine's other one, where such a head cannot be reached.
    """
    from ray._common.network_utils import node_ip_address_from_perspective

    host, _, port = address.rpartition(":")
    if host not in LOOPBACK:
        return False
    try:
        socket.create_connection((node_ip_address_from_perspective(), int(port)), timeout=1).close()
    except OSError:
        return True
    return False


def _probe(address: str, origin: str) -> None:
    """Fail within seconds where `ray.init` would hang for minutes: on an address without a gRPC server."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise ClusterError(f"{origin}: {address!r} is not host:port; correct it, or unset it to start Ray here")
    until, problem = time.monotonic() + ANSWER_SECONDS, "nothing accepts connections"
    while time.monotonic() < until:
        try:
            socket.create_connection((host, int(port)), timeout=3).close()
            if _speaks_grpc(address, until - time.monotonic()):
                return
            problem = "something listens there, but it does not speak gRPC"
        except OSError as err:
            problem = str(err)
            time.sleep(0.3)
    raise ClusterError(
        f"no Ray answers at {address} ({origin}) within {ANSWER_SECONDS:g} s: {problem}. Start Ray there or correct "
        "the address; unset FURLONG_RAY_ADDRESS to have Ray started on this machine; `make down` ends a head that hangs"
    )


def _speaks_grpc(address: str, seconds: float) -> bool:
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/furlong/probe")(b"", timeout=max(1.0, seconds), wait_for_ready=True)
        except grpc.RpcError as err:
            # Any refusal is an answer: no server has this method, and Ray's asks for a token first.
            return err.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return True


def own_address(placement: Placement) -> str:
    """The address at which the cluster's other machines reach this one; the loopback where Ray is on this machine."""
    host = placement.ray_address.rpartition(":")[0]
    if not host:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing; it only chooses the network
        return probe.getsockname()[0]
