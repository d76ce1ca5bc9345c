"""Programs that attack the sandbox they run in."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from furlong.ops.envs.protocol import EnvError
from furlong.resources.envs import sandbox as module
from furlong.resources.envs.sandbox import OUTPUT_BYTES, PythonSandbox

KINDS = ["namespaces", "process"]


@pytest.fixture(params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> PythonSandbox:
    found = PythonSandbox()
    if request.param == "namespaces" and found.isolation != "namespaces":
        pytest.skip("this machine permits no namespaces")
    found._isolation = request.param
    return found


def _children() -> set[str]:
    """Processes that carry out a program now, by their command lines."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "jail.py" in text and f" {os.getpid()} " in text:
            found.add(entry.parent.name)
    return found


def _none_left() -> bool:
    until = time.monotonic() + 5.0
    while _children() and time.monotonic() < until:
        time.sleep(0.02)
    return not _children()


def test_what_a_program_prints_comes_back(sandbox: PythonSandbox):
    assert sandbox.run("import math\nprint(math.factorial(20))\nprint('b', end='')", 10) == "2432902008176640000\nb"
    assert sandbox.run("", 10) == ""
    assert sandbox.run("print('\u00e4\u2211')", 10) == "\u00e4\u2211\n"
    first = sandbox.run("print({'a', 'b', 'c', 'd', 'e'})", 10)
    assert all(sandbox.run("print({'a', 'b', 'c', 'd', 'e'})", 10) == first for _ in range(3))


def test_how_a_program_fails_is_an_answer(sandbox: PythonSandbox):
    found = sandbox.run("print(1)\n1/0", 10)
    assert found.startswith("1\nTraceback")
    assert found.endswith("ZeroDivisionError: division by zero\n")
    assert "jail.py" not in found
    assert "SyntaxError" in sandbox.run("def", 10)
    assert sandbox.run("import sys; print(2); sys.exit(3)", 10) == "2\n\nerror: the program ended with status 3"
    assert "null bytes" in sandbox.run("a\0b", 10)


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        ("import os\nwhile True: os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['sleep', '60'])", "PermissionError"),
        ("import threading; threading.Thread(target=print).start()", "can't start new thread"),
        ("x = bytearray(10**9)", "MemoryError"),
        ("x = []\nwhile True: x.append('a' * 10**7)", "MemoryError"),
        ("import socket; socket.create_connection(('127.0.0.1', 80), 1)", "PermissionError"),
        ("import socket; socket.socket(socket.AF_UNIX)", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.kill(-1, 9)", "PermissionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (9, 9))", "Error"),
        ("open('/etc/passwd')", "Error"),
        (f"open({str(Path(__file__))!r})", "Error"),
        ("open('/etc/evil', 'w')", "Error"),
        (f"open({str(Path(__file__).with_name('evil'))!r}, 'w')", "Error"),
        ("import os; os.remove('/usr/lib/os-release')", "Error"),
        ("import numpy", "ModuleNotFoundError"),
        ("import os; os.execv('/bin/sh', ['sh'])", "PermissionError"),
    ],
)
def test_attacks_fail_and_leave_nothing(sandbox: PythonSandbox, attack: str, says: str):
    begin = time.monotonic()
    found = sandbox.run(attack, 20)
    assert says in found
    assert time.monotonic() - begin < 10.0
    assert not Path("/etc/evil").exists()
    assert _none_left()


@pytest.mark.parametrize(
    "attack",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os, time; os.close(1); os.close(2); time.sleep(60)",
    ],
)
def test_a_program_without_end_is_ended(sandbox: PythonSandbox, attack: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "PROGRAM_SECONDS", 1.0)
    begin = time.monotonic()
    assert sandbox.run(attack, 20) == "error: ended after 1 s"
    assert 1.0 <= time.monotonic() - begin < 10.0
    assert _none_left()


def test_endless_output_is_cut(sandbox: PythonSandbox):
    found = sandbox.run("while True: print('x' * 1000)", 20)
    assert found.endswith(f"error: ended after {OUTPUT_BYTES} bytes of output")
    assert len(found) < OUTPUT_BYTES + 100


def test_nothing_comes_from_outside(sandbox: PythonSandbox, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FURLONG_SECRET", "hidden")
    with open(__file__) as held:
        os.set_inheritable(held.fileno(), True)
        descriptors = "[fd for fd in range(3, 64) if not _closed(fd)]"
        code = f"import os\ndef _closed(fd):\n  try: os.fstat(fd)\n  except OSError: return True\nprint({descriptors})"
        assert sandbox.run(code, 10) == "[]\n"
    assert "hidden" not in sandbox.run("import os; print(dict(os.environ))", 10)


def test_the_callers_time_is_not_the_programs_fault(sandbox: PythonSandbox):
    with pytest.raises(TimeoutError, match="caller's time"):
        sandbox.run("import time; time.sleep(60)", 0.4)
    assert _none_left()


def test_several_at_once_do_not_mix(sandbox: PythonSandbox):
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda n: sandbox.run(f"print({n} * {n})", 30), range(12))) == [
            f"{n * n}\n" for n in range(12)
        ]


def test_a_full_sandbox_is_a_time_out(sandbox: PythonSandbox):
    taken = 0
    while sandbox._places.acquire(blocking=False):
        taken += 1
    with pytest.raises(TimeoutError, match="no place"):
        sandbox.run("print(1)", 0.1)
    for _ in range(taken):
        sandbox._places.release()
    assert sandbox.run("print(1)", 10) == "1\n"


class TestNamespaces:
    """What only namespaces guarantee: out of the interpreter's reach as well."""

    @pytest.fixture
    def shut(self) -> PythonSandbox:
        found = PythonSandbox()
        if found.isolation != "namespaces":
            pytest.skip("this machine permits no namespaces")
        return found

    def test_the_file_system_is_another_one(self, shut: PythonSandbox):
        listing = shut.run("import os; print(sorted(os.listdir('/')), os.listdir('.'), os.getpid())", 10)
        assert "'etc'" not in listing
        assert "'proc'" not in listing
        assert listing.endswith("[] 1\n")
        assert (
            shut.run(f"import os; print(os.path.exists({__file__!r}), os.path.exists({sys.prefix!r}))", 10)
            == "False False\n"
        )
        assert "Error" in shut.run("import os; open(os.__file__, 'a')", 10)

    def test_what_is_written_stays_inside_and_is_bounded(self, shut: PythonSandbox):
        code = "open('f', 'w').write('abc'); print(open('f').read())"
        assert shut.run(code, 10) == "abc\n"
        assert shut.run("import os; print(os.listdir('.'))", 10) == "[]\n"
        fill = "for n in range(9):\n  with open(str(n), 'wb') as f: f.write(bytes(4 * 2**20))"
        assert "No space left" in shut.run(fill, 10)

    def test_raw_system_calls_are_refused_too(self, shut: PythonSandbox):
        code = (
            "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
            "calls = dict(socket=(41, 2, 1, 0), unshare=(272, 0x10000000), clone=(56, 17, 0), kill=(62, -1, 9),\n"
            "             ptrace=(101, 0, 0, 0), x32=(0x40000000 + 41, 2, 1, 0))\n"
            "print([name for name, call in calls.items() if libc.syscall(*call) != -1 or ctypes.get_errno() != 1])"
        )
        assert os.uname().machine != "x86_64" or shut.run(code, 10) == "[]\n"

    def test_it_is_nobody_and_stays_so(self, shut: PythonSandbox):
        assert shut.run("import os; print(os.getuid() == 0)", 10) == "False\n"
        assert "PermissionError" in shut.run("import os; os.setuid(0)", 10)

    def test_crashes_end_only_themselves(self, shut: PythonSandbox):
        assert "ended with status 139" in shut.run("import ctypes; ctypes.string_at(0)", 10)
        assert shut.run("print(1)", 10) == "1\n"


def test_a_sandbox_that_does_not_work_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    broken = tmp_path / "jail.py"
    broken.write_text("raise SystemExit('no jail')")
    monkeypatch.setattr(module, "JAIL", broken)
    with pytest.raises(EnvError, match=r"does not work here.*no jail"):
        PythonSandbox().run("print(1)", 10)


def test_without_the_right_to_namespaces_it_says_what_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    refused = tmp_path / "jail.py"
    refused.write_text(f"import sys\nsys.exit({module.REFUSED})")
    monkeypatch.setattr(module, "JAIL", refused)
    assert PythonSandbox().isolation == "process"
    assert "an audit hook alone" in caplog.text


def _programs_of(pid: int) -> bool:
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"jail.py" in text and b"\0%d\0" % pid in text:
            return True
    return False


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_does_not_outlive_a_killed_driver(kind: str):
    code = (
        "from furlong.resources.envs.sandbox import PythonSandbox\n"
        f"sandbox = PythonSandbox()\nsandbox._isolation = {kind!r}\n"
        "print('up', flush=True)\nsandbox.run('while True: pass', 60)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert driver.stdout.readline() == b"up\n"
        until = time.monotonic() + 20
        while not _programs_of(driver.pid) and time.monotonic() < until:
            time.sleep(0.02)
        assert _programs_of(driver.pid)
        time.sleep(0.3)
    finally:
        driver.kill()
        driver.wait(10)
        driver.stdout.close()
    until = time.monotonic() + 3.0  # less than the program has
    while _programs_of(driver.pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _programs_of(driver.pid)
