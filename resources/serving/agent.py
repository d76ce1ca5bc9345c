"""Plays a group with an agent that is a program of its own and knows the policy by its URL alone."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import IO, Any

from furlong.ops.records import Failure
from furlong.ops.rollouts.trajectory import EngineLost, Failed, Outcome, Task, Trajectory
from furlong.ops.sessions.drift import DriftError
from furlong.ops.sessions.session import CutReply, SessionError
from furlong.ops.sessions.template import TemplateError
from furlong.resources.serving.endpoint import Endpoint
from furlong.resources.serving.errors import ApiError

MOST = 16 * (os.cpu_count() or 1)
"""Programs that run at once; each is an interpreter, and with an OpenAI client has 50 MB of memory or more."""
_free = threading.BoundedSemaphore(MOST)
POLL = 0.05
"""Seconds between two looks at a running program."""
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SHOWN = 2000
"""Bytes of a program's standard error that a failure shows the end of."""


@dataclass(frozen=True)
class _End:
    """How a program came to its end."""

    status: int | None
    """Exit status, negative for a signal; None when it was ended for being late or for no further use."""
    stderr: str


def play_agent(
    tasks: Sequence[Task],
    prompt: dict[str, Any],
    endpoint: Endpoint,
    program: str,
    deadline: float,
    key: str = "",
    look: Callable[[], object] = lambda: None,
) -> list[Outcome]:
    """Run the program once per task, each in a process group of its own, at most MOST at once; one outcome per task, in
    order.

    A program gets OPENAI_BASE_URL and OPENAI_API_KEY in its environment, and on standard input a JSON object with
    base_url, trajectory_id, question and entry (what the verifier needs, as values). Its exit status tells whether the
    conversation counts. A conversation that ran into the longest reply or the model's context counts whatever the
    program made of it: it ended with reason `length`.

    Args:
        prompt: the row of table `prompts`.
        program: `module:function`, called as function(base_url=, question=, entry=), or else a shell command.
        deadline: seconds that one program may run.
        key: names the group to the endpoint's engines.
        look: called now and then while programs run; what it raises ends them all.
    Raises:
        What the engines' router raised that is no fault of a trajectory, such as that the group is not wanted any more.
    """

    def turn(task: Task) -> Outcome:
        with _free:
            look()  # the group may have ended while this one waited
            return _play_one(task, prompt, endpoint, program, deadline, key, look)

    with ThreadPoolExecutor(max(1, len(tasks)), thread_name_prefix="agent") as pool:
        return [future.result() for future in [pool.submit(turn, task) for task in tasks]]


def _play_one(
    task: Task,
    prompt: dict[str, Any],
    endpoint: Endpoint,
    program: str,
    deadline: float,
    key: str,
    look: Callable[[], object],
) -> Outcome:
    endpoint.discard(task.trajectory_id)  # of a driver that died: the same seeds give the same replies again
    base_url = endpoint.open(task.trajectory_id, task.seed, task.attempt, key)
    try:
        question = {
            "base_url": base_url,
            "trajectory_id": task.trajectory_id,
            "question": prompt["question"],
            "entry": json.loads(prompt["entry"]) if isinstance(prompt["entry"], str) else prompt["entry"],
        }
        end = _run(program, question, endpoint, task, deadline, look)
        trouble, fatal = endpoint.trouble(task.trajectory_id), endpoint.fatal(task.trajectory_id)
        if fatal is not None:
            raise fatal
        try:
            found = endpoint.take(task.trajectory_id, task.sample)
        except (DriftError, TemplateError) as err:
            return _failed(task, endpoint, Failure.DRIFT, str(err))
        return _outcome(task, endpoint, found, end, trouble, deadline)
    finally:
        endpoint.discard(task.trajectory_id)


def _outcome(
    task: Task,
    endpoint: Endpoint,
    found: list[Trajectory],
    end: _End,
    trouble: Exception | None,
    deadline: float,
) -> Outcome:
    if isinstance(trouble, EngineLost) or (isinstance(trouble, SessionError) and not _out_of_room(trouble)):
        return _failed(task, endpoint, Failure.ENGINE_LOST, str(trouble))
    if isinstance(trouble, TimeoutError):
        return _failed(task, endpoint, Failure.DEADLINE, str(trouble))
    if found and _out_of_room(trouble):
        return [*found[:-1], replace(found[-1], finish_reason="length")]
    if end.status is None:
        return _failed(task, endpoint, Failure.DEADLINE, f"the agent ran for over {deadline:g} s{end.stderr}")
    if end.status != 0:
        return _failed(task, endpoint, Failure.ENVIRONMENT, f"the agent ended with status {end.status}{end.stderr}")
    if not found:
        detail = f"the agent asked for no reply{f' ({trouble})' if trouble else ''}{end.stderr}"
        return _failed(task, endpoint, Failure.ENVIRONMENT, detail)
    return found


def _run(
    program: str,
    question: dict[str, Any],
    endpoint: Endpoint,
    task: Task,
    deadline: float,
    look: Callable[[], object],
) -> _End:
    kind = "function" if _FUNCTION.fullmatch(program) else "shell"
    command = [sys.executable, "-m", "furlong.resources.serving.program", kind, program]
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": question["base_url"],
        "OPENAI_API_KEY": endpoint.keys.of(task.trajectory_id),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # as many programs as a group has trajectories
    }
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as stderr:
        stdin.write(json.dumps(question).encode())
        stdin.seek(0)
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        ended = False
        try:
            until = time.monotonic() + deadline
            while not (ended := _has_ended(process.pid)) and time.monotonic() < until:
                if endpoint.fatal(task.trajectory_id) is not None:
                    break
                look()
                time.sleep(POLL)
        finally:
            # before the leader is reaped, so that its number cannot have become another group's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return _End(process.returncode if ended else None, _tail(stderr))


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _tail(stderr: IO[bytes]) -> str:
    size = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, size - _SHOWN))
    lines = stderr.read().decode(errors="replace").strip().splitlines()[-5:]
    return f": {' | '.join(line.strip() for line in lines)}" if lines else ""


def _out_of_room(trouble: Exception | None) -> bool:
    return isinstance(trouble, CutReply) or (
        isinstance(trouble, ApiError) and trouble.code == "context_length_exceeded"
    )


def _failed(task: Task, endpoint: Endpoint, kind: Failure, detail: str) -> Failed:
    tokens = endpoint.sampled(task.trajectory_id)
    return Failed(task.trajectory_id, task.sample, task.attempt, kind, " ".join(detail.split()), tokens)
