"""What was written is on disk, not only in the system's memory."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Force a file, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
