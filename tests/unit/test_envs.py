"""Environments: what a spec names, and what tools answer."""

import json
import time

import pytest

from furlong.ops.envs.make import make_env
from furlong.ops.envs.single_turn import SingleTurn
from furlong.ops.envs.tools import LONGEST_ANSWER, MOST_CALLS, Tools, toolbox
from furlong.ops.spec import DataSpec, EnvSpec, SpecError, TaskSpec

PROMPT = {"prompt_id": "p", "question": "2+3?"}


def _data(name: str = "tools", system: str = "", **options: object) -> DataSpec:
    env = EnvSpec(name=name, options=options)
    return DataSpec(tasks=(TaskSpec(name="long_arithmetic"),), train_prompts=1, eval_prompts=1, system=system, env=env)


def _python(code: str, seconds: float) -> str:
    return f"ran {code!r}"


def _call(name: str, arguments: object, number: int = 0) -> dict:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": text}}


def _reply(*calls: dict) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def mine(system: str, **options: object) -> SingleTurn:
    """A factory as a user writes it."""
    if options.pop("wanted", None) is None:
        raise TypeError("wanted is missing")
    return SingleTurn(system + str(options))


def test_a_question_is_a_conversation():
    env = make_env(_data("single_turn"), _python)
    assert env.begin(PROMPT) == [{"role": "user", "content": "2+3?"}]
    env = make_env(_data("single_turn", system="Be brief."), _python)
    assert env.begin(PROMPT)[0] == {"role": "system", "content": "Be brief."}
    episode = env.episode(PROMPT, 0)
    assert episode.step({"role": "assistant", "content": "5"}, 1.0).done
    assert env.tools == ()


def test_calls_are_answered_in_order_until_a_reply_makes_none():
    env = make_env(_data(system="S"), _python)
    assert [tool["function"]["name"] for tool in env.tools] == ["calculator", "python"]
    episode = env.episode(PROMPT, 0)
    calls = [_call("calculator", {"expression": "2+3"}), _call("python", {"code": "print(5)"}, 1)]
    found = episode.step(_reply(*calls), 1.0)
    assert not found.done
    assert found.messages == (
        {"role": "tool", "tool_call_id": "call_0", "content": "5"},
        {"role": "tool", "tool_call_id": "call_1", "content": "ran 'print(5)'"},
    )
    end = episode.step({"role": "assistant", "content": "5"}, 1.0)
    assert (end.done, end.truncated, end.messages) == (True, False, ())


def test_turns_run_out():
    episode = make_env(_data(max_turns=2), _python).episode(PROMPT, 0)
    assert not episode.step(_reply(_call("calculator", {"expression": "1"})), 1.0).done
    end = episode.step(_reply(_call("calculator", {"expression": "1"})), 1.0)
    assert (end.done, end.truncated) == (True, True)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (_call("calculator", {"expression": "1/0"}), "error: division by zero"),
        (_call("calculator", {"expression": 5}), "error: the arguments lack the text \"expression\""),
        (_call("calculator", {"code": "5"}), "error: the arguments lack"),
        (_call("calculator", "[]"), "error: the arguments lack"),
        (_call("calculator", "{"), "error: the arguments are not JSON"),
        (_call("calculator", "[" * 100_000), "error: the arguments are not JSON"),
        (_call("python", {"code": "1"}), "error: no tool 'python'; there are calculator"),
        (_call("x" * 10_000, {}), "error: no tool"),
    ],
)  # fmt: skip
def test_a_call_that_cannot_be_made_is_told_to_the_policy(call: dict, says: str):
    episode = make_env(_data(tools="calculator"), _python).episode(PROMPT, 0)
    (answer,) = episode.step(_reply(call), 1.0).messages
    assert answer["content"].startswith(says)
    assert len(answer["content"]) < 200


def test_floods_are_bounded():
    long = make_env(_data(tools="python"), lambda code, seconds: "a" * 10**6 + "end").episode(PROMPT, 0)
    (answer,) = long.step(_reply(_call("python", {"code": ""})), 1.0).messages
    assert len(answer["content"]) < LONGEST_ANSWER + 100
    assert answer["content"].endswith("end")
    many = make_env(_data(), _python).episode(PROMPT, 0)
    answers = many.step(_reply(*(_call("calculator", {"expression": "1"}, n) for n in range(100))), 1.0).messages
    assert [a["content"] for a in answers].count("1") == MOST_CALLS
    assert len(answers) == 100


def test_calls_share_the_time_of_their_reply():
    def slow(code: str, seconds: float) -> str:
        given.append(seconds)
        time.sleep(0.3)
        return ""

    given: list[float] = []
    episode = make_env(_data(tools="python"), slow).episode(PROMPT, 0)
    with pytest.raises(TimeoutError, match="no time left"):
        episode.step(_reply(*(_call("python", {"code": ""}, n) for n in range(3))), 0.5)
    assert [round(seconds, 1) for seconds in given] == [0.5, 0.2]


def test_conversations_do_not_share_their_turns():
    env = Tools("", toolbox("calculator", _python), 2)
    one, two = env.episode(PROMPT, 0), env.episode(PROMPT, 1)
    call = _reply(_call("calculator", {"expression": "1"}))
    assert not one.step(call, 1.0).done
    assert not two.step(call, 1.0).done
    assert one.step(call, 1.0).done


def test_an_environment_of_ones_own():
    env = make_env(_data(f"{__name__}:mine", system="S", wanted=1, colour="red"), _python)
    assert env.begin(PROMPT)[0]["content"] == "S{'colour': 'red'}"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (_data("single_turn", max_turns=2), "single_turn has no option 'max_turns'; it takes none"),
        (_data(turns=2), "tools has no option 'turns'; it takes max_turns, tools"),
        (_data(max_turns=0), "max_turns=0"),
        (_data(max_turns=True), "max_turns=True"),
        (_data(max_turns=1.5), "max_turns=1.5"),
        (_data(tools="calculator,shell"), "tools='calculator,shell'.*calculator, python"),
        (_data(tools=""), "tools=''"),
        (_data(tools=3), "tools=3"),
        (_data("tool"), "no environment 'tool'"),
        (_data("nowhere:env"), "cannot be imported"),
        (_data("json:missing"), "no environment 'json:missing'"),
        (_data(f"{__name__}:mine"), "refuses the options"),
    ],
)
def test_a_spec_that_names_no_environment_is_told_why(data: DataSpec, says: str):
    with pytest.raises(SpecError, match=says):
        make_env(data, _python)
