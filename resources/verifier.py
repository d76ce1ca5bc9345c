"""Scores replies in child processes, each within a deadline: a scorer may hang, raise or die, and the step goes on."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from furlong.ops.records import Verdict
from furlong.ops.tasks.scoring import modules

CHUNK = 65536
LONGEST_ANSWER = 2**24
"""Bytes; a child that writes more is not answering."""


class VerifierError(RuntimeError):
    """The child process cannot be started; holds its last lines of stderr."""


class _ChildDied(Exception):
    """The child closed its pipe."""


class VerifierWorker:
    """One child process, which is started when first needed or, to overlap its second of imports with other work, by
    `start()`. For one thread at a time; `VerifierPool` is for several."""

    def __init__(self, deadline: float, start_deadline: float = 60.0):
        """`deadline`: seconds for one reply; `start_deadline`: seconds until the child must be ready."""
        if not (deadline > 0 and start_deadline > 0):
            raise ValueError(f"deadlines {deadline} and {start_deadline} must be positive; set verify_deadline")
        self._deadline = deadline
        self._start_deadline = start_deadline
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._buffer = b""
        self._ready_by = 0.0
        self._awaiting_ready = True
        self._loaded: frozenset[str] = frozenset()

    def start(self) -> None:
        """Start the child without waiting for it; harmless when it runs."""
        if self._child is not None:
            return
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it with the pipes
        self._buffer = b""
        self._ready_by = time.monotonic() + self._start_deadline
        self._child = subprocess.Popen(
            [
                sys.executable, "-m", "furlong.ops.tasks.verify_worker", str(2 * self._deadline + 1),
                str(2 * self._start_deadline + 1),
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, bufsize=0,
            start_new_session=True,  # so that a scorer's own children are killed with it
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        os.set_blocking(self._child.stdin.fileno(), False)
        self._awaiting_ready = True
        self._loaded = frozenset()

    def score(self, items: list[dict[str, str]]) -> list[dict[str, Any]]:
        """Give {verdict, score, extracted, detail, seconds} for each item, in order.

        Verdict `timeout` when a reply overran the deadline, `error` when its scorer raised or ended the process;
        both have a null score, and the next item gets a new child.

        Raises:
            VerifierError: the child does not start.
        """
        return [self._score_one(item) for item in items]

    def close(self) -> None:
        """End the child and whatever it started."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(timeout=30)
        for pipe in (self._child.stdin, self._child.stdout, self._stderr):
            pipe.close()
        self._child = self._stderr = None

    def __enter__(self) -> VerifierWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _score_one(self, item: dict[str, str]) -> dict[str, Any]:
        self._ensure_ready()
        started = time.monotonic()
        try:
            self._load(modules(item))
            started = time.monotonic()
            line = json.dumps(item).encode() + b"\n"
            answer = json.loads(self._exchange(line, started + self._deadline))
        except TimeoutError:
            self.close()
            answer = _unscored(Verdict.TIMEOUT, f"no verdict within {self._deadline:g} s; raise verify_deadline?")
        except _ChildDied:
            answer = _unscored(Verdict.ERROR, f"the scorer's process ended: {self._epitaph()}")
        return {**answer, "seconds": time.monotonic() - started}

    def _load(self, names: frozenset[str]) -> None:
        """Have verifiers imported that the child has not met yet: some take seconds, which are not the reply's."""
        if new := sorted(names - self._loaded):
            self._exchange(json.dumps({"load": new}).encode() + b"\n", time.monotonic() + self._start_deadline)
            self._loaded |= names

    def _ensure_ready(self) -> None:
        self.start()
        if not self._awaiting_ready:
            return
        try:
            self._exchange(b"", self._ready_by)
        except TimeoutError as err:
            tail = self._tail()
            self.close()
            raise VerifierError(
                f"the verifier was not ready within {self._start_deadline:g} s; raise its deadline. stderr: {tail}"
            ) from err
        except _ChildDied as err:
            raise VerifierError(
                f"the verifier died while starting ({self._epitaph()}); run `make test` to check the installation"
            ) from err
        self._awaiting_ready = False

    def _exchange(self, line: bytes, until: float) -> bytes:
        """Write `line` and read one line back; both ends may block, so both wait under the same deadline."""
        stdin, stdout = self._child.stdin.fileno(), self._child.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if line:
                selector.register(stdin, selectors.EVENT_WRITE)
            while b"\n" not in self._buffer:
                events = selector.select(max(0.0, until - time.monotonic()))
                # What came in time counts, also when nobody looked until after it.
                if not events and time.monotonic() >= until:
                    raise TimeoutError("the verifier's child did not answer in time; the caller says what that means")
                for key, _ in events:
                    if key.fd == stdout:
                        self._read(stdout)
                        continue
                    line = self._write(stdin, line)
                    if not line:
                        selector.unregister(stdin)
        answer, _, self._buffer = self._buffer.partition(b"\n")
        return answer

    def _read(self, stdout: int) -> None:
        data = os.read(stdout, CHUNK)
        if not data:
            raise _ChildDied("the verifier's child closed its output; its exit status says why")
        self._buffer += data
        if len(self._buffer) > LONGEST_ANSWER:
            raise _ChildDied(f"the verifier's child wrote {len(self._buffer)} bytes without an answer; mend the scorer")

    def _write(self, stdin: int, line: bytes) -> bytes:
        try:
            return line[os.write(stdin, line[:CHUNK]) :]
        except BrokenPipeError as err:
            raise _ChildDied("the verifier's child closed its input; its exit status says why") from err

    def _epitaph(self) -> str:
        """How the child ended and its last lines of stderr; the child is gone afterwards."""
        try:
            status = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            status = "still running with its pipes closed"
        text = f"exit status {status}, stderr: {self._tail()}"
        self.close()
        return text

    def _tail(self) -> str:
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, self._stderr.tell() - 2000))
        return self._stderr.read().decode(errors="replace").strip() or "(empty)"


def _unscored(verdict: Verdict, detail: str) -> dict[str, Any]:
    return {"verdict": verdict.value, "score": None, "extracted": "", "detail": detail}
