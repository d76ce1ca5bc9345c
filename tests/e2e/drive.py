"""Run as a program by the tests: drive a run through the Dagster job `rl_run`, and die where told.

    python drive.py CONFIG_JSON [KILL_JSON]

KILL_JSON is {"table", "step", "when"}: SIGKILL this process before or after the first commit of that table for that
step, or {"table", "commit", "when"}: the commit of that number. Only the lake's two writing methods are wrapped;
everything else is the product as it is.
"""

import itertools
import json
import os
import signal
import sys

from furlong.resources.lake import Lake


def die_at(point: dict) -> None:
    commits = itertools.count(1)
    for name in ("commit_once", "replace"):
        original = getattr(Lake, name)

        def wrapped(self, table, key, data, fence=None, _original=original, _name=name):
            hit = table == point["table"] and point.get("how", _name) == _name
            hit = hit and (next(commits) == point["commit"] if "commit" in point else _step(key, data) == point["step"])
            if hit and point["when"] == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = _original(self, table, key, data, fence)
            if hit:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(Lake, name, wrapped)


def _step(key: dict, data) -> int:
    if "step" in key:
        return key["step"]
    return data["step"][0].as_py() if "step" in data.schema.names else key.get("version", 0)


def main() -> None:
    from dagster import DagsterInstance

    from furlong.ops.spec import Placement
    from furlong.pipelines.definitions import defs
    from furlong.resources.dagster_home import ensure_dagster_home
    from furlong.resources.system import System

    config = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        die_at(json.loads(sys.argv[2]))
    placement = Placement.from_env()
    ensure_dagster_home(placement)
    with DagsterInstance.get() as instance:
        job = defs.resolve_job_def("rl_run")
        job.execute_in_process(
            run_config={"ops": {"block": {"config": config}}},
            resources={"system": System(placement)},
            instance=instance,
        )


if __name__ == "__main__":
    main()
