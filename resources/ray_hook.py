"""Runs inside `ray start` (RAY_START_HOOK) and leaves out what one machine does not need.

`ray start` has no switches for these two. The client server (for `ray://` addresses) always takes port 10001, so two
heads could not share a machine; the API server carries nothing but usage statistics once the dashboard is off, yet
takes a second to start and 120 MB to hold.
"""

from __future__ import annotations

from typing import Any


def trim(params: Any, head: bool) -> None:
    """Change the node's parameters before it starts; the signature is Ray's.

    Raises:
        AttributeError: this Ray has no such parts; use the pinned version.
    """
    from ray._private.node import Node

    if not hasattr(Node, "start_api_server") or not hasattr(params, "ray_client_server_port"):
        raise AttributeError("this version of Ray differs from the one in constraints.txt; install that one")
    params.ray_client_server_port = None
    Node.start_api_server = lambda self, **_: None
