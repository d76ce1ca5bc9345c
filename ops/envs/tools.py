"""Conversations in which the policy calls tools until it answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from furlong.ops.envs.calculator import CalculatorError, calculate
from furlong.ops.envs.protocol import Message, Observation
from furlong.ops.envs.single_turn import opening
from furlong.ops.spec import SpecError

RunPython = Callable[[str, float], str]
"""Runs a program within so many seconds and returns what it printed, or how it failed: that is an answer too. Raises
TimeoutError only when the sandbox itself does not answer in time, and EnvError when there is none."""

MOST_CALLS = 16
"""Calls of one reply that are answered; further ones are refused."""
LONGEST_ANSWER = 4000
"""Characters of a tool's answer; the middle of a longer one is left out."""


@dataclass(frozen=True)
class Tool:
    """Something that the policy can call."""

    schema: dict[str, Any]
    """Name, description and parameters as OpenAI writes them; one string argument."""
    run: Callable[[str, float], str]
    """From the argument and the seconds left to the answer."""


def toolbox(names: str, run_python: RunPython) -> dict[str, Tool]:
    """Tools by name, from names with commas between; SpecError for one that there is not."""
    known = {
        "calculator": _tool("calculator", "Evaluate an arithmetic expression.", "expression", _calculator),
        "python": _tool("python", "Run a Python program; returns what it prints.", "code", run_python),
    }
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    odd = [name for name in wanted if name not in known]
    if odd or not wanted:
        raise SpecError(f"data.env: tools={names!r}; set some of {', '.join(known)}, with commas between")
    return {name: known[name] for name in wanted}


class Tools:
    """An `Env` in which replies with tool calls are answered, and one without ends the conversation."""

    def __init__(self, system: str, tools: dict[str, Tool], max_turns: int):
        """`max_turns`: most replies of a conversation; calls in the last one are not answered."""
        self.tools: tuple[dict[str, Any], ...] = tuple(tool.schema for tool in tools.values())
        self._system = system
        self._tools = tools
        self._max_turns = max_turns

    def begin(self, prompt: dict[str, Any]) -> list[Message]:
        """System message and question; the tools go into the template as schemas."""
        return opening(self._system, prompt["question"])

    def episode(self, prompt: dict[str, Any], seed: int) -> ToolEpisode:
        """A conversation with its turns uncounted."""
        return ToolEpisode(self._tools, self._max_turns)


class ToolEpisode:
    """One conversation: counts turns, holds nothing else."""

    def __init__(self, tools: dict[str, Tool], max_turns: int):
        self._tools = tools
        self._left = max_turns

    def step(self, reply: Message, deadline: float) -> Observation:
        """One tool message per call of the reply, in its order; a call that cannot be made is answered with why."""
        self._left -= 1
        calls = reply.get("tool_calls") or []
        if not calls or self._left <= 0:
            return Observation((), done=True, truncated=bool(calls))
        until = time.monotonic() + deadline
        answers = []
        for number, call in enumerate(calls):
            if number >= MOST_CALLS:
                text = f"error: only {MOST_CALLS} calls are answered at once"
            else:
                text = self._answer(call["function"], until)
            answers.append({"role": "tool", "tool_call_id": call["id"], "content": text})
        return Observation(tuple(answers), done=False)

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, function: dict[str, Any], until: float) -> str:
        tool = self._tools.get(function["name"])
        if tool is None:
            return f"error: no tool {function['name']!r:.80}; there are {', '.join(self._tools)}"
        left = until - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"no time left for {function['name']}; its other calls took all; raise reply_deadline")
        argument = _argument(function["arguments"], tool.schema)
        return f"error: {argument.fault}" if isinstance(argument, _Unusable) else _cut(tool.run(argument, left))


@dataclass(frozen=True)
class _Unusable:
    fault: str


def _argument(arguments: str, schema: dict[str, Any]) -> str | _Unusable:
    """The one string that the tool takes, out of the JSON text that the policy wrote."""
    (name,) = schema["function"]["parameters"]["required"]
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return _Unusable(f"the arguments are not JSON; write {{{json.dumps(name)}: ...}}")
    if not isinstance(found, dict) or not isinstance(found.get(name), str):
        return _Unusable(f"the arguments lack the text {json.dumps(name)}")
    return found[name]


def _calculator(expression: str, seconds: float) -> str:
    try:
        return calculate(expression)
    except CalculatorError as err:
        return f"error: {err}"


def _cut(text: str) -> str:
    if len(text) <= LONGEST_ANSWER:
        return text
    half = LONGEST_ANSWER // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _tool(name: str, description: str, argument: str, run: Callable[[str, float], str]) -> Tool:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    function = {"name": name, "description": description, "parameters": parameters}
    return Tool({"type": "function", "function": function}, run)
