"""An endpoint on a port of this machine, served by a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Any

from furlong.resources.serving.endpoint import Endpoint

STOP_DEADLINE = 10.0
"""Seconds that requests under way have when the server stops."""


class ServerError(RuntimeError):
    """The server did not come up; the message says why."""


class Server:
    """Bound to 127.0.0.1 only: whoever can reach the port can talk to the policy."""

    def __init__(self, endpoint: Endpoint, port: int = 0, start_deadline: float = 30.0):
        """Serve, and set `endpoint.address`; returns once requests are answered.

        Args:
            port: 0 for any free one.
            start_deadline: seconds until then.
        Raises:
            ServerError: the port is taken, or the deadline has passed.
        """
        import uvicorn

        from furlong.resources.serving.app import make_app

        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(("127.0.0.1", port))
        except OSError as err:
            self._socket.close()
            raise ServerError(f"port {port} cannot be used ({err}); free it, or use port 0") from err
        config = uvicorn.Config(
            make_app(endpoint), log_level="warning", access_log=False, timeout_graceful_shutdown=int(STOP_DEADLINE)
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="endpoint", daemon=True
        )
        self._thread.start()
        until = time.monotonic() + start_deadline
        while not self._server.started:
            if time.monotonic() > until or not self._thread.is_alive():
                self.stop()
                raise ServerError(f"the endpoint did not start within {start_deadline:g} s; see the log above")
            time.sleep(0.01)
        endpoint.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def stop(self) -> None:
        """End the server; requests under way have a while to finish. Harmless when repeated."""
        self._server.should_exit = True
        self._thread.join(STOP_DEADLINE)
        if self._thread.is_alive():
            self._server.force_exit = True
            self._thread.join(STOP_DEADLINE)
        with contextlib.suppress(OSError):
            self._socket.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()
