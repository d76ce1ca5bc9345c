"""Between conversations and token ids, without ever encoding again what the policy has sampled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from furlong.ops.sessions.messages import Message, for_template
from furlong.ops.tasks.render import ChatTokenizer, decode


class TemplateError(ValueError):
    """A conversation that the model's chat template cannot carry token by token; says what it does to it."""


@dataclass(frozen=True)
class Suffix:
    """What comes between a sampled reply and the next one."""

    dropped: int
    """Tokens to leave out at the end of the reply: 1 when it ended with a stop token that the template does not write
    there, such as the header of another speaker; else 0."""
    ids: list[int]
    """Tokens to put after it."""


class ChatTemplate:
    """A tokenizer with its chat template; safe for several threads."""

    def __init__(self, tokenizer: ChatTokenizer):
        self.tokenizer = tokenizer
        added = tokenizer.encoder.get_added_tokens_decoder()
        special = {token for token, entry in added.items() if entry.special}
        self.stop_ids = tokenizer.stop_ids
        self.special_ids = frozenset(special | set(tokenizer.stop_ids))
        """Tokens that a tokenizer makes of nothing but their own text."""
        stops = [tokenizer.encoder.id_to_token(token) for token in tokenizer.stop_ids]
        longest_first = sorted(filter(None, stops), key=len, reverse=True)
        if not longest_first:
            raise TemplateError(
                f"stop ids {sorted(self.stop_ids)} are not in the vocabulary; correct generation_config.json"
            )
        self._end = re.compile(rf"({'|'.join(map(re.escape, longest_first))})\s*\Z")
        marks = {entry.content for token, entry in added.items() if token in self.special_ids}
        self._marks = tuple(marks | set(longest_first))

    def text(self, messages: list[Message], tools: Any = None, prompt: bool = True) -> str:
        """The conversation as the template writes it; `prompt` adds what a reply begins with.

        Raises:
            TemplateError: the template refuses the conversation; its own words are part of the message.
        """
        try:
            return self.tokenizer.template.render(
                messages=[for_template(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=prompt,
                **self.tokenizer.special,
            )
        except Exception as err:  # a template is a program of someone else's, and messages are an agent's
            raise TemplateError(
                f"the chat template cannot write the roles {', '.join(m['role'] for m in messages)}: {err}; change the "
                "conversation or the template"
            ) from err

    def encode(self, text: str) -> list[int]:
        """Token ids of a text on its own; TemplateError when it has characters that the tokenizer lacks."""
        try:
            return self.tokenizer.encoder.encode(text, add_special_tokens=False).ids
        except Exception as err:  # the library raises nothing more specific
            raise TemplateError(f"the tokenizer cannot encode {text!r} ({err}); use characters that it knows") from err

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text of tokens, special ones written out."""
        return self.tokenizer.encoder.decode(list(ids), skip_special_tokens=False)

    def reply_text(self, ids: list[int] | tuple[int, ...]) -> str:
        """The text of a reply without its stop token."""
        return decode(self.tokenizer, ids)

    def without_end(self, text: str) -> str:
        """The conversation's text without the stop token, and white space after it, that it ends with."""
        end = self._end.search(text)
        return text[: end.start()] if end else text

    def prompt_ids(self, messages: list[Message], tools: Any = None) -> list[int]:
        """Token ids of a whole conversation, ready for a reply.

        Raises:
            TemplateError: the template refuses it, or would write it otherwise once a reply has been given.
        """
        text = self.text(messages, tools)
        answered = self.text([*messages, {"role": "assistant", "content": "0"}], tools, prompt=False)
        if not answered.startswith(text):
            raise TemplateError(
                f"the template writes a conversation otherwise once it is answered: {_fork(text, answered)}; use one that "
                "only appends"
            )
        ids = self.encode(text)
        if not ids:
            raise TemplateError("the conversation has no tokens, so nothing could follow it; send some text")
        return ids

    def suffix(self, stored: list[Message], appended: list[Message], tools: Any, ended_by: int | None) -> Suffix:
        """What to put after the last reply of `stored` so that the policy can answer `appended`.

        The text is the difference between the conversation with and without them. A template may end a reply with the
        stop token and white space, or let the next speaker's header, itself a stop token, do so.

        Args:
            ended_by: the stop token that the reply's tokens end with; None when they end otherwise.
        Raises:
            TemplateError: the template is not append-only here, or writes no special token after a reply.
        """
        before, after = self.text(stored, tools, prompt=False), self.text([*stored, *appended], tools)
        end = self._end.search(before)
        rest = before[end.start() :] if end else ""
        if not after.startswith(before):
            raise TemplateError(
                f"the template writes old messages otherwise once new ones follow: {_fork(before, after)}; use one that "
                "only appends"
            )
        rest += after[len(before) :]
        if not rest.startswith(self._marks):
            raise TemplateError(
                f"the template writes {rest[:40]!r} after a reply, which begins with no special token, so nothing would "
                "tell the reply from it; use a template that ends replies"
            )
        ids = self.encode(rest)
        if self.decode(ids) != rest:
            raise TemplateError(
                f"the tokenizer gives {self.decode(ids)[:80]!r} back for {rest[:80]!r}, so nothing can be put after sampled "
                "tokens; use a tokenizer that keeps texts as they are, such as byte-level BPE"
            )
        if ended_by is not None and ids[0] == ended_by:
            return Suffix(0, ids[1:])
        return Suffix(int(ended_by is not None), ids)


def _fork(one: str, other: str) -> str:
    """Where two texts part, for a person."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{one[max(0, at - 20) : at + 20]!r} becomes {other[max(0, at - 20) : at + 20]!r}"
