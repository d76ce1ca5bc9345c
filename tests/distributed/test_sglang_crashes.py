"""Processes around a real SGLang server are killed, are slow, or do not start; nothing is left over and all is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from distributed.sglang_samples import ask, descendants, error_of, in_thread, make_folder

from furlong.ops.policy.architecture import read_architecture
from furlong.resources.engines.sglang import SGLangEngine
from furlong.resources.engines.sglang_server import PYTHON_VARIABLE, SGLangServer
from furlong.resources.engines.step_gate import EngineError

CHILD = """
import sys, torch
from distributed.sglang_samples import changed, deltas, weights
from furlong.ops.weights.digest import manifest, weights_digest
from furlong.ops.policy.architecture import read_architecture
from furlong.resources.engines.sglang import SGLangEngine
folder = sys.argv[1]
engine = SGLangEngine(folder, 4, "bfloat16", 1, (60,), push="disk")
old = weights(folder)
new = changed(old, "lm_head.weight", "model.layers.1.self_attn.q_norm.weight", "model.layers.0.mlp.up_proj.weight")
engine.stage(5, 4, deltas(5, 4, old, new), 1)
engine.activate(5, 1)
assert engine.attest().tensors == {row["name"]: row["digest"] for row in manifest(new)}
print(engine.attest().version, engine._server.pid, engine._scratch, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module", autouse=True)
def child(tmp_path_factory) -> Iterator[subprocess.Popen]:
    """Another process with an engine: Qwen3 in bfloat16, with a head of its own. Starts beside the tests of this one."""
    path = make_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", torch.bfloat16)
    tests = str(Path(__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": tests},
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate(timeout=30)


@pytest.mark.slow
def test_a_killed_server_is_noticed_at_once(folder):
    engine = SGLangEngine(folder, 0, "float32", 1, (60,))
    try:
        processes = descendants(engine._server.pid)
        server = engine._server.pid
        thread, failed = in_thread(lambda: error_of(lambda: engine.generate(ask(12, 900))))
        time.sleep(0.3)
        scheduler = next(p for p in processes if "scheduler" in " ".join(p.cmdline()))
        scheduler.kill()
        began = time.monotonic()
        thread.join(20)
        assert time.monotonic() - began < 10
        assert "SGLang server" in str(failed[0])
        for call in (engine.attest, engine.health, lambda: engine.generate(ask())):
            with pytest.raises(EngineError, match="SGLang server"):
                call()
        assert not psutil.wait_procs([p for p in processes if p.pid != server], timeout=10)[1]
    finally:
        engine.close()
    assert not psutil.pid_exists(server)


@pytest.mark.slow
def test_a_killed_engine_takes_its_server_along(child):
    version, pid, scratch = child.stdout.readline().split()
    assert version == "5"
    processes = descendants(int(pid))
    assert len(processes) > 3
    child.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs(processes, timeout=10)[1]
    assert not Path(scratch).exists()


def test_a_server_that_cannot_start_says_why(folder, monkeypatch):
    """This interpreter has no SGLang."""
    monkeypatch.setenv(PYTHON_VARIABLE, sys.executable)
    with pytest.raises(EngineError, match=r"(?s)ended while it started.*No module named"):
        SGLangEngine(folder, 0, "float32", 1, (60,))


def test_a_server_that_is_too_slow_to_start_is_ended(folder, tmp_path):
    server = SGLangServer(folder, read_architecture(folder), 0, "float32", 1, tmp_path)
    with pytest.raises(EngineError, match="did not answer within 0"):
        server.wait(0.5)
    assert not psutil.pid_exists(server.pid)


def test_without_sglang_it_says_how_to_get_it(folder, monkeypatch, tmp_path):
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "python"))
    with pytest.raises(EngineError, match="make sglang"):
        SGLangEngine(folder, 0, "float32", 1, (60,))
