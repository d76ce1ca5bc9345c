"""Replies of open sessions on disk, so that they outlive the process that serves them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from furlong.ops.sessions.node import Node, from_json, to_json
from furlong.resources.flush import flush

SUFFIX = ".session.jsonl"


class JournalError(RuntimeError):
    """A journal that cannot be read; the message names the file and the line."""


@dataclass(frozen=True)
class Record:
    """What a journal says of one session."""

    trajectory_id: str
    seed: int
    attempt: int
    nodes: list[Node]


class Journal:
    """One file per session below a folder: a line that names it, then one for each time that replies were committed.

    Not safe for several threads within one session.
    """

    def __init__(self, folder: str | Path):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def begin(self, trajectory_id: str, seed: int, attempt: int) -> None:
        """Start the session's file anew."""
        path = self._path(trajectory_id)
        path.unlink(missing_ok=True)
        self._append(path, {"trajectory_id": trajectory_id, "seed": seed, "attempt": attempt})
        flush(self._folder)

    def add(self, trajectory_id: str, nodes: list[Node]) -> None:
        """Write replies down, all or none; they are on disk when this returns."""
        self._append(self._path(trajectory_id), [to_json(node) for node in nodes])

    def drop(self, trajectory_id: str) -> None:
        """Forget the session; harmless when there is none."""
        self._path(trajectory_id).unlink(missing_ok=True)

    def sessions(self) -> list[Record]:
        """All sessions in the folder. A last line that was not finished is removed: its reply was never given out.

        Raises:
            JournalError: a file with a bad line before its last.
        """
        records = [self._read(path) for path in sorted(self._folder.glob(f"*{SUFFIX}"))]
        return [record for record in records if record is not None]

    def _read(self, path: Path) -> Record | None:
        data = path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:  # not even its name was written: nobody was given its URL
            path.unlink()
            return None
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))
                os.fsync(file.fileno())
        nodes: list[Node] = []
        head: dict[str, Any] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict if number == 1 else list):
                    raise TypeError(f"it holds a {type(row).__name__}")
                if number == 1:
                    head = {name: row[name] for name in ("trajectory_id", "seed", "attempt")}
                else:
                    nodes += [from_json(node) for node in row]
            except (ValueError, KeyError, TypeError) as err:
                raise JournalError(
                    f"{path}, line {number} is damaged ({err!r}); delete the file: its trajectory is drawn again"
                ) from err
        if head["trajectory_id"] != unquote(path.name.removesuffix(SUFFIX)):
            raise JournalError(f"{path} is the journal of {head['trajectory_id']}; delete the file")
        return Record(**head, nodes=nodes)

    def _append(self, path: Path, row: Any) -> None:
        line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(file).st_size
            try:
                if os.write(file, line) != len(line):
                    raise OSError(f"{path} took a part of {len(line)} bytes only; free some space on its disk")
                os.fsync(file)
            except OSError:
                os.ftruncate(file, size)  # what is not whole must not stand before the next line
                raise
        finally:
            os.close(file)

    def _path(self, trajectory_id: str) -> Path:
        return self._folder / f"{quote(trajectory_id, safe='')}{SUFFIX}"
