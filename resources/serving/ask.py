"""What a chat completion request asks for: every parameter is honoured, or refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from furlong.resources.serving.errors import ApiError

MOST_CHOICES = 128
MOST_STOPS = 16

HARMLESS = frozenset({
    "model", "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "verbosity",
})  # fmt: skip
"""Parameters without a bearing on what is drawn."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "modalities": (["text"],),
    "tool_choice": ("auto", "none", "required"),
}
"""Parameters that change what is drawn: the values that leave it alone, or are honoured here."""


@dataclass(frozen=True)
class Ask:
    """A chat completion request; None where the client left it to the server."""

    messages: Any
    tools: Any
    calls: bool
    """False when tools may not be called."""
    n: int
    stream: bool
    usage: bool
    """Whether a stream ends with the usage."""
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    max_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool


def read_ask(body: Any) -> Ask:
    """Check the parameters of a request; messages and tools are left to the session.

    Raises:
        ApiError: 400, naming the parameter at fault.
    """
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object; send one with `messages`")
    for name, value in body.items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            allowed = " or ".join(repr(each) for each in NEUTRAL[name])
            raise ApiError(400, f"{name}={value!r:.80} is not supported; leave it out, or send {allowed}", name, _CODE)
        if name not in NEUTRAL and name not in HARMLESS and name not in _READ and value is not None:
            raise ApiError(400, f"parameter {name!r:.80} is not supported; leave it out", f"{name:.80}", _CODE)
    if "messages" not in body:
        raise ApiError(400, "messages is missing; send the conversation", "messages")
    limits = [
        _number(body, name, 1, math.inf, whole=True) for name in ("max_completion_tokens", "max_tokens") if name in body
    ]
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise ApiError(
            400, "stream_options must be an object; send {include_usage: true}, or leave it out", "stream_options"
        )
    seed = _number(body, "seed", -(2**63), 2**64, whole=True)
    return Ask(
        messages=body["messages"],
        tools=body.get("tools"),
        calls=body.get("tool_choice") != "none",
        n=int(_number(body, "n", 1, MOST_CHOICES, whole=True) or 1),
        stream=_flag(body, "stream"),
        usage=bool(options.get("include_usage")),
        temperature=_number(body, "temperature", 0, 2),
        top_p=_number(body, "top_p", 1e-6, 1),
        top_k=_whole(_number(body, "top_k", 0, math.inf, whole=True)),
        min_p=_number(body, "min_p", 0, 1),
        max_tokens=_whole(next((limit for limit in limits if limit is not None), None)),
        stop=_stops(body.get("stop")),
        seed=_whole(seed),
        logprobs=_flag(body, "logprobs"),
    )


_CODE = "unsupported_parameter"
_READ = frozenset({
    "messages", "tools", "n", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "max_tokens",
    "max_completion_tokens", "stop", "seed", "logprobs",
})  # fmt: skip


def _number(body: dict[str, Any], name: str, low: float, high: float, whole: bool = False) -> float | int | None:
    value = body.get(name)
    if value is None:
        return None
    kinds = (int,) if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        kind = "a whole number" if whole else "a number"
        raise ApiError(400, f"{name}={value!r:.80} must be {kind} from {low:g} to {high:g}; correct it", name)
    return value


def _whole(value: float | int | None) -> int | None:
    return None if value is None else int(value)


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(400, f"{name}={value!r:.80} must be true or false; correct it", name)
    return bool(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, f"stop must be up to {MOST_STOPS} texts that are not empty; correct it", "stop")
    return tuple(stops)
