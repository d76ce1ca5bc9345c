"""Fingerprints and counter-based seeds: the same inputs give the same numbers, wherever and whenever."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(value: Any) -> str:
    """64 hex digits over a JSON-like value, independent of the order of keys.

    Refuses anything that is not plain data: a permissive `str()` would let two different values share a fingerprint.
    """
    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as err:
        raise ValueError(f"cannot fingerprint {type(value).__name__}: {err}; pass plain, finite JSON values") from err
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def counter_seed(*coordinates: int | str) -> int:
    """A 63-bit seed from coordinates such as (run seed, step, prompt id, sample), the same on every machine."""
    text = "\x1f".join(f"{type(c).__name__}:{c}" for c in coordinates)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
