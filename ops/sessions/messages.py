"""OpenAI chat messages as sessions keep them: plain, complete, and as a chat template wants to see them."""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles that are understood, and the one that templates know them by."""


class MessageError(ValueError):
    """A message or tool that no template could be given; says which one and what to send instead."""


def normalise(messages: Any) -> list[Message]:
    """The messages of a request with texts in one piece and without fields that say nothing.

    Raises:
        MessageError: not a conversation that a reply can follow; the message names its index.
    """
    if not isinstance(messages, list) or not messages:
        raise MessageError("messages must be a list with at least one message; send the conversation so far")
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if plain[-1]["role"] == "assistant":
        raise MessageError(
            "the last message is the assistant's, and replies cannot be continued; end with a user or tool message"
        )
    return plain


def normalise_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tool schemas of a request; MessageError when one is not a function with a name."""
    if tools is None:
        return ()
    if not isinstance(tools, list | tuple):
        raise MessageError("tools must be a list of function schemas; send a list")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
            or tool.get("type") != "function"
        ):
            raise MessageError(
                f"tools[{index}] is not of the form {{type: function, function: {{name, ...}}}}; mend it"
            )
        _check_text(json.dumps(tool, ensure_ascii=False), f"tools[{index}]")
    return tuple(tools)


def for_template(message: Message) -> Message:
    """The message with the arguments of tool calls as values, which templates write as JSON themselves."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _value(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _plain(message: Any, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise MessageError(f"{where} has no role among {', '.join(ROLES)}; give it one")
    role = ROLES[message["role"]]
    plain: Message = {"role": role, "content": _text(message.get("content"), f"{where}.content")}
    if role == "assistant" and message.get("tool_calls"):
        plain["tool_calls"] = _calls(message["tool_calls"], f"{where}.tool_calls")
    if message.get("function_call"):
        raise MessageError(f"{where}.function_call is not supported; use tool_calls")
    fields = {"assistant": ("reasoning_content",), "tool": ("tool_call_id", "name"), "user": ("name",)}.get(role, ())
    for field in fields:
        if isinstance(message.get(field), str) and message[field]:
            plain[field] = _check_text(message[field], f"{where}.{field}")
    return plain


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _check_text(content, where)
    if not isinstance(content, list):
        raise MessageError(f"{where} must be a text or a list of texts; send one of these")
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise MessageError(f"{where} holds something else than text, which the policy cannot read; send texts only")
    return _check_text("".join(parts), where)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise MessageError(f"{where} must be a list; send a list of function calls")
    plain = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MessageError(f"{where}[{index}] has no function.name; send the calls as they were given")
        arguments = function.get("arguments", "{}")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        _check_text(function["name"] + arguments, f"{where}[{index}]")
        plain.append(
            {
                "id": str(call.get("id") or f"call_{index}"),
                "type": "function",
                "function": {"name": function["name"], "arguments": arguments},
            }
        )
    return plain


def _check_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as err:
        raise MessageError(f"{where} holds half a surrogate pair ({err.reason}); send valid Unicode") from err
    return text


def _value(arguments: str) -> Any:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
