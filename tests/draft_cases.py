"""Small drafts to train, their micro-batches, and the truth: plain loops over anchors and depths with a decoder's cache.

The truth shares nothing with the code under test: one token at a time goes through the layer, over a list of keys and
values as a decoder has them, in float64, and autograd makes the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from furlong.kernels.layout import NOBODY, Rows
from furlong.ops.draft.inputs import DraftInputs, anchor_offsets, local_counts
from furlong.ops.draft.settings import DraftSettings
from furlong.ops.draft.shape import DraftShape

LENGTHS = (9, 1, 6, 2, 13)
DEPTHS = 4


@dataclass(frozen=True, eq=False)
class Case:
    shape: DraftShape
    settings: DraftSettings
    tensors: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    inputs: DraftInputs
    """Packed, without padding."""

    @property
    def counts(self) -> Tensor:
        return local_counts(self.inputs, self.shape, self.settings.depths)


def shape_of(kind: str, reduced: bool, layers: int) -> DraftShape:
    return DraftShape(
        kind=kind, hidden=12, heads=4, kv_heads=2, head_dim=4, ffn=10, norm_eps=1e-5, rope_theta=100.0, vocab=17,
        draft_vocab=9 if reduced else 17, taps=(0, 2, 3), context=64, block=DEPTHS + 1 if kind == "block" else 0,
        layers=layers,
    )  # fmt: skip


def make(kind: str = "eagle3", loss: str = "ce", reduced: bool = False, lengths=LENGTHS, temperature=0.7) -> Case:
    shape = shape_of(kind, reduced, 2 if kind == "block" else 1)
    draw = torch.Generator().manual_seed(7)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, dtype=torch.float64)

    tensors = {
        name: 1 + 0.1 * normal(*size) if "norm" in name else 0.5 * normal(*size)
        for name, size in shape.parameters().items()
    }
    if reduced:
        ids = torch.randperm(shape.vocab, generator=draw)[: shape.draft_vocab].sort().values
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.isin(torch.arange(shape.vocab), ids)}
    total = sum(lengths)
    inputs = DraftInputs(
        rows=rows_of(lengths),
        tokens=torch.randint(shape.vocab, (total,), generator=draw),
        taps=normal(total, len(shape.taps) * shape.hidden),
        final=normal(total, shape.hidden),
        trained=torch.rand(total, generator=draw) < 0.6,
        temperature=temperature,
        offsets=anchor_offsets(3, 1, [f"trajectory {n}" for n in range(len(lengths))], DEPTHS),
    )
    settings = DraftSettings(kind=kind, depths=DEPTHS, proposals=DEPTHS, loss=loss, layers=shape.layers)
    head, embedding = normal(shape.vocab, shape.hidden), normal(shape.vocab, shape.hidden)
    return Case(shape, settings, tensors, embedding, head, inputs)


def rows_of(lengths) -> Rows:
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return Rows(document, torch.cat([torch.arange(length) for length in lengths]))


def picked(inputs: DraftInputs, rows: Tensor, document: Tensor | None = None) -> DraftInputs:
    """Some rows in some order; NOBODY makes a padding row, which holds numbers that would show if anyone looked."""
    off = rows == NOBODY
    at = rows.clamp(min=0)
    found = inputs.rows.document[at] if document is None else document
    return DraftInputs(
        Rows(found.masked_fill(off, NOBODY), inputs.rows.position[at].masked_fill(off, 0)),
        inputs.tokens[at].masked_fill(off, 1),
        inputs.taps[at].masked_fill(off[:, None], float("nan")),
        inputs.final[at].masked_fill(off[:, None], float("nan")),
        inputs.trained[at] | off,
        inputs.temperature,
        inputs.offsets,
    )


class Truth:
    """The draft by definition; `tensors` are leaves."""

    def __init__(self, case: Case) -> None:
        self.case, self.shape = case, case.shape
        self.tensors = {
            name: t.clone().requires_grad_() if t.is_floating_point() else t for name, t in case.tensors.items()
        }
        self.ids = (
            torch.arange(self.shape.draft_vocab) + self.tensors["d2t"]
            if self.shape.reduced
            else torch.arange(self.shape.vocab)
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean() + self.shape.norm_eps).sqrt() * self.tensors[f"{name}.weight"]

    def turn(self, x: Tensor, position: int) -> Tensor:
        half = self.shape.head_dim // 2
        pair = torch.complex(x[:half], x[half:])
        angle = torch.tensor(
            [position * self.shape.rope_theta ** (-2 * n / self.shape.head_dim) for n in range(half)],
            dtype=torch.float64,
        )
        pair = pair * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag])

    def key_value(self, at: str, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        k, v = (self.tensors[f"{at}self_attn.{part}_proj.weight"] @ x for part in "kv")
        return [self.turn(head, position) for head in k.split(self.shape.head_dim)], list(v.split(self.shape.head_dim))

    def layer(self, at: str, x: Tensor, hidden: Tensor, position: int, cache: list) -> Tensor:
        q = (self.tensors[f"{at}self_attn.q_proj.weight"] @ x).split(self.shape.head_dim)
        group = self.shape.heads // self.shape.kv_heads
        seen = []
        for head, query in enumerate(q):
            query = self.turn(query, position)
            scores = torch.stack([query @ k[head // group] for k, _ in cache]) / self.shape.head_dim**0.5
            seen.append(sum(share * v[head // group] for share, (_, v) in zip(scores.softmax(0), cache, strict=True)))
        hidden = hidden + self.tensors[f"{at}self_attn.o_proj.weight"] @ torch.cat(seen)
        y = self.norm(f"{at}post_attention_layernorm", hidden)
        gate, up, down = (self.tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        gated = gate @ y
        return hidden + down @ (gated * torch.sigmoid(gated) * (up @ y))

    def eagle3(self, tokens: Tensor, taps: Tensor, anchor: int, depths: int) -> list[Tensor]:
        """States before the final norm that a decoder has at an anchor, depth after depth."""
        cache, states = [], []
        for position in range(anchor + depths):
            if position + 1 >= len(tokens):
                break
            hidden = self.tensors["fc.weight"] @ taps[position] if position <= anchor else states[-1]
            x = torch.cat(
                [
                    self.norm("midlayer.input_layernorm", self.case.embedding[tokens[position + 1]]),
                    self.norm("midlayer.hidden_norm", hidden),
                ]
            )
            cache.append(self.key_value("midlayer.", x, position))
            if position >= anchor:
                states.append(self.layer("midlayer.", x, hidden, position, cache))
        return states

    def block(self, tokens: Tensor, taps: Tensor, anchor: int, depths: int) -> list[Tensor]:
        """States of a block's masks; every slot sees all slots and what came before the anchor."""
        mask = self.tensors["mask_embedding.weight"][0]
        features = [self.norm("hidden_norm", self.tensors["fc.weight"] @ tap) for tap in taps[:anchor]]
        slots = [self.case.embedding[tokens[anchor]], *[mask] * depths]
        for at in self.shape.layer_names():
            inputs = [self.norm(f"{at}input_layernorm", slot) for slot in slots]
            cache = [self.key_value(at, feature, position) for position, feature in enumerate(features)]
            cache += [self.key_value(at, x, anchor + n) for n, x in enumerate(inputs)]
            slots = [
                self.layer(at, x, slot, anchor + n, cache)
                for n, (x, slot) in enumerate(zip(inputs, slots, strict=True))
            ]
        return slots[1:]

    def pairs(self) -> list[tuple[int, Tensor, Tensor]]:
        """(depth from 0, the draft's state, row of its teacher) of all that is learnt, document after document."""
        case, found = self.case, []
        start = 0
        for document, length in enumerate(torch.bincount(case.inputs.rows.document).tolist()):
            part = slice(start, start + length)
            tokens, taps, trained = case.inputs.tokens[part], case.inputs.taps[part], case.inputs.trained[part]
            for anchor in range(length):
                if case.shape.kind == "block":
                    if (anchor - int(case.inputs.offsets[document])) % DEPTHS:
                        continue
                    states, first = self.block(tokens, taps, anchor, DEPTHS), anchor
                else:
                    states, first = self.eagle3(tokens, taps, anchor, DEPTHS), anchor + 1
                for depth, state in enumerate(states):
                    if first + depth < length and trained[first + depth]:
                        found.append((depth, state, start + first + depth))
            start += length
        return found

    def solve(self, tv: float = 0.0) -> tuple[float, Tensor, dict[str, Tensor]]:
        """The loss, (tokens, ce, accepted, agreed, lost) by depth, and every parameter's gradient."""
        case, T = self.case, self.case.inputs.temperature
        sums = torch.zeros(5, DEPTHS, dtype=torch.float64)
        losses = [torch.zeros((), dtype=torch.float64)] * DEPTHS
        for depth, state, row in self.pairs():
            full = (case.head @ case.inputs.final[row] / T).softmax(0)
            p = full[self.ids]
            q = (self.tensors["lm_head.weight"] @ self.norm("norm", state) / T).softmax(0)
            ce = -(p / p.sum() * q.log()).sum()
            accepted = torch.minimum(p, q).sum()
            losses[depth] = losses[depth] + (1 - tv) * ce + tv * (1 - accepted)
            agreed = full.argmax() == self.ids[q.argmax()]
            values = (1.0, ce, accepted, agreed, 1 - p.sum())
            sums[:, depth] += torch.tensor(
                [float(torch.as_tensor(value).detach()) for value in values], dtype=torch.float64
            )
        weights = [case.settings.depth_decay**depth if sums[0, depth] else 0.0 for depth in range(DEPTHS)]
        loss = sum(
            w / sum(weights) * part / max(float(n), 1.0) for w, part, n in zip(weights, losses, sums[0], strict=True)
        )
        loss.backward()
        leaves = {name: t for name, t in self.tensors.items() if t.is_floating_point()}
        return (
            float(loss.detach()),
            sums,
            {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in leaves.items()},
        )
