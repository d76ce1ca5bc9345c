"""Child process that makes a model folder: a fixed number of threads, and its gigabytes go when it ends.

`python -m furlong.ops.policy.make FOLDER` reads a job as JSON from standard input and fills the empty FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from furlong.ops.spec import DataSpec, ScratchSpec


def run(job: dict[str, Any], target: Path) -> None:
    """Do `job`: {"gguf": path, "dtype"} or {"scratch", "data", "seed", "dtype"}."""
    if "gguf" in job:
        from furlong.ops.policy.gguf_import import convert_gguf

        convert_gguf(Path(job["gguf"]), target, job["dtype"])
        return
    from furlong.ops.policy.bootstrap import make_scratch

    spec = ScratchSpec.model_validate_json(json.dumps(job["scratch"]))
    data = DataSpec.model_validate_json(json.dumps(job["data"]))
    make_scratch(spec, data, job["seed"], target, job["dtype"])


if __name__ == "__main__":
    run(json.load(sys.stdin), Path(sys.argv[1]))
