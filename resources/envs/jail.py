"""First thing in the sandbox's process: shuts itself in, then runs the program that comes on standard input.

Run as a script with nothing but the standard library: `jail.py MODE PARENT CPU_SECONDS MEMORY_BYTES LIBRARY...`, where
the folders LIBRARY stay readable. MODE `namespaces` needs Linux and the right to make them; `process` needs nothing.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from types import TracebackType

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 1, 38, 22
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, AT_RECURSIVE, AT_FDCWD = 1, 2, 4, 0x8000, -100
NOBODY = 65534
SCRATCH_BYTES = 16 * 2**20
"""Size of the only folder that can be written to, and of the largest file."""
OPEN_FILES = 32
REFUSED = 97
"""Exit status of a jail that could not be built; nothing has run."""

SYSCALLS = {
    "x86_64": {"arch": 0xC000003E, "pivot_root": 155, "mount_setattr": 442, "capset": 126},
    "aarch64": {"arch": 0xC00000B7, "pivot_root": 41, "mount_setattr": 442, "capset": 91},
}
# socket, socketpair, ptrace, mount, unshare, setns, keyctl, bpf, perf_event_open, userfaultfd, io_uring_setup,
# process_vm_readv, process_vm_writev, kill, tkill, pidfd_send_signal, setrlimit, prlimit64, clone, clone3, execve,
# execveat, setsid, setpgid (and fork, vfork): the program needs none.
DENIED = {
    "x86_64": (41, 53, 101, 165, 272, 308, 250, 321, 298, 323, 425, 310, 311, 62, 200, 424, 160, 302, 56, 435, 59, 322,
               112, 109, 57, 58),
    "aarch64": (198, 199, 117, 40, 97, 268, 219, 280, 241, 282, 425, 270, 271, 129, 130, 424, 164, 261, 220, 435, 221,
                281, 157, 154),
}  # fmt: skip
OTHER_NUMBERING = 0x40000000
"""From here on x86_64 has the same calls under other numbers."""

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    mode, parent, cpu, memory, *libraries = sys.argv[1:]
    program = sys.stdin.buffer.read()
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the sandbox's parent is gone; nothing was run")
    if mode == "namespaces":
        try:
            _leave_the_machine(libraries)
        except OSError as err:
            sys.stderr.write(f"{err}")
            sys.stderr.flush()
            os._exit(REFUSED)
    _limit(int(cpu), int(memory))
    if sys.platform == "linux" and platform.machine() in DENIED:
        _filter_calls(platform.machine())
    if mode == "process":
        sys.addaudithook(_audit)
    sys.argv[:] = ["program.py"]
    sys.excepthook = _report
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Show the program's own lines only."""
    while trace is not None and trace.tb_frame.f_code.co_filename != "program.py":
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)


def _leave_the_machine(libraries: list[str]) -> None:
    """Go on in a process that sees no network, no other process, and of the files only `libraries`, read-only."""
    calls = SYSCALLS.get(platform.machine())
    if calls is None:
        raise OSError(f"system calls of {platform.machine()} are not known here; add them to SYSCALLS and DENIED")
    privileged = os.geteuid() == 0
    user, group = os.geteuid(), os.getegid()
    spaces = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET | (0 if privileged else NEWUSER)
    _checked(_libc.unshare(spaces), "unshare")
    if not privileged:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    child = os.fork()
    if child:
        _wait(child)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _swap_root(libraries, calls)
    if privileged:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    nothing = struct.pack("<6I", 0, 0, 0, 0, 0, 0)
    _checked(_libc.syscall(calls["capset"], struct.pack("<Ii", 0x20080522, 0), nothing), "capset")
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user clears it


def _wait(child: int) -> None:
    """Stand outside for the program, which is killed by the kernel should this process be."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _swap_root(libraries: list[str], calls: dict[str, int]) -> None:
    """Make a small file system in memory the root, with `libraries` in it; it goes when the last process does."""
    root = "/proc"  # it exists everywhere, and nothing below it is needed any more
    _mount(None, "/", None, MS_REC | MS_PRIVATE, None)
    _mount(b"tmpfs", root, b"tmpfs", MS_NOSUID | MS_NODEV, f"size={SCRATCH_BYTES},nr_inodes=1000,mode=755".encode())
    for library in libraries:
        os.makedirs(root + library, exist_ok=True)
        _mount(library.encode(), root + library, None, MS_BIND | MS_REC, None)
        attributes = struct.pack("<4Q", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0)
        target = (root + library).encode()
        code = _libc.syscall(calls["mount_setattr"], AT_FDCWD, target, AT_RECURSIVE, attributes, len(attributes))
        _checked(code, f"read-only {library}")
    os.mkdir(root + "/tmp")
    os.chmod(root + "/tmp", 0o777)
    os.chdir(root)
    _checked(_libc.syscall(calls["pivot_root"], b".", b"."), "pivot_root")
    _checked(_libc.umount2(b".", MNT_DETACH), "umount")
    os.chdir("/tmp")


def _limit(cpu: int, memory: int) -> None:
    limits = {"RLIMIT_CPU": cpu, "RLIMIT_AS": memory, "RLIMIT_FSIZE": SCRATCH_BYTES, "RLIMIT_NOFILE": OPEN_FILES,
              "RLIMIT_NPROC": 1, "RLIMIT_CORE": 0, "RLIMIT_MEMLOCK": 0, "RLIMIT_MSGQUEUE": 0}  # fmt: skip
    for name, value in limits.items():
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (value, value))


def _filter_calls(machine: str) -> None:
    """Have the kernel refuse calls that the program has no use for (seccomp)."""
    denied = DENIED[machine]
    load_arch, load_number = (0x20, 0, 0, 4), (0x20, 0, 0, 0)
    rules = [load_arch, (0x15, 1, 0, SYSCALLS[machine]["arch"]), (0x06, 0, 0, 0x80000000), load_number]
    rules.append((0x35, len(denied) + 1, 0, OTHER_NUMBERING))
    rules += [(0x15, len(denied) - index, 0, number) for index, number in enumerate(denied)]
    rules += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]  # allow; EPERM
    code = b"".join(struct.pack("<HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(rules), ctypes.addressof(buffer))
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _checked(_libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0), "seccomp")


_FORBIDDEN = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.kill", "os.system", "ctypes.",
              "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown",
              "os.truncate", "shutil.", "resource.", "signal.", "pty.")  # fmt: skip


def _audit(event: str, details: tuple) -> None:
    """Without namespaces: refuse what a program that does not mean harm might do."""
    if event.startswith(_FORBIDDEN):
        raise PermissionError(f"{event} is not allowed in the sandbox")
    if event == "open":
        path, _, flags = details
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) if isinstance(flags, int) else 0
        readable = isinstance(path, str) and os.path.realpath(path).startswith(tuple(sys.path))
        if writes or (isinstance(path, str | bytes) and not readable):
            raise PermissionError(f"opening {path!r} is not allowed in the sandbox")


def _mount(source: bytes | None, target: str, kind: bytes | None, flags: int, options: bytes | None) -> None:
    _checked(_libc.mount(source, target.encode(), kind, ctypes.c_ulong(flags), options), f"mount {target}")


def _prctl(option: int, value: int) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def _checked(code: int, what: str) -> None:
    if code:
        number = ctypes.get_errno()
        raise OSError(number, f"{what} is not permitted here ({os.strerror(number)})")


if __name__ == "__main__":
    main()
