"""Starts the ranks of a gloo group as real processes, and brings home what each of them found.

    results = run_ranks(4, function, *arguments)      # results[rank] = function(rank, *arguments)

`function` is a module-level function of an importable file; it runs with the default process group up
(`torch.distributed.group.WORLD`). One process imports torch and the function's module, and forks the ranks before
anything has started a thread: a start costs one import instead of one per rank, but still seconds, so pass many cases
to one call. As a program, this file is that process:

    python kernel_ranks.py FOLDER
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from pathlib import Path
from typing import Any

GRACE = 3.0
"""Seconds that the other ranks have to end by themselves, and say what they know, once one has failed."""


def run_ranks(
    count: int, function: Callable[..., Any], *args: Any, deadline: float = 60.0, lost: Collection[int] = ()
) -> list[Any]:
    """What `function(rank, *args)` returned on every rank, by rank.

    Args:
        args: the same for all ranks; they and the results are what `torch.save` can write.
        deadline: seconds from here to the last rank's end, imports included.
        lost: ranks that have to die (a signal, or a nonzero exit); theirs is None. The others must return all the same.
    Raises:
        AssertionError: a rank failed, one of `lost` did not, or time was up; with the stderr of those that failed, the
            first to fail first, or every thread's stack if time was up.
    """
    import torch

    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        file = Path(sys.modules[function.__module__].__file__).resolve()
        module = file.stem if function.__module__ == "__main__" else function.__module__
        path = [str(file.parents[module.count(".")]), *sys.path]
        plan = {"count": count, "module": module, "function": function.__qualname__, "lost": sorted(lost),
                "deadline": deadline, "path": path}  # fmt: skip
        (folder / "plan.json").write_text(json.dumps(plan))
        torch.save(args, folder / "args.pt")
        environment = os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with (folder / "start.log").open("w") as log:
            starter = subprocess.Popen(
                [sys.executable, __file__, name], env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                starter.wait(deadline)
            except subprocess.TimeoutExpired:
                os.killpg(starter.pid, signal.SIGUSR1)
                time.sleep(0.5)
                said = "\n".join(f"{file.name}: {file.read_text()[-4000:]}" for file in sorted(folder.glob("*.log")))
                raise AssertionError(f"{count} ranks of {function.__qualname__}: over {deadline} s\n{said}") from None
            finally:
                _end(starter)
        assert starter.returncode == 0, (folder / "start.log").read_text()[-6000:]
        return [
            None if rank in lost else torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)
        ]


def _end(starter: subprocess.Popen) -> None:
    """All of its ranks are in its session; a rank may outlive it."""
    try:
        os.killpg(starter.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        starter.wait()


def _start(folder: Path) -> int:
    plan = json.loads((folder / "plan.json").read_text())
    sys.path[:0] = [entry for entry in plan["path"] if entry not in sys.path]
    import faulthandler

    import torch.distributed  # noqa: F401

    function = importlib.import_module(plan["module"])
    for part in plan["function"].split("."):
        function = getattr(function, part)
    faulthandler.register(signal.SIGUSR1)
    # Should whoever started this be killed, nobody is left to end it.
    signal.alarm(int(plan["deadline"]) + 10)
    ranks = {}
    for rank in range(plan["count"]):
        pid = os.fork()
        if pid == 0:
            _rank(rank, function, plan, folder)
        ranks[pid] = rank
    return _watch(ranks, set(plan["lost"]), folder)


def _rank(rank: int, function: Callable[..., Any], plan: dict[str, Any], folder: Path) -> None:
    """Never returns."""
    import traceback

    import torch
    import torch.distributed as dist

    code = 1
    signal.alarm(int(plan["deadline"]) + 10)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=plan["count"],
            timeout=timedelta(seconds=plan["deadline"]),
        )  # fmt: skip
        args = torch.load(folder / "args.pt", weights_only=False)
        torch.save(function(rank, *args), folder / f"{rank}.pt")
        # A rank that leaves early closes connections that the others may still read from. The group may be broken by now.
        others = [folder / f"{other}.pt" for other in range(plan["count"]) if other not in plan["lost"]]
        while not all(file.exists() for file in others):
            time.sleep(0.005)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _watch(ranks: dict[int, int], lost: set[int], folder: Path) -> int:
    """Waits for all; 1 with what went wrong on stderr."""
    wrong: list[int] = []
    until = None
    while ranks and (until is None or time.monotonic() < until):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.01)
            continue
        rank = ranks.pop(pid)
        if (os.waitstatus_to_exitcode(status) != 0) != (rank in lost):
            wrong.append(rank)
            print(f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr)
            until = until or time.monotonic() + GRACE
    for rank in wrong:
        print(f"rank {rank}:\n{(folder / f'{rank}.log').read_text()[-4000:]}", file=sys.stderr)
    for rank in ranks.values() if wrong else ():
        print(f"rank {rank} was still running", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(_start(Path(sys.argv[1])))
