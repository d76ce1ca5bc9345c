"""Processes that belong to one root folder, known by a mark in their environment.

Children inherit the mark and keep it when they are orphaned, so it finds leftovers that a process group misses, and no
reused process id can be mistaken for ours. A process that renames itself may overwrite it: see `renamed_with_files_in`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

MARK = "FURLONG_PART"
"""Environment variable that says which part of which root a process belongs to, e.g. `ray:1f0c...`."""


class LeftoverError(RuntimeError):
    """A process of ours would not end."""


def root_hash(root: Path) -> str:
    """8 hex digits that stand for a root folder in marks, names and short paths."""
    return hashlib.blake2b(str(root).encode(), digest_size=4).hexdigest()


def mark(part: str, root: Path) -> dict[str, str]:
    """Environment to start a process of `part` with."""
    return {MARK: f"{part}:{root_hash(root)}"}


def bears(process: psutil.Process, marking: dict[str, str]) -> bool:
    """True for a running (not a zombie) process started under this mark."""
    wanted = f"{MARK}={marking[MARK]}"
    try:
        return process.status() != psutil.STATUS_ZOMBIE and wanted in _environment(process)
    except (psutil.Error, OSError):
        return False


def _environment(process: psutil.Process) -> list[str]:
    raw = Path(f"/proc/{process.pid}/environ")
    if raw.exists():
        # A process that renamed itself has overwritten the start of this block, at which psutil stops reading.
        return raw.read_bytes().decode(errors="replace").split("\0")
    return [f"{name}={value}" for name, value in process.environ().items()]


def running(pid: int, marking: dict[str, str]) -> bool:
    """True when `pid` is a live process under this mark, and not another one that got the number later."""
    try:
        return bears(psutil.Process(pid), marking)
    except psutil.NoSuchProcess:
        return False


def marked(marking: dict[str, str]) -> list[psutil.Process]:
    """All processes under this mark, whoever is their parent now."""
    return [process for process in psutil.process_iter() if bears(process, marking)]


def renamed_with_files_in(folder: Path, prefix: str) -> list[psutil.Process]:
    """Processes that call themselves `prefix...` and have a file below `folder` open, as Ray's have their logs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name().startswith(prefix) and any(
                Path(file.path).is_relative_to(folder) for file in process.open_files()
            ):
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile, or belongs to another user and so not to us
    return found


def writer_of(log: Path) -> psutil.Process | None:
    """The process whose output this file is, such as an actor by its log; None when nobody writes it."""
    for process in psutil.process_iter():
        try:
            if any(os.readlink(f"/proc/{process.pid}/fd/{fd}") == str(log) for fd in (1, 2)):
                return process
        except OSError:
            continue  # it ended, or is another user's
    return None


def end_all(find: Callable[[], list[psutil.Process]], polite_seconds: float, deadline: float) -> list[str]:
    """End every process that `find` gives, new ones too, and wait until it gives none.

    Args:
        find: looks for the processes; called again and again.
        polite_seconds: how long they have after SIGTERM until SIGKILL; 0 for SIGKILL at once.
        deadline: seconds for all of it.
    Returns:
        One line per process ended.
    Raises:
        LeftoverError: some were still there at the deadline.
    """
    begin, ended = time.monotonic(), {}
    if polite_seconds:
        _signal(find(), psutil.Process.terminate, ended)
        while find() and time.monotonic() < begin + polite_seconds:
            time.sleep(0.1)
    while rest := find():
        if time.monotonic() > begin + deadline:
            raise LeftoverError(
                f"{len(rest)} processes did not end within {deadline:g} s: {', '.join(_label(p) for p in rest)}; "
                "they may hang in a disk or device call: end them by hand"
            )
        _signal(rest, psutil.Process.kill, ended)
        time.sleep(0.05)
    return list(ended.values())


def _signal(processes: list[psutil.Process], action: Callable[[psutil.Process], None], ended: dict[int, str]) -> None:
    for process in processes:
        try:
            ended.setdefault(process.pid, _label(process))
            action(process)
        except psutil.NoSuchProcess:
            continue  # it ended between the look and the signal, which is what was wanted


def _label(process: psutil.Process) -> str:
    try:
        words = [Path(word).name if "/" in word else word for word in process.cmdline()[:4]]
        return f"{process.pid} {' '.join(words).strip()[:60]}"
    except psutil.Error:
        return str(process.pid)


def last_lines(path: Path, count: int, after: str = "") -> str:
    """The end of a text file: at most `count` lines, and only those after the last line that starts with `after`."""
    if not path.is_file():
        return f"(there is no {path} on this machine)"
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        lines = file.read().decode(errors="replace").splitlines()
    if after:
        starts = [number for number, line in enumerate(lines) if line.startswith(after)]
        lines = lines[starts[-1] + 1 :] if starts else lines
    return "\n".join(lines[-count:]) or "(it wrote nothing)"
