"""The rubric of a `verifiers` environment as a verifier."""

from __future__ import annotations

import asyncio
from typing import Any

from furlong.ops.envs.verifiers_env import load, no_client, step_of
from furlong.ops.tasks.scoring import Judgement


def rubric(reply: str, entry: dict[str, Any], messages: list[dict[str, Any]]) -> Judgement:
    """The weighted sum of the rubric's rewards over the sum of its positive weights, which puts it into [0, 1] when each
    reward is; 1 is accepted.

    Raises:
        ValueError: a sum outside of [0, 1], rewards of whole groups, or a rubric that rewards nothing. What a reward
            raises goes through, where the package itself would count it as 0.
    """
    return asyncio.run(_rubric(load(entry["options"]), reply, entry["input"], messages))


async def _rubric(env: Any, reply: str, example: dict[str, Any], messages: list[dict[str, Any]]) -> Judgement:
    from verifiers.utils.message_utils import normalize_messages

    state = await env.init_state(example, no_client(), "policy")
    said, blank = normalize_messages(messages), len(state["prompt"])
    for index, message in enumerate(said):
        if message.role == "assistant" and index >= blank:
            state["trajectory"].append(step_of(said[:index], [message]))
    state["completion"], state["is_completed"] = said[blank:], True
    total, weights, shown = 0.0, 0.0, []
    for each in _flat(env.rubric):
        for function, weight in zip(each.funcs, each.weights, strict=True):
            if weight == 0:
                continue
            if each._is_group_func(function):
                raise ValueError(
                    f"{function.__name__} rewards whole groups, which cannot be; use an environment without"
                )
            value = float(await _call(function, each.score_objects(state)))
            total, weights = total + weight * value, weights + max(0.0, weight)
            shown.append(f"{function.__name__} {value:.3g}")
    if not weights:
        raise ValueError(
            f"the rubric of {type(env).__name__} has no reward with a positive weight; use another verifier"
        )
    return Judgement(reply, total / weights, ", ".join(shown), total == weights)


def _flat(rubric: Any) -> list[Any]:
    parts = getattr(rubric, "rubrics", None)
    return [rubric] if parts is None else [one for part in parts for one in _flat(part)]


async def _call(function: Any, objects: dict[str, Any]) -> Any:
    from verifiers.utils.async_utils import maybe_call_with_named_args

    return await maybe_call_with_named_args(function, **objects)
