"""A verifier for tests: exact, but moody while a file named by MOODY_VERIFIER exists, of which it takes one line a mood.

`sleep` hangs once, `raise` fails once. Each mood is taken by one process alone.
"""

import fcntl
import os
import time

from furlong.ops.tasks.scoring import Judgement


def exact(reply: str, entry: dict) -> Judgement:
    mood = _take()
    if mood == "sleep":
        time.sleep(600)
    if mood == "raise":
        raise RuntimeError("the verifier is in a mood to fail")
    text = reply.strip()
    return Judgement(text or None, float(text == entry["answer"]))


def _take() -> str:
    try:
        with open(os.environ["MOODY_VERIFIER"], "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            mood, _, rest = file.read().partition("\n")
            file.seek(0)
            file.truncate()
            file.write(rest)
            return mood
    except (KeyError, FileNotFoundError):
        return ""
