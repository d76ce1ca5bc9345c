"""One pass of a step's micro-batches through this rank's chunks, by megatron-core's pipeline schedules.

Without pipeline parallelism micro-batches follow one another; with it they go 1F1B (Narayanan et al. 2019, "PipeDream")
or, with several chunks per rank, interleaved (Narayanan et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from jaxtyping import Float
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from furlong.ops.policy.lines import NOBODY, Line, empty_line, pack_lines
from furlong.ops.policy.packing import Masks, MicroBatch, empty_like, pack
from furlong.ops.protocols import TrainBatch
from furlong.resources.trainers.megatron.feed import Feed, feed, multiple, on
from furlong.resources.trainers.megatron.model import Chunk
from furlong.resources.trainers.megatron.parallel import Place

Head = Callable[[Feed, Float[Tensor, " tokens"], Float[Tensor, " places"]], Tensor | None]
"""On the last stage, after each micro-batch's forward: given it, its log-probabilities and entropies, the scalar whose
gradient is wanted, or None in a pass without a backward."""
Watch = Callable[[Feed, Float[Tensor, " tokens"] | None, Tensor | None], None]
"""After each micro-batch's forward: given it, its log-probabilities (on the last stage) and the embedding's output (on the
first)."""


class Student(Protocol):
    """What learns from the model's hidden states while micro-batches pass; it must not change what they give."""

    def begin(self, chunk: Chunk, number: int) -> None:
        """On every stage, before each forward of a chunk, in its grad mode. `number`: of the micro-batch among the feeds."""

    def learn(self, number: int) -> None:
        """On the last stage, after the micro-batch's forward and its head."""


def prepare(modules: list[Chunk]) -> None:
    """Set chunks up for `run`, before they are wrapped for data parallelism."""
    config = modules[0].config
    # Gradients are sums, never means: the objective's denominators are those of the whole step.
    config.calculate_per_token_loss = True
    if len(modules) > 1:
        # In one batch of messages, a pipeline of two ranks would take what the other sends it as the next stage for what
        # it sends as the previous one; so would it with the shapes that micro-batches of several sizes are announced by.
        config.batch_p2p_comm = config.variable_seq_lengths = False
    for module in modules:
        for name, parameter in module.named_parameters():
            if ".experts." in name:
                # megatron-core sees to it only when ep > 1. But experts are whole on each rank of tp, and sequence
                # parallelism sends them other tokens there: so gradients are summed over other ranks than those of dp.
                parameter.allreduce = False


def share(batch: TrainBatch, masks: Masks, budget: int, place: Place, device: torch.device) -> list[Feed]:
    """The micro-batches of `batch` that this rank computes: as many on every data-parallel rank, made up with empty ones.

    Args:
        masks: which reply tokens are wanted, at least one.
        budget: padded tokens per micro-batch at most.
    Raises:
        PackingError: one trajectory alone is longer than the budget.
    """
    layout = place.layout
    width = multiple(layout)
    micros: Sequence[MicroBatch | Line]
    # The interleaved schedule goes in rounds of pp.
    shares = layout.dp * (layout.pp if layout.vpp > 1 else 1)
    micros = pack_lines(batch, masks, budget, width) if layout.cp > 1 else pack(batch, masks, budget, shares)
    if not micros:
        raise ValueError("no token of the batch is wanted, so there is nothing to pass through the model; ask for one")
    count = -(-len(micros) // shares) * (shares // layout.dp)
    last = micros[-1]
    empty = empty_line(last, width) if isinstance(last, Line) else empty_like(last)
    if layout.vpp > 1:
        rows, widest = (max(micro.tokens.shape[dim] for micro in micros) for dim in (0, 1))
        micros, empty = [_padded(micro, rows, widest) for micro in micros], _padded(empty, rows, widest)
    # They come by size, so that dealing them out gives every rank some large and some small ones.
    mine = micros[place.dp :: layout.dp]
    return [on(feed(micro, place), device) for micro in (*mine, *[empty] * (count - len(mine)))]


def _padded(micro: MicroBatch | Line, rows: int, width: int) -> MicroBatch | Line:
    """The same with more padding."""
    had = micro.tokens.shape
    extra = (0, width - had[1], 0, rows - had[0])
    grown: dict[str, Tensor] = {name: F.pad(getattr(micro, name), extra) for name in ("tokens", "positions")}
    grown["places"] = micro.places // had[1] * width + micro.places % had[1]
    if micro.experts is not None:
        grown["experts"] = F.pad(micro.experts, (0, 0, 0, 0, *extra), value=-1)
    if isinstance(micro, Line):
        grown["documents"] = F.pad(micro.documents, extra, value=NOBODY)
    else:
        visible = torch.zeros(rows, 1, width, width, dtype=torch.bool)
        visible[: had[0], :, : had[1], : had[1]] = micro.visible
        visible[:, 0, range(width), range(width)] = True
        grown["visible"] = visible
    return replace(micro, **grown)


def run(
    chunks: list[nn.Module], feeds: list[Feed], temperature: float, head: Head, watch: Watch | None, backward: bool,
    student: Student | None = None,
) -> None:  # fmt: skip
    """Forward, and backward, of every micro-batch; every rank calls it with the same number of them.

    Args:
        chunks: this rank's, in order, each wrapped for data parallelism; gradients are added to their buffers.
        head: called on the last stage; must not raise, or the other stages would wait for it in vain.
        watch: called on every stage, once for each micro-batch.
        student: it must not raise either, but for a stage that is gone.
    """
    watching = _watching(chunks)

    def forward_step(turn: Iterator[tuple[int, Feed]], chunk: nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        (number, micro), model = next(turn), chunk.module
        if student:
            student.begin(model, number)
        out = chunk(micro, temperature)
        logprobs, loss = None, out
        if model.post_process:
            logprobs, entropy = out
            loss = head(micro, logprobs, entropy)
            loss = torch.zeros((), device=logprobs.device) if loss is None else loss
            if student:
                student.learn(number)
        if watch and chunk is watching:
            watch(micro, logprobs, trunk.pop() if trunk else None)
        return loss, _as_it_is

    shape = feeds[0].tokens.shape
    with _outputs(chunks[0].module) as trunk, torch.set_grad_enabled(backward):
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[enumerate(feeds) for _ in chunks],
            model=chunks,
            num_microbatches=len(feeds),
            # Read by the interleaved schedule alone; in the plain one stages tell each other each micro-batch's shape.
            seq_length=shape[1] * chunks[0].config.context_parallel_size,
            micro_batch_size=shape[0],
            forward_only=not backward,
        )


def _as_it_is(loss: Tensor) -> tuple[Tensor, Tensor, None]:
    """No tokens to divide by: the objective has divided already."""
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), None


def _watching(chunks: list[nn.Module]) -> nn.Module:
    """The chunk that has something to show: the last of those that hold an end of the network."""
    ends = [chunk for chunk in chunks if chunk.module.pre_process or chunk.module.post_process]
    return (ends or chunks)[-1]


@contextmanager
def _outputs(module: nn.Module) -> Iterator[list[Tensor]]:
    """What the embedding put out and nobody took yet; nothing on ranks without one."""
    outputs: list[Tensor] = []
    if not module.pre_process:
        yield outputs
        return
    hook = module.embedding.register_forward_hook(lambda module, args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        hook.remove()
