"""Which transport `auto` takes for an update, by what earlier updates took."""

from __future__ import annotations

from statistics import median
from typing import Any

TRANSPORTS = ("broadcast", "p2p", "disk_delta")
"""All of them, in the order in which untried ones are tried and ties are broken."""
_RECENT = 5
"""Updates of one transport that its cost is the median of: a single slow one does not turn the choice."""


def choose(history: list[dict[str, Any]], sizes: dict[str, int]) -> str:
    """The transport expected to stage this update soonest; the first of `TRANSPORTS` that was never measured, if any.

    expected seconds(t) = sizes[t] x median over the last 5 updates by t of stage_seconds / wire_bytes

    Args:
        history: rows of `weight_versions` with version, transport, wire_bytes and stage_seconds, in any order. Rows that
            moved nothing measure nothing.
        sizes: for each transport that can be used, the bytes this update would put on its wire.
    Raises:
        ValueError: no transport can be used, or one is unknown.
    """
    unknown = sorted(set(sizes) - set(TRANSPORTS))
    if unknown or not sizes:
        raise ValueError(
            f"transports {unknown or list(sizes)} cannot be compared; give sizes of some of {list(TRANSPORTS)}"
        )
    expected = {}
    for transport in TRANSPORTS:
        if transport not in sizes:
            continue
        rates = [
            row["stage_seconds"] / row["wire_bytes"]
            for row in sorted(history, key=lambda row: row["version"])
            if row["transport"] == transport and row["wire_bytes"]
        ]
        if not rates:
            return transport
        expected[transport] = median(rates[-_RECENT:]) * sizes[transport]
    return min(expected, key=lambda transport: (expected[transport], TRANSPORTS.index(transport)))
