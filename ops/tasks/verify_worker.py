"""Child process that scores replies: one JSON item per line in, one JSON verdict per line out.

It leaves when its input ends, which is also what happens when its parent dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

from furlong.ops.records import Verdict
from furlong.ops.tasks.scoring import score_reply


def main() -> None:
    """Serve until end of file. The one argument is the number of seconds after which a stuck child ends itself."""
    limit = float(sys.argv[1])
    # Verdicts leave by a private descriptor: whatever a scorer prints must not mix with them.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import reasoning_gym  # noqa: F401 - 1 s, paid before the first deadline runs

    out.write('{"ready": true}\n')
    for line in sys.stdin:
        # The kernel's own action ends even a scorer stuck in C code whose parent is gone and cannot kill it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit)
        answer = _score(json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(answer) + "\n")


def _score(item: dict[str, str]) -> dict:
    try:
        return score_reply(item)
    except Exception as err:  # any fault of a scorer is a verdict of its own, never a crash of the step
        where = traceback.extract_tb(err.__traceback__)[-1]
        detail = f"{type(err).__name__}: {err} ({os.path.basename(where.filename)}:{where.lineno})"
        return {"verdict": Verdict.ERROR.value, "score": None, "extracted": "", "detail": detail[:2000]}


if __name__ == "__main__":
    main()
