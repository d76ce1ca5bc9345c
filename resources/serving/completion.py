"""Replies in the form of OpenAI's chat completions, whole or as a stream of events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from furlong.ops.sessions.node import Node
from furlong.ops.sessions.template import ChatTemplate

MODEL = "policy"
"""Name of the one model that is served, whatever name a client asks for."""


@dataclass(frozen=True)
class Completion:
    """The replies to one request."""

    nodes: Sequence[Node]
    prompt_tokens: int
    created: int
    """Seconds since 1970."""
    logprobs: bool

    def body(self, template: ChatTemplate) -> dict[str, Any]:
        """The whole completion."""
        choices = [
            {
                "index": index,
                "message": _message(node),
                "logprobs": self._logprobs(template, node),
                "finish_reason": _reason(node),
            }
            for index, node in enumerate(self.nodes)
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def events(self, template: ChatTemplate, usage: bool) -> Iterator[str]:
        """The completion as server-sent events: role, text, tool calls and end of each choice, then the usage."""
        head = self._head("chat.completion.chunk")
        for index, node in enumerate(self.nodes):
            message = _message(node)
            deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
            if message["content"]:
                deltas.append({"content": message["content"]})
            for place, call in enumerate(message.get("tool_calls", [])):
                deltas.append({"tool_calls": [{"index": place, **call}]})
            for place, delta in enumerate(deltas):
                logprobs = self._logprobs(template, node) if place == 1 else None
                choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
                yield _event({**head, "choices": [choice]})
            last = {"index": index, "delta": {}, "logprobs": None, "finish_reason": _reason(node)}
            yield _event({**head, "choices": [last]})
        if usage:
            yield _event({**head, "choices": [], "usage": self._usage()})
        yield "data: [DONE]\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": self.created, "model": MODEL}

    def _usage(self) -> dict[str, int]:
        sampled = sum(len(node.sample.tokens) for node in self.nodes)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }

    def _logprobs(self, template: ChatTemplate, node: Node) -> dict[str, Any] | None:
        """Log-probabilities of all sampled tokens, the one that ended the reply too, as they were sampled."""
        if not self.logprobs:
            return None
        entries = []
        for token, logprob in zip(node.sample.tokens, node.sample.logprobs, strict=True):
            text = template.decode([token])
            entries.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": entries, "refusal": None}


def models_body(created: int) -> dict[str, Any]:
    return {"object": "list", "data": [model_body(created)]}


def model_body(created: int) -> dict[str, Any]:
    return {"id": MODEL, "object": "model", "created": created, "owned_by": "furlong"}


def _message(node: Node) -> dict[str, Any]:
    message = {**node.reply, "refusal": None}
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    return message


def _reason(node: Node) -> str:
    if node.sample.finish_reason != "stop":
        return "length"
    return "tool_calls" if node.reply.get("tool_calls") else "stop"


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
