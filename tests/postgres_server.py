"""A Postgres server on this machine, for tests: Debian's, on a socket in a folder of its own."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEADLINE = 60
USER = "furlong"


def programs() -> Path | None:
    """The folder of initdb and pg_ctl, of the newest release that is installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    elsewhere = shutil.which("initdb")
    return Path(elsewhere).resolve().parent if elsewhere else None


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """The URL of an empty database; skips where Postgres is not installed."""
    home = programs()
    if home is None:
        pytest.skip("Postgres is not installed; `apt-get install postgresql` brings it")
    folder.mkdir(parents=True)
    account = _account()
    if account is not None:
        # It refuses to run as root; the folders above belong to the tests' user and may be closed to others.
        os.chown(folder, account.pw_uid, account.pw_gid)
        for parent in folder.parents[:-1]:
            parent.chmod(parent.stat().st_mode | 0o011)
    _call(account, home / "initdb", "-D", folder / "data", "-U", USER, "-A", "trust", "-E", "UTF8", "--no-sync")
    options = f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off"
    _call(
        account,
        home / "pg_ctl",
        "-D",
        folder / "data",
        "-l",
        folder / "log",
        "-w",
        "-t",
        str(DEADLINE),
        "-o",
        options,
        "start",
    )
    try:
        _call(account, home / "createdb", "-h", folder, "-U", USER, "dagster")
        yield f"postgresql+psycopg2://{USER}@/dagster?host={folder}"
    finally:
        _call(account, home / "pg_ctl", "-D", folder / "data", "-m", "immediate", "-t", str(DEADLINE), "stop")


def _account() -> pwd.struct_passwd | None:
    return pwd.getpwnam("postgres") if os.getuid() == 0 else None


def _call(account: pwd.struct_passwd | None, *command: object) -> None:
    who = {} if account is None else {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    done = subprocess.run(
        [str(part) for part in command], **who, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, timeout=DEADLINE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
