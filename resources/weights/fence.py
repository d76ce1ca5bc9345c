"""Remembers the newest publisher an engine has heard of, and refuses older ones."""

from __future__ import annotations

import threading

from furlong.ops.protocols import StaleFence


class FenceGuard:
    """The highest fencing token seen; safe for several threads."""

    def __init__(self) -> None:
        self._highest = 0
        self._checking = threading.Lock()

    @property
    def highest(self) -> int:
        """0 before the first."""
        return self._highest

    def check(self, fence: int) -> None:
        """Remember `fence`; StaleFence when a higher one came before."""
        with self._checking:
            if fence < self._highest:
                raise StaleFence(
                    f"fencing token {fence} is lower than {self._highest}, which a newer publisher of this run showed: "
                    "that one has taken over, so nothing was changed; end this publisher, or let it take a new token"
                )
            self._highest = fence
