"""Real SGLang servers: one that is a child process, started within a deadline and ended with its owner, or one that
somebody else started."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.checkpoint import DTYPES
from furlong.resources.engines import sglang_capacity
from furlong.resources.engines.sglang_draft import refused
from furlong.resources.engines.sglang_http import ServerClient
from furlong.resources.engines.step_gate import EngineError
from furlong.resources.processes import last_lines

ROOT = Path(__file__).resolve().parents[2]
SHIM = Path(__file__).with_name("sglang_shim")
PYTHON_VARIABLE = "FURLONG_SGLANG_PYTHON"
"""Environment variable with the interpreter that has SGLang; without it, `make sglang`'s."""
VERSION = "0.5.23"
"""What the client was written for."""
START_DEADLINE = 300.0
"""Seconds until a server must answer; a tiny model takes about 25 on a free machine."""
END_DEADLINE = 10.0
ANSWER_DEADLINE = 10.0
"""Seconds for what a server answers without waiting for a decode step."""
SHOWN_LINES, LOOKED_AT_LINES = 15, 500
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


class SGLangServer(ServerClient):
    """One server on a free local port. Methods may be called by several threads at once."""

    def __init__(
        self, folder: str, architecture: Architecture, version: int, dtype: str, threads: int, scratch: Path,
        extra: Sequence[str] = (),
    ):  # fmt: skip
        """Begin to start; `wait` for it before anything else.

        Args:
            folder: a model in Hugging Face layout, of this architecture.
            version: its weights version.
            dtype: `bfloat16` or `float32`.
            threads: of PyTorch in the process that computes.
            scratch: folder for its log; goes with the engine's process.
            extra: more arguments of `sglang.launch_server`.
        """
        self.log = scratch / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        super().__init__("127.0.0.1", port)
        self._architecture = architecture
        free = psutil.virtual_memory().available
        self.capacity = sglang_capacity.choose(architecture, DTYPES[dtype].itemsize, free)
        interpreter = python()
        command = [
            *(interpreter, str(Path(__file__).with_name("sglang_guard.py")), str(os.getpid()), str(scratch)),
            *(interpreter, "-m", "sglang.launch_server", "--model-path", folder, *_CPU_FLAGS, "--dtype", dtype),
            *("--max-total-tokens", str(self.capacity.tokens), "--max-running-requests", str(self.capacity.running)),
            *("--context-length", str(architecture.context + sglang_capacity.SPARE)),
            *("--weight-version", str(version), "--host", "127.0.0.1", "--port", str(port)),
            *(["--enable-return-routed-experts"] if architecture.experts else []),
            *extra,
        ]
        # Without PYTHONPATH of the caller: it may lead to packages of another environment.
        environment = os.environ | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(SHIM),
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            # Else /health draws a token, which a paused server does not.
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            # For the positions it keeps to itself, which are never computed.
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
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

    @property
    def resident_bytes(self) -> int:
        try:
            return sum(p.memory_info().rss for p in psutil.Process(self.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return 0

    def wait(self, deadline: float = START_DEADLINE) -> None:
        """Return once the server answers; EngineError when it ended or the deadline passed, and then it is ended."""
        end = time.monotonic() + deadline
        while not self.ended and time.monotonic() < end:
            if self.answers(5.0):
                # It takes less room than asked for where it finds too little memory.
                room = sglang_capacity.read(self._architecture, self.get("/server_info", ANSWER_DEADLINE))
                self.capacity = min(self.capacity, room, key=lambda capacity: capacity.tokens)
                return
            time.sleep(0.25)
        ended = self.ended
        self.close()
        what = "ended while it started" if ended else f"did not answer within {deadline:.0f} s"
        # What it could not do stands above the lines in which its processes end each other.
        why = refused(last_lines(self.log, LOOKED_AT_LINES))
        raise EngineError(f"the SGLang server {what}. {why}Its last lines:\n{last_lines(self.log, SHOWN_LINES)}")

    def close(self) -> None:
        """End the server with all its processes; harmless when it has ended."""
        super().close()
        if not self.ended:
            self._process.terminate()
        try:
            self._process.wait(END_DEADLINE)
        except subprocess.TimeoutExpired:
            # The kernel ends the server with it.
            self._process.kill()
            self._process.wait(END_DEADLINE)

    def _where(self) -> str:
        return f"see {self.log}"

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


class OtherServer(ServerClient):
    """A server that somebody else started and will end."""

    def __init__(self, url: str, architecture: Architecture, dtype: str):
        """
        Args:
            url: `http://host:port`.
            architecture: of the model it must serve.
            dtype: in which it must compute.
        Raises:
            EngineError: it does not answer, or is not the server that is needed; the message says how to start it.
        """
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname or not parts.port or parts.path.strip("/"):
            raise EngineError(f"{url!r} is not the address of a server; give http://host:port")
        super().__init__(parts.hostname, parts.port)
        info = self.get("/server_info", ANSWER_DEADLINE)
        model = self.get("/model_info", ANSWER_DEADLINE)
        self._check(url, info, model, architecture, dtype)
        self.weight_version = str(model.get("weight_version"))
        self.capacity = sglang_capacity.read(architecture, info)

    def _check(self, url: str, info: dict, model: dict, architecture: Architecture, dtype: str) -> None:
        wanted = {
            "version": (info.get("version"), VERSION),
            "model_type": (model.get("model_type"), architecture.kind),
            "dtype": (str(info.get("dtype")).removeprefix("torch."), dtype),
            "skip_tokenizer_init": (info.get("skip_tokenizer_init"), True),
            "tp_size": (info.get("tp_size"), 1),
            "dp_size": (info.get("dp_size"), 1),
            "speculative_algorithm": (info.get("speculative_algorithm"), None),
        }
        if architecture.experts:
            wanted["enable_return_routed_experts"] = (info.get("enable_return_routed_experts"), True)
        for name, (found, needed) in wanted.items():
            if found != needed:
                raise EngineError(
                    f"the SGLang server at {url} has {name}={found!r}, needed is {needed!r}; start it with PYTHONPATH="
                    f"{SHIM} and {' '.join(_CPU_FLAGS)} --dtype {dtype}"
                    f"{' --enable-return-routed-experts' if architecture.experts else ''}"
                )
