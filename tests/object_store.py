"""An S3-compatible server on this machine, for tests: moto, in a process of its own."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DEADLINE = 60.0


@contextmanager
def object_store(log: Path) -> Iterator[dict[str, str]]:
    """What to set in the environment of a process so that s3://lake is a bucket of this server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with open(log, "wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=out, stderr=out
        )
    env = {
        "AWS_ACCESS_KEY_ID": "furlong", "AWS_SECRET_ACCESS_KEY": "a-secret-that-no-file-may-hold", "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": address, "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    try:
        _await(address, server, log)
        subprocess.run(
            [sys.executable, "-c", "import boto3; boto3.client('s3').create_bucket(Bucket='lake')"],
            env=os.environ | env, check=True, timeout=DEADLINE,
        )  # fmt: skip
        yield env
    finally:
        server.kill()
        server.wait()


def _await(address: str, server: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/moto-api/", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"no answer from the object store: {log.read_text()[-2000:]}")
