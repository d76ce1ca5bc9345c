"""Plays prompts: in an environment that answers the policy, or with an agent that asks it by URL."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from furlong.ops.envs.make import make_env
from furlong.ops.envs.single_turn import opening
from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.rollouts.play import play
from furlong.ops.rollouts.trajectory import Draw, Outcome, Task
from furlong.ops.sessions.matchers import MATCHERS, Matcher
from furlong.ops.sessions.template import ChatTemplate
from furlong.ops.spec import DataSpec, RunSpec, SamplingSpec, SpecError
from furlong.resources.envs.sandbox import PythonSandbox
from furlong.resources.serving.agent import MOST, play_agent
from furlong.resources.serving.endpoint import Defaults, Endpoint
from furlong.resources.serving.server import Server

AGENT = "agent"
"""`data.env.name` of runs whose conversations a program of the user's leads."""


class Player(Protocol):
    """Safe for any number of threads."""

    def render(self, prompt: dict[str, Any]) -> list[int]:
        """Token ids that a conversation about this row of `prompts` begins with."""

    def play(self, tasks: Sequence[Task], prompt: dict[str, Any], draw: Draw, key: str, greedy: bool) -> list[Outcome]:
        """See `ops.stages.context.Run.play`."""

    def close(self) -> None:
        """Release what is held."""


def make_player(spec: RunSpec, template: ChatTemplate, deadline: float, context: int, folder: Path) -> Player:
    """The player that `data.env` asks for.

    Args:
        deadline: seconds that one reply, one answer of the environment, or one agent may take.
        context: longest conversation, in tokens.
        folder: for the journals of sessions under way.
    """
    kind = AgentPlayer if spec.data.env.name == AGENT else EnvPlayer
    return kind(spec, template, deadline, context, folder)


class EnvPlayer:
    """The environment lives in this process; see `ops.rollouts.play`."""

    def __init__(self, spec: RunSpec, template: ChatTemplate, deadline: float, context: int, folder: Path):
        self._sampling, self._template, self._deadline, self._context = spec.sampling, template, deadline, context
        self._env = make_env(spec.data, PythonSandbox().run)

    def render(self, prompt: dict[str, Any]) -> list[int]:
        return self._template.prompt_ids(self._env.begin(prompt), self._env.tools)

    def play(self, tasks: Sequence[Task], prompt: dict[str, Any], draw: Draw, key: str, greedy: bool) -> list[Outcome]:
        sampling = at_temperature(self._sampling, greedy)
        return play(tasks, prompt, self._env, self._template, draw, sampling, self._deadline, self._context, key)

    def close(self) -> None:
        """Nothing is held."""


class AgentPlayer:
    """The agent is a program of its own that speaks to the policy as to any OpenAI-compatible server."""

    def __init__(self, spec: RunSpec, template: ChatTemplate, deadline: float, context: int, folder: Path):
        self._spec, self._template, self._deadline = spec, template, deadline
        self._context, self._folder = context, folder
        self._program, self._matcher = _agent(spec.data)
        self._lock = threading.Lock()
        self._servers: dict[bool, tuple[Endpoint, Server]] = {}
        self._draws: dict[str, Draw] = {}

    def render(self, prompt: dict[str, Any]) -> list[int]:
        return self._template.prompt_ids(opening("", prompt["question"]))

    def play(self, tasks: Sequence[Task], prompt: dict[str, Any], draw: Draw, key: str, greedy: bool) -> list[Outcome]:
        self._draws[key] = draw
        try:
            look = partial(draw, [], key)
            return play_agent(tasks, prompt, self._endpoint(greedy), self._program, self._deadline, key, look)
        finally:
            del self._draws[key]

    def close(self) -> None:
        for _, server in self._servers.values():
            server.stop()

    def _endpoint(self, greedy: bool) -> Endpoint:
        """One for each temperature, as a session that is trained has no other."""
        with self._lock:
            if greedy not in self._servers:
                sampling = at_temperature(self._spec.sampling, greedy)
                defaults = Defaults(sampling.temperature, sampling.max_new_tokens, self._deadline, self._context)
                journal = self._folder / ("sessions-greedy" if greedy else "sessions")
                endpoint = Endpoint(
                    self._template, self._draw, defaults, journal, self._matcher, most=max(256, 4 * MOST)
                )
                self._servers[greedy] = endpoint, Server(endpoint)
            return self._servers[greedy][0]

    def _draw(self, requests: list[GenerateRequest], key: str) -> list[Sample]:
        return self._draws[key](requests, key)


def check_env(data: DataSpec) -> None:
    """Raise SpecError when `data.env` cannot be played; the message names the field and the fix."""
    if data.env.name == AGENT:
        _agent(data)
    else:
        make_env(data, PythonSandbox().run)


def _agent(data: DataSpec) -> tuple[str, Matcher]:
    options = {"matcher": "loose_tool_call", **data.env.options}
    if set(options) != {"program", "matcher"} or not isinstance(options["program"], str):
        raise SpecError(
            f"data.env: agent takes the options program and matcher, not {data.env.options}; set program to "
            "module:function, or to a shell command that asks the URL in OPENAI_BASE_URL"
        )
    if options["matcher"] not in MATCHERS:
        raise SpecError(f"data.env: matcher {options['matcher']!r} is not known; set one of {', '.join(MATCHERS)}")
    if data.system:
        raise SpecError("data.system does not go with an agent, which begins its conversations itself; leave it empty")
    return options["program"], MATCHERS[options["matcher"]]


def at_temperature(sampling: SamplingSpec, greedy: bool) -> SamplingSpec:
    return sampling.model_copy(update={"temperature": 0.0}) if greedy else sampling
