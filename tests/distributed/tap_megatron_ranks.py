"""A policy in megatron-core's own pipeline schedules, and on every rank the same policy unsplit, for taps to be tried on.

The unsplit policy runs in the same processes, as data-parallel copies: the same modules, kernels and micro-batches, one
stage after the other in one place. What a stage computes is then the same arithmetic in the same order on the same
bytes, so that tapped features have to be bitwise those of the unsplit policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor, nn

from furlong.kernels.tap_channel import TapChannel
from furlong.kernels.tap_hooks import TapHooks
from furlong.kernels.tap_protocol import EMBEDDING, FINAL, slots_per_stage
from furlong.kernels.tap_shards import tap_group
from furlong.ops.policy.architecture import Architecture
from furlong.ops.policy.packing import MicroBatch
from furlong.ops.policy.parallel import Layout
from furlong.ops.weights.layout import cut
from furlong.resources.trainers.megatron import names, schedule
from furlong.resources.trainers.megatron.feed import Feed, feed
from furlong.resources.trainers.megatron.model import Chunk, build
from furlong.resources.trainers.megatron.parallel import Place, initialise

TINY = Architecture(
    kind="qwen3", vocab=61, hidden=32, layers=8, heads=4, kv_heads=2, head_dim=8, ffn=48, norm_eps=1e-5,
    rope_theta=1e4, context=64, tied=True,
)  # fmt: skip
"""Eight layers, so that four ranks with two chunks each have one to a chunk."""
Pause = Callable[[], None]
Features = dict[tuple[int, int], Tensor]
"""(micro-batch, layer) -> rows x hidden."""


def at_once() -> None:
    """No pause."""


@dataclass(frozen=True)
class Policy:
    """This rank's chunks, wrapped for data parallelism, and where they stand."""

    place: Place
    chunks: list[DistributedDataParallel]

    @property
    def modules(self) -> list[Chunk]:
        return [chunk.module for chunk in self.chunks]


def make_policy(layout: Layout, rank: int, dtype: torch.dtype, architecture: Architecture = TINY) -> Policy:
    """The policy with weights that depend on their names alone; whatever layout was there before is gone."""
    place = initialise(layout, rank, layout.world, 60.0)
    modules = build(architecture, place, dtype)
    schedule.prepare(modules)
    for held in names.pieces(modules).values():
        shape = architecture.shapes()[held.piece.name]
        generator = torch.Generator().manual_seed(sum(map(ord, held.piece.name)))
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        # Wide enough that no layer's output is like that of the layer before.
        whole = 1 + 0.1 * whole if len(shape) == 1 else whole * 1.7 / shape[1] ** 0.5
        held.put(held.parameter.data, cut(whole, held.piece))
    settings = DistributedDataParallelConfig()
    return Policy(place, [DistributedDataParallel(module.config, settings, module) for module in modules])


def make_feeds(
    count: int, place: Place, even: bool, rows: int = 2, width: int = 8, vocab: int = TINY.vocab
) -> list[Feed]:
    """Micro-batches of random tokens, every one of them predicted; of one shape if `even`, else of several."""
    shapes = [(rows, width) if even else (1 + m % rows, width - m % 4) for m in range(count)]
    return [feed(_micro(number, *shape, vocab), place) for number, shape in enumerate(shapes)]


def _micro(number: int, rows: int, width: int, vocab: int) -> MicroBatch:
    tokens = torch.randint(vocab, (rows, width), generator=torch.Generator().manual_seed(number))
    flat = torch.arange(rows * width)
    places = flat[flat % width < width - 1]
    return MicroBatch(
        tokens=tokens,
        positions=torch.arange(width).repeat(rows, 1),
        visible=torch.ones(width, width, dtype=torch.bool).tril().expand(rows, 1, width, width).clone(),
        places=places,
        place=torch.arange(len(places)),
        target=tokens.flatten()[places + 1],
        trajectory=places // width,
        offset=places % width,
    )


def most_rows(feeds: list[Feed], layout: Layout) -> int:
    """Of any of the micro-batches, on one rank."""
    return max(micro.tokens.numel() for micro in feeds) // (layout.tp if layout.sp else 1)


def unsplit(layout: Layout) -> Layout:
    """The same but for the pipeline, whose ranks are copies of it instead."""
    return replace(layout, pp=1, vpp=1, dp=layout.dp * layout.pp, recompute=False)


def stage_of(layer: int, layout: Layout, layers: int) -> int:
    """The pipeline rank that a feature of a policy of so many layers arises on."""
    if layer in (EMBEDDING, FINAL):
        return 0 if layer == EMBEDDING else layout.pp - 1
    return layer // (layers // (layout.pp * layout.vpp)) % layout.pp


def tapped(modules: list[Chunk], wanted: Sequence[int]) -> dict[int, nn.Module]:
    """Which of these modules' parts puts out each wanted feature that they have."""
    found: dict[int, nn.Module] = {}
    for chunk in modules:
        if chunk.pre_process:
            found[EMBEDDING] = chunk.embedding
        found |= {layer.layer_number - 1: layer for layer in chunk.decoder.layers}
        if chunk.post_process:
            found[FINAL] = chunk.decoder.final_layernorm
    return {layer: found[layer] for layer in wanted if layer in found}


def one_pass(
    policy: Policy, feeds: list[Feed], backward: bool = True, draft: Callable[[int], Pause | None] = lambda number: None
) -> tuple[list[float], dict[str, Tensor]]:
    """Every micro-batch's loss (on the last stage) and, after a backward, the gradient of all that this rank holds.

    Args:
        draft: called on the last stage, in each micro-batch's forward step, with its number; what it returns is called
            when that micro-batch's backward begins.
    """
    numbers = {id(micro): number for number, micro in enumerate(feeds)}
    losses: list[float] = []

    def head(micro: Feed, logprobs: Tensor, entropy: Tensor) -> Tensor:
        later = draft(numbers[id(micro)])
        generator = torch.Generator().manual_seed(1000 + numbers[id(micro)])
        loss = (logprobs * torch.randn(logprobs.shape, generator=generator).to(logprobs)).sum()
        losses.append(float(loss.detach()))
        if later:
            loss.register_hook(lambda gradient: later())
        return loss

    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    schedule.run(policy.chunks, feeds, 0.8, head, None, backward)
    if not backward:
        return losses, {}
    if policy.place.layout.dp == 1:  # copies of the unsplit policy took every micro-batch each: there is nothing to add
        finalize_model_grads(policy.chunks)
    held = names.pieces(policy.modules).items()
    return losses, {name: part.get(part.parameter.main_grad).clone() for name, part in held}


@contextmanager
def local_features(policy: Policy, feeds: list[Feed], wanted: Sequence[int]) -> Iterator[Features]:
    """What the modules put out, by plain hooks; for a policy in one place, without recomputation."""
    numbers = {id(micro): number for number, micro in enumerate(feeds)}
    found: Features = {}
    current: list[int] = []

    def keep(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor | tuple) -> None:
            key = current[-1], layer
            assert key not in found, f"{key} was put out twice"
            found[key] = (output[0] if isinstance(output, tuple) else output).detach().flatten(0, -2).clone()

        return hook

    modules = policy.modules
    handles = [m.register_forward_pre_hook(lambda chunk, args: current.append(numbers[id(args[0])])) for m in modules]
    handles += [module.register_forward_hook(keep(layer)) for layer, module in tapped(modules, wanted).items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def open_channel(
    policy: Policy, wanted: Sequence[int], rows: int, deadline: float = 20.0, **more: Any
) -> tuple[TapChannel, dist.ProcessGroup]:
    """A channel among the stages of this rank's coordinates, and its own group; called by all ranks together.

    Args:
        rows: most that a micro-batch has on one rank.
        more: of the channel.
    """
    layout, place = policy.place.layout, policy.place
    apart = layout.world // layout.pp
    group = tap_group([range(first, layout.world, apart) for first in range(apart)], deadline)
    config = policy.modules[0].config
    order = "none" if layout.pp == 1 else "interleaved" if layout.vpp > 1 else "1f1b"
    channel = TapChannel(
        group,
        stage=place.pp,
        draft_stage=layout.pp - 1,
        taps={layer: stage_of(layer, layout, config.num_layers) for layer in wanted},
        rows=rows,
        hidden=config.hidden_size,
        dtype=config.params_dtype,
        deadline=deadline,
        **{"slots": slots_per_stage(layout.pp, layout.vpp, order), **more},
    )
    return channel, group


@contextmanager
def tapping(
    policy: Policy, channel: TapChannel, wanted: Sequence[int], feeds: list[Feed], step: int, pause: Pause = at_once
) -> Iterator[None]:
    """Every forward of the feeds' micro-batches through a chunk puts what it has of the wanted features.

    Args:
        pause: called before each of those forwards.
    """
    numbers = {id(micro): number for number, micro in enumerate(feeds)}
    hooks = {module: TapHooks(channel, tapped([module], wanted)) for module in policy.modules}

    def begin(module: nn.Module, args: tuple) -> None:
        pause()
        hooks[module].begin(step, numbers[id(args[0])])

    handles = [module.register_forward_pre_hook(begin) for module in policy.modules]
    try:
        yield
        for hook in hooks.values():
            hook.end()
    finally:
        for handle in [*handles, *hooks.values()]:
            handle.remove()


@contextmanager
def counting(group: dist.ProcessGroup) -> Iterator[dict[str, int]]:
    """Messages and bytes that this rank sends in one group, as the group itself is told."""
    counted = {"messages": 0, "bytes": 0}
    bound, send = vars(dist.ProcessGroup)["send"], dist.ProcessGroup.send

    def counted_send(self: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> Any:
        if self is group:
            counted["messages"] += 1
            counted["bytes"] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return send(self, tensors, *args)

    dist.ProcessGroup.send = counted_send
    try:
        yield counted
    finally:
        dist.ProcessGroup.send = bound
