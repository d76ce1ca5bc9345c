"""One dynamic partition per RL step, `<run>-<00012>`, and one per run of a grid, its name."""

import re

from dagster import DynamicPartitionsDefinition

STEPS = DynamicPartitionsDefinition(name="rl_step")
RUNS = DynamicPartitionsDefinition(name="rl_run")
_KEY = re.compile(r"^(?P<run>[a-z][a-z0-9_-]*)-(?P<step>\d{5})$")


def partition_key(run: str, step: int) -> str:
    return f"{run}-{step:05d}"


def parse_partition_key(key: str) -> tuple[str, int]:
    """The run and step of a partition key; ValueError says how a key must look."""
    match = _KEY.match(key)
    if not match or int(match["step"]) < 1:
        raise ValueError(
            f"partition {key!r} is not <run>-<step> with five digits from 00001; add one such as demo-00001"
        )
    return match["run"], int(match["step"])
