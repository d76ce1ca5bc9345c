"""The trainer in its actor, as the stages see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from furlong.ops.spec import Placement, RunSpec
from furlong.ops.weights.layout import Offer, Piece
from furlong.resources.actors import Actor, call, find_or_start
from furlong.resources.trainers.place import Place

if TYPE_CHECKING:
    from furlong.resources.models import ModelFolder


def start_trainer(run: str, spec: RunSpec, model: ModelFolder, placement: Placement) -> RemoteTrainer:
    """The run's trainer, found or started; it finds its own state in the lake when it is first asked for a step."""
    state = placement.folder / "runs" / run / "state"
    logs = str(placement.folder / "logs" / f"trainer-{run}-ranks")
    place = Place(logs, placement.threads, placement.trainer_layout, placement.gpus, placement.stage_deadline)
    args = (spec.canonical(), run, str(model.path), placement.lake_uri(), str(state), place)
    return RemoteTrainer(find_or_start("trainer", run, "furlong.resources.trainers.host:TrainerHost", args, placement))


class RemoteTrainer:
    """Implements `ops.stages.context.StepTrainer` and `ops.protocols.WeightSource`.

    Methods raise ActorLost and ActorTimeout besides the trainer's errors.
    """

    def __init__(self, actor: Actor):
        self.actor = actor

    def base(self) -> dict[str, Any]:
        return call(self.actor, "base")

    def take_step(self, step: int, attempt: int) -> dict[str, Any]:
        return call(self.actor, "take_step", step, attempt)

    def publishable(self, step: int, attempt: int) -> dict[str, Any]:
        return call(self.actor, "publishable", step, attempt)

    def anchor(self, version: int, digest: str) -> str:
        return call(self.actor, "anchor", version, digest)

    def holds(self, digest: str) -> bool:
        """Whether it has the weights of that digest in memory, to send them."""
        return call(self.actor, "holds", digest)

    def holdings(self) -> list[list[Piece]]:
        return call(self.actor, "holdings")

    def send(self, offer: Offer) -> int:
        return call(self.actor, "send", offer)

    def settle(self) -> None:
        """Wait until a save in progress is on disk."""
        call(self.actor, "settle")
