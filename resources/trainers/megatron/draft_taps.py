"""The hidden states that a draft reads, from the stages that have them to the last one, in one pass of a step.

A channel lives for one pass: it has room for that pass's micro-batches, and a pass that failed leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from furlong.kernels.tap_channel import TapChannel
from furlong.kernels.tap_hooks import TapHooks
from furlong.kernels.tap_protocol import EMBEDDING, FINAL, TapPeerLost, TapTimeout, slots_per_stage
from furlong.kernels.tap_shards import assemble
from furlong.ops.policy.parallel import Layout
from furlong.resources.trainers.megatron.feed import Feed
from furlong.resources.trainers.megatron.model import Chunk
from furlong.resources.trainers.megatron.parallel import Place

STEP = 0
"""The channel's own number of its only pass."""
GIVE_UP = 2.0
"""Seconds for what was under way when something failed."""


@dataclass(frozen=True)
class Tapped:
    """A micro-batch's hidden states on the last stage, of the tokens that this rank has: flat index row * width + column."""

    embedded: Float[Tensor, "tokens hidden"]
    """What the embedding put out."""
    taps: Float[Tensor, "tokens taps_hidden"]
    """The residual stream after each tapped layer, ascending, side by side."""
    final: Float[Tensor, "tokens hidden"]
    """After the final norm."""


class DraftTaps:
    """The taps of one pass, between whose beginning and end by `tapping` all else may be called."""

    def __init__(self, chunks: list[nn.Module], layers: Sequence[int], place: Place, feeds: list[Feed]) -> None:
        """
        Args:
            chunks: this rank's, each wrapped for data parallelism.
            layers: tapped ones, from 0, ascending.
            place: with `taps` where there are several stages.
            feeds: this rank's micro-batches.
        """
        self._modules: list[Chunk] = [chunk.module for chunk in chunks]
        self._layers, self._place, self._feeds = (EMBEDDING, *layers, FINAL), place, feeds
        self._hooks: dict[Chunk, TapHooks] = {}

    @contextmanager
    def tapping(self) -> Iterator[None]:
        """Around the schedule; on all ranks.

        Raises:
            TapError: another stage is slow or gone.
        """
        self._channel = self._open()
        self._hooks = {module: TapHooks(self._channel, self._tapped(module)) for module in self._modules}
        try:
            yield
            for hooks in self._hooks.values():
                hooks.end()
        except RuntimeError as error:
            self._give_up(error)
            raise
        finally:
            for hooks in self._hooks.values():
                hooks.remove()
        self._channel.close()

    def mine(self, number: int) -> bool:
        """Whether this rank learns from a micro-batch: they are dealt out over the ranks of tensor parallelism."""
        return number % self._place.layout.tp == self._place.tp

    def travels(self, number: int) -> bool:
        """Whether this rank's part of a micro-batch is wanted: with sequence parallelism, every rank has another."""
        return self._place.layout.sp or self.mine(number)

    def begin(self, chunk: Chunk, number: int) -> None:
        """Before a forward of a chunk, in its grad mode."""
        if self.travels(number):
            self._hooks[chunk].begin(STEP, number)

    def take(self, number: int, device: torch.device) -> Tapped | None:
        """On the last stage, after the forward of a micro-batch that travels: copies, on `device`. None where it is another
        rank's, to whom this one gives its part."""
        taken = self._channel.take(STEP, number)
        rows = torch.cat([taken[layer] for layer in self._layers], 1).to(device)
        self._channel.release(STEP, number)
        if self._place.layout.sp:
            rows = assemble(rows, self._place.tp_group)
        if not self.mine(number):
            return None
        # Activations come by column, then row.
        rows = rows.view(-1, self._feeds[number].tokens.shape[0], rows.shape[1]).transpose(0, 1).flatten(0, 1)
        hidden = rows.shape[1] // len(self._layers)
        return Tapped(rows[:, :hidden], rows[:, hidden:-hidden], rows[:, -hidden:])

    def _open(self) -> TapChannel:
        layout, config = self._place.layout, self._modules[0].config
        order = "none" if layout.pp == 1 else "interleaved" if layout.vpp > 1 else "1f1b"
        return TapChannel(
            self._place.taps,
            stage=self._place.pp,
            draft_stage=layout.pp - 1,
            taps={layer: stage_of(layer, layout, config.num_layers) for layer in self._layers},
            rows=max(feed.tokens.numel() for feed in self._feeds) // (layout.tp if layout.sp else 1),
            hidden=config.hidden_size,
            dtype=config.params_dtype,
            slots=slots_per_stage(layout.pp, layout.vpp, order),
            deadline=self._place.deadline,
        )

    def _give_up(self, error: RuntimeError) -> None:
        """Close what an error broke off; raise TapPeerLost where it is the stage that is lost that broke it."""
        try:
            # Not for long: others may be waiting for this very rank, and hear of it when it lets go.
            self._channel.close(min(GIVE_UP, self._place.deadline))
        except TapTimeout:
            pass
        except TapPeerLost as reason:
            raise reason from error

    def _tapped(self, chunk: Chunk) -> dict[int, nn.Module]:
        """What puts out each wanted state that the chunk has."""
        found: dict[int, nn.Module] = {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
        if chunk.pre_process:
            found[EMBEDDING] = chunk.embedding
        if chunk.post_process:
            found[FINAL] = chunk.decoder.final_layernorm
        return {layer: found[layer] for layer in self._layers if layer in found}


def stage_of(layer: int, layout: Layout, layers: int) -> int:
    """The pipeline rank that a state of a policy of so many layers arises on."""
    if layer in (EMBEDDING, FINAL):
        return 0 if layer == EMBEDDING else layout.pp - 1
    return layer // (layers // (layout.pp * layout.vpp)) % layout.pp
