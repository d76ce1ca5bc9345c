"""Reads from the engines what a draft did for the replies of each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from furlong.ops.protocols import Engine
from furlong.ops.rollouts.acceptance import counted, since, together


class Meter:
    """Of one thread. What an engine counted between its last reading and its loss is not known to anybody."""

    def __init__(self, engines: Callable[[], Mapping[int, Engine]]):
        """
        Args:
            engines: those that were not lost, by number; a replaced one is another object.
        """
        self._engines = engines
        self._known: dict[int, tuple[Engine, dict[str, Any]]] = {}

    def begin(self) -> None:
        """What was counted until now is of no step."""
        self._known = self._read()

    def take(self) -> dict[str, Any] | None:
        """Counts since the last reading, for column `speculation` of table `batches`; None when no engine could be read or
        none speculates."""
        before, self._known = self._known, self._read()
        parts = []
        for number, (engine, now) in self._known.items():
            last, counts = before.get(number, (None, None))
            parts.append(since(counts if last is engine else None, now))
        return together(parts)

    def _read(self) -> dict[int, tuple[Engine, dict[str, Any]]]:
        found = {}
        for number, engine in self._engines().items():
            try:
                health = engine.health()
            except (RuntimeError, OSError):
                # The router finds out for itself, and replaces it.
                continue
            if "speculation" in health:
                found[number] = engine, counted(health["speculation"])
        return found
