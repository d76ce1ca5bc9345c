"""Who may ask an endpoint: bearers of its key for anything, bearers of a session's key for that session alone.

An agent is a program like any other on this machine: with a key of its own it cannot speak in another's session.
"""

from __future__ import annotations

import hmac
import secrets

from furlong.resources.serving.errors import ApiError


class Keys:
    """The keys of one endpoint."""

    def __init__(self, master: str = "") -> None:
        """
        Args:
            master: the key for everything; a random one when empty.
        """
        self.master = master or secrets.token_urlsafe(32)

    def of(self, trajectory_id: str) -> str:
        """The key of a session: HMAC-SHA256 of its name under the master key."""
        return hmac.new(self.master.encode(), trajectory_id.encode(), "sha256").hexdigest()

    def check(self, header: str | None, trajectory_id: str | None) -> None:
        """Let a request pass, or raise ApiError 401.

        Args:
            header: its Authorization.
            trajectory_id: of the session it is for; None for a request without one.
        """
        scheme, _, key = (header or "").partition(" ")
        known = [self.master] + ([self.of(trajectory_id)] if trajectory_id is not None else [])
        # All are compared, and in constant time: how long an answer takes must not tell of a key.
        fits = [hmac.compare_digest(key.strip().encode(), one.encode()) for one in known]
        if scheme.lower() != "bearer" or not any(fits):
            raise ApiError(
                401,
                "the API key is missing, or not that of this endpoint or session; send it as Authorization: Bearer, in "
                "OpenAI's clients api_key: an agent has it in OPENAI_API_KEY, `furlong serve` prints it",
                code="invalid_api_key",
            )
