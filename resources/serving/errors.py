"""What a client is told when it gets no reply, in the form that OpenAI clients understand."""

from __future__ import annotations

from typing import Any

KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    422: "unprocessable_entity_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRIED = frozenset({429, 503})
"""Where asking again in a while may help; clients are told not to try it elsewhere."""


class ApiError(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        retried = self.status in RETRIED
        return {"x-should-retry": str(retried).lower(), **({"retry-after": "1"} if retried else {})}
