"""Child process that scores replies: one JSON item per line in, one JSON verdict per line out.

A line {"load": [module, ...]} imports verifiers beforehand, so that the seconds this may take are nobody's deadline. The
child leaves when its input ends, which is also what happens when its parent dies.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import traceback

from furlong.ops.records import Verdict
from furlong.ops.tasks.scoring import score_reply


def main() -> None:
    """Serve until end of file. The arguments are the seconds after which a child stuck in scoring, or in loading, ends
    itself."""
    limit, load_limit = float(sys.argv[1]), float(sys.argv[2])
    # Verdicts leave by a private descriptor: whatever a scorer prints must not mix with them.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import reasoning_gym  # noqa: F401 - 1 s, paid before the first deadline runs

    out.write('{"ready": true}\n')
    for line in sys.stdin:
        item = json.loads(line)
        # The kernel's own action ends even a scorer stuck in C code whose parent is gone and cannot kill it.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, load_limit if "load" in item else limit)
        answer = _load(item["load"]) if "load" in item else _score(item)
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(answer) + "\n")


def _load(names: list[str]) -> dict:
    faults = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as err:  # the verdict of the reply that needs it will say so too
            faults.append(f"{name}: {err}")
    return {"faults": faults}


def _score(item: dict[str, str]) -> dict:
    try:
        return score_reply(item)
    except Exception as err:  # any fault of a scorer is a verdict of its own, never a crash of the step
        where = traceback.extract_tb(err.__traceback__)[-1]
        detail = f"{type(err).__name__}: {err} ({os.path.basename(where.filename)}:{where.lineno})"
        return {"verdict": Verdict.ERROR.value, "score": None, "extracted": "", "detail": detail[:2000]}


if __name__ == "__main__":
    main()
