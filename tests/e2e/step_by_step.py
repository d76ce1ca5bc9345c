"""Run as a program by the tests: materialise steps through the Dagster job `rl_step`, one partition after another.

python step_by_step.py SPEC RUN STEPS
"""

import sys

from dagster import DagsterInstance

from furlong.ops.spec import Placement
from furlong.pipelines.definitions import defs
from furlong.pipelines.partitions import STEPS, partition_key
from furlong.resources.dagster_home import ensure_dagster_home
from furlong.resources.system import System


def main() -> None:
    spec, run, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    placement = Placement.from_env()
    ensure_dagster_home(placement)
    with DagsterInstance.get() as instance:
        instance.add_dynamic_partitions(STEPS.name, [partition_key(run, 1)])
        for step in range(1, steps + 1):
            key = partition_key(run, step)
            assert instance.has_dynamic_partition(STEPS.name, key), f"{key} was not offered"
            defs.resolve_job_def("rl_step").execute_in_process(
                partition_key=key,
                run_config={"ops": {"prompts": {"config": {"spec": spec}}}},
                resources={"system": System(placement)},
                instance=instance,
            )


if __name__ == "__main__":
    main()
