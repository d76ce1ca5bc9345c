"""Memory of everything a run uses: this process, its children, and our Ray processes."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path

import psutil


def release_freed() -> None:
    """Give freed memory back to the system: glibc keeps it, and engine and trainer would each hold the other's peak."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def resident_bytes(root: Path) -> int:
    """Sum of the proportional set sizes, so that a page shared by several processes counts once."""
    seen: dict[int, psutil.Process] = {}
    for origin in [psutil.Process().pid, *_head(root)]:
        try:
            top = psutil.Process(origin)
            seen |= {p.pid: p for p in [top, *top.children(recursive=True)]}
        except psutil.NoSuchProcess:
            continue  # it ended between two looks; nothing of it is resident
    return sum(_share(process) for process in seen.values())


def _share(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
        return getattr(info, "pss", info.rss)  # only Linux tells the proportional size
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return 0


def _head(root: Path) -> list[int]:
    state = root / "ray" / "head.json"
    return [json.loads(state.read_text())["pid"]] if state.is_file() else []
