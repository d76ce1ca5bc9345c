"""The endpoint as OpenAI's own client sees it, and what is left of it after a crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from chat_templates import call, make_sample, make_template
from openai import OpenAI
from scripted import Script

from furlong.ops.identity import counter_seed
from furlong.ops.rollouts.trajectory import EngineLost
from furlong.ops.sessions.drift import DriftError
from furlong.resources.serving.endpoint import Defaults, Endpoint
from furlong.resources.serving.journal import Journal, JournalError
from furlong.resources.serving.server import Server, ServerError

ID = "run-00001.1-g000-s03"
DEFAULTS = Defaults(temperature=0.8, max_new_tokens=200, reply_deadline=9.0, context_length=600)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
USER = {"role": "user", "content": "hello"}


def echo(prompt: str) -> str:
    """Calls a tool where there are tools and it has not been answered, else repeats the last message."""
    if "Tools:" in prompt and "<tool_response>" not in prompt:
        return f"let me see {call('add', json.dumps({'a': 1}))} {call('add', json.dumps({'b': 'ü'}))}"
    return f"you said {prompt.split('<|im_start|>user')[-1].split('<|im_end|>')[0].strip()}"


BEARER = {"authorization": "Bearer sesame"}


@pytest.fixture
def script() -> Script:
    return Script(make_template("chatml"), echo)


@pytest.fixture
def endpoint(script: Script, tmp_path: Path) -> Iterator[Endpoint]:
    made = Endpoint(script.template, script, DEFAULTS, tmp_path / "journal", most=4, key="sesame")
    with Server(made):
        yield made
        script.open.set()


def client(base_url: str, retries: int = 0) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="sesame", max_retries=retries, timeout=20)


def create(base_url: str, messages: list | None = None, **parameters):
    return client(base_url).chat.completions.create(model="any", messages=messages or [USER], **parameters)


def test_a_conversation_with_tools_is_one_exact_trajectory(endpoint: Endpoint, script: Script) -> None:
    url = endpoint.open(ID, 7, key="group")
    first = create(url, tools=TOOLS, tool_choice="auto")
    choice = first.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "let me see")
    assert [json.loads(c.function.arguments) for c in choice.message.tool_calls] == [{"a": 1}, {"b": "ü"}]
    assert first.usage.completion_tokens + first.usage.prompt_tokens == first.usage.total_tokens
    history = [USER, choice.message.model_dump()]
    history += [{"role": "tool", "tool_call_id": c.id, "content": "3"} for c in choice.message.tool_calls]
    second = create(url, history, tools=TOOLS)
    assert second.choices[0].finish_reason == "stop"
    one, two = script.requests
    assert (one.seed, two.seed) == (7, counter_seed(7, 1))
    assert (one.temperature, one.max_new_tokens, one.deadline, one.top_p) == (0.8, 200, 9.0, 1.0)
    assert script.keys == ["group", "group"]
    (trajectory,) = endpoint.take(ID, 3)
    assert trajectory.tokens[: len(two.prompt)] == two.prompt
    assert two.prompt[: len(one.prompt)] == one.prompt
    assert (trajectory.trajectory_id, trajectory.sample, trajectory.turns, trajectory.seed) == (ID, 3, 2, 7)
    assert sum(trajectory.loss_mask) == first.usage.completion_tokens + second.usage.completion_tokens
    assert trajectory.messages[-1]["content"] == second.choices[0].message.content == trajectory.text
    assert trajectory.seconds > 0
    assert endpoint.take(ID, 3) == [trajectory]
    endpoint.discard(ID)
    with pytest.raises(KeyError):
        endpoint.take(ID)


def test_streams_say_the_same(endpoint: Endpoint) -> None:
    url = endpoint.open(ID, 7)
    whole = create(url, tools=TOOLS, n=2).choices
    endpoint.discard(ID)
    url = endpoint.open(ID, 7)
    texts, calls, reasons, usage = ["", ""], [{}, {}], [None, None], None
    stream = create(url, tools=TOOLS, n=2, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage or usage
        for part in chunk.choices:
            texts[part.index] += part.delta.content or ""
            reasons[part.index] = part.finish_reason or reasons[part.index]
            for delta in part.delta.tool_calls or []:
                calls[part.index][delta.index] = (delta.id, delta.function.name, delta.function.arguments)
    assert texts == [choice.message.content for choice in whole]
    assert reasons == [choice.finish_reason for choice in whole] == ["tool_calls"] * 2
    spelled = [[(c.id, c.function.name, c.function.arguments) for c in choice.message.tool_calls] for choice in whole]
    assert [list(c.values()) for c in calls] == spelled
    assert usage.completion_tokens > 0
    body = {"messages": [USER], "stream": True}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=BEARER) as raw:
        lines = [line for line in raw.iter_lines() if line]
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"


def test_several_replies_are_siblings_and_a_repeated_request_is_a_retry(endpoint: Endpoint, script: Script) -> None:
    url = endpoint.open(ID, 7)
    reply = create(url, n=3).choices[2].message
    assert [request.seed for request in script.requests] == [7, counter_seed(7, 0, 1), counter_seed(7, 0, 2)]
    create(url, [USER, reply.model_dump(), USER])
    create(url, [USER, reply.model_dump(), USER])
    leaves = endpoint.take(ID)
    assert [leaf.trajectory_id for leaf in leaves] == [ID, f"{ID}-l1", f"{ID}-l2"]
    assert [leaf.turns for leaf in leaves] == [1, 1, 2]
    names = [request.request_id for request in script.requests]
    assert len(set(names)) == 5
    assert all(name.startswith(f"{ID}:0.") for name in names)


def test_a_sequential_agent_is_repeated_bit_for_bit(endpoint: Endpoint) -> None:
    def run() -> list[tuple[int, ...]]:
        endpoint.discard(ID)
        url, history = endpoint.open(ID, 99), [USER]
        for _ in range(4):
            history += [create(url, history).choices[0].message.model_dump(), {"role": "user", "content": "and again"}]
        return [trajectory.tokens for trajectory in endpoint.take(ID)]

    assert run() == run()


def test_requests_at_once_become_branches(endpoint: Endpoint, script: Script) -> None:
    url = endpoint.open(ID, 7)
    reply = create(url).choices[0].message.model_dump()
    script.open.clear()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(create, url, [USER, reply, {"role": "user", "content": text}]) for text in "aabc"]
        wait_for(lambda: len(script.requests) == 5)
        with pytest.raises(openai.RateLimitError, match="4 replies are under way"):
            create(url)
        script.open.set()
        assert len({future.result().choices[0].message.content for future in asked}) == 3
    leaves = endpoint.take(ID)
    assert [leaf.turns for leaf in leaves] == [2] * 4  # the two equal ones were side by side: none is a retry
    assert len({request.seed for request in script.requests}) == 5
    assert sum(sum(leaf.loss_mask) for leaf in leaves) == endpoint.sampled(ID)


def wait_for(condition) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_reply_to_a_closed_session_is_given_and_not_recorded(endpoint: Endpoint, script: Script) -> None:
    url = endpoint.open(ID, 7)
    create(url)
    script.open.clear()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(create, url, [{"role": "user", "content": "late"}])
        wait_for(lambda: len(script.requests) == 2)
        assert len(endpoint.take(ID)) == 1
        script.open.set()
        assert late.result().choices[0].message.content == "you said late"
    assert endpoint.unrecorded == 1
    assert len(endpoint.take(ID)) == 1
    with pytest.raises(openai.ConflictError, match="is closed"):
        create(url)


def test_a_reply_that_nobody_waits_for_is_not_part_of_the_conversation(endpoint: Endpoint, script: Script) -> None:
    """A client that gives up and asks again has seen one reply, so one is trained."""
    url = endpoint.open(ID, 7)
    script.open.clear()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/chat/completions", json={"messages": [USER]}, timeout=0.2, headers=BEARER)
    time.sleep(0.1)
    script.open.set()
    wait_for(lambda: endpoint.unrecorded == 1)
    create(url)
    assert [leaf.turns for leaf in endpoint.take(ID)] == [1]
    assert len(endpoint._seat(ID).session.nodes) == 1


def test_sampling_without_a_session(endpoint: Endpoint, script: Script) -> None:
    url = f"{endpoint.address}/v1"
    one = create(
        url, seed=5, temperature=0, top_p=0.5, max_completion_tokens=300, extra_body={"top_k": 3, "min_p": 0.1}
    )
    two = create(url, seed=5, max_tokens=3)
    create(url)
    a, b, c = script.requests
    assert (a.temperature, a.top_p, a.top_k, a.min_p, a.max_new_tokens) == (0, 0.5, 3, 0.1, 300)
    assert a.seed == b.seed != c.seed
    assert two.choices[0].finish_reason == "length"
    assert two.usage.completion_tokens == 3
    assert one.choices[0].message.content == "you said hello"
    assert endpoint.sessions() == []
    assert [m.id for m in client(url).models.list()] == ["policy"] == [client(url).models.retrieve("policy").id]
    with pytest.raises(openai.NotFoundError, match="no model"):
        client(url).models.retrieve("gpt-4o")


def test_stop_texts_and_log_probabilities(endpoint: Endpoint) -> None:
    url = endpoint.open(ID, 7)
    reply = create(url, stop=["said", "never"], logprobs=True).choices[0]
    assert (reply.message.content, reply.finish_reason) == ("you ", "stop")
    assert b"".join(bytes(entry.bytes) for entry in reply.logprobs.content).decode() == "you said"
    (trajectory,) = endpoint.take(ID)
    mine = [value for value in trajectory.logprobs if value is not None]
    assert [entry.logprob for entry in reply.logprobs.content] == mine
    assert trajectory.text == "you "


REFUSED = [
    ({"temperature": 0.5}, "temperature"), ({"top_p": 0.9}, "top_p"), ({"extra_body": {"top_k": 5}}, "top_k"),
    ({"extra_body": {"min_p": 0.5}}, "min_p"), ({"temperature": 3}, "temperature"), ({"top_p": 0}, "top_p"),
    ({"n": 0}, "n"), ({"n": 1000}, "n"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": True}, "max_tokens"),
    ({"stop": ["a"] * 17}, "stop"), ({"stop": ""}, None), ({"stop": [""]}, "stop"), ({"seed": 1.5}, "seed"),
    ({"logprobs": 3}, "logprobs"), ({"top_logprobs": 2}, "top_logprobs"), ({"presence_penalty": 1}, "presence_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"), ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
    ({"extra_body": {"best_of": 3}}, "best_of"), ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ({"stream": "yes"}, None), ({"extra_body": {"stream_options": 3}}, "stream_options"),
    ({"tools": [{"type": "function"}]}, "messages"), ({"parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"extra_body": {"messages": []}}, "messages"), ({"extra_body": {"messages": "x"}}, "messages"),
    ({"messages": [{"role": "robot", "content": ""}]}, "messages"),
    ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages"),
]  # fmt: skip


def test_what_cannot_be_honoured_is_refused(endpoint: Endpoint, script: Script) -> None:
    url = endpoint.open(ID, 7)
    for parameters, param in REFUSED:
        if param is None:  # the client would not send it
            answer = httpx.post(f"{url}/chat/completions", json={"messages": [USER], **parameters}, headers=BEARER)
            assert answer.status_code == 400
            continue
        with pytest.raises(openai.BadRequestError) as told:
            create(url, **parameters)
        assert told.value.param == param
        assert told.value.type == "invalid_request_error"
    assert script.requests == []
    assert endpoint.take(ID) == []


ACCEPTED = [
    {"temperature": 0.8}, {"top_p": 1}, {"extra_body": {"top_k": 0}}, {"seed": 3}, {"n": 1}, {"max_tokens": 10_000},
    {"tool_choice": "none", "tools": TOOLS}, {"tool_choice": "required", "tools": TOOLS}, {"presence_penalty": 0},
    {"user": "me"},
]  # fmt: skip


def test_what_changes_nothing_is_accepted(endpoint: Endpoint, script: Script) -> None:
    for parameters in ACCEPTED:
        reply = create(endpoint.open(ID, 7), **parameters).choices[0].message
        assert script.requests[-1].max_new_tokens == 200
        assert bool(reply.tool_calls) == (parameters.get("tool_choice") == "required")


def test_errors_have_their_codes(endpoint: Endpoint, script: Script) -> None:
    url = endpoint.open(ID, 7)
    with pytest.raises(openai.NotFoundError, match="no session"):
        create(f"{endpoint.address}/sessions/other/v1")
    for raised, status, code in (
        (EngineLost("gone"), 503, "engine_lost"), (TimeoutError("late"), 408, "deadline"), (RuntimeError("odd"), 500, None),
    ):  # fmt: skip
        script.raises = raised
        with pytest.raises(openai.APIStatusError) as told:
            create(url)
        assert (told.value.status_code, told.value.code) == (status, code)
        assert told.value.response.headers["x-should-retry"] == str(status == 503).lower()
        assert endpoint.trouble(ID) is raised
        assert endpoint.fatal(ID) is (raised if status == 500 else None)
    names = [request.request_id for request in script.requests]
    assert [name.split("-")[-2] for name in names] == ["0", "0", "1"]  # a lost engine's reply keeps its place and seed
    script.raises = None
    for reason, status in (("deadline", 408), ("abort", 503)):
        script.reason = reason
        with pytest.raises(openai.APIStatusError) as told:
            create(url)
        assert told.value.status_code == status
    script.reason = "length"
    cut = create(url).choices[0]
    assert cut.finish_reason == "length"
    assert endpoint.trouble(ID) is None
    script.reason = ""
    with pytest.raises(openai.UnprocessableEntityError, match="cut off"):
        create(url, [USER, cut.message.model_dump(), USER])
    with pytest.raises(openai.BadRequestError) as told:
        create(url, [{"role": "user", "content": "x" * 700}])
    assert told.value.code == "context_length_exceeded"
    for data in (b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"n": NaN}', b'{"messages": "\\ud800"}'):
        assert httpx.post(f"{url}/chat/completions", content=data, headers=BEARER).status_code == 400
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    assert httpx.post(f"{url}/chat/completions", content=surrogate, headers=BEARER).status_code == 400
    assert httpx.get(f"{url}/chat/completions").status_code == 405
    missing = httpx.post(f"{url}/completions", json={}, headers=BEARER)
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert [leaf.finish_reason for leaf in endpoint.take(ID)] == ["length"]


def test_bad_samples_are_not_recorded(endpoint: Endpoint, script: Script, monkeypatch) -> None:
    url = endpoint.open(ID, 7)
    for samples in ([], [make_sample([100])], [make_sample([100], name="other")] * 2):
        monkeypatch.setattr(endpoint, "_generate", lambda requests, key, samples=samples: samples)
        with pytest.raises(openai.InternalServerError, match="mend the router"):
            create(url)
    assert endpoint.take(ID) == []


def test_what_nobody_foresaw_is_an_answer_too(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    url = endpoint.open(ID, 7)
    monkeypatch.setattr(endpoint, "complete", lambda *_: 1 / 0)
    with pytest.raises(openai.InternalServerError, match="ZeroDivisionError"):
        create(url)
    monkeypatch.undo()
    assert create(url).choices[0].finish_reason == "stop"


def test_drift_is_found_when_the_trajectory_is_taken(endpoint: Endpoint, script: Script) -> None:
    """Letters that read like a special token: rendered again, the reply would end where it did not."""
    url = endpoint.open(ID, 7)
    script.say = lambda _: " ".join("x<|im_start|>x")
    create(url)
    assert len(endpoint.take(ID)) == 1
    endpoint.discard(ID)
    url = endpoint.open(ID, 3)  # a seed with which the word is spelled letter by letter
    script.say = lambda _: "x<|im_start|>x"
    create(url)
    assert len(endpoint._seat(ID).session.nodes[0].sample.tokens) > 10
    with pytest.raises(DriftError, match="special_token"):
        endpoint.take(ID)


# --- crashes -----------------------------------------------------------------------------------------------------------

SERVE = """
import sys, time
from chat_templates import make_template
from scripted import Script
from furlong.resources.serving.endpoint import Defaults, Endpoint
from furlong.resources.serving.server import Server
import test_endpoint
script = Script(make_template("chatml"), test_endpoint.echo)
endpoint = Endpoint(script.template, script, test_endpoint.DEFAULTS, sys.argv[1], key="sesame")
server = Server(endpoint)
print(endpoint.open(test_endpoint.ID, 7), flush=True)
time.sleep(60)
"""


def test_sessions_survive_the_death_of_their_process(script: Script, tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    history, given, stop = [USER], [], threading.Event()

    def talk(url: str) -> None:
        while not stop.is_set():
            try:
                reply = create(url, history).choices[0].message
            except openai.APIConnectionError:
                return
            given.append(reply.content)
            history.extend([reply.model_dump(), {"role": "user", "content": f"more {len(given)}"}])

    thread = threading.Thread(target=talk, args=(process.stdout.readline().strip(),))
    try:
        thread.start()
        wait_for(lambda: len(given) >= 3)
        process.send_signal(signal.SIGKILL)
        thread.join(30)
    finally:
        stop.set()
        process.kill()
        process.wait()
        process.stdout.close()
    again = Endpoint(script.template, script, DEFAULTS, tmp_path, key="sesame")
    with Server(again):
        url = again.open(ID, 7)
        while len(given) < 8:
            reply = create(url, history).choices[0].message
            given.append(reply.content)
            history.extend([reply.model_dump(), {"role": "user", "content": f"more {len(given)}"}])
        survived = again.take(ID)
    # the last reply may have been written down and not given out: then it was asked for again
    uninterrupted = Endpoint(script.template, script, DEFAULTS, tmp_path / "other", key="sesame")
    with Server(uninterrupted):
        url, history = uninterrupted.open(ID, 7), [USER]
        for turn in range(8):
            reply = create(url, history).choices[0].message
            history.extend([reply.model_dump(), {"role": "user", "content": f"more {turn + 1}"}])
        wanted = uninterrupted.take(ID)
    assert len(survived) == len(wanted) == 1
    assert survived[0].messages == wanted[0].messages
    assert survived[0].turns == 8
    assert sum(survived[0].loss_mask) == sum(value is not None for value in survived[0].logprobs)


def test_a_torn_line_is_forgotten_and_a_damaged_one_is_named(
    endpoint: Endpoint, script: Script, tmp_path: Path
) -> None:
    url = endpoint.open(ID, 7)
    reply = create(url).choices[0].message.model_dump()
    (path,) = (tmp_path / "journal").iterdir()
    one = path.read_bytes()
    create(url, [USER, reply, USER])
    two = path.read_bytes()
    for cut in range(len(one), len(two)):
        path.write_bytes(two[:cut])
        (record,) = Journal(path.parent).sessions()
        assert len(record.nodes) == 1
        assert path.read_bytes() == one
        if cut > len(one) + 40:
            break
    path.write_bytes(two[:-1])
    again = Endpoint(script.template, script, DEFAULTS, path.parent, key="sesame")
    with Server(again):
        create(again.open(ID, 7), [USER, reply, USER])
        assert [t.turns for t in again.take(ID)] == [2]
    assert len(Journal(path.parent).sessions()[0].nodes) == 2
    assert path.read_bytes() == two  # the same seeds: the very same line
    path.write_bytes(one[: one.index(b"\n") + 1] + b"{}\n" + two[len(one) :])
    with pytest.raises(JournalError, match="line 2 is damaged"):
        Journal(path.parent).sessions()
    path.write_bytes(b'{"trajectory_id": "other", "seed": 1, "attempt": 0}\n')
    with pytest.raises(JournalError, match="journal of other"):
        Journal(path.parent).sessions()
    path.write_bytes(b'{"traj')
    assert Journal(path.parent).sessions() == []
    assert not path.exists()


def test_a_disk_that_takes_nothing_changes_nothing(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    url = endpoint.open(ID, 7)
    create(url)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("furlong.resources.serving.journal.os.fsync", full)
        with pytest.raises(openai.InternalServerError, match="No space left"):
            create(url, [{"role": "user", "content": "more"}])
    assert len(endpoint.take(ID)) == 1
    (record,) = endpoint._journal.sessions()
    assert len(record.nodes) == 1


def test_opening_again_goes_on_and_another_try_begins_anew(endpoint: Endpoint) -> None:
    url = endpoint.open(ID, 7)
    create(url)
    assert endpoint.open(ID, 7) == url
    assert endpoint.sampled(ID) > 0
    endpoint.open(ID, 8)
    assert endpoint.sampled(ID) == 0
    create(url)
    endpoint.open(ID, 8, attempt=1)
    assert endpoint.take(ID) == []
    odd = "a/b c?%2F-s07:…"
    create(endpoint.open(odd, 1))
    assert [(t.trajectory_id, t.sample) for t in endpoint.take(odd, 2)] == [(odd, 2)]
    endpoint.discard(odd)
    endpoint.discard(odd)
    assert endpoint.sessions() == [ID]


def test_a_server_that_cannot_start_says_so_and_stops_for_good(script: Script, tmp_path: Path) -> None:
    endpoint = Endpoint(script.template, script, DEFAULTS, tmp_path, key="sesame")
    with pytest.raises(RuntimeError, match="no address"):
        endpoint.open(ID, 1)
    with Server(endpoint) as server:
        port = int(endpoint.address.rpartition(":")[2])
        assert endpoint.address.startswith("http://127.0.0.1:")
        with pytest.raises(ServerError, match=f"port {port} cannot be used"):
            Server(Endpoint(script.template, script, DEFAULTS, tmp_path / "b"), port)
        url = endpoint.open(ID, 1)
    server.stop()
    with pytest.raises(openai.APIConnectionError):
        create(url)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer none", "Basic sesame", "sesame", "Bearer sesamé"])
def test_without_its_key_nothing_is_served(endpoint: Endpoint, header: str | None) -> None:
    url = endpoint.open(ID, 7)
    headers = {} if header is None else {"authorization": header.encode()}
    body = {"messages": [USER]}
    for base in (url, f"{endpoint.address}/v1"):
        answers = [httpx.post(f"{base}/chat/completions", json=body, headers=headers)]
        answers += [httpx.get(f"{base}/models", headers=headers)]
        for answer in answers:
            assert answer.status_code == 401
            assert "OPENAI_API_KEY" in answer.json()["error"]["message"]
            assert "sesame" not in answer.text
    assert endpoint.take(ID) == []


def test_a_session_s_key_opens_no_other_session(endpoint: Endpoint) -> None:
    mine, other = endpoint.open(ID, 7), endpoint.open(f"{ID}x", 8)
    headers, body = {"authorization": f"Bearer {endpoint.keys.of(ID)}"}, {"messages": [USER]}
    assert httpx.post(f"{mine}/chat/completions", json=body, headers=headers).status_code == 200
    for base in (other, f"{endpoint.address}/v1"):
        assert httpx.post(f"{base}/chat/completions", json=body, headers=headers).status_code == 401
    assert endpoint.take(f"{ID}x") == []
