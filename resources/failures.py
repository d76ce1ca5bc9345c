"""Which failures are the machinery's, and so worth another try, and which are answers that a repeat would only give again.

A failed check, an impossible spec, rows that differ: these are answers. A process that died, a call that overran its
deadline, storage that failed: these say nothing about the run, and the lake makes trying again harmless.
"""

from __future__ import annotations

from furlong.ops.rollouts.trajectory import EngineLost
from furlong.resources.actors import ActorLost, ActorTimeout
from furlong.resources.lake import RowsDifferError
from furlong.resources.lake_table import LakeError
from furlong.resources.ray_head import ClusterError
from furlong.resources.trainers.group import TrainerError
from furlong.resources.verifier import VerifierError
from furlong.resources.weights.group import PeerLost
from furlong.resources.weights.publisher import PublishError
from furlong.resources.weights.session import TransferError
from furlong.resources.weights.together import Overran

INFRASTRUCTURE: dict[type[BaseException], str] = {
    ActorLost: "a process that holds an engine or the trainer was lost",
    ActorTimeout: "an engine or the trainer did not answer in time and was ended",
    EngineLost: "no engine was there to draw replies",
    TrainerError: "a process of a divided trainer was lost",
    PeerLost: "a process that sends or takes weights was lost",
    TransferError: "weights did not reach an engine",
    Overran: "an engine did not answer in time",
    ClusterError: "Ray could not be started or reached",
    LakeError: "the lake's storage failed",
    VerifierError: "a verifier's process could not be started",
}
"""Error -> what it means, in words for a log."""
ANSWERS = (RowsDifferError,)
"""Kinds of the above that a repeat would only meet again."""


def infrastructure(error: BaseException) -> str | None:
    """What of the machinery failed, in words; None when trying again would bring the same answer.

    A publication that failed is judged by what made it fail.
    """
    if isinstance(error, PublishError) and error.__cause__ is not None:
        return infrastructure(error.__cause__)
    if isinstance(error, ANSWERS):
        return None
    return next((words for kind, words in INFRASTRUCTURE.items() if isinstance(error, kind)), None)
