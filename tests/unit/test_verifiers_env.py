"""Environments of the verifiers package, played here; most of it needs `pip install 'furlong-rl[verifiers]'`."""

import importlib.util
import json
import sys
from itertools import islice

import pytest

from furlong.ops.envs.make import make_env
from furlong.ops.envs.protocol import EnvError
from furlong.ops.records import Verdict
from furlong.ops.spec import DataSpec, EnvSpec, SpecError, TaskSpec
from furlong.ops.tasks.families import entries
from furlong.ops.tasks.scoring import score_reply

FACTORY = "furlong.ops.envs.verifiers_env:environment"
needs_package = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")
MODULE = '''
import verifiers as vf
from datasets import Dataset


def exact(completion, answer) -> float:
    return float(completion[-1].content.strip() == answer)


def short(completion) -> float:
    return 1.0 / len(completion[-1].content)


def broken(completion) -> float:
    raise KeyError("bug")


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        if messages[-1].content == "stop":
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
        if messages[-1].content == "fail":
            state["error"] = vf.Error("out of order")
        return [{"role": "user", "content": f"wrong, {state['tries']}"}]


def load_environment(kind="single", weight=0.5, n=3, bad=False):
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(n)]
    data = Dataset.from_list(rows)
    funcs = [exact, broken] if bad else [exact, short]
    rubric = vf.Rubric(funcs=funcs, weights=[1.0, weight])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, rubric=rubric, system_prompt="Answer.")
    if kind == "tools":
        return vf.ToolEnv(dataset=data, rubric=rubric, tools=[add], max_turns=3)
    return Guess(dataset=data, rubric=rubric, max_turns=3)
'''


@pytest.fixture(autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path_factory.mktemp("env")
    (folder / "furlong_sample_env.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(folder))


def _made(**options: object):
    options = {"id": "furlong-sample-env", **options}
    task = TaskSpec(name="verifiers", options=options)
    data = DataSpec(tasks=(task,), train_prompts=2, eval_prompts=1, env=EnvSpec(name=FACTORY, options=options))
    rows = [{**row, "prompt_id": "p", "entry": json.dumps(row["entry"])} for row in islice(entries(task, 0), 4)]
    return make_env(data, lambda code, seconds: ""), rows


def _said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def _score(row: dict, messages: list[dict], finish_reason: str = "stop") -> dict:
    reply = messages[-1]["content"]
    return score_reply({**row, "reply": reply, "messages": json.dumps(messages), "finish_reason": finish_reason})


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_the_package_it_says_how_to_install_it():
    with pytest.raises(SpecError, match=r"pip install 'furlong-rl\[verifiers\]'"):
        next(entries(TaskSpec(name="verifiers", options={"id": "furlong-sample-env"}), 0))


def test_an_environment_needs_a_name():
    data = DataSpec(tasks=(TaskSpec(name="verifiers"),), train_prompts=1, eval_prompts=1, env=EnvSpec(name=FACTORY))
    with pytest.raises(SpecError, match="needs the option `id`"):
        make_env(data, lambda code, seconds: "")
    assert "verifiers" not in sys.modules or importlib.util.find_spec("verifiers") is not None


@needs_package
def test_questions_come_from_the_environment():
    _, rows = _made()
    assert [row["question"] for row in rows] == ["0+0?", "1+1?", "2+2?", "0+0?"]
    assert [row["answer"] for row in rows] == ["0", "2", "4", "0"]
    assert rows == _made()[1]


@needs_package
def test_one_turn():
    env, rows = _made()
    begin = env.begin(rows[1])
    assert begin == [{"role": "system", "content": "Answer."}, {"role": "user", "content": "1+1?"}]
    episode = env.episode(rows[1], 0)
    assert episode.step(_said("2"), 5.0).done
    episode.close()
    episode.close()
    assert _score(rows[1], [*begin, _said("2")]) == {
        "verdict": Verdict.CORRECT, "score": 1.0, "extracted": "2", "detail": "exact 1, short 1",
    }  # fmt: skip
    wrong = _score(rows[1], [*begin, _said("two")])
    assert (wrong["verdict"], wrong["score"]) == (Verdict.INCORRECT, pytest.approx(0.5 / 3 / 1.5))


@needs_package
def test_several_turns_keep_their_own_state():
    env, rows = _made(kind="guess")
    one, two = env.episode(rows[1], 0), env.episode(rows[1], 1)
    assert one.step(_said("7"), 5.0).messages == ({"role": "user", "content": "wrong, 1"},)
    assert two.step(_said("7"), 5.0).messages == ({"role": "user", "content": "wrong, 1"},)
    assert one.step(_said("8"), 5.0).messages == ({"role": "user", "content": "wrong, 2"},)
    assert one.step(_said("9"), 5.0).done
    assert two.step(_said("stop"), 5.0).done
    one.close()
    two.close()
    with pytest.raises(EnvError, match="out of order"):
        env.episode(rows[1], 0).step(_said("fail"), 5.0)


@needs_package
def test_tools_of_the_environment():
    env, rows = _made(kind="tools")
    assert [tool["function"]["name"] for tool in env.tools] == ["add"]
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    episode = env.episode(rows[1], 0)
    found = episode.step(reply, 5.0)
    assert found.messages == ({"role": "tool", "tool_call_id": "c0", "content": "2"},)
    assert episode.step(_said("2"), 5.0).done
    messages = [*env.begin(rows[1]), reply, *found.messages, _said("2")]
    assert _score(rows[1], messages)["score"] == 1.0
    endless = env.episode(rows[1], 0)
    assert not endless.step(reply, 5.0).done
    assert not endless.step(reply, 5.0).done
    end = endless.step(reply, 5.0)
    assert (end.done, end.truncated) == (True, True)


@needs_package
def test_a_reward_that_raises_is_an_error_not_a_zero():
    env, rows = _made(bad=True)
    with pytest.raises(KeyError, match="bug"):
        _score(rows[1], [*env.begin(rows[1]), _said("2")])


@needs_package
@pytest.mark.parametrize(("options", "says"), [({"id": "no-such-env"}, "no-such-env"), ({"colour": 1}, "colour")])
def test_an_environment_that_cannot_be_loaded_is_named(options: dict, says: str):
    with pytest.raises(SpecError, match=says):
        _made(**options)
