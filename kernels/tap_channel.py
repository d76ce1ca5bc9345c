"""TapChannel: hidden states from the pipeline's stages to the one that trains a draft, beside the pipeline's own sends.

docs/tap_channel.md has the protocol and why it cannot deadlock.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor

from furlong.kernels.tap_draft import Draft
from furlong.kernels.tap_protocol import TapError, TapKey, by_stage, check_dtype
from furlong.kernels.tap_slots import Wire
from furlong.kernels.tap_source import Source

LANDING = 2
"""Slots per source on the draft's stage: one that it reads, one that the next message lands in meanwhile."""


@dataclass(frozen=True)
class TapStats:
    """What one stage has sent, in bytes by kind, and what it holds."""

    messages: int
    payload_bytes: int
    header_bytes: int
    gradient_bytes: int
    weight_bytes: int
    longest_put_wait_s: float
    slots_high_water: int
    allocated_bytes: int


class TapChannel:
    """Carries tapped hidden states, by (step, micro-batch, layer), to the stage that trains the draft.

    Every stage makes one, with the same arguments but for `stage`. Stages that tap call `put` in their forward, mostly
    through TapHooks; the draft's stage calls `take`, uses the rows, and calls `release`. Nothing here runs in the
    pipeline's process group, and nothing in a thread of its own.

    Args:
        group: gloo group of the stages that share this rank's tensor-, context- and data-parallel coordinates, which
            nothing else uses (`tap_group` makes it); a stage's number is its rank there. None for one stage alone.
        stage: this stage.
        draft_stage: the stage that takes; at or after every stage that taps.
        taps: layer -> the stage that holds it; EMBEDDING and FINAL are layers too.
        rows: most rows of a micro-batch on this rank; fewer travel as they are.
        hidden: width of a row.
        dtype: of the taps.
        slots: per stage, what `slots_per_stage` says for the schedule.
        deadline: seconds that a stage waits for another, each time.
        verify: send a digest with each tap and compare it; set alike on all stages.
        project: width of the projection y = sum_l a_l W_l^T, made where the taps are, or None to send taps.
    Raises:
        ValueError: the arguments do not fit each other.
        TapError: of any later call; TapTimeout and TapPeerLost say that another stage is slow or gone. After an error
            of the transfer the channel is broken: every later call raises at once, and so do the other stages' calls.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        stage: int,
        draft_stage: int,
        taps: Mapping[int, int],
        rows: int,
        hidden: int,
        dtype: torch.dtype,
        slots: Sequence[int],
        deadline: float,
        verify: bool = False,
        project: int | None = None,
    ):
        stages = 1 if group is None else dist.get_world_size(group)
        held = _checked(stages, stage, draft_stage, dict(taps), slots, group)
        check_dtype(dtype)
        if rows < 0 or min(hidden, hidden if project is None else project) < 1:
            raise ValueError(f"rows {rows}, hidden {hidden}, project {project}: need at least 0, 1 and 1")
        self.stage, self.draft_stage = stage, draft_stage
        self._rows, self._hidden, self._dtype, self._project = rows, hidden, dtype, project
        self._layers = frozenset(held[stage])
        self._wire = Wire(group, stage, deadline)
        self._closed = False
        self._source = self._draft = None
        if stage == draft_stage:
            self._draft = Draft(self._wire, held, rows, hidden, dtype, slots, LANDING, verify, project)
        elif self._layers:
            self._source = Source(
                self._wire, draft_stage, held[stage], rows, hidden, dtype, slots[stage], LANDING, verify, project
            )

    def put(self, key: TapKey, hidden: Float[Tensor, "*rows hidden"]) -> None:
        """Copy a tap, and send its micro-batch's message if this is the stage's last tap of it.

        With `slots_needed` slots it never waits. The tensor is the caller's again at once; no gradient flows through.

        Raises:
            TapError: a layer that this stage does not tap, another shape or dtype, a key put before.
        """
        self._check()
        if key.layer not in self._layers:
            raise TapError(f"{key}: stage {self.stage} taps layers {sorted(self._layers)} only; name them in `taps`")
        if hidden.dtype != self._dtype or hidden.dim() < 2 or hidden.shape[-1] != self._hidden:
            raise TapError(
                f"{key} is {tuple(hidden.shape)} of {hidden.dtype}; the channel carries [..., {self._hidden}] of "
                f"{self._dtype}: make it with the model's width and dtype"
            )
        rows = hidden.detach().reshape(-1, self._hidden)
        if len(rows) > self._rows:
            raise TapError(f"{key} has {len(rows)} rows; a slot holds {self._rows}: make the channel with more rows")
        (self._draft or self._source).put(key, rows)

    def take(self, step: int, micro_batch: int) -> dict[int, Float[Tensor, "rows hidden"]]:
        """A micro-batch's taps by ascending layer, once all are here. Read in place: theirs until `release`.

        Raises:
            TapCancelled: a stage cancelled the micro-batch; cancel it here too, and go on.
            TapTimeout: it did not come within the deadline.
            TapError: taken before, or it cannot come.
        """
        draft = self._on_draft("take")
        if self._project is not None:
            raise TapError("this channel projects its taps; call take_projected")
        return draft.take((step, micro_batch))

    def take_projected(self, step: int, micro_batch: int) -> Float[Tensor, "rows project"]:
        """sum_l a_l W_l^T of a micro-batch, the caller's own; answer it with `return_gradient`, or `release` it."""
        draft = self._on_draft("take_projected")
        self._projects()
        return draft.take_projected((step, micro_batch))

    def release(self, step: int, micro_batch: int) -> None:
        """Free the slots of a micro-batch that was taken. A backward that still needs its rows fails from here on."""
        self._on_draft("release").release((step, micro_batch))

    def cancel(self, step: int, micro_batch: int) -> None:
        """Give up a micro-batch that failed, on any stage and in any state: its slots are free, here and there."""
        self._check()
        if self._draft or self._source:
            (self._draft or self._source).cancel((step, micro_batch))

    def load_projection(self, weights: Mapping[int, Float[Tensor, "project hidden"]] | None) -> None:
        """Before a step, on every stage: the draft's stage gives W_l of every layer, the others None."""
        self._check()
        self._projects()
        if self._source:
            self._source.load()
        elif self._draft:
            shapes = {layer: tuple(w.shape) for layer, w in (weights or {}).items()}
            expected = dict.fromkeys(self._draft.layers, (self._project, self._hidden))
            if shapes != expected:
                raise TapError(f"weights {shapes} are not those of the taps; give {expected}")
            self._draft.load(weights)

    def return_gradient(self, step: int, micro_batch: int, gradient: Float[Tensor, "rows project"]) -> None:
        """After the draft's backward: the gradient of what `take_projected` gave; frees the micro-batch."""
        draft = self._on_draft("return_gradient")
        self._projects()
        draft.return_gradient((step, micro_batch), gradient.detach())

    def projection_gradients(self) -> dict[int, Float[Tensor, "project hidden"]]:
        """After a step, on every stage: sums of dW_l, wide; all layers on the draft's stage, else this stage's own."""
        self._check()
        self._projects()
        if self._source:
            return self._source.gradients()
        return self._draft.gradients() if self._draft else {}

    @property
    def stats(self) -> TapStats:
        """Counts since the channel was made."""
        source, draft = self._source, self._draft
        projection = source.projection if source else None
        return TapStats(
            messages=source.messages if source else 0,
            payload_bytes=source.payload_bytes if source else 0,
            header_bytes=(source or draft).header_bytes if source or draft else 0,
            gradient_bytes=draft.gradient_bytes if draft else 0,
            weight_bytes=draft.weight_bytes if draft else projection.weight_bytes if projection else 0,
            longest_put_wait_s=source.outbox.longest_wait_s if source else 0.0,
            slots_high_water=max(draft.high_water, draft.local.high_water)
            if draft
            else source.outbox.high_water
            if source
            else 0,
            allocated_bytes=(source or draft).allocated_bytes if source or draft else 0,
        )

    def close(self, deadline: float | None = None) -> None:
        """On every stage: let what is under way arrive, drop what nobody took, and end. Later calls are errors.

        Args:
            deadline: seconds for all of it; the channel's own unless given.
        Raises:
            TapTimeout, TapPeerLost: another stage did not close within them, or is gone.
        """
        if self._closed:
            return
        self._closed = True
        # What broke it has been raised already, and nobody can say what is still under way.
        if not self._wire.broken and (self._draft or self._source):
            (self._draft or self._source).close(
                time.monotonic() + (self._wire.deadline if deadline is None else deadline)
            )

    def _on_draft(self, call: str) -> Draft:
        self._check()
        if self._draft is None:
            raise TapError(f"{call} on stage {self.stage}: the draft is on stage {self.draft_stage}; call it there")
        return self._draft

    def _projects(self) -> None:
        if self._project is None:
            raise TapError("this channel sends taps as they are; make it with project=<width> to project them")

    def _check(self) -> None:
        if self._closed:
            raise TapError(f"stage {self.stage}: the tap channel is closed; make another")
        self._wire.check()


def _checked(
    stages: int, stage: int, draft_stage: int, taps: dict[int, int], slots: Sequence[int], group: object
) -> list[tuple[int, ...]]:
    """The layers of each stage, if the arguments fit each other."""
    if not 0 <= stage < stages or not 0 <= draft_stage < stages:
        raise ValueError(f"stage {stage} and draft_stage {draft_stage} must be among the group's {stages} stages")
    if group is not None and dist.get_rank(group) != stage:
        raise ValueError(f"stage {stage} has rank {dist.get_rank(group)} in the group; order its ranks by stage")
    if not taps:
        raise ValueError("no taps: name the layers to tap and their stages")
    if late := {layer: at for layer, at in taps.items() if at > draft_stage}:
        raise ValueError(
            f"taps {late} lie after the draft's stage {draft_stage}, whose forward would wait for a later stage's, "
            "which waits for it; train the draft on the last stage"
        )
    if len(slots) != stages:
        raise ValueError(f"{len(slots)} slot counts for {stages} stages; give what slots_per_stage says")
    return by_stage(taps, stages)
