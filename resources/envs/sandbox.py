"""Runs programs that a policy wrote, each in a process of its own that can do next to nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path

from furlong.ops.envs.protocol import EnvError

_LOG = logging.getLogger(__name__)

JAIL = Path(__file__).with_name("jail.py")
PROGRAM_SECONDS = 5.0
"""Wall-clock seconds of one program, beyond which it is ended; also its seconds of CPU."""
MEMORY_BYTES = 256 * 2**20
"""Address space of the program."""
OUTPUT_BYTES = 64 * 2**10
"""What a program may print; one that prints more is ended."""
CHUNK = 65536
REFUSED = 97
"""As `jail.REFUSED`, which is a script and not imported here."""


class PythonSandbox:
    """Runs programs one by one or from several threads; as many at once as there are cores.

    A program runs in a new interpreter with the standard library and nothing else: empty environment, no open file but
    its pipes, no further process or thread, limits on memory, CPU, wall-clock time, output and the size of files. The
    kernel refuses it sockets, signals to others, and system calls it has no use for. Nothing is left of it afterwards.

    With `isolation` == "namespaces" (Linux with the right to make them: root, or unprivileged user namespaces) it sees
    no network, no other process, and of the machine's files only the standard library and the system's shared
    libraries, read-only; it writes into 16 MiB of memory that vanish with it. With "process", which is what is left
    elsewhere, an audit hook alone refuses it every write and all files but the standard library: enough against
    accidents, not against a program that looks for a way out of Python. Which one it is is found out once, told by
    `isolation`, and logged when it is the weaker.
    """

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(os.cpu_count() or 1)
        self._lock = threading.Lock()
        self._isolation: str | None = None

    @property
    def isolation(self) -> str:
        """`namespaces` or `process`."""
        with self._lock:
            if self._isolation is None:
                self._isolation = _probe()
                if self._isolation == "process":
                    _LOG.warning(
                        "the Python sandbox has no namespaces here, so an audit hook alone keeps programs from this "
                        "machine's files; permit unprivileged user namespaces, or train on programs that you trust"
                    )
        return self._isolation

    def run(self, code: str, seconds: float) -> str:
        """What `code` printed to stdout and stderr, at most OUTPUT_BYTES, and how it ended when that was not well.

        Args:
            code: a Python program.
            seconds: what is left of the caller's time, waiting for a place included.
        Raises:
            TimeoutError: the caller's time was over before the program's own was.
            EnvError: the sandbox cannot be started on this machine.
        """
        until = time.monotonic() + seconds
        mode = self.isolation
        if not self._places.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError(f"no place in the sandbox within {seconds:g} s; raise reply_deadline or use fewer tasks")
        try:
            return _run(mode, code, until)
        finally:
            self._places.release()


def _probe() -> str:
    """The stronger kind of isolation, if this machine permits it."""
    if sys.platform != "linux":
        return "process"
    answer, status = _exchange("namespaces", b"print('inside')", time.monotonic() + 60.0)
    if status == REFUSED:
        return "process"
    if answer.strip() != b"inside":
        text = answer.decode(errors="replace")[-500:]
        raise EnvError(f"the Python sandbox does not work here (exit status {status}): {text}; use other tools")
    return "namespaces"


def _run(mode: str, code: str, until: float) -> str:
    started = time.monotonic()
    own = started + PROGRAM_SECONDS
    answer, status = _exchange(mode, code.encode(errors="replace"), min(own, until))
    text = answer[:OUTPUT_BYTES].decode(errors="replace")
    if len(answer) > OUTPUT_BYTES:
        return f"{text}\nerror: ended after {OUTPUT_BYTES} bytes of output"
    if status is None and time.monotonic() < own:
        raise TimeoutError(f"the caller's time ended {time.monotonic() - started:.1f} s into a program")
    if status is None or status in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return f"{text}\nerror: ended after {PROGRAM_SECONDS:g} s".lstrip()
    if status > 1 or status < 0:
        return f"{text}\nerror: the program ended with status {status}".lstrip()
    return text


def _exchange(mode: str, program: bytes, until: float) -> tuple[bytes, int | None]:
    """What a process printed, a little more than OUTPUT_BYTES at most, and its exit status, None when it was ended."""
    own = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}  # not those of a virtual environment
    stdlib = {sysconfig.get_path(name, vars=own) for name in ("stdlib", "platstdlib")}
    system = [folder for folder in ("/usr/lib", "/usr/lib64", "/lib", "/lib64") if os.path.isdir(folder)]
    libraries = sorted({os.path.realpath(folder) for folder in [*stdlib, *system]})
    with tempfile.TemporaryFile() as source:
        source.write(program)
        source.seek(0)
        child = subprocess.Popen(
            [
                os.path.realpath(sys._base_executable), "-S", "-s", "-P", "-B", "-X", "utf8", str(JAIL), mode,
                str(os.getpid()), str(int(PROGRAM_SECONDS)), str(MEMORY_BYTES), *libraries,
            ],
            stdin=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0, cwd="/",
            env={"PYTHONHASHSEED": "0"},  # -E would ignore it, and sets would print in another order each time
            start_new_session=True,
        )  # fmt: skip
        try:
            return _read(child, until)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(timeout=30)
            child.stdout.close()


def _read(child: subprocess.Popen[bytes], until: float) -> tuple[bytes, int | None]:
    parts, total = [], 0
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while total <= OUTPUT_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not selector.select(left):
                return b"".join(parts), None
            part = os.read(child.stdout.fileno(), CHUNK)
            if not part:
                break
            parts.append(part)
            total += len(part)
    if total > OUTPUT_BYTES:
        return b"".join(parts), None
    try:
        return b"".join(parts), child.wait(timeout=max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return b"".join(parts), None
