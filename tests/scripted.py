"""A `Draw` that says what it is told to, for tests of what surrounds the engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace

from chat_templates import make_sample

from furlong.ops.protocols import GenerateRequest, Sample
from furlong.ops.sessions.template import ChatTemplate


class Script:
    """Replies are `say(prompt text)`, spelled in random tokens that follow from the request's seed."""

    def __init__(self, template: ChatTemplate, say: Callable[[str], str]):
        self.template, self.say = template, say
        self.requests: list[GenerateRequest] = []
        self.keys: list[str] = []
        self.raises: Exception | None = None
        self.reason = ""
        """Ends replies without a stop token, for this reason."""
        self.open = threading.Event()
        """While it is not set, replies wait."""
        self.open.set()

    def __call__(self, requests: list[GenerateRequest], key: str) -> list[Sample]:
        self.requests += requests
        self.keys.append(key)
        assert self.open.wait(30)
        if self.raises is not None:
            raise self.raises
        return [self._sample(request) for request in requests]

    def _sample(self, request: GenerateRequest) -> Sample:
        encoder, rng = self.template.tokenizer.encoder, random.Random(request.seed)
        ids: list[int] = []
        for word in self.say(self.template.decode(request.prompt)).split(" "):
            pieces = list(f" {word}" if ids else word) if rng.random() < 0.5 else [f" {word}" if ids else word]
            ids += [i for piece in pieces for i in encoder.encode(piece, add_special_tokens=False).ids]
        end = encoder.token_to_id("<|im_end|>")
        ids.append(end if end in self.template.stop_ids else min(self.template.stop_ids))
        reason = "length" if len(ids) > request.max_new_tokens else "stop"
        ids = ids[: request.max_new_tokens]
        if self.reason:
            ids, reason = ids[:-1] or ids, self.reason
        return replace(make_sample(ids, reason), request_id=request.request_id)
