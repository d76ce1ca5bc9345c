"""An agent as a user would write it: it knows OpenAI's client, and nothing of what answers it."""

from typing import Any

from openai import OpenAI


def play(base_url: str, question: str, entry: dict[str, Any]) -> None:
    client = OpenAI()
    assert str(client.base_url).rstrip("/") == base_url
    message = {"role": "user", "content": question}
    reply = client.chat.completions.create(model="policy", messages=[message]).choices[0]
    assert reply.message.content is not None
