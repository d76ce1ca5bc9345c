"""A process between an engine and its server that lets neither outlive the other, whoever is killed and however.

`python sglang_guard.py ENGINE_PID SCRATCH COMMAND...` runs the command in a process group of its own and ends the whole
group when the engine's process is gone, when the command has ended, or when told to by SIGTERM. After the engine's
process it also removes the scratch folder. It is run by the server's interpreter, so it needs nothing of ours.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

POLL_SECONDS = 0.25
TRACKER_SECONDS = 3.0
_PR_SET_PDEATHSIG = 1


def _die_with_guard() -> None:
    # Bound to the thread that forks; this process has only one, which is why an engine's thread does not start servers.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_group(group: int) -> None:
    """Kill the server, and its scheduler and detokenizer, which may be left after it."""
    end = time.monotonic() + TRACKER_SECONDS
    while (members := _members(group)) and time.monotonic() < end:
        for pid in members:
            # Python's tracker ends when the others have, and then unlinks their semaphores.
            if b"resource_tracker" not in _read(f"/proc/{pid}/cmdline"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _members(group: int) -> list[int]:
    """Processes of the group that have not ended (state Z); the name in parentheses may hold anything."""
    stats = {
        int(pid): _read(f"/proc/{pid}/stat").rpartition(b")")[2].split() for pid in os.listdir("/proc") if pid.isdigit()
    }
    return [pid for pid, stat in stats.items() if stat and stat[0] != b"Z" and int(stat[2]) == group]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""  # it has ended meanwhile


def main(engine: int, scratch: str, command: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_guard, process_group=0)
    try:
        while server.poll() is None and os.getppid() == engine:
            time.sleep(POLL_SECONDS)
        if server.returncode is not None:
            print(f"the server ended by itself with exit status {server.returncode}", file=sys.stderr, flush=True)
    finally:
        _end_group(server.pid)
        server.wait()
        if os.getppid() != engine:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
