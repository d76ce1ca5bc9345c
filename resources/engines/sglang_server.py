"""A real SGLang server as a child process: started within a deadline, asked over HTTP, ended with its owner."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from furlong.resources.engines.step_gate import EngineError
from furlong.resources.processes import last_lines

ROOT = Path(__file__).resolve().parents[2]
PYTHON_VARIABLE = "FURLONG_SGLANG_PYTHON"
"""Environment variable with the interpreter that has SGLang; without it, `make sglang`'s."""
START_DEADLINE = 300.0
"""Seconds until a server must answer; a tiny model takes about 25 on a free machine."""
END_DEADLINE = 10.0
MAX_TOKENS = 8192
"""Token positions in the server's cache, prompt and replies of all running requests together."""
MAX_RUNNING = 8
"""Requests decoded at once."""
SHOWN_LINES = 15
_CPU_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--disable-overlap-schedule"),
    *("--skip-tokenizer-init", "--skip-server-warmup", "--random-seed", "0"),
)


def python() -> str:
    """The interpreter that has SGLang installed; EngineError when there is none."""
    path = Path(os.environ.get(PYTHON_VARIABLE) or ROOT / ".venv-sglang/bin/python")
    if not path.exists():
        raise EngineError(f"there is no {path}: SGLang is not installed; run `make sglang`, or set {PYTHON_VARIABLE}")
    return str(path)


class SGLangServer:
    """One server on a free local port. Methods may be called by several threads at once."""

    def __init__(self, folder: str, version: int, dtype: str, threads: int, scratch: Path):
        """Begin to start; `wait` for it before anything else.

        Args:
            folder: a model in Hugging Face layout.
            version: its weights version.
            dtype: `bfloat16` or `float32`.
            threads: of PyTorch in the process that computes.
            scratch: folder for its log; goes with the engine's process.
        """
        self.log = scratch / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        interpreter = python()
        command = [
            *(interpreter, str(Path(__file__).with_name("sglang_guard.py")), str(os.getpid()), str(scratch)),
            *(interpreter, "-m", "sglang.launch_server", "--model-path", folder, *_CPU_FLAGS, "--dtype", dtype),
            *("--max-total-tokens", str(MAX_TOKENS), "--max-running-requests", str(MAX_RUNNING)),
            *("--weight-version", str(version), "--host", "127.0.0.1", "--port", str(self._port)),
        ]
        # Without PYTHONPATH of the caller: it may lead to packages of another environment.
        environment = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(Path(__file__).with_name("sglang_shim")),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            # Else /health draws a token, which a paused server does not.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        with open(self.log, "wb") as output:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """The process above all those of the server."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, deadline: float = START_DEADLINE) -> None:
        """Return once the server answers; EngineError when it ended or the deadline passed, and then it is ended."""
        end = time.monotonic() + deadline
        while not self.ended and time.monotonic() < end:
            try:
                if self._exchange("GET", "/health", None, 5.0)[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass  # it does not listen yet
            time.sleep(0.25)
        ended = self.ended
        self.close()
        what = "ended while it started" if ended else f"did not answer within {deadline:.0f} s"
        raise EngineError(f"the SGLang server {what}; its last lines:\n{last_lines(self.log, SHOWN_LINES)}")

    def get(self, path: str, deadline: float) -> Any:
        return self._ask("GET", path, None, deadline)

    def post(self, path: str, body: dict[str, Any], deadline: float) -> Any:
        """The answer's JSON (None when it is empty).

        Raises:
            EngineError: the server ended, did not answer within `deadline` seconds, or refused.
        """
        return self._ask("POST", path, json.dumps(body).encode(), deadline)

    def close(self) -> None:
        """End the server with all its processes; harmless when it has ended."""
        if not self.ended:
            self._process.terminate()
        try:
            self._process.wait(END_DEADLINE)
        except subprocess.TimeoutExpired:
            # The kernel ends the server with it.
            self._process.kill()
            self._process.wait(END_DEADLINE)

    def _ask(self, method: str, path: str, body: bytes | None, deadline: float) -> Any:
        try:
            status, content = self._exchange(method, path, body, deadline)
        except (OSError, http.client.HTTPException) as err:
            raise EngineError(self._lost(path, err)) from err
        if status != 200:
            raise EngineError(
                f"the SGLang server refused {path} with status {status}: {content[:500].decode(errors='replace')}; "
                f"see {self.log}"
            )
        return json.loads(content) if content[:1] in (b"{", b"[") else None

    def _exchange(self, method: str, path: str, body: bytes | None, deadline: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=deadline)
        end = time.monotonic() + deadline
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            # Looked at twice a second, because a server whose processes are being killed may leave the socket open.
            while not select.select([connection.sock], [], [], 0.5)[0]:
                if self.ended:
                    raise EngineError(self._lost(path))
                if time.monotonic() > end:
                    raise EngineError(
                        f"the SGLang server did not answer {path} within {deadline:g} s; see {self.log}, or allow more"
                    )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _lost(self, path: str, err: Exception | None = None) -> str:
        try:
            # A connection breaks before the processes are gone.
            self._process.wait(1.0)
            state = "has ended"
        except subprocess.TimeoutExpired:
            state = "broke the connection"
        return (
            f"the SGLang server {state} during {path}{f' ({err})' if err else ''}; start the engine again. Its last "
            f"lines:\n{last_lines(self.log, SHOWN_LINES)}"
        )
