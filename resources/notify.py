"""Messages to people, through apprise: mail, chat, web hooks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late

DEADLINE = 30.0
"""Seconds for all receivers together."""


class NotifyError(RuntimeError):
    """A message did not reach everybody; receivers are named by scheme and position, as URLs hold secrets."""


def notify(urls: list[str], title: str, body: str, deadline: float = DEADLINE) -> None:
    """Send a message to every URL.

    Raises:
        NotifyError: a URL is unusable, and nothing was sent; or a receiver did not take the message within `deadline`
            seconds, and the others have been sent it.
    """
    import apprise

    senders = []
    for number, url in enumerate(urls, 1):
        sender = apprise.Apprise()
        if not sender.add(url):
            raise NotifyError(f"{_name(number, url)} is no URL that apprise knows; correct it in watch.yaml")
        senders.append(sender)
    pool = ThreadPoolExecutor(max(1, len(senders)), thread_name_prefix="notify")
    sent = [pool.submit(sender.notify, body=body, title=title) for sender in senders]
    pool.shutdown(wait=False)
    failed, until = [], time.monotonic() + deadline
    for number, (url, future) in enumerate(zip(urls, sent, strict=True), 1):
        try:
            told = future.result(timeout=max(0.0, until - time.monotonic()))
        except Late:
            told = False
        if not told:
            failed.append(_name(number, url))
    if failed:
        raise NotifyError(
            f"{', '.join(failed)} did not take the message {title!r} within {deadline:g} s; check address and secret in "
            "watch.yaml, and that this machine reaches the receiver"
        )


def _name(number: int, url: str) -> str:
    scheme = url.split("://")[0] if "://" in url else "without scheme"
    return f"receiver {number} ({scheme})"
