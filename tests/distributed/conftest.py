"""One head for all tests of this folder, under a root of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from furlong.ops.spec import Placement
from furlong.resources.cluster import stop_cluster
from furlong.resources.ray_head import ray_processes


@pytest.fixture(scope="session", autouse=True)
def samples_importable() -> Iterator[None]:
    """Actors import `actor_samples` by name, so the heads started from here have to find it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def placement(tmp_path_factory: pytest.TempPathFactory, samples_importable: None) -> Iterator[Placement]:
    made = Placement(root=str(tmp_path_factory.mktemp("shared")), threads=1, start_deadline=120.0, stage_deadline=60.0)
    yield made
    stop_cluster(made)
    assert ray_processes(made.folder) == []


@pytest.fixture(scope="session")
def drive(samples_importable: None) -> Callable[..., subprocess.Popen]:
    """Start another driver process that runs some code, with `placement` of a root defined."""

    def start(root: Path, code: str, **environment: str) -> subprocess.Popen:
        head = (
            "from furlong.ops.spec import Placement\n"
            f"placement = Placement(root={str(root)!r}, threads=1, start_deadline=120.0, stage_deadline=60.0)\n"
        )
        return subprocess.Popen(
            [sys.executable, "-c", head + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=os.environ | environment,
        )  # fmt: skip

    return start


def result(process: subprocess.Popen) -> str:
    """Wait for a driver that has to succeed; its output."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out.strip()
