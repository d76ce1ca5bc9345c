"""Child process of `resources.serving.agent`: calls a function, or becomes a shell command.

    python -m furlong.resources.serving.program function module:function
    python -m furlong.resources.serving.program shell COMMAND

The question comes as JSON on standard input; whatever the function raises ends the process with a traceback.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(kind: str, program: str) -> None:
    # without the process that serves its replies, an agent only spends processor time
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if kind == "shell":
        os.execv("/bin/sh", ["/bin/sh", "-c", program])
    task = json.load(sys.stdin)
    module, _, name = program.partition(":")
    try:
        function = importlib.import_module(module)
    except ModuleNotFoundError as err:
        sys.exit(
            f"{program!r} cannot be imported ({err}); start the run in the folder that holds it, or set PYTHONPATH"
        )
    for part in name.split("."):
        function = getattr(function, part)
    function(base_url=task["base_url"], question=task["question"], entry=task["entry"])


if __name__ == "__main__":
    main(*sys.argv[1:])
