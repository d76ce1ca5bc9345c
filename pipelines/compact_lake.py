"""The job `compact_lake`: fewer, larger files, and no older ones than time travel needs. A schedule runs it weekly."""

from typing import TYPE_CHECKING, Any

from dagster import Config, MetadataValue, OpExecutionContext, ResourceParam, RunConfig, job, op
from pydantic import Field

from furlong.pipelines.wanted import tell
from furlong.resources.system import System

if TYPE_CHECKING:
    from furlong.resources.lake import Lake

SAFE_HOURS = 24
"""A retention that no process can outlast which still reads the files it is about."""


class Compacted(Config):
    """How much of the past to keep."""

    retention_hours: int = Field(
        168,
        ge=0,
        description="Files whose rows were rewritten or replaced longer ago are removed; older versions of the tables "
        "cannot be read any more. Below 24 only while no run is driven.",
    )
    tables: list[str] = Field([], description="Tables to compact; empty for all.")


@op
def compact_tables(context: OpExecutionContext, config: Compacted, system: ResourceParam[System]) -> None:
    """Table by table; beside a driven run, whose commits go first."""
    from furlong.resources.lake import Lake

    lake = Lake(system.placement.lake_uri())
    names = _tables(config)
    _check_retention(config.retention_hours, system)
    lines, totals = [], {"files_before": 0, "files_after": 0, "files_removed_for_good": 0}
    for name in names:
        row = _compact(lake, name, config.retention_hours)
        context.log.info(f"{name}: {row['before']} files, now {row['after']}; {row['vacuumed']} older ones removed")
        lines.append(f"| {name} | {row['before']} | {row['after']} | {row['vacuumed']} |")
        totals["files_before"] += row["before"]
        totals["files_after"] += row["after"]
        totals["files_removed_for_good"] += row["vacuumed"]
    head = "| table | files before | files after | older files removed |\n|---|---:|---:|---:|\n"
    words = f"{len(names)} tables: {totals['files_before']} files are {totals['files_after']} now, and "
    words += f"{totals['files_removed_for_good']} files of versions older than {config.retention_hours} hours are gone"
    tell(context, words, {**totals, "tables": MetadataValue.md(head + "\n".join(lines))})


def _compact(lake: "Lake", table: str, retention_hours: int) -> dict[str, Any]:
    before = lake.files(table)
    lake.compact(table)
    return {"before": before, "after": lake.files(table), "vacuumed": len(lake.vacuum(table, retention_hours))}


def _tables(config: Compacted) -> list[str]:
    from furlong.ops.records import TABLES
    from furlong.ops.spec import SpecError

    if unknown := sorted(set(config.tables) - TABLES.keys()):
        raise SpecError(f"the lake has no tables {', '.join(unknown)}; it has {', '.join(TABLES)}: name some of these")
    return config.tables or list(TABLES)


def _check_retention(hours: int, system: System) -> None:
    from furlong.ops.spec import SpecError
    from furlong.resources.run_lock import driven_runs

    driven = driven_runs(system.placement.folder)
    if hours < SAFE_HOURS and driven:
        raise SpecError(
            f"retention_hours={hours} while run {', '.join(driven)} is driven: it may still read files that left the "
            f"tables within the last {SAFE_HOURS} hours; set {SAFE_HOURS} or more, or wait until nothing is driven"
        )


@job(
    description="Rewrite the lake's many small files as few larger ones, and remove files that no version within the "
    "retention needs. Safe while runs are driven.",
    config=RunConfig(ops={"compact_tables": Compacted()}),
)
def compact_lake() -> None:
    compact_tables()
