"""Programs that are given a URL: what becomes of them when they end well, badly, late or not at all."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from chat_templates import make_template
from scripted import Script

from furlong.ops.records import Failure
from furlong.ops.rollouts.trajectory import EngineLost, Failed, Task
from furlong.ops.spec import Placement, SpecError
from furlong.resources.serving import agent
from furlong.resources.serving.agent import play_agent
from furlong.resources.serving.endpoint import Defaults, Endpoint
from furlong.resources.serving.server import Server
from furlong.resources.system import System

DEFAULTS = Defaults(temperature=1.0, max_new_tokens=50, reply_deadline=9.0, context_length=300)
TASKS = [Task(f"run-00001.1-g000-s{sample:02d}", sample, 100 + sample) for sample in range(4)]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", here, prepend=os.pathsep)
    return Script(make_template("chatml"), lambda prompt: "the answer is forty two")


@pytest.fixture
def endpoint(script: Script, tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(script.template, script, DEFAULTS, tmp_path / "journal")
    with Server(made):
        yield made


def play(endpoint: Endpoint, program: str, tasks: list[Task] = TASKS[:1], deadline: float = 30.0, **entry) -> list:
    prompt = {"question": "hello", "entry": json.dumps({"more": "again", **entry})}
    outcomes = play_agent(tasks, prompt, endpoint, program, deadline, "group")
    assert endpoint.sessions() == []
    assert list(endpoint._journal._folder.iterdir()) == []
    return outcomes


def test_a_group_of_agents(endpoint: Endpoint, script: Script) -> None:
    outcomes = play(endpoint, "agent_samples:by_sample", TASKS)
    assert [isinstance(outcome, Failed) for outcome in outcomes] == [False, True, False, True]
    for task, outcome in zip(TASKS, outcomes, strict=True):
        if isinstance(outcome, Failed):
            assert (outcome.trajectory_id, outcome.sample, outcome.attempt) == (task.trajectory_id, task.sample, 0)
            assert (outcome.kind, outcome.tokens) == (Failure.ENVIRONMENT, 0)
            assert "ValueError: odd" in outcome.detail
            assert "\n" not in outcome.detail
        else:
            (trajectory,) = outcome
            assert (trajectory.trajectory_id, trajectory.sample, trajectory.turns) == (
                task.trajectory_id,
                task.sample,
                2,
            )
            assert trajectory.seed == task.seed
            assert [m["content"] for m in trajectory.messages if m["role"] == "user"] == ["hello", "again"]
    assert set(script.keys) == {"group"}
    assert {request.seed for request in script.requests} >= {100, 102}


def test_a_shell_command(endpoint: Endpoint, script: Script) -> None:
    body = '{"messages": [{"role": "user", "content": "hi"}]}'
    ask = f"""curl -sf -H "Authorization: Bearer $OPENAI_API_KEY" --json '{body}' $OPENAI_BASE_URL/chat/completions"""
    program = f"cat > /dev/null; {ask} || exit 3"
    if os.system("command -v curl > /dev/null"):
        pytest.skip("no curl")
    ((trajectory,),) = play(endpoint, program)
    assert trajectory.messages[0]["content"] == "hi"
    (failed,) = play(endpoint, "echo to no avail >&2; exit 7")
    assert failed.detail == "the agent ended with status 7: to no avail"


def test_an_agent_that_is_late_is_ended_with_its_children(endpoint: Endpoint, tmp_path: Path) -> None:
    file = tmp_path / "pids"
    begin = time.monotonic()
    (failed,) = play(endpoint, "agent_samples:sleep", deadline=6.0, file=str(file))
    assert 6 <= time.monotonic() - begin < 12
    assert (failed.kind, failed.detail[:27]) == (Failure.DEADLINE, "the agent ran for over 6 s")
    assert failed.tokens > 0
    pids = [int(pid) for pid in file.read_text().split()]
    assert len(pids) == 2
    until = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.05)


def test_failures_have_their_kinds(endpoint: Endpoint, script: Script) -> None:
    (failed,) = play(endpoint, "agent_samples:ask_in_vain")
    assert failed.kind is Failure.ENVIRONMENT
    assert failed.detail.endswith("ValueError: the agent | lost its way")
    assert failed.tokens == len(script._sample(script.requests[0]).tokens)
    (failed,) = play(endpoint, "agent_samples:do_nothing")
    assert (failed.kind, failed.detail) == (Failure.ENVIRONMENT, "the agent asked for no reply")
    (failed,) = play(endpoint, "agent_samples:missing")
    assert (failed.kind, "missing" in failed.detail) == (Failure.ENVIRONMENT, True)
    (failed,) = play(endpoint, "no_such_module:play")
    assert failed.detail.endswith("start the run in the folder that holds it, or set PYTHONPATH")
    script.raises = EngineLost("both replicas")
    (failed,) = play(endpoint, "agent_samples:swallow")
    assert (failed.kind, failed.detail) == (Failure.ENGINE_LOST, "both replicas")
    script.raises, script.reason = None, "deadline"
    (failed,) = play(endpoint, "agent_samples:swallow")
    assert failed.kind is Failure.DEADLINE
    script.reason = ""
    script.say = lambda _: "x<|im_start|>x<|im_end|>" * 3
    failed = play(endpoint, "agent_samples:ask", TASKS[:3])
    assert Failure.DRIFT in [outcome.kind for outcome in failed if isinstance(outcome, Failed)]


def test_a_conversation_out_of_room_counts_as_it_is(endpoint: Endpoint, script: Script) -> None:
    """The policy's fault and no accident: it must not be tried again until it comes out short."""
    for program in ("agent_samples:swallow", "agent_samples:ask"):
        script.reason = "length"
        ((trajectory,),) = play(endpoint, program)
        assert (trajectory.finish_reason, trajectory.turns) == ("length", 1)
    script.reason = ""
    ((trajectory,),) = play(endpoint, "agent_samples:swallow", more="x" * 400)
    assert (trajectory.finish_reason, trajectory.turns) == ("length", 1)


def test_what_is_no_fault_of_the_trajectory_is_raised(endpoint: Endpoint, script: Script) -> None:
    class Unwanted(Exception):
        pass

    script.raises = Unwanted("the group is stale")
    begin = time.monotonic()
    with pytest.raises(Unwanted, match="stale"):
        play(endpoint, "agent_samples:swallow", TASKS[:2], deadline=60)
    assert time.monotonic() - begin < 30


def test_programs_wait_for_a_place_and_are_not_begun_for_nothing(endpoint, script, monkeypatch) -> None:
    def look() -> None:
        if script.requests:
            raise KeyError("the group has ended")

    monkeypatch.setattr(agent, "_free", threading.Semaphore(1))
    with pytest.raises(KeyError, match="has ended"):
        play_agent(TASKS, {"question": "hello", "entry": {"more": "x"}}, endpoint, "agent_samples:ask", 30.0, "", look)
    assert len({request.seed for request in script.requests if request.seed in range(100, 104)}) == 1


def test_programs_are_ended_when_the_group_is_not_wanted_any_more(endpoint: Endpoint) -> None:
    begun = time.monotonic()

    def look() -> None:
        if time.monotonic() - begun > 0.3:
            raise KeyError("unwanted")

    prompt = {"question": "hello", "entry": "{}"}
    with pytest.raises(KeyError, match="unwanted"):
        play_agent(TASKS, prompt, endpoint, "exec sleep 31", 60.0, "group", look)
    assert time.monotonic() - begun < 10
    assert endpoint.sessions() == []
    assert not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "31"]]


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("set program to", {"data.env": {"name": "agent"}}),
        ("no environment 'agents'", {"data.env": {"name": "agents"}}),
        (
            "matcher 'odd' is not known",
            {"data.env": {"name": "agent", "options": {"program": "a:b", "matcher": "odd"}}},
        ),
        ("leave it empty", {"data.env": {"name": "agent", "options": {"program": "a:b"}}, "data.system": "Be brief."}),
    ],
)
def test_a_spec_that_cannot_be_played_starts_no_run(said: str, change: dict, tmp_path: Path) -> None:
    system = System(Placement(root=str(tmp_path)))
    with pytest.raises(SpecError, match=said):
        system.start_run("tiny", change)
    assert list(tmp_path.iterdir()) == []
