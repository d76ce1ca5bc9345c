"""Names that people give to weights versions, such as `stable`; a tagged version is never collected.

Tag and collection may meet. Each first writes, then looks for the other: a tagger puts the tag, then reads the states of
the version's chain; a collector marks versions `collecting`, then reads the tags. Whichever looks second sees what the
other wrote, and backs off: a tagger takes the tag back, a collector makes the version live again. Only after its look
does a collector write `collected`, and only after that does it delete; so no tag that stands names a version whose bytes
are gone.
"""

from __future__ import annotations

import re
import time

import pyarrow as pa

from furlong.ops import records
from furlong.ops.stages.chain import chain_rows
from furlong.ops.stages.context import StageError
from furlong.resources.lake import Lake, RowsDifferError

TABLE = "weight_tags"
NAME = re.compile(r"[a-z][a-z0-9._-]*")


class TagError(ValueError):
    """A tag that cannot be given or found; the message says why."""


def set_tag(lake: Lake, run: str, tag: str, version: int) -> None:
    """Let `tag` name a live version, whatever it named before.

    Raises:
        TagError: a name that could be a number, or a version that is unknown, not live, or being collected.
    """
    if not NAME.fullmatch(tag):
        raise TagError(f"tag {tag!r} could be taken for something else; use a-z, 0-9, '.', '_' and '-' after a letter")
    _check_lasting(lake, run, version)
    key = {"run": run, "tag": tag}
    before = lake.read(TABLE, key)
    mine = records.rows(TABLE, [{**key, "version": version, "tagged_at": time.time()}])
    lake.replace(TABLE, key, mine)
    try:
        _check_lasting(lake, run, version)
    except TagError:
        _put_back(lake, key, mine, before)
        raise


def remove_tag(lake: Lake, run: str, tag: str) -> int:
    """Take a tag away; returns the version it named. TagError when there is no such tag."""
    version = tagged_version(lake, run, tag)
    key = {"run": run, "tag": tag}
    lake.replace(TABLE, key, records.TABLES[TABLE].empty_table())
    return version


def list_tags(lake: Lake, run: str) -> dict[str, int]:
    """Tag -> version, by name."""
    rows = lake.read(TABLE, {"run": run}, ["tag", "version"]).to_pylist()
    return {row["tag"]: row["version"] for row in sorted(rows, key=lambda row: row["tag"])}


def tagged_version(lake: Lake, run: str, name: str) -> int:
    """The version that a tag, or a number as text, means; TagError when there is no such tag."""
    if name.isdecimal():
        return int(name)
    tags = list_tags(lake, run)
    if name not in tags:
        raise TagError(
            f"run {run} has no tag {name!r}; it has {', '.join(tags) or 'none'}: give one, or a version number"
        )
    return tags[name]


def drop_void_tags(lake: Lake, run: str) -> None:
    """Remove tags of collected versions: what a tagger leaves that was killed before its second look."""
    for tag, version in list_tags(lake, run).items():
        state = lake.read("weight_versions", {"run": run, "version": version}, ["state"])["state"].to_pylist()
        if state == ["collected"]:
            key = {"run": run, "tag": tag}
            _swap(lake, key, lake.read(TABLE, key | {"version": version}), records.TABLES[TABLE].empty_table())


def _check_lasting(lake: Lake, run: str, version: int) -> None:
    """Refuse unless the version is live and nothing it is built from is going away."""
    try:
        chain = chain_rows(lake, run, version)
    except StageError as err:
        raise TagError(f"it cannot be tagged: {err}") from err
    if chain[0]["state"] == "staged":
        raise TagError(
            f"weights version {version} of run {run} is staged: no engine has proved it yet; publish it first, then tag it"
        )
    going = [row["version"] for row in chain if row["state"] == "collecting"]
    if going:
        raise TagError(
            f"weights version {version} of run {run} cannot be tagged: {going[0]} is just being collected; tag it again "
            "when `furlong weights collect` has ended, or choose another version"
        )


def _put_back(lake: Lake, key: dict[str, str], mine: pa.Table, before: pa.Table) -> None:
    if _swap(lake, key, mine, before) and before.num_rows:
        try:
            _check_lasting(lake, key["run"], before["version"][0].as_py())
        except TagError:  # it was collected while the tag was away
            _swap(lake, key, before, before.slice(0, 0))


def _swap(lake: Lake, key: dict[str, str], mine: pa.Table, then: pa.Table) -> bool:
    """Replace the tag if it is still ours; another tagger's stands."""
    try:
        lake.replace(TABLE, key, then, expected=mine)
    except RowsDifferError:
        return False
    return True
