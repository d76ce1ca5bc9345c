"""Checks every version of a run that is not collected, applying each once rather than a chain per version."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from furlong.ops.stages.chain import CHAIN_COLUMNS
from furlong.resources.weights.rebuild import RebuildError, changed, complete, full_row, same_digest

if TYPE_CHECKING:
    from torch import Tensor

    from furlong.resources.lake import Lake


@dataclass(frozen=True)
class Verdict:
    """What became of one version."""

    version: int
    state: str
    fault: str | None
    """Why it cannot be rebuilt exactly; None when it can."""


def verify_run(lake: Lake, run: str, base_folder: str) -> Iterator[Verdict]:
    """Rebuild every version that is not collected and compare every tensor's digest; one verdict each.

    Memory: tensors are shared between versions where they did not change. Children are visited smallest subtree first
    and the last one takes over its parent's tensors, so at most log2(versions) + 2 versions are held at once.

    Raises:
        RebuildError: the run has no versions, which is no success.
    """
    rows = {row["version"]: row for row in lake.read("weight_versions", {"run": run}, CHAIN_COLUMNS).to_pylist()}
    if not rows:
        raise RebuildError(f"run {run} has no weights versions in the lake {lake.uri}; nothing was verified")
    walk = _Walk(lake, run, base_folder, rows)
    for version in sorted(rows):
        if walk.is_root(version):
            yield from walk.tree(version)


@dataclass(frozen=True)
class Held:
    """A verified version in memory."""

    tensors: dict[str, Tensor]
    digests: dict[str, str]


class _Walk:
    def __init__(self, lake: Lake, run: str, base_folder: str, rows: dict[int, dict[str, Any]]):
        self.lake, self.run, self.base_folder, self.rows = lake, run, base_folder, rows
        self.kept = {version for version, row in rows.items() if row["state"] != "collected"}
        children: dict[int, list[int]] = {version: [] for version in rows}
        for version in sorted(self.kept):
            if not self.is_root(version):
                children[rows[version]["parent"]].append(version)
        sizes: dict[int, int] = {}
        for version in sorted(rows, reverse=True):  # a parent has a lower number than its children
            sizes[version] = 1 + sum(sizes[child] for child in children[version])
        self.children = {v: sorted(below, key=lambda c: sizes[c], reverse=True) for v, below in children.items()}

    def is_root(self, version: int) -> bool:
        """Whether it is visited without its parent's tensors."""
        row = self.rows[version]
        return version in self.kept and not (row["parent"] in self.kept and row["parent"] < version)

    def tree(self, root: int) -> Iterator[Verdict]:
        """The root and all below it; an explicit stack, as chains are longer than Python's call stack is deep."""
        stack: list[tuple[int, Held | None]] = [(root, None)]
        while stack:
            version, parent = stack.pop()
            held, fault = self._check(version, parent)
            yield Verdict(version, self.rows[version]["state"], fault)
            # The smallest subtree is on top; the largest, at the bottom of this batch, is the last to hold `held`.
            stack += [(child, held) for child in self.children[version]]

    def _check(self, version: int, parent: Held | None) -> tuple[Held | None, str | None]:
        """What the version holds, None when it cannot be had, and what is wrong."""
        row = self.rows[version]
        try:
            record = full_row(self.lake, self.run, version)
            same_digest(record)
            warm = None if parent is None else self._on(parent, record)
            if row["kind"] == "anchor":
                return Held(complete(self.lake, record, self.base_folder), _digests(record)), None
        except RebuildError as err:
            return None, str(err)
        if warm is None:
            return None, f"run {self.run}: weights version {version} is built on {self._lost(row['parent'])}"
        return warm, None

    def _on(self, parent: Held, record: dict[str, Any]) -> Held | None:
        """The version made from its parent's tensors; None for an anchor without deltas, which is not made so."""
        fresh, digests = changed(self.lake, self.run, record["version"], parent.tensors)
        if record["kind"] == "anchor" and not fresh:
            return None
        held = parent.digests | digests
        for name, wanted in _digests(record).items():
            if held.get(name) != wanted:
                raise RebuildError(
                    f"run {self.run}: weights version {record['version']}: tensor {name} comes out with digest "
                    f"{str(held.get(name))[:12]}, the manifest says {wanted[:12]}; rows of weight_deltas are missing or "
                    "of another version: restore that table"
                )
        names = _digests(record)
        return Held({name: (parent.tensors | fresh)[name] for name in names}, names)

    def _lost(self, parent: int | None) -> str:
        if parent not in self.rows:
            return f"version {parent}, which is not in the lake"
        if parent not in self.kept:
            return f"version {parent}, which was collected"
        return f"version {parent}, which is at fault itself"


def _digests(record: dict[str, Any]) -> dict[str, str]:
    return {tensor["name"]: tensor["digest"] for tensor in record["tensors"]}
