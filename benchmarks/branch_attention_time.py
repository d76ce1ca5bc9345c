"""Wall time on one rank, as ratios within one run: sides by turns, medians with lowest and highest."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from branch_attention_baselines import (
    Joined,
    causal_block_mask,
    computed_by_blocks,
    dense_attention,
    dense_mask,
    flex,
)
from branch_attention_ranks import DEPTH, coordinates, document, tensors
from branch_attention_tables import causal_pairs, size, table
from torch import Tensor

from furlong.kernels.branch_attention import branch_attention
from furlong.kernels.branches import test_time_training

Side = Callable[..., Tensor]
TOLERANCE = 2e-5
"""Between sides, absolute: float32 outputs of magnitude 1."""


Times = list[tuple[float, float]]
"""Of each turn: seconds of wall time, and of CPU time, which other programs on the machine hardly change."""


def by_turns(sides: dict[str, Callable[[], object]], repeats: int) -> dict[str, Times]:
    """One more turn is done first and not counted."""
    taken: dict[str, Times] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            wall, used = time.perf_counter(), time.process_time()
            side()
            if turn:
                taken[name].append((time.perf_counter() - wall, time.process_time() - used))
    return taken


def ratios(taken: dict[str, Times], name: str, base: str, at: int = 0) -> tuple[float, float, float]:
    """Median, lowest and highest, over turns, of a side's seconds by the base's."""
    found = sorted(a[at] / b[at] for a, b in zip(taken[name], taken[base], strict=True))
    return median(found), found[0], found[-1]


def time_tables(tokens: int, repeats: int) -> list[tuple[str, bool]]:
    """Forward and backward against dense masks, forward against FlexAttention."""
    layout = document(tokens, 1)
    rows = layout.rows(0)
    branches = test_time_training(rows, DEPTH)
    inputs = tensors(branches, tokens, 0)
    at = coordinates(rows, layout, branches)
    dense, blocks = dense_mask(at), causal_block_mask(tokens, DEPTH)
    main_only = dense[:, :tokens].contiguous()

    def ours(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        return branch_attention(q, k, v, kb, vb, rows=rows, branches=branches, backend="cpu")

    def by_dense(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        return dense_attention(q, Joined.apply(k, kb, None), Joined.apply(v, vb, None), dense)

    def by_flex(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
        return flex(q, Joined.apply(k, kb, None), Joined.apply(v, vb, None), blocks)

    sides: dict[str, Side] = {
        "branch attention": ours,
        "SDPA, dense mask": by_dense,
        "SDPA, dense mask, main keys alone": lambda q, k, v, kb, vb: dense_attention(q, k, v, main_only),
        "causal SDPA, main keys alone": _causal_alone,
    }
    grad = torch.randn_like(inputs[0])
    passes = {name: _both(side, inputs, grad) for name, side in sides.items()}
    forwards = {name: _forward(side, inputs) for name, side in {**sides, "FlexAttention, compiled": by_flex}.items()}
    del forwards["SDPA, dense mask, main keys alone"]
    _agree({name: forwards[name]() for name in ("branch attention", "SDPA, dense mask", "FlexAttention, compiled")})
    print(f"Wall time on one rank, {torch.get_num_threads()} thread, T = {size(tokens)}, K = {DEPTH}, {repeats} turns;")
    print(
        "x: seconds by those of branch attention in the same turn, median (lowest to highest). Masks are made before;"
    )
    print(
        f"FlexAttention's blocks hold {computed_by_blocks(blocks) / (causal_pairs(tokens) + tokens * DEPTH):.2f} times"
    )
    print("the visible pairs. 'Main keys alone' leave branches out: not the same function, a floor for any such mask.")
    both, forward = by_turns(passes, repeats), by_turns(forwards, 2 * repeats)
    rows_ = [
        _row(what, name, taken)
        for what, taken in (("forward + backward", both), ("forward", forward))
        for name in taken
    ]
    table(["", "", "median s", "x, wall time", "x, CPU time"], rows_)
    against = ratios(both, "SDPA, dense mask", "branch attention")[0]
    flexed = ratios(forward, "FlexAttention, compiled", "branch attention")[0]
    return [
        (f"forward + backward {against:.2f}x as fast as dense-mask SDPA at T = {size(tokens)}, K = {DEPTH} (>= 2)",
         against >= 2),
        (f"forward no slower than compiled FlexAttention ({flexed:.2f}x as fast)", flexed >= 1),
    ]  # fmt: skip


def _row(what: str, name: str, taken: dict[str, Times]) -> list[str]:
    seconds = median(wall for wall, _ in taken[name])
    cells = [[f"{x:.2f}" for x in ratios(taken, name, "branch attention", at)] for at in (0, 1)]
    return [what, name, f"{seconds:.3f}", *(f"{middle} ({low} to {high})" for middle, low, high in cells)]


def _both(side: Side, inputs: list[Tensor], grad: Tensor) -> Callable[[], None]:
    def run() -> None:
        side(*inputs).backward(grad)
        for x in inputs:
            x.grad = None

    return run


def _forward(side: Side, inputs: list[Tensor]) -> Callable[[], Tensor]:
    plain = [x.detach() for x in inputs]

    def run() -> Tensor:
        with torch.no_grad():
            return side(*plain)

    return run


def _causal_alone(q: Tensor, k: Tensor, v: Tensor, kb: Tensor, vb: Tensor) -> Tensor:
    query, (keys, values) = (
        q[:, 0].transpose(0, 1)[None],
        (x.transpose(0, 1).repeat_interleave(q.shape[2] // x.shape[1], 0)[None] for x in (k, v)),
    )
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True)[0].transpose(0, 1)[:, None]


def _agree(outs: dict[str, Tensor]) -> None:
    first = next(iter(outs.values()))
    for name, out in outs.items():
        off = float((out - first).abs().max())
        if not off <= TOLERANCE:
            raise ValueError(
                f"{name} is {off:.1e} from branch attention, more than {TOLERANCE}: the sides differ, fix that"
            )
