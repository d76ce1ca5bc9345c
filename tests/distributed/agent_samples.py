"""Agents that tests start as programs of their own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from typing import Any


def ask(base_url: str, question: str, entry: dict[str, Any], turns: int = 2) -> None:
    """Ask, and ask again after each reply; without OpenAI's client, which takes long to import."""
    assert os.environ["OPENAI_BASE_URL"] == base_url
    history: list[Any] = [{"role": "user", "content": question}]
    for _ in range(turns):
        data, key = json.dumps({"messages": history}).encode(), os.environ["OPENAI_API_KEY"]
        request = urllib.request.Request(f"{base_url}/chat/completions", data, {"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request) as answer:
            reply = json.load(answer)["choices"][0]["message"]
        history += [reply, {"role": "user", "content": entry["more"]}]


def ask_with_client(base_url: str, question: str, entry: dict[str, Any]) -> None:
    """As any OpenAI program does, which finds the address in its environment."""
    from openai import OpenAI

    client = OpenAI(max_retries=0)
    history: list[Any] = [{"role": "user", "content": question}]
    reply = client.chat.completions.create(model="gpt-4o", messages=history).choices[0].message
    client.chat.completions.create(
        model="gpt-4o", messages=[*history, reply, {"role": "user", "content": entry["more"]}]
    )


def ask_in_vain(base_url: str, question: str, entry: dict[str, Any]) -> None:
    ask(base_url, question, entry, 1)
    raise ValueError("the agent\nlost its way")


def sleep(base_url: str, question: str, entry: dict[str, Any]) -> None:
    """Hang, with a child that hangs too and whose number is left in a file."""
    ask(base_url, question, entry, 1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(entry["file"], "a") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    time.sleep(600)


def do_nothing(base_url: str, question: str, entry: dict[str, Any]) -> None:
    pass


def swallow(base_url: str, question: str, entry: dict[str, Any]) -> None:
    """Take whatever comes, as careless agents do."""
    with contextlib.suppress(Exception):
        ask(base_url, question, entry, 9)


def by_sample(base_url: str, question: str, entry: dict[str, Any]) -> None:
    """Every other trajectory of a group fails."""
    if base_url.endswith(("-s01/v1", "-s03/v1")):
        raise ValueError("odd")
    (ask_with_client if base_url.endswith("-s02/v1") else ask)(base_url, question, entry)
