"""Promotion and rollback: `stable` and `candidate` as rows, with their history.

The tag is set first, then its history is written: a tag without a history row is completed when the command is repeated.
"""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable
from typing import Any

from furlong.ops import records
from furlong.ops.promotion import NAMES, PromotionError, failing_checks, previous_version, worse_evals
from furlong.ops.stages.chain import version_row
from furlong.resources.lake import Lake
from furlong.resources.weights.tags import list_tags, set_tag

TABLE = "promotions"


def refusals(lake: Lake, run: str, version: int) -> list[str]:
    """Why a version may not be promoted, as far as the lake tells."""
    row = version_row(lake, run, version)
    if row is None or row["state"] != "live":
        return [f"it is {'unknown' if row is None else row['state']}, not live; publish it first"]
    said = []
    if row["step"] > 0:  # version 0 is the model as it came, which no step made
        where = {"run": run, "step": row["step"], "attempt": row["attempt"]}
        said += failing_checks(lake.read("checks", where, ["check", "passed", "blocking", "message"]).to_pylist())
    stable = list_tags(lake, run).get("stable")
    columns = ["mode", "prompt_id", "samples", "correct"]
    mine, theirs = (
        lake.read("evals", {"run": run, "version": at}, columns).to_pylist() if at is not None else []
        for at in (version, stable)
    )
    return said + worse_evals(mine, theirs)


def promote(
    lake: Lake, run: str, version: int, tag: str, because: str, reloads: Callable[[], str], by: str = ""
) -> dict[str, Any]:
    """Let `tag` name `version`, and write down why; harmless when it does already.

    Args:
        reloads: exports the version and compares the reloaded logits; returns what is wrong, empty for nothing. Asked last.
    Returns:
        The newest row of `promotions` for the tag.
    Raises:
        PromotionError: the version is not fit for it; every reason is named. TagError: it is being collected.
    """
    _check_words(tag, because)
    last = _last(lake, run, tag)
    if last and last["version"] == version and list_tags(lake, run).get(tag) == version:
        return last
    said = refusals(lake, run, version)
    if not said and (wrong := reloads()):
        said = [f"its export does not reload to the same logits: {wrong}"]
    if said:
        raise PromotionError(f"version {version} of run {run} cannot be {tag}: " + "; ".join(said))
    return _name(lake, run, version, tag, "promote", because, by)


def rollback(
    lake: Lake, run: str, tag: str, because: str, bring: Callable[[int], None], by: str = ""
) -> dict[str, Any]:
    """Bring the engines back to what `tag` named before, then let it name that again, and write down why.

    Args:
        bring: has every engine prove the version, or raises; then nothing was changed.
    Returns:
        The row of `promotions`.
    Raises:
        PromotionError: there is nothing to go back to. TagError: its bytes are being or were collected.
    """
    _check_words(tag, because)
    version = previous_version(lake.read(TABLE, {"run": run}).to_pylist(), tag)
    bring(version)
    return _name(lake, run, version, tag, "rollback", because, by)


def _check_words(tag: str, because: str) -> None:
    if tag not in NAMES:
        raise PromotionError(f"{tag!r} is no name to promote to; use {' or '.join(NAMES)}, or `furlong weights tag`")
    if not because.strip():
        raise PromotionError("the reason is empty; say with --because why, for whoever reads the history")


def _name(lake: Lake, run: str, version: int, tag: str, action: str, because: str, by: str) -> dict[str, Any]:
    last = _last(lake, run, tag)
    set_tag(lake, run, tag, version)
    rows = lake.read(TABLE, {"run": run}, ["seq"])["seq"].to_pylist()
    row = {
        "run": run, "seq": max(rows, default=0) + 1, "tag": tag, "version": version,
        "previous": last["version"] if last else None, "action": action, "reason": because.strip(),
        "by": by or getpass.getuser(), "at": time.time(),
    }  # fmt: skip
    lake.commit_once(TABLE, {"run": run, "seq": row["seq"]}, records.rows(TABLE, [row]))
    return row


def _last(lake: Lake, run: str, tag: str) -> dict[str, Any] | None:
    rows = lake.read(TABLE, {"run": run, "tag": tag}).to_pylist()
    return max(rows, key=lambda row: row["seq"], default=None)
