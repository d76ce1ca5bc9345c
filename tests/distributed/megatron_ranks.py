"""One rank of a process group, which takes a list of layouts in turn and writes down what it found.

    python megatron_ranks.py RANK WORLD FOLDER LAYOUT=KIND,KIND...

The folder holds a model per kind, and what transformers makes of a batch (`test_megatron_model.py`). The rank writes
`RANK.json` with the largest differences, and `LAYOUT.KIND.RANK.safetensors` with the weights that it read back.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

warnings.filterwarnings("ignore")

from furlong.kernels.context_parallel import ring_attention  # noqa: E402
from furlong.kernels.layout import line_layout  # noqa: E402
from furlong.ops.policy.checkpoint import read_tensors  # noqa: E402
from furlong.ops.policy.lines import empty_line, pack_lines  # noqa: E402
from furlong.ops.policy.packing import empty_like, pack  # noqa: E402
from furlong.ops.policy.parallel import Layout, parse_layout  # noqa: E402
from furlong.ops.protocols import TrainBatch  # noqa: E402
from furlong.ops.weights.layout import cut  # noqa: E402
from furlong.resources.trainers.megatron import names  # noqa: E402
from furlong.resources.trainers.megatron.feed import Feed, feed, multiple  # noqa: E402
from furlong.resources.trainers.megatron.model import Chunk, build  # noqa: E402
from furlong.resources.trainers.megatron.parallel import Place, initialise, teardown  # noqa: E402
from furlong.resources.trainers.megatron.vocab_head import span  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
BUDGET = 48


def every_token(micro, vocabulary: int):
    """The micro-batch that wants every token of the vocabulary at each of its places; token 0 there names the place."""
    first = torch.unique(micro.place, return_inverse=False)
    at = torch.stack([(micro.place == place).nonzero()[0, 0] for place in first]) if len(first) else first
    spread = {
        name: getattr(micro, name)[at].repeat_interleave(vocabulary) for name in ("place", "trajectory", "offset")
    }
    return replace(micro, **spread, target=torch.arange(vocabulary).repeat(len(at)))


def feeds_of(batch: TrainBatch, place: Place, vocabulary: int) -> list[Feed]:
    layout = place.layout
    in_lines = layout.cp > 1
    micros = pack_lines(batch, batch.masks, BUDGET, multiple(layout)) if in_lines else pack(batch, batch.masks, BUDGET)
    assert len(micros) > 1
    # Every rank with as many, in rounds of pp, made up with empty ones: at least one on each.
    count = -(-(len(micros) // layout.dp + 1) // layout.pp) * layout.pp
    empty = empty_line(micros[0], multiple(layout)) if in_lines else empty_like(micros[0])
    mine = micros[place.dp :: layout.dp]
    return [feed(every_token(micro, vocabulary), place) for micro in (*mine, *[empty] * (count - len(mine)))]


def forward(chunks: list[Chunk], feeds: list[Feed], place: Place) -> list[tuple[Tensor, Tensor]]:
    """What the last stage puts out for each micro-batch, by megatron-core's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    outputs: list[tuple[Tensor, Tensor]] = []

    def step(turn, chunk):
        out = chunk(next(turn), 0.8)
        if chunk.post_process:
            outputs.append(out)
            out = out[0].sum()
        return out, lambda out, non_loss_data: out

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(feeds) for _ in chunks],
            model=chunks,
            num_microbatches=len(feeds),
            seq_length=1,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return outputs


def difference(outputs: list[tuple[Tensor, Tensor]], feeds: list[Feed], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of any log-probability or entropy from those of transformers, and how many were compared."""
    worst, seen = 0.0, 0
    for (logprobs, entropy), micro in zip(outputs, feeds, strict=True):
        for at in range(0, len(micro.target), wanted["vocabulary"]):
            expected = wanted[f"{int(micro.trajectory[at])}"][int(micro.offset[at])]
            worst = max(worst, float((logprobs[at : at + len(expected)].double() - expected).abs().max()))
            spread = -(expected.exp() * expected).sum()
            worst = max(worst, float((entropy[micro.place[at]].double() - spread).abs()))
            seen += 1
    return {"worst": worst, "seen": seen}


def fill(chunks: list[Chunk], tensors: dict[str, Tensor]) -> None:
    """Every weight, having made sure that every element gets one, once; vocabulary padding is NaN, which nobody may read."""
    counted = {}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
            counted[id(parameter)] = torch.zeros(parameter.shape)
    for name, held in names.pieces(chunks).items():
        held.put(held.parameter.data, cut(tensors[name], held.piece))
        held.window(counted[id(held.parameter)]).add_(1)
        assert torch.equal(held.get(held.parameter.data), cut(tensors[name], held.piece).to(held.parameter.dtype))
    for chunk in chunks:
        start, stop = span(chunk.architecture.vocab, chunk.place)
        for name, parameter in chunk.named_parameters():
            rows = stop - start if "word_embeddings" in name or "output_layer" in name else len(parameter)
            count = counted[id(parameter)]
            assert (count[:rows] == 1).all(), name
            assert (count[rows:] == 0).all(), name


def model_cases(layout: Layout, place: Place, folder: Path, kinds: list[str], found: dict) -> None:
    for kind in kinds:
        for name, dtype in DTYPES.items():
            chunks = build(str(folder / kind), place, dtype)
            architecture = chunks[0].architecture
            tensors = read_tensors(str(folder / kind), architecture, torch.float32)
            fill(chunks, tensors)
            expected = load_file(folder / f"{kind}.{name}.safetensors")
            batch = batch_of(json.loads((folder / "batch.json").read_text()))
            feeds = feeds_of(batch, place, architecture.vocab)
            outputs = forward(chunks, feeds, place)
            if place.last_stage:
                found[f"{layout}/{kind}/{name}"] = difference(
                    outputs, feeds, expected | {"vocabulary": architecture.vocab}
                )
            if name == "fp32":
                pieces = {
                    f"{held.piece.name}|{held.piece.dim}|{held.piece.start}|{held.piece.stop}|{held.owner}": held.get(
                        held.parameter.detach()
                    ).contiguous()
                    for held in names.pieces(chunks).values()
                }
                save_file(pieces, folder / f"{layout}.{kind}.{place.rank}.safetensors")


def batch_of(values: dict) -> TrainBatch:
    def frozen(value):
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return TrainBatch(**{name: frozen(value) for name, value in values.items()})


LINES = {
    "several": [5, 9, 1, 3, 6],
    "one": [24],
    "short": [1] * 7 + [2, 2, 3],
    "half-empty": [5],
    "empty": [],
}
"""Lengths of the documents in a line of 24 tokens; the rest is padding."""


def dense(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, positions: Tensor, scaling: float) -> Tensor:
    """The slow way: all scores of the whole line at once."""
    k, v = (x.repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    see = (documents[:, None] == documents) & (positions[:, None] >= positions) & (documents[:, None] >= 0)
    scores = (scaling * q @ k.transpose(1, 2)).masked_fill(~see, float("-inf"))
    return torch.nan_to_num(torch.softmax(scores, -1)) @ v


def ring_cases(place: Place, found: dict) -> None:
    width, scaling = 24, 0.37
    for label, lengths in LINES.items():
        documents, positions = torch.full((width,), -1), torch.zeros(width, dtype=torch.int64)
        at = 0
        for number, length in enumerate(lengths):
            documents[at : at + length], positions[at : at + length] = number, torch.arange(length)
            at += length
        layout = line_layout(documents, positions, place.layout.cp)
        mine = layout.source[place.cp]
        generator = torch.Generator().manual_seed(3)
        whole = [torch.randn(heads, width, 8, generator=generator) * 2 for heads in (4, 2, 2, 4)]
        whole = [x.bfloat16().double() for x in whole]  # so that every dtype starts from the same numbers
        slow = [x.clone().requires_grad_() for x in whole[:3]]
        expected = dense(*slow, documents, positions, scaling)
        real = documents >= 0
        grads = torch.autograd.grad((expected * whole[3])[:, real].sum(), slow)
        for name, dtype in {**DTYPES, "bf16": torch.bfloat16}.items():
            parts = [x[:, mine].to(dtype).requires_grad_() for x in whole[:3]]
            rows = [part.transpose(0, 1) for part in parts]
            out = ring_attention(*rows, layout=layout, ring=place.ring, scale=scaling, backend="cpu").transpose(0, 1)
            out.backward((whole[3] * real[None, :, None])[:, mine].to(dtype))
            pairs = [(out.detach(), expected.detach()[:, mine])]
            pairs += [(part.grad, grad[:, mine]) for part, grad in zip(parts, grads, strict=True)]
            gaps = [float((a.double() - b).abs().max() / (1 + b.abs().max())) for a, b in pairs]
            seen = int(real[mine].sum())
            found[f"ring/{label}/{name}"] = {"worst": gaps[0], "seen": seen}
            found[f"ring/{label}/{name} gradients"] = {"worst": max(gaps[1:]), "seen": seen}


def main(rank: int, world: int, folder: Path, layouts: list[str]) -> None:
    if world > 1:
        where = f"file://{folder}/store{world}"
        dist.init_process_group("gloo", where, timedelta(seconds=60), rank=rank, world_size=world)
    torch.use_deterministic_algorithms(True)
    found: dict[str, dict[str, float]] = {}
    try:
        for text, _, kinds in (case.partition("=") for case in layouts):
            layout = parse_layout("" if text == "dp1" else text)
            place = initialise(layout, rank, world, 60.0)
            if layout.cp > 1 and layout.tp == 1:
                ring_cases(place, found)
            model_cases(layout, place, folder, kinds.split(","), found)
            teardown()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    (folder / f"{world}.{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
