"""Environments of the `verifiers` package: its questions, its conversations and its rewards.

    data:
      tasks: [{name: verifiers, options: {id: my-env}}]
      env: {name: "furlong.ops.envs.verifiers_env:environment", options: {id: my-env}}

Further options go to the environment's own `load_environment`, and should be the same in both places. Rewards are computed
from the conversation, in the verifier's process: one that reads what an environment keeps in its state raises there.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from collections.abc import Coroutine, Iterator
from typing import Any

from furlong.ops.envs.protocol import EnvError, Message, Observation
from furlong.ops.spec import SpecError, TaskSpec

RUBRIC = "furlong.ops.tasks.scoring_verifiers:rubric"


@functools.cache
def _load(env_id: str, options: str) -> Any:
    try:
        import verifiers as vf

        load = vf.load_environment
    except (ImportError, AttributeError) as err:
        raise SpecError(
            f"verifiers environments need the package verifiers, of a version with load_environment ({err}); run "
            "pip install 'furlong-rl[verifiers]'"
        ) from err
    try:
        env = load(env_id, **json.loads(options))
    except (ValueError, RuntimeError) as err:
        raise SpecError(
            f"verifiers cannot load {env_id!r} with options {options}: {err}; install or correct it"
        ) from err
    if not isinstance(env, vf.MultiTurnEnv):
        raise SpecError(
            f"{env_id!r} is a {type(env).__name__}, which cannot be played; use a single-turn or multi-turn one"
        )
    return env


def load(options: dict[str, Any]) -> Any:
    """The environment that `options["id"]` names, loaded once per process; SpecError when that fails."""
    rest = dict(options)
    env_id = rest.pop("id", None)
    if not isinstance(env_id, str) or not env_id:
        raise SpecError(f"a verifiers environment needs the option `id`, got {options}; set its name")
    return _load(env_id, json.dumps(rest, sort_keys=True))


def rows(task: TaskSpec) -> Iterator[dict[str, Any]]:
    """Endless entries {question, answer, verifier, entry} of the environment's own questions, in its order."""
    dataset = load(task.options).get_dataset()
    if not len(dataset):
        raise SpecError(f"the verifiers environment {task.options['id']!r} has no training questions; use another one")
    return (_row(task, dict(dataset[index])) for index in itertools.cycle(range(len(dataset))))


def _row(task: TaskSpec, example: dict[str, Any]) -> dict[str, Any]:
    plain = json.loads(json.dumps(example, default=str))
    said = [_plain(message) for message in plain["prompt"]]
    question = next((m["content"] for m in reversed(said) if m["role"] == "user"), json.dumps(said))
    entry = {"options": task.options, "input": plain}
    return {"question": question, "answer": str(plain.get("answer", "")), "verifier": RUBRIC, "entry": entry}


def environment(system: str, **options: Any) -> VerifiersEnv:
    """The factory that `data.env.name` names; the environment brings its own system message."""
    if system:
        raise SpecError("data.system does not go with a verifiers environment, which brings its own; leave it empty")
    return VerifiersEnv(load(options))


class VerifiersEnv:
    """An `Env` around a loaded environment of the package."""

    def __init__(self, env: Any):
        self._env = env
        self.tools: tuple[dict[str, Any], ...] = tuple(
            {"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in env.tool_defs or []
        )

    def begin(self, prompt: dict[str, Any]) -> list[Message]:
        """The prompt as the environment's dataset has it."""
        return [_plain(message) for message in json.loads(prompt["entry"])["input"]["prompt"]]

    def episode(self, prompt: dict[str, Any], seed: int) -> VerifiersEpisode:
        """A conversation with its own state; what is random in it is the environment's own affair."""
        return VerifiersEpisode(self._env, json.loads(prompt["entry"])["input"])


class VerifiersEpisode:
    """Drives the environment's stop conditions and answers the way its own rollout does."""

    def __init__(self, env: Any, example: dict[str, Any]):
        self._env = env
        self._loop = asyncio.new_event_loop()
        self._state = self._run(self._begin(example), 60.0)

    def step(self, reply: Message, deadline: float) -> Observation:
        """What the environment answers, or that it is over; raises EnvError when its state says so."""
        return self._run(self._answer(reply), deadline)

    def close(self) -> None:
        """Run the environment's own clean-up and end its event loop."""
        if self._loop.is_closed():
            return
        try:
            self._run(self._env.cleanup(self._state), 60.0)
        finally:
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        try:
            return self._loop.run_until_complete(asyncio.wait_for(work, seconds))
        except TimeoutError as err:
            raise TimeoutError(f"the environment took longer than {seconds:g} s; raise reply_deadline") from err

    async def _begin(self, example: dict[str, Any]) -> Any:
        state = await self._env.init_state(example, no_client(), "policy")
        await self._env.setup_state(state)
        return state

    async def _answer(self, reply: Message) -> Observation:
        from verifiers.utils.message_utils import normalize_messages

        state = self._state
        before = state["trajectory"][-1]["said"] if state["trajectory"] else list(state["prompt"])
        said = [*before, *normalize_messages([reply])]
        state["trajectory"].append(step_of(before, said[len(before) :]) | {"said": said})
        if await self._over():
            return Observation(
                (), done=True, truncated=state["stop_condition"] == "max_turns_reached" and self._wants(reply)
            )
        answer = normalize_messages(await self._env.env_response(said, state))
        state["trajectory"][-1]["said"] = [*said, *answer]
        if state.get("final_env_response") is not None or await self._over():
            return Observation((), done=True)
        return Observation(tuple(_plain(message.model_dump(exclude_none=True)) for message in answer), done=False)

    async def _over(self) -> bool:
        over = await self._env.is_completed(self._state)
        if self._state.get("error") is not None:
            raise EnvError(f"the environment reports {self._state['error']!r}; see its own documentation")
        return over

    @staticmethod
    def _wants(reply: Message) -> bool:
        return bool(reply.get("tool_calls"))


def step_of(prompt: list[Any], completion: list[Any]) -> dict[str, Any]:
    """One turn as the package's states hold it."""
    return {"prompt": prompt, "completion": completion, "response": None, "tokens": None, "reward": None,
            "advantage": None, "is_truncated": False, "trajectory_id": "", "extras": {}}  # fmt: skip


def _plain(message: dict[str, Any]) -> Message:
    """A message as OpenAI writes it; the package keeps tool calls flat."""
    plain = {key: value for key, value in message.items() if value is not None}
    calls = plain.pop("tool_calls", None) or []
    calls = [call if isinstance(call, dict) else json.loads(call) for call in calls]
    flat = [c if "function" in c else {"id": c["id"], "type": "function", "function": {"name": c["name"],
            "arguments": c["arguments"]}} for c in calls]  # fmt: skip
    return {**plain, "content": plain.get("content") or "", **({"tool_calls": flat} if flat else {})}


def no_client() -> Any:
    """A client for states that must have one: replies are drawn elsewhere, so nothing may call it."""
    from verifiers.clients import Client

    def refuse(*_: Any, **__: Any) -> Any:
        raise EnvError("the environment asked a model by itself, which is not possible here; use another one")

    methods = dict.fromkeys(Client.__abstractmethods__, refuse)
    return type("NoClient", (Client,), methods)(object())
