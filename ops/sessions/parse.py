"""From the text of a reply to an assistant message: what calls a tool, and what is said beside it."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from furlong.ops.sessions.messages import Message

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"


def parse_reply(text: str, name: str) -> Message:
    """An assistant message with the tool calls that the reply makes, in order.

    Two forms are understood: JSON between <tool_call> tags, as Hermes and Qwen write it, any number of times and with
    text around; and a reply that is nothing but one JSON call, or a list of them, as Llama 3 writes it. A call is
    {"name": text, "arguments" or "parameters": object}. What is malformed stays text.

    Args:
        text: the reply without its stop token.
        name: makes the ids of the calls unique in the conversation.
    """
    content, calls = _tagged(text)
    if not calls and (bare := _bare(text)):
        content, calls = "", bare
    if not calls:
        return {"role": "assistant", "content": text}
    tool_calls = [
        {"id": f"call_{name}_{index}", "type": "function", "function": function} for index, function in enumerate(calls)
    ]
    return {"role": "assistant", "content": content.strip(), "tool_calls": tool_calls}


def _tagged(text: str) -> tuple[str, list[dict[str, str]]]:
    said, calls, at = [], [], 0
    while (begin := text.find(OPEN, at)) >= 0:
        found = _decode(text, begin + len(OPEN))
        end = found and re.compile(rf"\s*{CLOSE}").match(text, found[1])
        function = _function(found[0]) if found and end else None
        if function is None:
            said.append(text[at : begin + len(OPEN)])
            at = begin + len(OPEN)
        else:
            said.append(text[at:begin])
            calls.append(function)
            at = end.end()
    return "".join([*said, text[at:]]), calls


def _bare(text: str) -> list[dict[str, str]]:
    text = text.strip().removeprefix(_PYTHON_TAG).strip()
    found = _decode(text, 0) if text[:1] in ("{", "[") else None
    if found is None or found[1] != len(text):
        return []
    calls = [_function(value) for value in (found[0] if isinstance(found[0], list) else [found[0]])]
    return calls if all(calls) else []


def _decode(text: str, at: int) -> tuple[Any, int] | None:
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return json.JSONDecoder(parse_constant=_no_number).raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _function(value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value["arguments"] if "arguments" in value else value.get("parameters")
    if isinstance(arguments, str):
        found = _decode(arguments, 0)
        arguments = found[0] if found and not arguments[found[1] :].strip() else None
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    try:
        "".join(function.values()).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which neither a tokenizer nor a client could be given
        return None
    return function


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON; write a finite number")
