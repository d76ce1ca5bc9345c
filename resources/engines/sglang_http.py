"""HTTP to one SGLang server: connections that are kept, and no call without a deadline."""

from __future__ import annotations

import http.client
import json
import select
import threading
import time
from typing import Any

from furlong.resources.engines.step_gate import EngineError

CONTROL_DEADLINE = 60.0
"""Seconds for a call that the server's scheduler answers between two steps."""
KEPT_SECONDS = 2.0
"""An idle connection is used again for this long; the server closes it after five."""
LOOK_SECONDS = 0.5
_HEADERS = {"Content-Type": "application/json"}


class ServerLost(EngineError):
    """The server ended, broke the connection or did not answer in time; whether it has acted is not known."""


class ServerClient:
    """Methods may be called by several threads at once, each of which gets a connection of its own."""

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port
        self.local = host in ("127.0.0.1", "localhost", "::1")
        """Whether it runs on this machine."""
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []

    @property
    def ended(self) -> bool:
        """Whether it is known to have ended; never of a server that runs elsewhere."""
        return False

    @property
    def resident_bytes(self) -> int:
        """Memory of its processes, 0 when they are out of sight."""
        return 0

    def get(self, path: str, deadline: float) -> Any:
        return self._ask("GET", path, None, deadline)

    def post(self, path: str, body: dict[str, Any], deadline: float) -> Any:
        """The answer's JSON (None when it is empty).

        Raises:
            ServerLost: the server ended or did not answer within `deadline` seconds.
            EngineError: it refused.
        """
        return self._ask("POST", path, json.dumps(body).encode(), deadline)

    def answers(self, deadline: float) -> bool:
        """Whether it takes requests now; False also when it refuses or is not there."""
        try:
            return not self.ended and self._exchange("GET", "/health", None, deadline)[0] == 200
        except (OSError, http.client.HTTPException, EngineError):
            return False

    def close(self) -> None:
        """Give the connections back."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection, _ in idle:
            connection.close()

    def _ask(self, method: str, path: str, body: bytes | None, deadline: float) -> Any:
        try:
            status, content = self._exchange(method, path, body, deadline)
        except (OSError, http.client.HTTPException) as err:
            raise ServerLost(self._lost(path, err)) from err
        if status != 200:
            raise EngineError(
                f"the SGLang server refused {path} with status {status}: {content[:500].decode(errors='replace')}; "
                f"{self._where()}"
            )
        return json.loads(content) if content[:1] in (b"{", b"[") else None

    def _exchange(self, method: str, path: str, body: bytes | None, deadline: float) -> tuple[int, bytes]:
        connection = self._connection(deadline)
        end = time.monotonic() + deadline
        try:
            connection.request(method, path, body, _HEADERS)
            # Looked at twice a second, because a server whose processes are being killed may leave the socket open.
            while not select.select([connection.sock], [], [], LOOK_SECONDS)[0]:
                if self.ended:
                    raise ServerLost(self._lost(path))
                if time.monotonic() > end:
                    raise ServerLost(
                        f"the SGLang server did not answer {path} within {deadline:g} s; {self._where()}, or allow more"
                    )
            answer = connection.getresponse()
            found = answer.status, answer.read()
        except BaseException:
            connection.close()
            raise
        if answer.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append((connection, time.monotonic()))
        return found

    def _connection(self, deadline: float) -> http.client.HTTPConnection:
        with self._lock:
            while self._idle:
                connection, used = self._idle.pop()
                # One that can be read from before it was asked anything has been closed by the server.
                if time.monotonic() - used < KEPT_SECONDS and not select.select([connection.sock], [], [], 0)[0]:
                    connection.sock.settimeout(deadline)
                    return connection
                connection.close()
        return http.client.HTTPConnection(self._host, self._port, timeout=deadline)

    def _where(self) -> str:
        return f"see the log of {self._host}:{self._port}"

    def _lost(self, path: str, err: Exception | None = None) -> str:
        return (
            f"the SGLang server at {self._host}:{self._port} broke the connection during {path}"
            f"{f' ({err})' if err else ''}; see whether it still runs, and start the engine again"
        )
