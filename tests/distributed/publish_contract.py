"""What publishing owes to whoever serves: the same checks for every engine, of one process or two, or a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from furlong.ops.protocols import Engine, GenerateRequest, StaleFence
from furlong.ops.weights.delta import encode
from furlong.ops.weights.digest import manifest, tensor_digest, weights_digest
from furlong.ops.weights.layout import Offer, Piece, TensorSpec, specs, whole
from furlong.resources.weights.publisher import PHASES, Publication, PublishError, publish
from furlong.resources.weights.send import send

DRAFT = "draft.head.weight"
REQUEST = [GenerateRequest("r", (1, 2, 3), 0, 12, 0.0)]


class Source:
    """A trainer of one rank, in this process, that holds whole tensors."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors
        self._specs = {spec.name: spec for spec in specs(manifest(tensors))}

    def holdings(self) -> list[list[Piece]]:
        return [[whole(spec) for spec in self._specs.values()]]

    def send(self, offer: Offer) -> int:
        wanted: dict[str, TensorSpec] = {spec.name: spec for spec in offer.tensors}
        return send(offer, 0, {whole(wanted[name]): tensor for name, tensor in self._tensors.items()})


@dataclass
class Stand:
    """One engine that serves version 0 of a folder, and the versions that are published to it, each on the last."""

    engine: Engine
    folder: str
    transport: str
    fences: Iterator[int] = field(default_factory=lambda: count(1))
    seen: list[str] = field(default_factory=list)
    """Phases of the last publication."""

    def __post_init__(self) -> None:
        self.engine.load_anchor(self.folder, 0, [], next(self.fences))
        self.versions = [load_file(f"{self.folder}/model.safetensors")]

    def add(self, others: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The next version: most elements of most tensors moved, with these tensors instead of what was there."""
        draw = torch.Generator().manual_seed(len(self.versions))
        new = dict(self.versions[-1])
        for name in sorted(new):
            if not name.endswith("model.norm.weight"):
                new[name] = new[name] + (0.2 * torch.randn(new[name].shape, generator=draw)).to(new[name].dtype)
        self.versions.append(new | (others or {}))
        return self.versions[-1]

    def publish(
        self, spoil: Callable[[dict[str, Any]], None] = lambda row: None, fence: int = 0, **at: Callable[[], None]
    ) -> Publication:
        """Publish the newest version; `spoil` may alter its row, `at` says what else happens as a phase begins."""
        version, (old, new) = len(self.versions) - 1, self.versions[-2:]
        tensors = manifest(new)
        digests = {row["name"]: row["digest"] for row in tensors}
        deltas = encode(version, version - 1, "contract", old, new, digests)
        row = {"version": version, "parent": version - 1, "digest": weights_digest(digests), "tensors": tensors}
        spoil(row)
        self.seen = []

        def watch(phase: str) -> None:
            self.seen.append(phase)
            at.get(phase, lambda: None)()

        args = (row, deltas, self.transport, fence or next(self.fences), 30.0, watch)
        return publish([self.engine], Source(new), *args)

    def check_serves(self, version: int) -> None:
        """By the engine's own account of its bytes, and by what it draws."""
        proof = self.engine.attest()
        digests = {name: tensor_digest(tensor) for name, tensor in self.versions[version].items()}
        assert (proof.version, proof.tensors, proof.digest) == (version, digests, weights_digest(digests))
        assert self.engine.health()["version"] == version
        assert self.engine.health()["paused"] is False
        sample = self.engine.generate(REQUEST)[0]
        assert [span[0] for span in sample.versions] == [version]


def a_version_is_published(stand: Stand) -> None:
    stand.check_serves(0)
    new = stand.add()
    done = stand.publish()
    assert stand.seen == list(PHASES)
    assert done.attestations[0].tensors == {name: tensor_digest(tensor) for name, tensor in new.items()}
    assert done.wire_bytes > 0
    assert done.pause_seconds > 0 < done.stage_seconds
    stand.check_serves(1)


def a_draft_joins_moves_and_takes_another_shape(stand: Stand) -> None:
    """It is published like the policy, and no shape of it is known before."""
    for version, shape in enumerate([(6, 32), (6, 32), (9, 4)], 1):
        stand.add({DRAFT: torch.full(shape, float(version))})
        stand.publish()
        stand.check_serves(version)
    assert DRAFT in stand.engine.attest().tensors


def a_late_publisher_changes_nothing(stand: Stand) -> None:
    late = next(stand.fences)
    stand.add()
    stand.publish()
    stand.add()
    with pytest.raises(PublishError) as raised:
        stand.publish(fence=late)
    assert isinstance(raised.value.__cause__, StaleFence) or "StaleFence" in str(raised.value)
    assert stand.engine.health()["staged"] is None
    stand.check_serves(1)


def bytes_that_are_not_the_manifests_never_serve(stand: Stand) -> None:
    stand.add()

    def spoil(row: dict[str, Any]) -> None:
        row["tensors"] = [dict(tensor) for tensor in row["tensors"]]
        row["tensors"][1]["digest"] = "0" * 64

    name = sorted(stand.versions[-1])[1]
    with pytest.raises(PublishError, match=f"phase verify.*engine 0: .*{name}.*engine 0 serves version 0"):
        stand.publish(spoil)
    assert "pause" not in stand.seen
    stand.check_serves(0)
    stand.publish()
    stand.check_serves(1)


def a_failure_in_any_phase_leaves_the_version_before(stand: Stand) -> None:
    def fail() -> None:
        raise RuntimeError("the roof fell in")

    stand.add()
    for phase in PHASES:
        with pytest.raises(PublishError, match=f"phase {phase}.*roof fell in.*engine 0 serves version 0"):
            stand.publish(**{phase: fail})
        stand.check_serves(0)
    stand.publish()
    stand.check_serves(1)


CONTRACT = (
    a_version_is_published,
    a_draft_joins_moves_and_takes_another_shape,
    a_late_publisher_changes_nothing,
    bytes_that_are_not_the_manifests_never_serve,
    a_failure_in_any_phase_leaves_the_version_before,
)
